//! Allreduce and its family over RDMA, for processes that speak gRPC.
#![forbid(unsafe_code)]

mod communicator;
pub(crate) mod engine;
mod error;
mod fusion;
pub(crate) mod group;
pub(crate) mod lane;
mod memory;
pub(crate) mod plan;
mod reduce;
mod tuner;

#[doc(hidden)]
pub mod internal;

pub use crate::communicator::{
    Communicator, CommunicatorBuilder, Failed, Operand, Operation, PlanChoice, Statistics,
};
pub use crate::error::{CollectiveError, Place};
pub use crate::fusion::{
    BucketSize, Finish, Fusion, FusionBuilder, FusionError, Means, Names, Overlap, Slot, Step,
};
pub use crate::group::Launch;
pub use crate::memory::Buffer;
pub use crate::plan::Algorithm;
pub use crate::reduce::{Number, Reduction};
pub use crate::tuner::{PlanRange, PlanTable, PlanTableError};
