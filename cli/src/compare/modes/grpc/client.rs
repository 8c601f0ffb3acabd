//! The client half of the gRPC modes: the calls that are measured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use tonic_rdma_commands::cores::Usage;
use tonic_rdma_commands::payload::content::Content;
use tonic_rdma_commands::payload::reduce::Reduced;
use tonic_rdma_commands::{Context as _, Failure};
use tonic_rdma_proto::tensors::exchange_client::ExchangeClient;
use tonic_rdma_proto::tensors::{
    BeginTrialRequest, EndTrialRequest, GetRequest, Mismatch, PushReply, PushRequest,
};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::{Check, PutReply, PutRequest, UsageReply, UsageRequest};

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::reference::Owner;
use crate::compare::modes::grpc::service::{Checker, Findings, KeepAwake};
use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::operations::{CallPayload, Form, Operation, Operations};
use crate::compare::options::CompareOptions;
use crate::compare::plan::Direction;
use crate::compare::server::{Addresses, Http2Addresses};
use crate::measure::settings::Http2;
use crate::measure::transport::{CallChannel, Encode, EncodingChannel, Rdma, RdmaConnection};

/// The settings of calls, of which the server must have the same.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallSettings {
    pub(crate) encode: Encode,
    /// The direction of payloads.
    pub(crate) direction: Direction,
    /// Whether the receiver consumes payloads.
    pub(crate) reduces: bool,
    /// Seed of the content that payloads are requested from.
    pub(crate) origin: u64,
}

/// A connection in one of the gRPC modes. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct GrpcCaller {
    transfer: TransferClient<EncodingChannel>,
    exchange: ExchangeClient<EncodingChannel>,
    /// The channel of both clients, to inspect its connection.
    channel: Box<CallChannel>,
    pub(crate) settings: CallSettings,
    /// Whether payloads are sent from registered memory, and the cell's content in such memory.
    registers: bool,
    registered: Option<Content>,
    /// The owner of the payloads of a mode by reference.
    owner: Option<Owner>,
    /// Checks the payloads that come down.
    checker: Checker,
    /// Keeps the runtime awake in a mode that never sleeps.
    awake: Option<KeepAwake>,
}

impl GrpcCaller {
    /// Makes a caller on `channel`, without limits on message sizes.
    pub(crate) fn new(channel: impl Into<CallChannel>, mode: Mode, settings: CallSettings) -> Self {
        let calls = channel.into();
        let channel = mode.encoding(settings.encode).wrap(calls.clone());
        let transfer = TransferClient::new(channel.clone());
        let exchange = ExchangeClient::new(channel);
        Self {
            transfer: transfer.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            exchange: exchange.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            channel: Box::new(calls),
            settings,
            registers: mode.registers_payloads(),
            registered: None,
            owner: None,
            checker: Checker::default(),
            awake: mode.never_sleeps().then(KeepAwake::default),
        }
    }

    /// Connects in the mode of `contender`, which must be a gRPC mode.
    pub(crate) async fn connect(
        contender: Contender,
        addresses: &Addresses,
        options: &CompareOptions,
        rdma: Option<&Rdma>,
    ) -> Result<(Self, Option<RdmaConnection>), Failure> {
        let CompareOptions { encode, direction, consume, .. } = *options;
        let (channel, verdict) = connect(contender, addresses, rdma).await?;
        let mode = contender.mode;
        let settings = CallSettings { encode, direction, reduces: mode.reduces(consume), origin: 0 };
        let mut caller = Self::new(channel, mode, settings);
        if mode.is_by_reference() {
            caller.own(mode, addresses.of(contender.http2)?.setting, rdma).await?;
        }
        Ok((caller, verdict))
    }

    /// Makes this process the owner of payloads, from which receivers fetch them.
    pub(crate) async fn own(&mut self, mode: Mode, http2: Http2, rdma: Option<&Rdma>) -> Result<(), Failure> {
        let channel = mode.encoding(self.settings.encode).wrap((*self.channel).clone());
        self.owner = Some(Owner::listen(mode, channel, http2, rdma).await?);
        Ok(())
    }

    /// Prepares for `operations`. A mode that sends from registered memory needs the content there. Other buffers
    /// are allocated with each message.
    pub(crate) fn prepare(&mut self, operations: &Operations) -> Result<(), CallError> {
        let content = &operations.content;
        self.settings.origin = content.seed();
        self.registered = match &self.owner {
            Some(owner) => Some(owner.copy(content)?),
            None if self.registers && self.settings.direction == Direction::Up => {
                Some(operations.registered()?)
            }
            None => None,
        };
        Ok(())
    }

