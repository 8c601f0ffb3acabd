//! The modes: how each carries the payloads of a cell.
//!
//! [`Caller`] is the client half of every mode. The server halves are in `grpc` and `placement`; `memcpy` has
//! none. This folder never decides when an operation begins: `turns` does.

pub(crate) mod grpc;
mod memcpy;
pub(crate) mod mode;
pub(crate) mod placement;

use std::time::Duration;

use tokio::task::JoinError;
use tonic_rdma::memory::PoolError;
use tonic_rdma_commands::{Failure, units};
use tonic_rdma_payload::reduce::Reduced;
use tonic_rdma_proto::transfer::Check;
use tonic_rdma_tensor::{ChannelError, ShapeError, TensorError};

use crate::compare::modes::grpc::client::{self, GrpcCaller};
use crate::compare::modes::memcpy::MemcpyCaller;
use crate::compare::modes::mode::Mode;
use crate::compare::modes::placement::PlacementCaller;
use crate::compare::modes::placement::geometry::Discrepancy;
use crate::compare::operations::{Operation, Operations};
use crate::compare::options::CompareOptions;
use crate::compare::server::Addresses;
use crate::measure::http2::Http2;
use crate::measure::transport::{NotNative, Rdma, RdmaConnection};

/// A connection in one mode. Clones share it.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are few, and each lives as long as its connection")]
pub(crate) enum Caller {
    Grpc(GrpcCaller),
    Placement(PlacementCaller),
    Memcpy(MemcpyCaller),
}

impl Caller {
    /// Prepares for `operations`, up to `inflight` of them at once, before the measured time begins. Memory is warm
    /// afterwards.
    pub(crate) async fn prepare(
        &mut self,
        operations: &Operations,
        inflight: usize,
    ) -> Result<(), CallError> {
        match self {
            Self::Grpc(caller) => caller.prepare(operations),
            Self::Placement(caller) => caller.prepare(operations, inflight).await,
            Self::Memcpy(caller) => caller.prepare(operations).await,
        }
    }

    /// Begins the mode's turn. `check` selects how the receiver checks everything that arrives in the turn.
    pub(crate) async fn begin(&mut self, check: Check) -> Result<(), CallError> {
        match self {
            // Each message carries its own kind of check.
            Self::Grpc(caller) => caller.begin().await,
            Self::Memcpy(_) => Ok(()),
            Self::Placement(caller) => caller.begin(check).await,
        }
    }

    /// Ends the mode's turn, so that other modes have the core. Returns the number of messages of the turn whose every
    /// byte was checked now. An error is about the content that arrived in the turn.
    pub(crate) async fn end(&mut self) -> Result<u64, CallError> {
        match self {
            Self::Grpc(caller) => caller.end().await,
            Self::Placement(caller) => caller.end().await.map(|()| 0),
            // Each copy was checked at once.
            Self::Memcpy(_) => Ok(0),
        }
    }

    /// Carries out `operation`, which must be prepared. A set has up to `width` calls at once. Returns the time of the
    /// operation.
    pub(crate) async fn run(
        &mut self,
        operation: &Operation,
        check: Check,
        width: usize,
    ) -> Result<Duration, CallError> {
        match self {
            Self::Grpc(caller) => caller.run(operation, check, width).await,
            // A set is sent as a whole: none of its calls has to wait for an answer.
            Self::Placement(caller) => caller.run(operation).await,
            Self::Memcpy(caller) => caller.run(operation, check).await,
        }
    }

    /// Releases everything that was prepared.
    pub(crate) async fn release(&mut self) {
        match self {
            Self::Grpc(caller) => caller.release(),
            Self::Placement(caller) => caller.release().await,
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
) -> Result<(Caller, Option<RdmaConnection>), Failure> {
    let reduces = mode.reduces(options.consume);
    match mode {
        mode if mode.is_grpc() => {
            let (channel, verdict) = client::connect(mode, addresses, options.http2, rdma).await?;
            let caller = GrpcCaller::new(channel, mode, options.encode).reducing(reduces);
            Ok((Caller::Grpc(caller.towards(options.direction)), verdict))
        }
        Mode::Memcpy => Ok((Caller::Memcpy(MemcpyCaller::new(reduces)), None)),
        _ => {
            let (Some(rdma), Some(endpoint)) = (rdma, &addresses.tensors) else {
                return Err(Failure::run("the server process has no device for tensors"));
            };
            let control = client::tcp(addresses.tcp, Http2::Default).await?;
            let connected = PlacementCaller::connect(mode, control, endpoint, rdma, reduces).await;
            connected.map(|(caller, verdict)| (Caller::Placement(caller), Some(verdict)))
        }
    }
}

/// The reason why a call counts as an error.
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
    #[error("the receiver found {arrived:?} in the payload, and {sent:?} was sent")]
    Consumed { sent: Option<Reduced>, arrived: Option<Reduced> },
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error(transparent)]
    Discrepancy(#[from] Discrepancy),
    #[error("the operation was not prepared")]
    Unprepared,
    #[error("there is no memory for {} more", units::rough_size(*.0))]
    Memory(u64),
    #[error("there is no registered memory for the payloads")]
    Registered(#[from] PoolError),
    #[error("{}", .0.with_causes())]
    Connect(#[from] Failure),
    #[error(transparent)]
    NotNative(#[from] NotNative),
    #[error(transparent)]
    Crash(#[from] JoinError),
    #[error("no answer within {} s", .0.as_secs())]
    NoAnswer(Duration),
}

impl CallError {
    /// Returns whether the content that arrived differs from the content that was sent.
    pub(crate) fn is_mismatch(&self) -> bool {
        matches!(
            self,
            Self::Length { .. }
                | Self::Content { .. }
                | Self::Buffers { .. }
                | Self::BufferContent { .. }
                | Self::Consumed { .. }
                | Self::Discrepancy(_)
        )
    }
}

/// Returns the message of the innermost cause, because tonic's own message is seldom more than "transport error".
fn deepest(status: &tonic::Status) -> String {
    let mut message = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        message = error.to_string();
        cause = error.source();
    }
    message
}
