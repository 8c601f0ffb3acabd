//! The serving process: the services Transfer, Tensors and Source on a TCP, a Unix and an RDMA listener at the same time.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net as unix;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::gather;
use tonic_rdma_proto::tensors::tensors_server::{Tensors, TensorsServer};
use tonic_rdma_proto::tensors::{Mismatch, PushReply, PushRequest};
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::turns_server::{Turns, TurnsServer};
use tonic_rdma_proto::transfer::{
    BeginTurnReply, BeginTurnRequest, Check, EndTurnReply, EndTurnRequest, PutReply, PutRequest, UsageReply,
    UsageRequest, WrongByte,
};
use tonic_rdma_tensor::RdmaDevice;

use super::busy::Awake;
use super::consume::{reduce, reduce_all};
use super::content::{check_all, check_buffers, check_stamps};
use super::cores;
use super::direction::Direction;
use super::encode::Encode;
use super::http2::Http2;
use super::mode::Mode;
use super::placement::PlacementService;
use super::rdma::Rdma;
use super::sample::Sample;
use super::source::SourceService;
use crate::args::ServerOptions;
use crate::failure::Failure;

/// The one line that the serving process writes to stdout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Hello {
    /// It serves.
    Ready(Addresses),
    /// It can't serve, and why; whether the request was to blame.
    Failed { reason: String, usage: bool },
}

/// Where the service is to be found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addresses {
    pub(crate) tcp: SocketAddr,
    /// The same with tuned windows and frames.
    pub(crate) tcp_tuned: SocketAddr,
    /// Name in the abstract namespace, which leaves no file behind.
    pub(crate) uds: String,
    pub(crate) rdma: Option<SocketAddr>,
    /// Where large answers go by reference, which they do for `grpc-rdma-gather`.
    pub(crate) rdma_gather: Option<SocketAddr>,
    /// Where its device for tensors listens, as `host:port`.
    pub(crate) tensors: Option<String>,
    /// Whether the process sits on the core that it was given.
    pub(crate) pinned: bool,
}

/// Serves until stdin ends, which it does when the parent is gone, however it went.
pub(crate) fn run(options: &ServerOptions) -> Result<(), Failure> {
    let pinned = options.core.is_some_and(|core| cores::pin(core).is_ok());
    exit_with_parent()?;
    let runtime =
        options.runtime.build().map_err(|error| Failure::run(format!("can't start a runtime: {error}")))?;
    runtime.block_on(async {
        let started = match options.allocator.verify() {
            Ok(()) => start(options, pinned).await,
            Err(failure) => Err(failure),
        };
        let (addresses, mut servers) = match started {
            Ok(started) => started,
            Err(failure) => {
                let usage = matches!(failure, Failure::Usage(_));
                // The parent reports it: saying it here as well would be saying it twice.
                return announce(&Hello::Failed { reason: failure.to_string(), usage });
            }
        };
        announce(&Hello::Ready(addresses))?;
        match servers.join_next().await {
            Some(Ok(Err(error))) => Err(Failure::run(format!("the server failed: {error}"))),
            Some(Err(error)) => Err(Failure::run(format!("the server crashed: {error}"))),
            Some(Ok(Ok(()))) | None => Ok(()),
        }
    })
}

/// A thread of its own waits for the end of stdin, so that a busy runtime can't outlive the parent.
fn exit_with_parent() -> Result<(), Failure> {
    let wait = || {
        // Nothing is ever sent; an error means the same as the end.
        let _ = io::copy(&mut io::stdin().lock().take(u64::MAX), &mut io::sink());
        #[expect(clippy::disallowed_methods, reason = "the parent is gone: there is nobody left to answer")]
        std::process::exit(0)
    };
    let thread = std::thread::Builder::new().name("stdin".to_owned()).spawn(wait);
    thread.map(drop).map_err(|error| Failure::run(format!("can't start a thread: {error}")))
}

fn announce(hello: &Hello) -> Result<(), Failure> {
    let line = serde_json::to_string(hello).map_err(|error| Failure::run(error.to_string()))?;
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(|error| Failure::output(&error))
}

type Servers = JoinSet<Result<(), tonic::transport::Error>>;

async fn start(options: &ServerOptions, pinned: bool) -> Result<(Addresses, Servers), Failure> {
    // All of gRPC's modes come to this one service, and every setting treats them alike.
    let service = Service::reducing(options.consume.reduces(Mode::GrpcTcp));
    let mut servers = Servers::new();

    let rdma = if options.rdma { Some(Rdma::new(&options.provider)?) } else { None };
    let device = match &rdma {
        Some(rdma) => Some(tensor_device(rdma).await?),
        None => None,
    };
    let tensors = device.as_ref().map(RdmaDevice::endpoint);
    let placement = device.map(|device| PlacementService::new(device, options.consume));

    let tcp = tcp_listener()?;
    let tcp_address = tcp.local_addr().map_err(|error| listen_error("TCP", &error))?;
    let tuned = tcp_listener()?;
    let tcp_tuned = tuned.local_addr().map_err(|error| listen_error("TCP", &error))?;
    let gathers = options.encode == Encode::Gather;
    let (http2, source) = (options.http2, SourceService::default());
    let services = Services { service, source, http2 };
    servers.spawn(services.clone().serve(gathers, placement, tcp));
    let services_tuned = Services { http2: Http2::Tuned, ..services.clone() };
    servers.spawn(services_tuned.serve(gathers, None, tuned));

    let (uds, uds_name) = uds_listener().map_err(|error| listen_error("a Unix socket", &error))?;
    servers.spawn(services.clone().serve(gathers, None, uds));

    let (mut rdma_address, mut rdma_gather) = (None, None);
    if let Some(rdma) = rdma {
        let (incoming, address) = rdma.bind().await?;
        rdma_address = Some(address);
        servers.spawn(services.clone().serve(gathers, None, incoming));
        if options.direction == Direction::Down {
            let (incoming, address) = rdma.bind().await?;
            rdma_gather = Some(address);
            servers.spawn(services.serve(true, None, incoming));
        }
    }
    let (tcp, uds, rdma) = (tcp_address, uds_name, rdma_address);
    Ok((Addresses { tcp, tcp_tuned, uds, rdma, rdma_gather, tensors, pinned }, servers))
}

