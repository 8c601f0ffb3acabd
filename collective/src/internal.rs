//! The kernels of reductions, for benches.
//!
//! Nothing here is a promise: any release may change or remove it.

pub use crate::reduce::Kernel;
