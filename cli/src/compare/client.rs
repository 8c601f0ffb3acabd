//! A mode's client half, whatever carries its bytes, and what can go wrong with it.
//!
//! A mode without gRPC is a variant of [`Caller`] with its own `prepare` (buffers, addresses, whatever can be had before the
//! time begins), `run` (the part that is timed) and `release`; what it needs of the other process, `server` starts.

use std::time::Duration;

use tokio::task::JoinError;
use tonic_rdma_proto::transfer::Check;

use super::grpc::{self, GrpcCaller};
use super::memcpy::MemcpyCaller;
use super::mode::Mode;
use super::operations::{Operation, Operations};
use super::rdma::{Rdma, Verdict};
use super::server::Addresses;
use crate::args::CompareOptions;
use crate::failure::Failure;
use crate::units;

/// Why a call counts as an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("{}: {}", .0.code().description(), deepest(.0))]
    Status(#[from] tonic::Status),
    #[error("sent {sent} bytes and {arrived} arrived")]
    Length { sent: u64, arrived: u64 },
    #[error("byte {offset} of {sent} arrived wrong")]
    Content { offset: u64, sent: u64 },
    #[error("buffers of {sent:?} bytes were sent and of {arrived:?} arrived")]
    Buffers { sent: Vec<u64>, arrived: Vec<u64> },
    #[error("byte {offset} of buffer {buffer} arrived wrong")]
    BufferContent { buffer: u64, offset: u64 },
    #[error("the receiver found the largest element to be {arrived:?}, and it is {sent:?}")]
    Maximum { sent: Option<f32>, arrived: Option<f32> },
    #[error("there is no memory for {} more", units::rough_size(*.0))]
    Memory(u64),
    #[error("{0}")]
    Crash(#[from] JoinError),
}

impl CallError {
    /// Whether what arrived was not what was sent.
    pub(crate) fn is_mismatch(&self) -> bool {
        !matches!(self, Self::Status(_) | Self::Memory(_) | Self::Crash(_))
    }
}

/// The cause at the bottom: what tonic says itself is seldom more than "transport error".
fn deepest(status: &tonic::Status) -> String {
    let mut message = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        message = error.to_string();
        cause = error.source();
    }
    message
}

/// A connection in one mode. Clones share it.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "there are few, and in an open loop each call clones one: no allocation"
)]
pub(crate) enum Caller {
    Grpc(GrpcCaller),
    Memcpy(MemcpyCaller),
}

impl Caller {
    /// Makes ready for `operations`, before the time begins: afterwards memory is warm.
    pub(crate) async fn prepare(&mut self, operations: &Operations) -> Result<(), CallError> {
        match self {
            // Its buffers come and go with each message.
            Self::Grpc(_) => Ok(()),
            Self::Memcpy(caller) => caller.prepare(operations).await,
        }
    }

    /// Carries out `operation`, one of those that were prepared for, with up to `width` calls at once if it is a set, and
    /// says how long that took.
    pub(crate) async fn run(
        &mut self,
        operation: &Operation,
        check: Check,
        width: usize,
    ) -> Result<Duration, CallError> {
        match self {
            Self::Grpc(caller) => caller.run(operation, check, width).await,
            Self::Memcpy(caller) => caller.run(operation, check).await,
        }
    }

    /// Gives back what was prepared.
    pub(crate) async fn release(&mut self) {
        match self {
            Self::Grpc(_) => {}
            Self::Memcpy(caller) => caller.release().await,
        }
    }
}

/// Connects in `mode`.
pub(crate) async fn connect(
    mode: Mode,
    addresses: &Addresses,
    options: &CompareOptions,
    rdma: Option<&Rdma>,
) -> Result<(Caller, Option<Verdict>), Failure> {
    let reduces = options.consume.reduces(mode);
    match mode {
        Mode::GrpcTcp | Mode::GrpcUds | Mode::GrpcRdma | Mode::GrpcRdmaGather => {
            let (channel, verdict) = grpc::connect(mode, addresses, options.http2, rdma).await?;
            let caller = GrpcCaller::new(channel, mode, options.encode).reducing(reduces);
            Ok((Caller::Grpc(caller), verdict))
        }
        Mode::Memcpy => Ok((Caller::Memcpy(MemcpyCaller::new(reduces)), None)),
    }
}