/// A device that tensors are put into.
async fn tensor_device(rdma: &Rdma) -> Result<RdmaDevice, Failure> {
    let bound = rdma.tensor_device().bind((Ipv4Addr::LOCALHOST, 0)).await;
    bound.map_err(|error| Failure::run(format!("can't make a device for tensors: {error}")))
}

/// What is served on every listener.
#[derive(Clone, Debug)]
struct Services {
    service: Service,
    source: SourceService,
    http2: Http2,
}

impl Services {
    /// Serves on one listener, and sends large answers by reference if it `gathers`; `placement` is asked for by one connection
    /// alone, outside the time.
    async fn serve<I, IO>(
        self,
        gathers: bool,
        placement: Option<PlacementService>,
        incoming: I,
    ) -> Result<(), tonic::transport::Error>
    where
        I: Stream<Item = io::Result<IO>> + Send,
        IO: tokio::io::AsyncRead + tokio::io::AsyncWrite + tonic::transport::server::Connected,
        IO: Unpin + Send + 'static,
    {
        let Self { service, source, http2 } = self;
        let placement = placement.map(PlacementService::server);
        let (transfer, tensors) = (service.clone().transfer(), service.clone().tensors());
        let (source, turns) = (source.server(), TurnsServer::new(service));
        let mut server = http2.server(Server::builder());
        if gathers {
            let mut server = server.layer(gather::responses());
            let server = server.add_service(transfer).add_service(tensors).add_service(turns);
            server.add_service(source).add_optional_service(placement).serve_with_incoming(incoming).await
        } else {
            let server = server.add_service(transfer).add_service(tensors).add_service(turns);
            server.add_service(source).add_optional_service(placement).serve_with_incoming(incoming).await
        }
    }
}

fn listen_error(what: &str, error: &io::Error) -> Failure {
    Failure::run(format!("can't listen on {what}: {error}"))
}

/// A listener on a free port of the loopback interface, nodelay on everything that it accepts.
pub(crate) fn tcp_listener() -> Result<TcpIncoming, Failure> {
    let incoming = TcpIncoming::bind((Ipv4Addr::LOCALHOST, 0).into());
    Ok(incoming.map_err(|error| listen_error("127.0.0.1", &error))?.with_nodelay(Some(true)))
}

fn uds_listener() -> io::Result<(UnixListenerStream, String)> {
    let name = format!("tonic-rdma-compare-{}", std::process::id());
    let listener = unix::UnixListener::bind_addr(&unix::SocketAddr::from_abstract_name(&name)?)?;
    listener.set_nonblocking(true)?;
    Ok((UnixListenerStream::new(UnixListener::from_std(listener)?), name))
}

/// Takes payloads and says whether they are what their seed demands.
#[derive(Clone, Debug, Default)]
pub(crate) struct Service {
    /// Calls so far: moves the sampled offsets from call to call.
    calls: Arc<AtomicU64>,
    /// Whether each answer says what consuming the payload finds.
    reduces: bool,
    /// Of the messages of this turn, where nothing else looks at every byte of them.
    sample: Sample,
    /// Keeps the runtime from sleeping in turns that ask for it.
    awake: Awake,
}

impl Service {
    /// A service that consumes what it takes, if `reduces`.
    pub(crate) fn reducing(reduces: bool) -> Self {
        Self { reduces, ..Self::default() }
    }

    /// The service for single payloads as a tonic server without limits on message sizes.
    pub(crate) fn transfer(self) -> TransferServer<Self> {
        TransferServer::new(self).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX)
    }

    /// The same for messages of several buffers.
    pub(crate) fn tensors(self) -> TensorsServer<Self> {
        TensorsServer::new(self).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX)
    }
}

#[tonic::async_trait]
impl Transfer for Service {
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
impl Tensors for Service {
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
impl Turns for Service {
    async fn begin(&self, request: Request<BeginTurnRequest>) -> Result<Response<BeginTurnReply>, Status> {
        if request.into_inner().never_sleep {
            self.awake.begin();
        }
        Ok(Response::new(BeginTurnReply {}))
    }

    async fn end(&self, _: Request<EndTurnRequest>) -> Result<Response<EndTurnReply>, Status> {
        self.awake.end();
        let look = self.sample.look();
        let wrong = look.wrong.map(|(buffer, offset)| WrongByte { buffer, offset });
        Ok(Response::new(EndTurnReply { messages: look.messages, wrong }))
    }
}
