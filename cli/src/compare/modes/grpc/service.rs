//! The services that take payloads and check them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tonic::{Request, Response, Status, Streaming};
use tonic_rdma_proto::tensors::tensors_server::{Tensors, TensorsServer};
use tonic_rdma_proto::tensors::{Mismatch, PushReply, PushRequest};
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::turns_server::Turns;
use tonic_rdma_proto::transfer::{
    BeginTurnReply, BeginTurnRequest, Check, EndTurnReply, EndTurnRequest, PutReply, PutRequest, UsageReply,
    UsageRequest, WrongByte,
};

use super::keep_awake::KeepAwake;
use super::sample::Sample;
use crate::measure::process::cores;
use tonic_rdma_payload::content::{check_all, check_buffers, check_stamps};
use tonic_rdma_payload::reduce::{reduce, reduce_all};

/// Takes payloads, and answers whether their content is right.
#[derive(Clone, Debug, Default)]
pub(crate) struct TransferService {
    /// Number of calls so far. The check derives the sampled offsets from it, so that they differ from call to call.
    calls: Arc<AtomicU64>,
    /// Whether each answer has the result of consuming the payload.
    reduces: bool,
    /// A sample of the messages of this turn, if nothing else checks every byte of them.
    sample: Sample,
    /// Keeps the runtime awake in turns that ask for it.
    awake: KeepAwake,
}

impl TransferService {
    /// Makes a service, which consumes payloads if `reduces`.
    pub(crate) fn reducing(reduces: bool) -> Self {
        Self { reduces, ..Self::default() }
    }

    /// Returns the service for single payloads as a tonic server without limits on message sizes.
    pub(crate) fn transfer(self) -> TransferServer<Self> {
        TransferServer::new(self).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX)
    }

    /// Returns the service for messages of several buffers as a tonic server without limits on message sizes.
    pub(crate) fn tensors(self) -> TensorsServer<Self> {
        TensorsServer::new(self).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX)
    }
}

#[tonic::async_trait]
impl Transfer for TransferService {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let request = request.into_inner();
        let draw = self.calls.fetch_add(1, Ordering::Relaxed);
        let mismatch = match request.check() {
            Check::Stamps => check_stamps(request.seed, &request.payload, draw),
            Check::All => check_all(request.seed, &request.payload),
        };
        if request.check() == Check::Stamps && !self.reduces {
            self.sample.arrived(request.seed, std::slice::from_ref(&request.payload));
        }
        let reduced = self.reduces.then(|| reduce(&request.payload));
        Ok(Response::new(PutReply {
            bytes: request.payload.len() as u64,
            first_mismatch: mismatch.map_or(0, |offset| offset + 1),
            maximum: reduced.map(|reduced| reduced.maximum),
            digest: reduced.map(|reduced| reduced.digest),
        }))
    }

    type EchoStream = Streaming<PutRequest>;

    async fn echo(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<Self::EchoStream>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<UsageReply>, Status> {
        let cpu_nanos = u64::try_from(cores::cpu_time().as_nanos()).unwrap_or(u64::MAX);
        Ok(Response::new(UsageReply { cpu_nanos }))
    }
}

#[tonic::async_trait]
impl Tensors for TransferService {
    async fn push(&self, request: Request<PushRequest>) -> Result<Response<PushReply>, Status> {
        let PushRequest { seed, every_byte, buffers } = request.into_inner();
        let draw = self.calls.fetch_add(1, Ordering::Relaxed);
        let mismatch = check_buffers(seed, &buffers, (!every_byte).then_some(draw));
        if !every_byte && !self.reduces {
            self.sample.arrived(seed, &buffers);
        }
        let reduced = self.reduces.then(|| reduce_all(buffers.iter().map(|buffer| &buffer[..])));
        Ok(Response::new(PushReply {
            lengths: buffers.iter().map(|buffer| buffer.len() as u64).collect(),
            mismatch: mismatch.map(|(buffer, offset)| Mismatch { buffer, offset }),
            maximum: reduced.map(|reduced| reduced.maximum),
            digest: reduced.map(|reduced| reduced.digest),
        }))
    }
}

#[tonic::async_trait]
impl Turns for TransferService {
    async fn begin(&self, request: Request<BeginTurnRequest>) -> Result<Response<BeginTurnReply>, Status> {
        if request.into_inner().never_sleep {
            self.awake.begin();
        }
        Ok(Response::new(BeginTurnReply {}))
    }

    async fn end(&self, _: Request<EndTurnRequest>) -> Result<Response<EndTurnReply>, Status> {
        self.awake.end();
        let checked = self.sample.check();
        let wrong = checked.wrong.map(|(buffer, offset)| WrongByte { buffer, offset });
        Ok(Response::new(EndTurnReply { messages: checked.messages, wrong }))
    }
}
