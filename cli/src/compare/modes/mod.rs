//! The modes: how each carries the payloads of a cell.
//!
//! [`Caller`] is the client half of every mode. The server halves are in `grpc` and `placement`; `memcpy` has
//! none. This folder never decides when an operation begins: `trials` does.

pub(crate) mod call_error;
pub(crate) mod grpc;
mod memcpy;
pub(crate) mod mode;
pub(crate) mod placement;

use std::net::IpAddr;
use std::time::Duration;

use tonic_rdma_commands::Failure;
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client::{self, GrpcCaller};
use crate::compare::modes::memcpy::MemcpyCaller;
use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::modes::placement::PlacementCaller;
use crate::compare::operations::{Operation, Operations};
use crate::compare::options::CompareOptions;
use crate::compare::server::Addresses;
use crate::measure::transport::{Rdma, RdmaConnection};

/// A connection in one mode. Clones share it.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are few, and each lives as long as its connection")]
pub(crate) enum Caller {
    Grpc(GrpcCaller),
    Placement(PlacementCaller),
    Memcpy(MemcpyCaller),
}

impl Caller {
    /// Prepares for `operations`, up to `inflight` of them at once, before the measured time begins. Memory
    /// is warm afterwards.
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

    /// Begins the mode's trial. `check` selects how the receiver checks everything that arrives in the trial.
    pub(crate) async fn begin(&mut self, check: Check) -> Result<(), CallError> {
        match self {
            // Each message carries its own kind of check.
            Self::Grpc(caller) => caller.begin().await,
            Self::Memcpy(_) => Ok(()),
            Self::Placement(caller) => caller.begin(check).await,
        }
    }

    /// Ends the mode's trial, so that other modes have the core. Returns the number of messages of the trial
    /// whose every byte was checked now. An error is about the content that arrived in the trial.
    pub(crate) async fn end(&mut self) -> Result<u64, CallError> {
        match self {
            Self::Grpc(caller) => caller.end().await,
            Self::Placement(caller) => caller.end().await.map(|()| 0),
            // Each copy was checked at once.
            Self::Memcpy(_) => Ok(0),
        }
    }

    /// Carries out `operation`, which must be prepared. A set has up to `width` calls at once. Returns the
    /// time of the operation.
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

/// Connects in the mode of `contender`. `local`: the address of this process, for the server.
pub(crate) async fn connect(
    contender: Contender,
    addresses: &Addresses,
    options: &CompareOptions,
    rdma: Option<&Rdma>,
    local: IpAddr,
) -> Result<(Caller, Option<RdmaConnection>), Failure> {
    let mode = contender.mode;
    let reduces = mode.reduces(options.consume);
    match mode {
        mode if mode.is_grpc() => {
            let (caller, verdict) = GrpcCaller::connect(contender, addresses, options, rdma).await?;
            Ok((Caller::Grpc(caller), verdict))
        }
        Mode::Memcpy => Ok((Caller::Memcpy(MemcpyCaller::new(reduces)), None)),
        _ => {
            let (Some(rdma), Some(endpoint)) = (rdma, &addresses.tensors) else {
                return Err(Failure::run("the server process has no device for tensors"));
            };
            let control = client::control(addresses).await?;
            let connected = PlacementCaller::connect(mode, control, endpoint, (rdma, local), reduces).await;
            connected.map(|(caller, verdict)| (Caller::Placement(caller), Some(verdict)))
        }
    }
}
