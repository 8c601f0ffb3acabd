//! The machinery, for the other crates of this repository, their tests and their benches.
//!
//! Nothing here is a promise: any release may change or remove it.

pub use crate::memory::machinery::*;
pub use crate::soft::reach::{soft_admits_any_user, soft_place, soft_takes_directory, soft_uses_directory};
pub use crate::throttle::Throttle;
pub use crate::throttled;
