//! The client half of the gRPC modes: the calls that are measured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use tonic_rdma::gather::GatherRequests;
use tonic_rdma_commands::Failure;
use tonic_rdma_payload::content::{Content, check_all, check_stamps};
use tonic_rdma_payload::reduce::{Reduced, reduce};
use tonic_rdma_proto::tensors::PushRequest;
use tonic_rdma_proto::tensors::tensors_client::TensorsClient;
use tonic_rdma_proto::transfer::source_client::SourceClient;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::turns_client::TurnsClient;
use tonic_rdma_proto::transfer::{
    BeginTurnRequest, Check, EndTurnRequest, GetRequest, PutRequest, UsageRequest,
};

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::service::{KeepAwake, Sample};
use crate::compare::modes::mode::Mode;
use crate::compare::operations::{Operation, Operations, Push, Put, registered_copy};
use crate::compare::plan::cell::Direction;
use crate::compare::server::Addresses;
use crate::measure::http2::Http2;
use crate::measure::transport::{CallChannel, Encode, Rdma, RdmaConnection};

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
    registered: Option<Content>,
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
            self.registered = Some(registered_copy(content)?);
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
        let registered = self.registered.as_ref();
        registered.and_then(|content| content.buffer(seed, payload.len())).unwrap_or_else(|| payload.clone())
    }

    /// Requests payloads from the content of `origin` from now on.
    pub(crate) fn request_from(&mut self, origin: u64) {
        self.origin = origin;
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
                Direction::Down => self.get((put.seed, put.payload.len() as u64), put.reduced, check).await,
            },
            Operation::Push(push) => self.push(push, check).await,
            Operation::Set(set) => {
                let start = Instant::now();
                run_set(std::slice::from_ref(self), set, check, width).await?;
                Ok(start.elapsed())
            }
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

    /// Ends a turn. The receivers check every byte of some messages of the turn. Returns the number of these messages.
    pub(crate) async fn end(&mut self) -> Result<u64, CallError> {
        if let Some(awake) = &self.awake {
            awake.end();
        }
        let reply = self.turns.end(EndTurnRequest {}).await?.into_inner();
        self.channel.check_native()?;
        // The server has the sample of what went up, and this end that of what came down.
        let down = self.sample.check();
        match reply.wrong.map(|wrong| (wrong.buffer, wrong.offset)).or(down.wrong) {
            Some((buffer, offset)) => Err(CallError::BufferContent { buffer, offset }),
            None => Ok(reply.messages + down.messages),
        }
    }

    /// Compares the receiver's result of consuming the payload with the sender's result.
    fn check_reduced(&self, sent: Option<Reduced>, arrived: Option<Reduced>) -> Result<(), CallError> {
        if self.reduces && sent != arrived { Err(CallError::Consumed { sent, arrived }) } else { Ok(()) }
    }

    /// Sends a payload and waits for the answer. Returns the time that this took.
    pub(crate) async fn put(&mut self, put: &Put, check: Check) -> Result<Duration, CallError> {
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

    /// Requests the payload of `seed`, of `sent` bytes, checks it, and consumes it, like the server in the other
    /// direction. `reduced` is the expected result of consuming. Returns the time of the three steps together.
    pub(crate) async fn get(
        &mut self,
        (seed, sent): (u64, u64),
        reduced: Option<Reduced>,
        check: Check,
    ) -> Result<Duration, CallError> {
        let request = GetRequest { origin: self.origin, seed, bytes: sent };
        let start = Instant::now();
        let payload = self.source.get(request).await?.into_inner().payload;
        let mismatch = match check {
            Check::Stamps => check_stamps(seed, &payload, self.draws.fetch_add(1, Ordering::Relaxed)),
            Check::All => check_all(seed, &payload),
        };
        let found = self.reduces.then(|| reduce(&payload));
        if check == Check::Stamps && !self.reduces {
            self.sample.arrived(seed, std::slice::from_ref(&payload));
        }
        let elapsed = start.elapsed();
        match mismatch {
            Some(offset) => Err(CallError::Content { offset, sent }),
            None if payload.len() as u64 != sent => {
                Err(CallError::Length { sent, arrived: payload.len() as u64 })
            }
            None => self.check_reduced(reduced, found).map(|()| elapsed),
        }
    }

    /// Sends one message of several buffers and waits for the answer. Returns the time that this took.
    pub(crate) async fn push(&mut self, push: &Push, check: Check) -> Result<Duration, CallError> {
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

    /// Returns the CPU time that the server process has used.
    pub(crate) async fn usage(&mut self) -> Result<Duration, CallError> {
        let reply = self.client.usage(UsageRequest {}).await?;
        Ok(Duration::from_nanos(reply.into_inner().cpu_nanos))
    }
}

/// A call of a set.
pub(crate) trait SetCall: Send + Sync + 'static {
    /// Makes the call by one of `callers`.
    fn make(
        &self,
        callers: &mut [GrpcCaller],
        check: Check,
    ) -> impl Future<Output = Result<(), CallError>> + Send;
}

