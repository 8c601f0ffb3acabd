//! The rights of peers to a region.

use tonic_rdma_verbs::Access;

/// The rights of peers to a region.
///
/// ```
/// use tonic_rdma_tensor::Rights;
///
/// assert_eq!(Rights::READ_WRITE, Rights { read: true, write: true });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Whether peers may read the region.
    pub read: bool,
    /// Whether peers may write the region.
    pub write: bool,
}

impl Rights {
    /// The right to read.
    pub const READ: Self = Self { read: true, write: false };
    /// The right to write.
    pub const WRITE: Self = Self { read: false, write: true };
    /// The rights to read and to write.
    pub const READ_WRITE: Self = Self { read: true, write: true };

    pub(crate) fn access(self) -> Access {
        let read = if self.read { Access::REMOTE_READ } else { Access::LOCAL_READ };
        let write = if self.write { Access::REMOTE_WRITE } else { Access::LOCAL_READ };
        read | write
    }
}