    /// Prepares for the operations that `other` is prepared for, and shares the memory of their content.
    pub(crate) fn prepare_like(&mut self, other: &Self) {
        self.settings.origin = other.settings.origin;
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

    /// Carries out `operation`. A set has up to `width` calls at once. Returns the time of the operation.
    pub(crate) async fn run(
        &mut self,
        operation: &Operation,
        check: Check,
        width: usize,
    ) -> Result<Duration, CallError> {
        let start = Instant::now();
        match (operation.form, &*operation.calls) {
            (Form::Put, [put]) => match self.settings.direction {
                Direction::Up => self.put(put, check).await,
                Direction::Down => self.get(put, check).await,
            },
            (Form::Push, [push]) => self.push(push, check).await,
            _ => {
                run_set(std::slice::from_ref(self), &operation.calls, check, width).await?;
                Ok(start.elapsed())
            }
        }
    }

    /// Begins a trial.
    pub(crate) async fn begin(&mut self) -> Result<(), CallError> {
        if let Some(awake) = &self.awake {
            self.exchange.begin(BeginTrialRequest { never_sleep: true }).await?;
            awake.begin();
        }
        Ok(())
    }

    /// Ends a trial. The receivers check every byte of some messages of the trial. Returns the number of
    /// these messages.
    pub(crate) async fn end(&mut self) -> Result<u64, CallError> {
        if let Some(awake) = &self.awake {
            awake.end();
        }
        let reply = self.exchange.end(EndTrialRequest {}).await?.into_inner();
        self.channel.check_native()?;
        // The server has the sample of the payloads that went up, and this client the sample of those that
        // came down.
        let down = self.checker.end();
        match reply.wrong.or(down.wrong) {
            Some(Mismatch { buffer, offset }) => Err(CallError::BufferContent { buffer, offset }),
            None => Ok(reply.messages + down.messages),
        }
    }

    /// Compares what the receiver of `call` has got and found with what was sent.
    fn judge(&self, call: &CallPayload, arrived: Vec<u64>, found: Findings) -> Result<(), CallError> {
        let Findings { mismatch, reduced } = found;
        match (call.lengths(), mismatch) {
            (sent, _) if sent != arrived => Err(CallError::Buffers { sent, arrived }),
            (_, Some(Mismatch { buffer, offset })) => Err(CallError::BufferContent { buffer, offset }),
            _ if self.settings.reduces && call.reduced != reduced => {
                Err(CallError::Consumed { sent: call.reduced, arrived: reduced })
            }
            _ => Ok(()),
        }
    }

    /// Sends a payload and waits for the answer. Returns the time that this took.
    pub(crate) async fn put(&mut self, put: &CallPayload, check: Check) -> Result<Duration, CallError> {
        if self.owner.is_some() {
            return self.push(put, check).await;
        }
        let (seed, payload) = put.seeded().next().ok_or(CallError::Unprepared)?;
        let request = PutRequest { seed, check: check.into(), payload: self.source(seed, payload) };
        let start = Instant::now();
        let reply = self.transfer.put(request).await?;
        let elapsed = start.elapsed();
        let PutReply { bytes, first_mismatch, maximum, digest } = reply.into_inner();
        let mismatch = first_mismatch.checked_sub(1).map(|offset| Mismatch { buffer: 0, offset });
        let found = Findings { mismatch, reduced: Reduced::of_parts(maximum, digest) };
        self.judge(put, vec![bytes], found).map(|()| elapsed)
    }

    /// Requests a payload, checks it, and consumes it, like the server in the other direction. Returns the
    /// time of the three steps together.
    pub(crate) async fn get(&mut self, pull: &CallPayload, check: Check) -> Result<Duration, CallError> {
        let CallSettings { origin, reduces, .. } = self.settings;
        let request = GetRequest { origin, seed: pull.seed, bytes: pull.bytes() };
        let start = Instant::now();
        let payload = [self.exchange.get(request).await?.into_inner().payload];
        let found = self.checker.check(pull.seed, &payload, check == Check::All, reduces);
        let elapsed = start.elapsed();
        self.judge(pull, vec![payload[0].len() as u64], found).map(|()| elapsed)
    }

    /// Sends one message of several buffers and waits for the answer. Returns the time that this took.
    pub(crate) async fn push(&mut self, push: &CallPayload, check: Check) -> Result<Duration, CallError> {
        let every_byte = check == Check::All;
        let buffers = push.seeded().map(|(seed, buffer)| self.source(seed, buffer)).collect();
        let (reply, elapsed) = match &mut self.owner {
            Some(owner) => owner.put(push, buffers, check).await?,
            None => {
                let request = PushRequest { seed: push.seed, every_byte, buffers };
                let start = Instant::now();
                let reply = self.exchange.push(request).await?;
                (reply.into_inner(), start.elapsed())
            }
        };
        let PushReply { lengths, mismatch, maximum, digest } = reply;
        let found = Findings { mismatch, reduced: Reduced::of_parts(maximum, digest) };
        self.judge(push, lengths, found).map(|()| elapsed)
    }

    /// Returns what the server process has used.
    pub(crate) async fn usage(&mut self) -> Result<Usage, CallError> {
        let UsageReply { cpu_nanos, switches, sleeps } =
            self.transfer.usage(UsageRequest {}).await?.into_inner();
        Ok(Usage { cpu: Duration::from_nanos(cpu_nanos), switches, sleeps })
    }
}

/// Makes all calls of a set, in order, up to `width` of them at once. The callers make them in turn. The
/// first error ends the set.
pub(crate) async fn run_set(
    callers: &[GrpcCaller],
    set: &Arc<[CallPayload]>,
    check: Check,
    width: usize,
) -> Result<(), CallError> {
    let next = Arc::new(AtomicUsize::new(0));
    let make = || {
        let (mut callers, set, next) = (callers.to_vec(), Arc::clone(set), Arc::clone(&next));
        async move {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(call) = set.get(index) else { return Ok::<_, CallError>(()) };
                let servers = callers.len().max(1);
                let caller = callers.get_mut(index % servers).ok_or(CallError::Unprepared)?;
                match call.pulls {
                    Some(_) => caller.get(call, check).await?,
                    None => caller.push(call, check).await?,
                };
            }
        }
    };
    if width == 1 {
        return make().await;
    }
    let mut under_way = JoinSet::new();
    for _ in 0..width.min(set.len()) {
        under_way.spawn(make());
    }
    while let Some(ended) = under_way.join_next().await {
        ended??;
    }
    Ok(())
}

