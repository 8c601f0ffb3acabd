//! The server process: its start by the client, here or by a listening end on another host, and its services on
//! TCP, Unix and RDMA listeners at once.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net as unix;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{Body as HttpBody, Bytes, Service, StdError};
use tonic::transport::Server;
use tonic_rdma::{Policy, RdmaIncoming, RdmaRoutes, RdmaServer, gather};
use tonic_rdma_commands::ends::{self, limit_memory, own_arguments, parse_arguments};
use tonic_rdma_commands::remote::{Host, Request as ChildRequest};
use tonic_rdma_commands::{Context as _, Failure, cores};
use tonic_rdma_proto::placement::placement_server::PlacementServer;
use tonic_rdma_tensor::RdmaDevice;
use tower::Layer;
use tower::layer::util::Identity;
use tower::util::{Either, option_layer};

use crate::compare::modes::grpc::service::{Source, TransferService};
use crate::compare::modes::mode::Mode;
use crate::compare::modes::placement::PlacementService;
use crate::compare::options::{CompareOptions, Conditions, Grant, PROGRAM, ServerJob, ServerRequest};
use crate::compare::plan::{Direction, Plan};
use crate::measure::process::{self, Children, container, raise_open_files};
use crate::measure::recorder;
use crate::measure::settings::Http2;
use crate::measure::transport::{self, Encode, LOCALHOST, Rdma, tcp_listener};

/// The addresses of the server process, which it reports when it has started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addresses {
    /// The listeners for calls over HTTP/2, for each setting of the run.
    pub(crate) http2: Vec<Http2Addresses>,
    /// The listener for native calls, and the one that also sends and lands payloads by reference.
    pub(crate) native: Option<SocketAddr>,
    pub(crate) native_gather: Option<SocketAddr>,
    /// Address of the tensor device, as `host:port`.
    pub(crate) tensors: Option<String>,
    /// The core that the process is kept on.
    pub(crate) core: Option<usize>,
}

/// The addresses of listeners that have one setting of HTTP/2.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Http2Addresses {
    pub(crate) setting: Http2,
    pub(crate) tcp: SocketAddr,
    /// Name in the abstract namespace, which leaves no file behind. Absent on another host.
    pub(crate) uds: Option<String>,
    pub(crate) rdma: Option<SocketAddr>,
    /// The listener that sends large answers by reference, for `grpc-rdma-gather`.
    pub(crate) rdma_gather: Option<SocketAddr>,
}

impl Addresses {
    /// Returns the listeners that have this `setting`, or the first ones without it.
    pub(crate) fn of(&self, setting: Option<Http2>) -> Result<&Http2Addresses, Failure> {
        let mut of_setting =
            self.http2.iter().filter(|it| setting.is_none_or(|setting| it.setting == setting));
        of_setting
            .next()
            .ok_or_else(|| Failure::run("the server process does not listen with this HTTP/2 setting"))
    }
}

/// Serves until stdin ends. The end of the parent closes stdin in every case.
pub(crate) fn run(job: &ServerJob) -> Result<(), Failure> {
    let conditions = Conditions::of(&job.options);
    let core = job.core.filter(|core| cores::pin(*core).is_ok());
    if let Some(grant) = job.grant {
        limit_memory(grant.memory)?;
    }
    let _commands = process::commands::<IgnoredAny>()?;
    if job.options.with_metrics {
        recorder::install().map(drop)?;
    }
    // The client reports a connection that fails because the limit is too low.
    let _ = raise_open_files();
    let runtime = conditions.runtime.build().context("can't start a runtime")?;
    runtime.block_on(async {
        let (addresses, mut servers) = match listen(job, core).await {
            Ok(started) => started,
            Err(failure) => return process::report_failure(Err(failure)),
        };
        process::report(&addresses)?;
        match servers.join_next().await {
            Some(Ok(Err(error))) => Err(Failure::run("the server failed").because(error)),
            Some(Err(error)) => Err(Failure::run("the server crashed").because(error)),
            Some(Ok(Ok(()))) | None => Ok(()),
        }
    })
}

/// The running servers of a process. The drop of this value ends them.
pub(crate) type Servers = JoinSet<Result<(), StdError>>;

async fn listen(job: &ServerJob, core: Option<usize>) -> Result<(Addresses, Servers), Failure> {
    let options = &job.options;
    Conditions::of(options).allocator.verify()?;
    let provider = options.server_provider.as_ref().unwrap_or(&options.provider);
    let connections = options.connections.map_or(1, |most| u32::try_from(most).unwrap_or(u32::MAX));
    let rdma = job.rdma.then(|| Rdma::new(provider)).transpose()?;
    let rdma = rdma.map(|rdma| rdma.for_load(connections, job.longest_payload));
    let rdma = rdma.map(|rdma| job.grant.map_or(rdma.clone(), |grant| rdma.at_most(grant.memory)));
    let ip = job.grant.map_or(LOCALHOST, |grant| grant.ip);
    let device = match &rdma {
        Some(rdma) => Some(tensor_device(rdma, ip).await?),
        None => None,
    };
    let tensors = device.as_ref().map(RdmaDevice::endpoint);
    let placement = device.map(|device| PlacementService::new(device, options.consume));
    let services = Services {
        // All gRPC modes use this one service, and settings apply to all of them.
        service: TransferService::reducing(Mode::GrpcTcp.reduces(options.consume)).up_to(job.longest_payload),
        registering: Source::registering(),
        http2: job.http2.clone(),
        gathers: options.encode == Encode::Gather,
        direction: options.direction,
        ip,
    };
    let (addresses, servers) = services.listen(rdma.as_ref(), placement).await?;
    Ok((Addresses { tensors, core, ..addresses }, servers))
}

