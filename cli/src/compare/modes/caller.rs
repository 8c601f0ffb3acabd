//! A mode's client half, whatever carries its bytes, and what can go wrong with it.
//!
//! A mode without gRPC is a variant of [`Caller`] with its own `prepare` (buffers, addresses, whatever can be had before the
//! time begins), `run` (the part that is timed) and `release`; what it needs of the other process, `server` starts.

use std::time::Duration;

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
use crate::failure::Failure;
use crate::measure::transport::http2::Http2;
use crate::measure::transport::rdma::{Rdma, RdmaConnection};

/// A connection in one mode. Clones share it.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    Grpc(GrpcCaller),
    Placement(PlacementCaller),
    Memcpy(MemcpyCaller),
}

impl Caller {
    /// Makes ready for `operations`, of which up to `inflight` are to be under way, before the time begins: afterwards memory is
    /// warm.
    pub(crate) async fn prepare(
        &mut self,
        operations: &Operations,
        inflight: usize,
    ) -> Result<(), CallError> {
        match self {
            Self::Grpc(caller) => {
                caller.prepare(operations);
                Ok(())
            }
            Self::Placement(caller) => caller.prepare(operations, inflight).await,
            Self::Memcpy(caller) => caller.prepare(operations).await,
        }
    }

    /// The mode's turn begins; in it all of what arrives is looked at as `check` says.
    pub(crate) async fn begin(&mut self, check: Check) -> Result<(), CallError> {
        match self {
            // Each message says how it is to be looked at.
            Self::Grpc(caller) => caller.begin().await,
            Self::Memcpy(_) => Ok(()),
            Self::Placement(caller) => caller.begin(check).await,
        }
    }

    /// The mode's turn ends: others have the core. Says how many messages of it were looked at byte by byte now; an error is about
    /// what arrived in it.
    pub(crate) async fn end(&mut self) -> Result<u64, CallError> {
        match self {
            Self::Grpc(caller) => caller.end().await,
            Self::Placement(caller) => caller.end().await.map(|()| 0),
            // Each copy was checked at once.
            Self::Memcpy(_) => Ok(0),
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
            // A set goes as a whole: no call of it has to wait for an answer.
            Self::Placement(caller) => caller.run(operation).await,
            Self::Memcpy(caller) => caller.run(operation, check).await,
        }
    }

    /// Gives back what was prepared.
    pub(crate) async fn release(&mut self) {
        match self {
            Self::Grpc(_) => {}
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
        | Mode::GrpcRdmaGather => {
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
