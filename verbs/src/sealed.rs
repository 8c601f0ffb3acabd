//! The seal: only this crate implements the traits of devices.
//!
//! Safe code relies on these traits. For example, the pool hands the memory of a slab to a
//! [`ProtectionDomain`], and [`LocalSegment`](crate::LocalSegment) takes the key that a [`MemoryRegion`]
//! states; a wrong key would let the device write to memory that `&[u8]` names. Were the traits open to safe
//! code of other crates, that code could break memory.
//!
//! ```compile_fail,E0277
//! #[derive(Debug)]
//! struct Mine;
//!
//! impl tonic_rdma_verbs::SharedReceiveQueue for Mine {
//!     fn capacity(&self) -> u32 {
//!         16
//!     }
//!
//!     fn post_receive(&self, _: &[tonic_rdma_verbs::ReceiveRequest<'_>]) -> Result<(), tonic_rdma_verbs::PostError> {
//!         Ok(())
//!     }
//! }
//! ```

/// A type of this crate that implements traits of devices. The module is private, so other crates can't name
/// this trait.
#[expect(unnameable_types, reason = "so only this crate implements it")]
pub trait Sealed {}

#[cfg(test)]
mod tests {
    use super::Sealed;
    use crate::{
        CompletionQueue, Context, DeviceMemoryRegion, LocalQueuePair, MemoryRegion, MemoryWindow,
        ProtectionDomain, QueuePair, SharedReceiveQueue,
    };

    /// Compiles only if each trait of devices has the seal.
    #[test]
    fn all_are_sealed() {
        fn sealed<T: Sealed + ?Sized>() {}
        sealed::<dyn Context>();
        sealed::<dyn ProtectionDomain>();
        sealed::<dyn MemoryRegion>();
        sealed::<dyn MemoryWindow>();
        sealed::<dyn DeviceMemoryRegion>();
        sealed::<dyn QueuePair>();
        sealed::<dyn LocalQueuePair>();
        sealed::<dyn CompletionQueue>();
        sealed::<dyn SharedReceiveQueue>();
    }
}
