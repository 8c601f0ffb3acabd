//! The server process: the services Transfer, Tensors, Source and Turns on TCP, Unix and RDMA listeners at once.

use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net as unix;

use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{Body as HttpBody, Bytes, Service, StdError};
use tonic::transport::Server;
use tonic_rdma::{RdmaIncoming, RdmaRoutes, RdmaServer, gather};
use tonic_rdma_commands::Failure;
use tonic_rdma_proto::transfer::turns_server::TurnsServer;
use tonic_rdma_tensor::RdmaDevice;
use tower::Layer;

use super::start_report::{Addresses, StartReport};
use crate::compare::modes::grpc::service::TransferService;
use crate::compare::modes::grpc::source::SourceService;
use crate::compare::modes::mode::Mode;
use crate::compare::modes::placement::PlacementService;
use crate::compare::options::ServerOptions;
use crate::compare::plan::direction::Direction;
use crate::measure::process::cores;
use crate::measure::process::limits::raise_open_files;
use crate::measure::transport::encode::Encode;
use crate::measure::transport::http2::Http2;
use crate::measure::transport::listener::{listen_error, tcp_listener};
use crate::measure::transport::rdma::Rdma;

/// Serves until stdin ends. The end of the parent closes stdin in every case.
pub(crate) fn run(options: &ServerOptions) -> Result<(), Failure> {
    let pinned = options.core.is_some_and(|core| cores::pin(core).is_ok());
    exit_with_parent()?;
    // The client reports a connection that fails because the limit is too low.
    let _ = raise_open_files();
    let runtime =
        options.runtime.build().map_err(|error| Failure::run("can't start a runtime").because(error))?;
    runtime.block_on(async {
        let started = match options.allocator.verify() {
            Ok(()) => start(options, pinned).await,
            Err(failure) => Err(failure),
        };
        let (addresses, mut servers) = match started {
            Ok(started) => started,
            Err(failure) => {
                let usage = failure.is_usage();
                // The parent reports the failure. A second report here would repeat it.
                return announce(&StartReport::Failed { reason: failure.with_causes(), usage });
            }
        };
        announce(&StartReport::Ready(addresses))?;
        match servers.join_next().await {
            Some(Ok(Err(error))) => Err(Failure::run("the server failed").because(error)),
            Some(Err(error)) => Err(Failure::run("the server crashed").because(error)),
            Some(Ok(Ok(()))) | None => Ok(()),
        }
    })
}

/// Starts a thread that waits for the end of stdin, so that a busy runtime does not outlive the parent.
fn exit_with_parent() -> Result<(), Failure> {
    let wait = || {
        // The parent sends nothing. An error counts as the end.
        let _ = io::copy(&mut io::stdin().lock().take(u64::MAX), &mut io::sink());
        #[expect(clippy::disallowed_methods, reason = "the parent is gone, and nothing waits for an answer")]
        std::process::exit(0)
    };
    let thread = std::thread::Builder::new().name("stdin".to_owned()).spawn(wait);
    thread.map(drop).map_err(|error| Failure::run("can't start a thread").because(error))
}

fn announce(report: &StartReport) -> Result<(), Failure> {
    let line = serde_json::to_string(report)
        .map_err(|error| Failure::run("can't make JSON of the start report").because(error))?;
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(|error| Failure::output(&error))
}

type Servers = JoinSet<Result<(), StdError>>;

