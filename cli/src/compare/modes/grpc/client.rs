//! The client half of the gRPC modes: the calls that are measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::JoinSet;
use tonic_rdma::gather::GatherRequests;
use tonic_rdma_proto::tensors::PushRequest;
use tonic_rdma_proto::tensors::tensors_client::TensorsClient;
use tonic_rdma_proto::transfer::source_client::SourceClient;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::turns_client::TurnsClient;
use tonic_rdma_proto::transfer::{
    BeginTurnRequest, Check, EndTurnRequest, GetRequest, PutRequest, UsageRequest,
};

use super::keep_awake::KeepAwake;
use super::registered::RegisteredContent;
use super::sample::{Sample, SampleCheck};
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::{Operation, Operations, Push, Put};
use crate::compare::plan::direction::Direction;
use crate::measure::transport::calls::CallChannel;
use crate::measure::transport::encode::Encode;
use tonic_rdma_payload::content::{check_all, check_stamps};
use tonic_rdma_payload::reduce::{Reduced, reduce};

/// A connection in one of the gRPC modes. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct GrpcCaller {
    client: TransferClient<GatherRequests<CallChannel>>,
    tensors: TensorsClient<GatherRequests<CallChannel>>,
    source: SourceClient<GatherRequests<CallChannel>>,
    turns: Box<TurnsClient<GatherRequests<CallChannel>>>,
    /// The channel of all clients, for a look at its connection.
    channel: Box<CallChannel>,
    direction: Direction,
    /// Whether payloads are sent from registered memory, and the cell's content in such memory.
    registers: bool,
    registered: Option<RegisteredContent>,
    /// Seed of the content that payloads are requested from.
    origin: u64,
    /// Number of requests so far. The check derives the sampled offsets from it.
    draws: Arc<AtomicU64>,
    /// Whether the receiver consumes payloads; the server was started with this setting.
    reduces: bool,
    /// A sample of the payloads that came down in this turn.
    sample: Sample,
    /// Keeps the runtime awake in a mode that never sleeps.
    awake: Option<KeepAwake>,
}

impl GrpcCaller {
    /// Makes a caller on `channel`, without limits on message sizes, to a server that consumes nothing.
    pub(crate) fn new(channel: impl Into<CallChannel>, mode: Mode, encode: Encode) -> Self {
        let calls = channel.into();
        let channel = mode.encoding(encode).wrap(calls.clone());
        let client = TransferClient::new(channel.clone());
        let tensors = TensorsClient::new(channel.clone());
        let (source, turns) = (SourceClient::new(channel.clone()), Box::new(TurnsClient::new(channel)));
        Self {
            client: client.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            tensors: tensors.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            source: source.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            turns,
            channel: Box::new(calls),
            direction: Direction::Up,
            registers: mode.registers_payloads(),
            registered: None,
            origin: 0,
            draws: Arc::default(),
            reduces: false,
            sample: Sample::default(),
            awake: mode.never_sleeps().then(KeepAwake::default),
        }
    }

    /// Returns the caller with payloads that go in `direction`.
    pub(crate) fn towards(self, direction: Direction) -> Self {
        Self { direction, ..self }
    }

    /// Prepares for `operations`. A mode that sends from registered memory copies the content there. Other buffers are
    /// allocated with each message.
    pub(crate) fn prepare(&mut self, operations: &Operations) -> Result<(), CallError> {
        let content = operations.content();
        self.origin = content.seed();
        self.registered = None;
        if self.registers && self.direction == Direction::Up {
            self.registered = Some(RegisteredContent::new(content.all().len(), content.seed())?);
        }
        Ok(())
    }

    /// Prepares for the operations that `other` is prepared for, and shares the memory of their content.
    pub(crate) fn prepare_like(&mut self, other: &Self) {
        self.origin = other.origin;
        self.registered.clone_from(&other.registered);
    }

    /// Releases what was prepared.
    pub(crate) fn release(&mut self) {
        self.registered = None;
    }

    /// Returns the memory that `payload`, with the content of `seed`, is sent from.
    fn source(&self, seed: u64, payload: &Bytes) -> Bytes {
        match &self.registered {
            Some(content) => content.cut(seed, payload.len()),
            None => payload.clone(),
        }
    }

    /// Returns the caller with the setting `reduces`: whether the server answers with the largest element.
    pub(crate) fn reducing(self, reduces: bool) -> Self {
        Self { reduces, ..self }
    }

    /// Carries out `operation`. A set has up to `width` calls at once. Returns the time of the operation.
    pub(crate) async fn run(
        &mut self,
        operation: &Operation,
        check: Check,
        width: usize,
    ) -> Result<Duration, CallError> {
        match operation {
            Operation::Put(put) => match self.direction {
                Direction::Up => self.put(put, check).await,
                Direction::Down => self.get(put, check).await,
            },
            Operation::Push(push) => self.push(push, check).await,
            Operation::Set(set) => self.push_set(set, check, width).await,
        }
    }

    /// Begins a turn.
    pub(crate) async fn begin(&mut self) -> Result<(), CallError> {
        if let Some(awake) = &self.awake {
            self.turns.begin(BeginTurnRequest { never_sleep: true }).await?;
            awake.begin();
        }
        Ok(())
    }