impl SetCall for Push {
    async fn make(&self, callers: &mut [GrpcCaller], check: Check) -> Result<(), CallError> {
        let caller = callers.first_mut().ok_or(CallError::Unprepared)?;
        caller.push(self, check).await.map(drop)
    }
}

/// Makes all calls of a set, in order, up to `width` of them at once. The first error ends the set.
pub(crate) async fn run_set<C: SetCall>(
    callers: &[GrpcCaller],
    set: &Arc<[C]>,
    check: Check,
    width: usize,
) -> Result<(), CallError> {
    if width == 1 {
        let mut callers = callers.to_vec();
        for call in set.iter() {
            call.make(&mut callers, check).await?;
        }
        return Ok(());
    }
    let next = Arc::new(AtomicUsize::new(0));
    let mut under_way = JoinSet::new();
    for _ in 0..width.min(set.len()) {
        let (mut callers, set, next) = (callers.to_vec(), Arc::clone(set), Arc::clone(&next));
        under_way.spawn(async move {
            while let Some(call) = set.get(next.fetch_add(1, Ordering::Relaxed)) {
                call.make(&mut callers, check).await?;
            }
            Ok::<_, CallError>(())
        });
    }
    while let Some(ended) = under_way.join_next().await {
        ended??;
    }
    Ok(())
}

/// Longest time to make a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Connects in `mode`, which must be a gRPC mode.
pub(crate) async fn connect(
    mode: Mode,
    addresses: &Addresses,
    http2: Http2,
    rdma: Option<&Rdma>,
) -> Result<(CallChannel, Option<RdmaConnection>), Failure> {
    let no_listener = || Failure::run("the server process does not listen for RDMA peers");
    let over_rdma = |address: Option<SocketAddr>| {
        let (rdma, address) = rdma.zip(address).ok_or_else(no_listener)?;
        Ok::<_, Failure>((rdma, endpoint(address, http2)?))
    };
    match mode {
        Mode::GrpcTcp | Mode::GrpcTcpBusy => Ok((tcp(addresses.tcp, http2).await?.into(), None)),
        Mode::GrpcTcpTuned => Ok((tcp(addresses.tcp_tuned, Http2::Tuned).await?.into(), None)),
        Mode::GrpcTcpShared => {
            let address = addresses.rdma.ok_or_else(no_listener)?;
            Ok((tcp(address, http2).await?.into(), None))
        }
        Mode::GrpcUds => Ok((uds(addresses, http2).await?.into(), None)),
        Mode::GrpcRdma | Mode::GrpcRdmaGather => {
            // For payloads from the server there is a listener that sends them by reference.
            let gathering = addresses.rdma_gather.filter(|_| mode == Mode::GrpcRdmaGather);
            let (rdma, endpoint) = over_rdma(gathering.or(addresses.rdma))?;
            let (channel, verdict) = rdma.connect(endpoint).await?;
            Ok((channel.into(), Some(verdict)))
        }
        Mode::GrpcNative => {
            let (rdma, endpoint) = over_rdma(addresses.native)?;
            let (channel, verdict) = rdma.connect_native(endpoint).await?;
            Ok((channel.into(), Some(verdict)))
        }
        Mode::GrpcNativeGather => {
            let (rdma, endpoint) = over_rdma(addresses.native_gather)?;
            let (channel, verdict) = rdma.connect_native(endpoint).await?;
            Ok((CallChannel::gathering(channel), Some(verdict)))
        }
        Mode::RdmaCp | Mode::RdmaZerocp | Mode::RdmaZerocpAwait | Mode::Memcpy => {
            Err(Failure::run(format!("{mode} is not a gRPC mode")))
        }
    }
}

/// Connects over TCP with nodelay.
pub(crate) async fn tcp(address: SocketAddr, http2: Http2) -> Result<Channel, Failure> {
    endpoint(address, http2)?.connect().await.map_err(|error| connect_error("TCP", error))
}

async fn uds(addresses: &Addresses, http2: Http2) -> Result<Channel, Failure> {
    // A zero byte begins an abstract name.
    let name = format!("\0{}", addresses.uds);
    let connector = tower::service_fn(move |_| {
        let name = name.clone();
        async move { UnixStream::connect(name).await.map(TokioIo::new) }
    });
    let endpoint = endpoint(addresses.tcp, http2)?;
    endpoint.connect_with_connector(connector).await.map_err(|error| connect_error("a Unix socket", error))
}

fn endpoint(address: SocketAddr, http2: Http2) -> Result<Endpoint, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Failure::run(format!("bad address {address}")).because(error))?;
    Ok(http2.client(endpoint.tcp_nodelay(true).connect_timeout(CONNECT)))
}

fn connect_error(what: &str, error: tonic::transport::Error) -> Failure {
    Failure::run(format!("can't connect to the server process over {what}")).because(error)
}