async fn start(options: &ServerOptions, pinned: bool) -> Result<(Addresses, Servers), Failure> {
    // All gRPC modes use this one service, and settings apply to all of them.
    let service = TransferService::reducing(Mode::GrpcTcp.reduces(options.consume));
    let mut servers = Servers::new();

    let rdma = match options.rdma {
        true => Some(Rdma::new(&options.provider)?.for_load(options.connections, options.longest_payload)),
        false => None,
    };
    let device = match &rdma {
        Some(rdma) => Some(tensor_device(rdma).await?),
        None => None,
    };
    let tensors = device.as_ref().map(RdmaDevice::endpoint);
    let placement = device.map(|device| PlacementService::new(device, options.consume));

    let tcp = tcp_listener()?;
    let tcp_address = tcp.local_addr().map_err(|error| listen_error("TCP", error))?;
    let tuned = tcp_listener()?;
    let tcp_tuned = tuned.local_addr().map_err(|error| listen_error("TCP", error))?;
    let gathers = options.encode == Encode::Gather;
    let (http2, source) = (options.http2, SourceService::default());
    let services = Services { service, source, http2 };
    servers.spawn(services.clone().serve(gathers, placement, tcp));
    let services_tuned = Services { http2: Http2::Tuned, ..services.clone() };
    servers.spawn(services_tuned.serve(gathers, None, tuned));

    let (uds, uds_name) = uds_listener().map_err(|error| listen_error("a Unix socket", error))?;
    servers.spawn(services.clone().serve(gathers, None, uds));

    let mut addresses = Addresses {
        tcp: tcp_address,
        tcp_tuned,
        uds: uds_name,
        rdma: None,
        rdma_gather: None,
        native: None,
        native_gather: None,
        tensors,
        pinned,
    };
    if let Some(rdma) = rdma {
        let (incoming, address) = rdma.bind().await?;
        addresses.rdma = Some(address);
        servers.spawn(services.clone().serve(gathers, None, incoming));
        if options.direction == Direction::Down {
            let (incoming, address) = rdma.bind().await?;
            addresses.rdma_gather = Some(address);
            servers.spawn(services.clone().serve(true, None, incoming));
        }
        let (incoming, address) = rdma.bind().await?;
        addresses.native = Some(address);
        let server = rdma.server(options.http2);
        if gathers {
            servers.spawn(services.clone().serve_native(server.layer(gather::responses()), incoming));
        } else {
            servers.spawn(services.clone().serve_native(server, incoming));
        }
        let (incoming, address) = rdma.bind().await?;
        addresses.native_gather = Some(address);
        let registering = Services { source: SourceService::registering(), ..services };
        let both = gather::both_layer().max_decoding_message_size(usize::MAX);
        servers.spawn(registering.serve_native(rdma.server(options.http2).layer(both), incoming));
    }
    Ok((addresses, servers))
}

/// Makes the device that tensors are written to.
async fn tensor_device(rdma: &Rdma) -> Result<RdmaDevice, Failure> {
    let bound = rdma.tensor_device().bind((Ipv4Addr::LOCALHOST, 0)).await;
    bound.map_err(|error| Failure::run("can't make a device for tensors").because(error))
}

/// The services of every listener.
#[derive(Clone, Debug)]
struct Services {
    service: TransferService,
    source: SourceService,
    http2: Http2,
}

impl Services {
    /// Serves on one listener, with large answers by reference if `gathers`. Only one connection, outside the measured
    /// time, uses `placement`.
    async fn serve<I, IO>(
        self,
        gathers: bool,
        placement: Option<PlacementService>,
        incoming: I,
    ) -> Result<(), StdError>
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
            server.add_service(source).add_optional_service(placement).serve_with_incoming(incoming).await?;
        } else {
            let server = server.add_service(transfer).add_service(tensors).add_service(turns);
            server.add_service(source).add_optional_service(placement).serve_with_incoming(incoming).await?;
        }
        Ok(())
    }

    /// Serves native calls through the layers of `server`.
    async fn serve_native<L, S, B>(
        self,
        server: RdmaServer<L>,
        incoming: RdmaIncoming,
    ) -> Result<(), StdError>
    where
        L: Layer<RdmaRoutes, Service = S> + Send + 'static,
        S: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<StdError> + Send + 'static,
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<StdError>,
    {
        let Self { service, source, http2: _ } = self;
        let (transfer, tensors) = (service.clone().transfer(), service.clone().tensors());
        let server = server.add_service(transfer).add_service(tensors).add_service(TurnsServer::new(service));
        Ok(server.add_service(source.server()).serve_with_incoming(incoming).await?)
    }
}

fn uds_listener() -> io::Result<(UnixListenerStream, String)> {
    let name = format!("tonic-rdma-compare-{}", std::process::id());
    let listener = unix::UnixListener::bind_addr(&unix::SocketAddr::from_abstract_name(&name)?)?;
    listener.set_nonblocking(true)?;
    Ok((UnixListenerStream::new(UnixListener::from_std(listener)?), name))
}
