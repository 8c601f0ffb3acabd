//! gRPC's client half: connections to the serving process, and the calls that are measured.

use std::io;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net as unix;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use tonic_rdma::gather::GatherRequests;
use tonic_rdma_proto::tensors::PushRequest;
use tonic_rdma_proto::tensors::tensors_client::TensorsClient;
use tonic_rdma_proto::transfer::source_client::SourceClient;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::turns_client::TurnsClient;
use tonic_rdma_proto::transfer::{
    BeginTurnRequest, Check, EndTurnRequest, GetRequest, PutRequest, UsageRequest,
};

use super::busy::Awake;
use super::client::CallError;
use super::consume::{Reduced, reduce};
use super::content::{check_all, check_stamps};
use super::direction::Direction;
use super::encode::Encode;
use super::http2::Http2;
use super::mode::Mode;
use super::operations::{Operation, Operations, Push, Put};
use super::rdma::{Rdma, Verdict};
use super::sample::{Look, Sample};
use super::server::Addresses;
use crate::failure::Failure;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);

/// A connection in one of gRPC's modes. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct GrpcCaller {
    client: TransferClient<GatherRequests<Channel>>,
    tensors: TensorsClient<GatherRequests<Channel>>,
    source: SourceClient<GatherRequests<Channel>>,
    turns: Box<TurnsClient<GatherRequests<Channel>>>,
    direction: Direction,
    /// Seed of the content that payloads are asked for from, and how often that was: it moves the sampled offsets.
    origin: u64,
    draws: Arc<AtomicU64>,
    /// Whether the receiver consumes what arrives; the server was told so.
    reduces: bool,
    /// Of the payloads that came down in this turn.
    sample: Sample,
    /// Where the mode never sleeps, this keeps the runtime from it.
    awake: Option<Awake>,
}

impl GrpcCaller {
    /// A caller on `channel`, without limits on message sizes, to a server that consumes nothing.
    pub(crate) fn new(channel: Channel, mode: Mode, encode: Encode) -> Self {
        let channel = encode.wrap(mode, channel);
        let client = TransferClient::new(channel.clone());
        let tensors = TensorsClient::new(channel.clone());
        let (source, turns) = (SourceClient::new(channel.clone()), Box::new(TurnsClient::new(channel)));
        Self {
            client: client.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            tensors: tensors.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            source: source.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            turns,
            direction: Direction::Up,
            origin: 0,
            draws: Arc::default(),
            reduces: false,
            sample: Sample::default(),
            awake: mode.never_sleeps().then(Awake::default),
        }
    }

    /// The same with payloads that go this way.
    pub(crate) fn towards(self, direction: Direction) -> Self {
        Self { direction, ..self }
    }

    /// Makes ready for `operations`. Their buffers come and go with each message.
    pub(crate) fn prepare(&mut self, operations: &Operations) {
        self.origin = operations.content().seed();
    }

    /// The same to a server that answers with the largest element, if `reduces`.
    pub(crate) fn reducing(self, reduces: bool) -> Self {
        Self { reduces, ..self }
    }

    /// Carries out `operation`, with up to `width` calls at once if it is a set, and says how long that took.
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

    /// Ends a turn: every byte of some of its messages is looked at where they arrived. Says how many these were.
    pub(crate) async fn end(&mut self) -> Result<u64, CallError> {
        if let Some(awake) = &self.awake {
            awake.end();
        }
        let reply = self.turns.end(EndTurnRequest {}).await?.into_inner();
        let look = match self.direction {
            Direction::Up => Look {
                messages: reply.messages,
                wrong: reply.wrong.map(|wrong| (wrong.buffer, wrong.offset)),
            },
            Direction::Down => self.sample.look(),
        };
        match look.wrong {
            Some((buffer, offset)) => Err(CallError::BufferContent { buffer, offset }),
            None => Ok(look.messages),
        }
    }

    /// Whether the receiver found what there is in what was sent.
    fn check_reduced(&self, sent: Option<Reduced>, arrived: Option<Reduced>) -> Result<(), CallError> {
        if self.reduces && sent != arrived { Err(CallError::Consumed { sent, arrived }) } else { Ok(()) }
    }