    /// Ends a turn. The receiver checks every byte of some messages of the turn. Returns the number of these messages.
    pub(crate) async fn end(&mut self) -> Result<u64, CallError> {
        if let Some(awake) = &self.awake {
            awake.end();
        }
        let reply = self.turns.end(EndTurnRequest {}).await?.into_inner();
        self.channel.check_native()?;
        let checked = match self.direction {
            Direction::Up => SampleCheck {
                messages: reply.messages,
                wrong: reply.wrong.map(|wrong| (wrong.buffer, wrong.offset)),
            },
            Direction::Down => self.sample.check(),
        };
        match checked.wrong {
            Some((buffer, offset)) => Err(CallError::BufferContent { buffer, offset }),
            None => Ok(checked.messages),
        }
    }

    /// Compares the receiver's result of consuming the payload with the sender's result.
    fn check_reduced(&self, sent: Option<Reduced>, arrived: Option<Reduced>) -> Result<(), CallError> {
        if self.reduces && sent != arrived { Err(CallError::Consumed { sent, arrived }) } else { Ok(()) }
    }

    /// Sends a payload and waits for the answer. Returns the time that this took.
    pub(super) async fn put(&mut self, put: &Put, check: Check) -> Result<Duration, CallError> {
        let sent = put.payload.len() as u64;
        let request =
            PutRequest { seed: put.seed, check: check.into(), payload: self.source(put.seed, &put.payload) };
        let start = Instant::now();
        let reply = self.client.put(request).await?;
        let elapsed = start.elapsed();
        let reply = reply.into_inner();
        match reply.first_mismatch.checked_sub(1) {
            Some(offset) => Err(CallError::Content { offset, sent }),
            None if reply.bytes != sent => Err(CallError::Length { sent, arrived: reply.bytes }),
            None => {
                let arrived = Reduced::of_parts(reply.maximum, reply.digest);
                self.check_reduced(put.reduced, arrived).map(|()| elapsed)
            }
        }
    }

    /// Requests a payload, checks it, and consumes it, like the server in the other direction. Returns the time of the
    /// three steps together.
    async fn get(&mut self, put: &Put, check: Check) -> Result<Duration, CallError> {
        let sent = put.payload.len() as u64;
        let request = GetRequest { origin: self.origin, seed: put.seed, bytes: sent };
        let start = Instant::now();
        let payload = self.source.get(request).await?.into_inner().payload;
        let mismatch = match check {
            Check::Stamps => check_stamps(put.seed, &payload, self.draws.fetch_add(1, Ordering::Relaxed)),
            Check::All => check_all(put.seed, &payload),
        };
        let reduced = self.reduces.then(|| reduce(&payload));
        if check == Check::Stamps && !self.reduces {
            self.sample.arrived(put.seed, std::slice::from_ref(&payload));
        }
        let elapsed = start.elapsed();
        match mismatch {
            Some(offset) => Err(CallError::Content { offset, sent }),
            None if payload.len() as u64 != sent => {
                Err(CallError::Length { sent, arrived: payload.len() as u64 })
            }
            None => self.check_reduced(put.reduced, reduced).map(|()| elapsed),
        }
    }

    /// Sends one message of several buffers and waits for the answer. Returns the time that this took.
    pub(super) async fn push(&mut self, push: &Push, check: Check) -> Result<Duration, CallError> {
        let sent: Vec<u64> = push.buffers.iter().map(|buffer| buffer.len() as u64).collect();
        let every_byte = check == Check::All;
        let buffers = push.seeded().map(|(seed, buffer)| self.source(seed, buffer)).collect();
        let request = PushRequest { seed: push.seed, every_byte, buffers };
        let start = Instant::now();
        let reply = self.tensors.push(request).await?;
        let elapsed = start.elapsed();
        let reply = reply.into_inner();
        if reply.lengths != sent {
            return Err(CallError::Buffers { sent, arrived: reply.lengths });
        }
        match reply.mismatch {
            Some(wrong) => Err(CallError::BufferContent { buffer: wrong.buffer, offset: wrong.offset }),
            None => {
                let arrived = Reduced::of_parts(reply.maximum, reply.digest);
                self.check_reduced(push.reduced, arrived).map(|()| elapsed)
            }
        }
    }

    /// Sends a whole set, in order, with up to `width` calls in flight. The first error ends the set. Returns the time
    /// of the set.
    async fn push_set(
        &mut self,
        set: &Arc<[Push]>,
        check: Check,
        width: usize,
    ) -> Result<Duration, CallError> {
        let start = Instant::now();
        if width == 1 {
            for push in set.iter() {
                self.push(push, check).await?;
            }
            return Ok(start.elapsed());
        }
        let next = Arc::new(AtomicUsize::new(0));
        let mut pushers = JoinSet::new();
        for _ in 0..width.min(set.len()) {
            let (mut caller, set, next) = (self.clone(), Arc::clone(set), Arc::clone(&next));
            pushers.spawn(async move {
                while let Some(push) = set.get(next.fetch_add(1, Ordering::Relaxed)) {
                    caller.push(push, check).await?;
                }
                Ok::<_, CallError>(())
            });
        }
        while let Some(ended) = pushers.join_next().await {
            ended??;
        }
        Ok(start.elapsed())
    }

    /// Returns the CPU time that the server process has used.
    pub(crate) async fn usage(&mut self) -> Result<Duration, CallError> {
        let reply = self.client.usage(UsageRequest {}).await?;
        Ok(Duration::from_nanos(reply.into_inner().cpu_nanos))
    }
}