/// Makes the device that tensors are written to.
pub(crate) async fn tensor_device(rdma: &Rdma, ip: IpAddr) -> Result<RdmaDevice, Failure> {
    let bound = rdma.tensor_device().bind((ip, 0)).await;
    bound.context("can't make a device for tensors")
}

/// The services of every listener, and their settings.
#[derive(Clone, Debug)]
pub(crate) struct Services {
    pub(crate) service: TransferService,
    /// The source of the listener that sends payloads from registered memory.
    pub(crate) registering: Source,
    /// The settings of HTTP/2, with listeners of its own for each of them.
    pub(crate) http2: Vec<Http2>,
    /// Whether all listeners send large answers by reference.
    pub(crate) gathers: bool,
    pub(crate) direction: Direction,
    /// The address of all listeners.
    pub(crate) ip: IpAddr,
}

impl Services {
    /// Listens for native calls if `rdma` is there, and for HTTP/2. Only one connection, outside the measured time, uses
    /// `placement`.
    pub(crate) async fn listen(
        self,
        rdma: Option<&Rdma>,
        mut placement: Option<PlacementService>,
    ) -> Result<(Addresses, Servers), Failure> {
        let (mut servers, mut addresses) = (Servers::new(), Addresses::default());
        for setting in &self.http2 {
            let listening = self.listen_for_http2(*setting, rdma, placement.take(), &mut servers);
            addresses.http2.push(listening.await?);
        }
        let Some(rdma) = rdma else { return Ok((addresses, servers)) };
        let http2 = self.http2.first().copied().unwrap_or(Http2::DEFAULT);
        let (incoming, address) = rdma.bind(self.ip, Policy::Require).await?;
        addresses.native = Some(address);
        let server = rdma.server(http2).layer(gathering(self.gathers));
        servers.spawn(self.clone().serve_native(server, incoming));
        let (incoming, address) = rdma.bind(self.ip, Policy::Require).await?;
        addresses.native_gather = Some(address);
        let both = gather::GatherBothLayer::new().max_decoding_message_size(usize::MAX);
        let mut service = self.service.clone().with(self.registering.clone());
        if self.fetches() {
            service = service.fetching(transport::fetching(Some(rdma))?, true);
        }
        let registering = Self { service, ..self };
        servers.spawn(registering.serve_native(rdma.server(http2).layer(both), incoming));
        Ok((addresses, servers))
    }

    /// Listens with one setting: on TCP, within one host on a Unix socket, and for RDMA peers if `rdma` is there.
    async fn listen_for_http2(
        &self,
        setting: Http2,
        rdma: Option<&Rdma>,
        placement: Option<PlacementService>,
        servers: &mut Servers,
    ) -> Result<Http2Addresses, Failure> {
        let (gathers, ip) = (self.gathers, self.ip);
        let tcp = tcp_listener(ip)?;
        let address = tcp.local_addr().context("can't listen on TCP")?;
        let mut addresses =
            Http2Addresses { setting, tcp: address, uds: None, rdma: None, rdma_gather: None };
        let mut on_tcp = self.clone();
        if self.fetches() {
            on_tcp.service = on_tcp.service.fetching(transport::fetching(None)?, false);
        }
        servers.spawn(on_tcp.serve(setting, gathers, placement, tcp));
        if ip == LOCALHOST {
            let listener = uds_listener(address.port()).context("can't listen on a Unix socket");
            let (listener, name) = listener?;
            servers.spawn(self.clone().serve(setting, gathers, None, listener));
            addresses.uds = Some(name);
        }
        let Some(rdma) = rdma else { return Ok(addresses) };
        let (incoming, address) = rdma.bind(ip, Policy::Prefer).await?;
        addresses.rdma = Some(address);
        servers.spawn(self.clone().serve(setting, gathers, None, incoming));
        if self.direction == Direction::Down {
            let (incoming, address) = rdma.bind(ip, Policy::Require).await?;
            addresses.rdma_gather = Some(address);
            servers.spawn(self.clone().serve(setting, true, None, incoming));
        }
        Ok(addresses)
    }

    /// Returns whether receivers by reference fetch payloads: they connect to owners of this host alone.
    fn fetches(&self) -> bool {
        self.ip == LOCALHOST && self.direction == Direction::Up
    }