/// Longest time to make a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Connects in the mode of `contender`, which must be a gRPC mode.
pub(crate) async fn connect(
    contender: Contender,
    addresses: &Addresses,
    rdma: Option<&Rdma>,
) -> Result<(CallChannel, Option<RdmaConnection>), Failure> {
    let mode = contender.mode;
    let listeners = addresses.of(match mode {
        Mode::GrpcTcpTuned => Some(Http2::TUNED),
        _ => contender.http2,
    })?;
    let http2 = listeners.setting;
    let no_listener = || Failure::run("the server process does not listen for RDMA peers");
    let over_rdma = |address: Option<SocketAddr>| {
        let (rdma, address) = rdma.zip(address).ok_or_else(no_listener)?;
        Ok::<_, Failure>((rdma, endpoint(address, http2)?))
    };
    match mode {
        Mode::GrpcTcp | Mode::GrpcTcpBusy | Mode::GrpcTcpTuned | Mode::GrpcReferenceTcp => {
            Ok((tcp(listeners.tcp, http2).await?.into(), None))
        }
        Mode::GrpcTcpShared => {
            let address = listeners.rdma.ok_or_else(no_listener)?;
            Ok((tcp(address, http2).await?.into(), None))
        }
        Mode::GrpcUds => Ok((uds(listeners).await?.into(), None)),
        Mode::GrpcRdma | Mode::GrpcRdmaGather => {
            // For payloads from the server there is a listener that sends them by reference.
            let gathering = listeners.rdma_gather.filter(|_| mode == Mode::GrpcRdmaGather);
            let (rdma, endpoint) = over_rdma(gathering.or(listeners.rdma))?;
            let (channel, verdict) = rdma.connect(endpoint).await?;
            Ok((channel.into(), Some(verdict)))
        }
        Mode::GrpcNative => {
            let (rdma, endpoint) = over_rdma(addresses.native)?;
            let (channel, verdict) = rdma.connect_native(endpoint).await?;
            Ok((channel.into(), Some(verdict)))
        }
        Mode::GrpcNativeGather | Mode::GrpcReference => {
            let (rdma, endpoint) = over_rdma(addresses.native_gather)?;
            let (channel, verdict) = rdma.connect_native(endpoint).await?;
            Ok((CallChannel::gathering(channel), Some(verdict)))
        }
        _ => Err(Failure::run(format!("{mode} is not a gRPC mode"))),
    }
}

/// Connects over TCP, for calls outside the measured time.
pub(crate) async fn control(addresses: &Addresses) -> Result<Channel, Failure> {
    tcp(addresses.of(None)?.tcp, Http2::DEFAULT).await
}

/// Connects over TCP with nodelay.
pub(crate) async fn tcp(address: SocketAddr, http2: Http2) -> Result<Channel, Failure> {
    endpoint(address, http2)?.connect().await.context("can't connect to the server process over TCP")
}

async fn uds(listeners: &Http2Addresses) -> Result<Channel, Failure> {
    // A zero byte begins an abstract name.
    let name = listeners.uds.as_ref().ok_or_else(|| Failure::run("the server process has no Unix socket"))?;
    let name = format!("\0{name}");
    let connector = tower::service_fn(move |_| {
        let name = name.clone();
        async move { UnixStream::connect(name).await.map(TokioIo::new) }
    });
    let endpoint = endpoint(listeners.tcp, listeners.setting)?;
    let connected = endpoint.connect_with_connector(connector).await;
    connected.context("can't connect to the server process over a Unix socket")
}

fn endpoint(address: SocketAddr, http2: Http2) -> Result<Endpoint, Failure> {
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).context(format!("bad address {address}"))?;
    Ok(http2.client(endpoint.tcp_nodelay(true).connect_timeout(CONNECT)))
}
