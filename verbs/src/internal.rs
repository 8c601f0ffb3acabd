//! The machinery, for the other crates of this repository, their tests and their benches.
//!
//! Nothing here is a promise: any release may change or remove it.

pub use crate::memory::machinery::*;
pub use crate::throttle::Throttle;
pub use crate::throttled;
