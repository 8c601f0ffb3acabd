//! The meeting of the processes of a job; and the formats, the generated code, and the state machine of the rendezvous, for tests and
//! benches.
//!
//! Nothing here is a promise: any release may change or remove it.

pub use crate::wire::{tensor_frame, tensor_metadata};

use crate::device::RdmaDevice;
use crate::device::shared::Group;
use tonic_rdma_verbs::unstable::lock;

/// Lets only the ranks of a group open links to `device` from now on: peers that know the group's `name`. Without a name, because the
/// ranks have not met yet, no peer does.
pub fn admit_only_ranks(device: &RdmaDevice, name: Option<[u8; 16]>) {
    *lock(&device.shared.group) = name.map_or(Group::Meeting, Group::Named);
}

/// The meeting of the processes of a job, for groups and graphs.
pub mod meeting {
    pub use crate::meeting::*;
}

/// The state machine of the rendezvous.
pub mod rendezvous {
    pub use crate::rendezvous::*;
}

/// The generated code of `proto/tensor_device.proto`.
pub mod proto {
    pub use crate::control::proto::*;
}
