//! The client half of every mode.
//!
//! A mode without gRPC is a variant of [`Caller`] with its own `prepare` (buffers, addresses: everything that can exist
//! before the measured time begins), `run` (the measured part) and `release`. The server process starts the mode's
//! other half.

use std::time::Duration;

use tonic_rdma_commands::Failure;
use tonic_rdma_proto::transfer::Check;

use super::call_error::CallError;
use super::memcpy::MemcpyCaller;
use super::mode::Mode;
use super::placement::PlacementCaller;
use crate::compare::modes::grpc::client::GrpcCaller;
use crate::compare::modes::grpc::connect;
use crate::compare::operations::{Operation, Operations};
use crate::compare::options::CompareOptions;
use crate::compare::server::start_report::Addresses;
use crate::measure::transport::http2::Http2;
use crate::measure::transport::rdma::{Rdma, RdmaConnection};

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
        Mode::GrpcTcp
        | Mode::GrpcTcpBusy
        | Mode::GrpcTcpTuned
        | Mode::GrpcUds
        | Mode::GrpcRdma
        | Mode::GrpcRdmaGather
        | Mode::GrpcNative
        | Mode::GrpcNativeGather => {
            let (channel, verdict) = connect::connect(mode, addresses, options.http2, rdma).await?;
            let caller = GrpcCaller::new(channel, mode, options.encode).reducing(reduces);
            Ok((Caller::Grpc(caller.towards(options.direction)), verdict))
        }
        Mode::RdmaCp | Mode::RdmaZerocp | Mode::RdmaZerocpAwait => {
            let (Some(rdma), Some(endpoint)) = (rdma, &addresses.tensors) else {
                return Err(Failure::run("the server process has no device for tensors"));
            };
            let control = connect::tcp(addresses.tcp, Http2::Default).await?;
            let connected = PlacementCaller::connect(mode, control, endpoint, rdma, reduces).await;
            connected.map(|(caller, verdict)| (Caller::Placement(caller), Some(verdict)))
        }
        Mode::Memcpy => Ok((Caller::Memcpy(MemcpyCaller::new(reduces)), None)),
    }
}