    /// Sends a payload, waits for the answer, and says how long that took.
    async fn put(&mut self, put: &Put, check: Check) -> Result<Duration, CallError> {
        let sent = put.payload.len() as u64;
        let request = PutRequest { seed: put.seed, check: check.into(), payload: put.payload.clone() };
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

    /// Asks for a payload, checks it and consumes it as the server does on the way up, and says how long all of that took.
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

    /// The same for one message of several buffers.
    async fn push(&mut self, push: &Push, check: Check) -> Result<Duration, CallError> {
        let sent: Vec<u64> = push.buffers.iter().map(|buffer| buffer.len() as u64).collect();
        let every_byte = check == Check::All;
        let request = PushRequest { seed: push.seed, every_byte, buffers: push.buffers.clone() };
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

    /// A whole set, in order, with up to `width` calls in flight; the first error ends it.
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

    /// CPU time that the serving process has used.
    pub(crate) async fn usage(&mut self) -> Result<Duration, CallError> {
        let reply = self.client.usage(UsageRequest {}).await?;
        Ok(Duration::from_nanos(reply.into_inner().cpu_nanos))
    }
}

/// A channel in `mode`, which is one of gRPC's.
pub(crate) async fn connect(
    mode: Mode,
    addresses: &Addresses,
    http2: Http2,
    rdma: Option<&Rdma>,
) -> Result<(Channel, Option<Verdict>), Failure> {
    match (mode, rdma, addresses.rdma) {
        (Mode::GrpcTcp | Mode::GrpcTcpBusy, ..) => Ok((tcp(addresses.tcp, http2).await?, None)),
        (Mode::GrpcTcpTuned, ..) => Ok((tcp(addresses.tcp_tuned, Http2::Tuned).await?, None)),
        (Mode::GrpcUds, ..) => Ok((uds(addresses, http2).await?, None)),
        (Mode::GrpcRdma | Mode::GrpcRdmaGather, Some(rdma), Some(address)) => {
            // Where payloads come from the server, there is a listener that sends them by reference.
            let gathering = addresses.rdma_gather.filter(|_| mode == Mode::GrpcRdmaGather);
            let address = gathering.unwrap_or(address);
            let (channel, verdict) = rdma.connect(endpoint(address, http2)?).await?;
            Ok((channel, Some(verdict)))
        }
        (Mode::GrpcRdma | Mode::GrpcRdmaGather, ..) => {
            Err(Failure::run("the server process does not listen for RDMA peers"))
        }
        (Mode::RdmaCp | Mode::RdmaZerocp | Mode::RdmaZerocpAwait | Mode::Memcpy, ..) => {
            Err(Failure::run(format!("{mode} is no mode of gRPC")))
        }
    }
}

/// A TCP connection with nodelay.
pub(crate) async fn tcp(address: SocketAddr, http2: Http2) -> Result<Channel, Failure> {
    endpoint(address, http2)?.connect().await.map_err(|error| connect_error("TCP", &error))
}

async fn uds(addresses: &Addresses, http2: Http2) -> Result<Channel, Failure> {
    let name = addresses.uds.clone();
    let connector = tower::service_fn(move |_| {
        let stream = uds_stream(&name);
        async move { stream.map(TokioIo::new) }
    });
    let endpoint = endpoint(addresses.tcp, http2)?;
    endpoint.connect_with_connector(connector).await.map_err(|error| connect_error("a Unix socket", &error))
}

/// Connecting within one host does not block, so it needs no detour through the reactor.
fn uds_stream(name: &str) -> io::Result<UnixStream> {
    let stream = unix::UnixStream::connect_addr(&unix::SocketAddr::from_abstract_name(name)?)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

fn endpoint(address: SocketAddr, http2: Http2) -> Result<Endpoint, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Failure::run(format!("bad address {address}: {error}")))?;
    Ok(http2.client(endpoint.tcp_nodelay(true).connect_timeout(CONNECT)))
}

fn connect_error(what: &str, error: &tonic::transport::Error) -> Failure {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    Failure::run(format!("can't connect to the server process over {what}: {error}{cause}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use tonic::transport::Server;
    use tonic_rdma_proto::transfer::turns_server::TurnsServer;

    use super::super::cell::Load;
    use super::super::consume::{reduce, reduce_all};
    use super::super::content::Content;
    use super::super::server::{Service, tcp_listener};
    use super::*;

    /// The address of a service of this process.
    fn serve() -> SocketAddr {
        serve_with(Service::default())
    }

    fn serve_with(service: Service) -> SocketAddr {
        let incoming = tcp_listener().unwrap();
        let address = incoming.local_addr().unwrap();
        let server = Server::builder().add_service(service.clone().transfer());
        let server = server.add_service(service.clone().tensors()).add_service(TurnsServer::new(service));
        tokio::spawn(server.serve_with_incoming(incoming));
        address
    }

    #[tokio::test]
    async fn a_wrong_byte_is_an_error_and_names_its_place() {
        let address = serve();
        for encode in [Encode::Copy, Encode::Gather] {
            let mut caller =
                GrpcCaller::new(tcp(address, Http2::Default).await.unwrap(), Mode::GrpcTcp, encode);

            let right = put(100_000, 3);
            for check in [Check::All, Check::Stamps] {
                caller.put(&right, check).await.unwrap();
            }
            let mut wrong = right.payload.to_vec();
            wrong[70_001] ^= 4;
            let wrong = Put { payload: wrong.into(), ..right.clone() };
            let error = caller.put(&wrong, Check::All).await.unwrap_err();
            assert!(matches!(error, CallError::Content { offset: 70_001, sent: 100_000 }), "{error}");
            let stale = Put { seed: right.seed + 1, ..right };
            let error = caller.put(&stale, Check::Stamps).await.unwrap_err();
            assert!(matches!(error, CallError::Content { offset: 0, .. }), "{error}");
            assert!(caller.usage().await.unwrap() > Duration::ZERO);
        }
    }

    fn put(len: usize, seed: u64) -> Put {
        let payload = Content::new(len, seed).unwrap().cut(len);
        Put { seed, reduced: Some(reduce(&payload)), payload }
    }

    fn message(content: &mut Content, lengths: &[usize]) -> Push {
        let seed = content.seed();
        let buffers: Vec<_> = lengths.iter().map(|len| content.cut(*len)).collect();
        let reduced = Some(reduce_all(buffers.iter().map(|buffer| &buffer[..])));
        Push { seed, buffers, reduced }
    }

    #[tokio::test]
    async fn what_the_server_found_to_be_the_largest_element_is_compared() {
        let channel = tcp(serve_with(Service::reducing(true)), Http2::Default).await.unwrap();
        let caller = GrpcCaller::new(channel, Mode::GrpcTcp, Encode::Copy);
        let mut reducing = caller.clone().reducing(true);
        let right = put(100_001, 3);
        let push = message(&mut Content::new(1000, 9).unwrap(), &[10, 500, 3]);
        reducing.put(&right, Check::Stamps).await.unwrap();
        reducing.push(&push, Check::Stamps).await.unwrap();

        let other = right.reduced.map(|reduced| Reduced { maximum: -1.0, ..reduced });
        let error = reducing.put(&Put { reduced: other, ..right.clone() }, Check::Stamps).await;
        assert!(error.unwrap_err().to_string().contains("maximum: -1.0"));
        let error = reducing.push(&Push { reduced: None, ..push }, Check::Stamps).await.unwrap_err();
        assert!(matches!(error, CallError::Consumed { sent: None, arrived: Some(_) }) && error.is_mismatch());

        // A server that was not told to consume is found out.
        let channel = tcp(serve(), Http2::Default).await.unwrap();
        let mut reducing = GrpcCaller::new(channel, Mode::GrpcTcp, Encode::Copy).reducing(true);
        let error = reducing.put(&right, Check::Stamps).await.unwrap_err();
        assert!(matches!(error, CallError::Consumed { arrived: None, .. }), "{error}");
    }

    #[tokio::test]
    async fn a_torn_middle_that_stamps_miss_is_found_when_the_turn_ends() {
        let right = Operations::new(Load::Size(1 << 20), 3, true).unwrap();
        let torn = right.torn(500_032..500_096);
        let channel = tcp(serve(), Http2::Default).await.unwrap();
        let mut caller = GrpcCaller::new(channel, Mode::GrpcTcp, Encode::Copy);
        for number in 0..4 {
            caller.run(&right.take(number), Check::Stamps, 1).await.unwrap();
        }
        assert_eq!(caller.end().await.unwrap(), 1);
        assert_eq!(caller.end().await.unwrap(), 0);
        for number in 0..4 {
            caller.run(&torn.take(number), Check::Stamps, 1).await.unwrap();
        }
        let error = caller.end().await.unwrap_err();
        let at = |offset: u64| (499_840..500_096).contains(&offset);
        assert!(matches!(error, CallError::BufferContent { offset, .. } if at(offset)), "{error}");

        // One that consumes finds it in each call.
        let channel = tcp(serve_with(Service::reducing(true)), Http2::Default).await.unwrap();
        let mut caller = GrpcCaller::new(channel, Mode::GrpcTcp, Encode::Copy).reducing(true);
        caller.run(&right.take(0), Check::Stamps, 1).await.unwrap();
        let error = caller.run(&torn.take(0), Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(error, CallError::Consumed { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_torn_buffer_of_several_is_found_when_the_turn_ends() {
        let channel = tcp(serve(), Http2::Default).await.unwrap();
        let mut caller = GrpcCaller::new(channel, Mode::GrpcTcp, Encode::Copy);
        let mut torn = message(&mut Content::new(200_000, 9).unwrap(), &[10, 100_000, 3]);
        let mut buffer = torn.buffers[1].to_vec();
        buffer[50_000..50_008].fill(0);
        torn.buffers[1] = buffer.into();
        caller.push(&torn, Check::Stamps).await.unwrap();
        let error = caller.end().await.unwrap_err();
        assert!(matches!(error, CallError::BufferContent { buffer: 1, offset: 50_000 }), "{error}");
    }

    #[tokio::test]
    async fn buffers_in_another_order_are_an_error_that_says_so() {
        let address = serve();
        for encode in [Encode::Copy, Encode::Gather] {
            let mut caller =
                GrpcCaller::new(tcp(address, Http2::Default).await.unwrap(), Mode::GrpcTcp, encode);
            let push = message(&mut Content::new(300_000, 9).unwrap(), &[10, 100_000, 10_240, 100_000, 10]);
            for check in [Check::All, Check::Stamps] {
                caller.run(&Operation::Push(push.clone()), check, 1).await.unwrap();
                let mut swapped = push.clone();
                swapped.buffers.swap(1, 3);
                let error = caller.run(&Operation::Push(swapped), check, 1).await.unwrap_err();
                assert!(matches!(error, CallError::BufferContent { buffer: 1, offset: 0 }), "{error}");
            }
            let mut wrong = push.clone();
            let mut bytes = wrong.buffers[3].to_vec();
            bytes[99_999] ^= 1;
            wrong.buffers[3] = bytes.into();
            let error = caller.run(&Operation::Push(wrong), Check::Stamps, 1).await.unwrap_err();
            assert!(matches!(error, CallError::BufferContent { buffer: 3, offset: 99_999 }), "{error}");
            assert!(error.is_mismatch());
        }
    }

    #[tokio::test]
    async fn one_wrong_message_spoils_a_set_however_it_is_pushed() {
        let mut caller =
            GrpcCaller::new(tcp(serve(), Http2::Default).await.unwrap(), Mode::GrpcTcp, Encode::Copy);
        let mut content = Content::new(100_000, 2).unwrap();
        let set: Vec<Push> = (1..20).map(|index| message(&mut content, &[index * 100])).collect();
        let mut spoilt = set.clone();
        spoilt[7].seed += 1;
        for width in [1, 4, 100] {
            caller.run(&Operation::Set(set.clone().into()), Check::All, width).await.unwrap();
            let error =
                caller.run(&Operation::Set(spoilt.clone().into()), Check::All, width).await.unwrap_err();
            assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 0 }), "{error}");
        }
    }
}
