//! The rights of peers to a region.

use tonic_rdma_verbs::Access;

/// What peers may do with a region.
///
/// ```
/// use tonic_rdma_tensor::Rights;
///
/// assert_eq!(Rights::READ_WRITE, Rights { read: true, write: true });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// They may read it.
    pub read: bool,
    /// They may write it.
    pub write: bool,
}

impl Rights {
    /// Reading alone.
    pub const READ: Self = Self { read: true, write: false };
    /// Writing alone.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Both.
    pub const READ_WRITE: Self = Self { read: true, write: true };

    pub(crate) fn access(self) -> Access {
        let read = if self.read { Access::REMOTE_READ } else { Access::LOCAL_READ };
        let write = if self.write { Access::REMOTE_WRITE } else { Access::LOCAL_READ };
        read | write
    }
}