    /// Serves on one listener, with large answers by reference if `gathers`.
    async fn serve<I, IO>(
        self,
        setting: Http2,
        gathers: bool,
        placement: Option<PlacementService>,
        incoming: I,
    ) -> Result<(), StdError>
    where
        I: Stream<Item = io::Result<IO>> + Send,
        IO: tokio::io::AsyncRead + tokio::io::AsyncWrite + tonic::transport::server::Connected,
        IO: Unpin + Send + 'static,
    {
        let placement = placement.map(PlacementServer::new);
        let mut server = setting.server(Server::builder()).layer(gathering(gathers));
        let server = server.add_service(self.service.transfer()).add_service(self.service.exchange());
        let server = server.add_optional_service(self.service.reference()).add_optional_service(placement);
        Ok(server.serve_with_incoming(incoming).await?)
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
        let server = server.add_service(self.service.transfer()).add_service(self.service.exchange());
        let server = match self.service.reference() {
            Some(reference) => server.add_service(reference),
            None => server,
        };
        Ok(server.serve_with_incoming(incoming).await?)
    }
}

/// Returns the layer that sends large answers by reference, if this `gathers`.
fn gathering(gathers: bool) -> Either<gather::GatherResponses, Identity> {
    option_layer(gathers.then(gather::GatherResponses::new))
}

/// Listens on a Unix socket. `port`, which no other listener of this host has, is in its name.
fn uds_listener(port: u16) -> io::Result<(UnixListenerStream, String)> {
    let name = format!("tonic-rdma-compare-{}-{port}", std::process::id());
    let listener = unix::UnixListener::bind_addr(&unix::SocketAddr::from_abstract_name(&name)?)?;
    listener.set_nonblocking(true)?;
    Ok((UnixListenerStream::new(UnixListener::from_std(listener)?), name))
}

/// Longest time until the server process has started.
const START: Duration = Duration::from_secs(20);
/// Time to wait for the end of the server after a failure. Connections break before the end of the process
/// can be seen. On a busy machine that may take seconds.
pub(crate) const EXPLANATION: Duration = Duration::from_secs(5);

/// Starts this program again as the server, here or at `host`, and waits until the server has started.
pub(crate) async fn start(
    job: &ServerJob,
    host: Option<&Arc<Host>>,
) -> Result<(Children<Addresses>, Addresses), Failure> {
    let mut children = Children::new();
    match host {
        Some(host) => {
            let (arguments, pinned) = (own_arguments(2)?, job.core.is_some());
            let request = ServerRequest { arguments, pinned };
            children.start_at(host, NAME, &request)?;
        }
        None => children.start(NAME, command(job)?)?,
    }
    let mut addresses = children.receive_reports(0..1, Instant::now() + START, EXPLANATION).await?;
    let missing = || Failure::run("the server process has no addresses");
    Ok((children, addresses.pop().ok_or_else(missing)?))
}

/// The name of the server process, for people.
const NAME: &str = "the server process";

fn command(job: &ServerJob) -> Result<Command, Failure> {
    let mut command = process::command("compare-server", job)?;
    if job.options.container {
        command = container(&command);
    }
    Conditions::of(&job.options).allocator.choose_for(&mut command);
    Ok(command)
}

/// Most cells of a caller's run.
const MOST_CELLS: usize = 1000;

/// Serves the callers of `address`, until a signal comes.
pub(crate) fn listen_for_callers(address: &str, options: &CompareOptions) -> Result<(), Failure> {
    Rdma::new(&options.provider)?;
    ends::listen(PROGRAM, address, options.limit, |request| admit(request, options))
}

/// Makes the job of a caller's server process. `options` are those of the listening end.
fn admit(request: &ChildRequest, options: &CompareOptions) -> Result<(String, Command), Failure> {
    let ServerRequest { arguments, pinned } = request.job()?;
    let asked: CompareOptions = parse_arguments(&arguments)?;
    if asked.connections.is_some() || asked.container || asked.listen.is_some() {
        return Err(Failure::usage("--connections, --container and --listen are for one host"));
    }
    if asked.cells_at_most() > MOST_CELLS {
        return Err(Failure::usage(format!(
            "a listening end measures at most {MOST_CELLS} cells in one run"
        )));
    }
    let plan = Plan::new(&asked)?;
    let too_much =
        |failure: Failure| Failure::usage(format!("--limit of the listening end: {}", failure.with_causes()));
    plan.parts().try_for_each(|part| part.fits(Some(options.limit))).map_err(too_much)?;
    let what = plan.describe();
    let asked = CompareOptions { provider: options.provider.clone(), server_provider: None, ..asked };
    let conditions = Conditions::of(&asked);
    let job = ServerJob {
        rdma: plan.uses_rdma(),
        longest_payload: plan.parts().map(Plan::longest_payload).max().unwrap_or(0),
        core: conditions.cores().filter(|_| pinned).map(|cores| cores.server),
        grant: Some(Grant { ip: request.ip, memory: options.limit }),
        http2: plan.http2(&asked),
        options: asked,
    };
    Ok((what, command(&job)?))
}
