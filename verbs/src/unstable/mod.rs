//! What the other packages of tonic-rdma need and applications do not. It changes only with a new minor
//! version (0.1 to 0.2), never with a patch, so `version = "0.1"` is enough.

#[cfg(feature = "allocator")]
pub mod allocator;

pub use crate::error::{chain, with_causes};
pub use crate::memory::machinery::*;
pub use crate::panics::{drop_all, lock, run_each, run_foreign, wake_all};
pub use crate::soft::peers::message::VERSIONS as SOFT_VERSIONS;
pub use crate::soft::peers::ping::{DeviceOwner, Ping, SoftDevice, SoftQueuePair};
pub use crate::soft::reach::{
    soft_admits_any_user, soft_location, soft_shares_with_user, soft_takes_directory, soft_uses_directory,
};
pub use crate::throttle::Throttle;
#[doc(inline)]
pub use crate::throttled;
pub use crate::versions::Versions;

/// Sizes and times in variables and options.
pub mod units {
    pub use crate::units::{SIZE_FORMS, SizeError, parse_size, parse_time, size};
}

/// The code of the software device's shared memory, generic over the atomics. The models in `verbs/models`
/// run it.
pub mod shared_memory {
    pub use crate::soft::shared::attention::{Answered, Arming, Attention, Debt, Guarded, Watch};
    pub use crate::soft::shared::bias::{Bias, Seat, Seats};
    pub use crate::soft::shared::end::{EndState, Failure, unless_revoked};
    pub use crate::soft::shared::platform::{Orders, Platform, Shipping, Word};
    pub use crate::soft::shared::ring::{Flags, Header, Kind, Reader, Record, RingSlot, Violation, Writer};
    pub use crate::soft::shared::table::{ENTRY, Entry, holds, remove};
}

/// Runs one input of the software device's fuzzer.
#[cfg(fuzzing)]
pub use crate::soft::tests::fuzz::run_input;
