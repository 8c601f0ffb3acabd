//! The kernels of reductions, and lanes, for benches.
//!
//! Nothing here is a promise: any release may change or remove it.

pub use crate::lane::remote::Duo;
pub use crate::reduce::Kernel;
