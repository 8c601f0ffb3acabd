//! Allreduce and its family over RDMA, for processes that speak gRPC.
#![forbid(unsafe_code)]

pub(crate) mod engine;
mod error;
pub(crate) mod group;
pub(crate) mod lane;
pub(crate) mod plan;
mod reduce;

#[doc(hidden)]
pub mod internal;

pub use crate::error::{CollectiveError, Place};
pub use crate::group::Launch;
pub use crate::plan::Algorithm;
pub use crate::reduce::{Number, Reduction};
