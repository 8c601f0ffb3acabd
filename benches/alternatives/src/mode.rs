//! The modes, and what the server and the client of each do.

use serde::{Deserialize, Serialize};
use tonic_rdma_commands::clap::{self, ValueEnum};
use tonic_rdma_commands::{Context as _, Failure, displayed_by_name};

use crate::{Cell, Job, grpc, memory};

/// A way to carry a payload to another process, which checks it and answers. The names of modes that
/// `tonic-rdma compare` has too are its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// tonic over TCP.
    GrpcTcp,
    /// tonic over a Unix socket.
    GrpcUds,
    /// connectrpc over TCP, with its gRPC protocol.
    ConnectrpcTcp,
    /// connectrpc over a Unix socket.
    ConnectrpcUds,
    /// tonic over tonic-rdma's byte stream.
    GrpcRdma,
    /// connectrpc over the same byte stream.
    ConnectrpcRdma,
    /// tonic's generated code with native calls.
    GrpcNative,
    /// iceoryx2's request and response, with the payload copied to shared memory.
    Iceoryx2,
    /// The same, with a payload that the client wrote to shared memory before the call.
    Iceoryx2InPlace,
    /// Tensors, which the client wrote to registered memory before the transfer.
    RdmaZerocp,
}

displayed_by_name!(Mode);

impl Mode {
    /// Returns whether the mode takes part in the cell.
    pub(crate) fn has(self, cell: Cell) -> bool {
        self != Self::RdmaZerocp || cell.inflight == 1
    }
}

/// Serves until stdin ends.
pub(crate) fn serve(job: &Job) -> Result<(), Failure> {
    let runtime = job.runtime().build().context("can't start a runtime")?;
    match job.mode {
        Mode::Iceoryx2 | Mode::Iceoryx2InPlace => memory::serve_iceoryx2(job),
        Mode::RdmaZerocp => runtime.block_on(memory::receive_tensors(job)),
        _ => runtime.block_on(grpc::serve(job)),
    }
}

/// Measures as the client, reports the figures.
pub(crate) fn call(job: &Job) -> Result<(), Failure> {
    let runtime = job.runtime().build().context("can't start a runtime")?;
    match job.mode {
        Mode::Iceoryx2 | Mode::Iceoryx2InPlace => runtime.block_on(memory::call_iceoryx2(job)),
        Mode::RdmaZerocp => runtime.block_on(memory::send_tensors(job)),
        _ => runtime.block_on(grpc::call(job)),
    }
}
