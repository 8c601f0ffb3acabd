//! `tonic-rdma bridge`: carries byte streams unchanged between TCP or Unix sockets on one side and RDMA on
//! the other, so that programs without RDMA can use it.
//!
//! ```text
//!   client ──tcp──▶ bridge ══rdma══▶ bridge ──unix──▶ server        serve   accepts, a task for each connection
//!                   listen           listen                         dial    connects to the target, with back-off
//!                   relay            relay                          relay   two pumps, one for each direction
//! ```
//!
//! Each thread has its own runtime, which polls completion queues before it would go to sleep. All threads
//! accept from the same sockets. A connection stays on the thread that accepted it.

mod address;
mod listen;
mod meters;
mod relay;
mod route;
mod serve;
mod stream;

use std::io;
use std::net::ToSocketAddrs as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use metrics_exporter_prometheus::PrometheusHandle;
use rustix::process::{Resource, getrlimit};
use sd_notify::NotifyState;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tonic_rdma::{Config, Dialer};
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::units::parse_time;
use tonic_rdma_commands::{Context as _, Failure, Flavour, Signals};

use self::address::Address;
use self::listen::Bound;
use self::route::Route;
use self::serve::{BridgeState, Phase};
use crate::measure::process::{pinned, raise_open_files};
use crate::measure::recorder;

pub(crate) const HELP: &str = "\
ADDR is tcp://HOST:PORT, unix:PATH, unix:@NAME (abstract) or rdma://HOST:PORT; IPv6 goes in brackets, port 0 picks a free port. \
--listen and --connect come in pairs, one for each route. Once a route listens, stdout has a line for it: \
`listening on tcp://127.0.0.1:41234, connecting to rdma://ps0:50051`.

rdma:// is negotiated on that TCP port. RDMA_POLICY and the other RDMA_* variables configure it. Without RDMA the same bytes \
go over TCP, and stderr gives the reason; with --policy require the connection fails. An rdma:// listener also serves clients \
without RDMA on the same port, with any protocol (a client that sends nothing counts as one without RDMA after 3 s).

Bytes pass unchanged. The bridge passes an end (half-close) on as an end and a failure as a reset, so a stream that was cut \
short never looks complete. When a client connects, the bridge connects to the target, and tries again with growing pauses until \
--connect-timeout; the client's bytes wait meanwhile. SIGTERM or SIGINT closes the listeners and waits for the connections, \
at most for --drain-timeout; a second signal ends them at once. Exit status: 0 if all connections ended by themselves, 1 if some \
were cut off or the bridge could not start, 2 for bad input.

Example: a client and a server without RDMA, each with a bridge on its host, the client's first:
  tonic-rdma bridge --listen tcp://127.0.0.1:50051 --connect rdma://ps0:50052
  tonic-rdma bridge --listen rdma://0.0.0.0:50052 --connect unix:/run/server.sock";

/// Options of `bridge`.
#[derive(Debug, Args)]
pub(crate) struct BridgeOptions {
    /// Where to accept connections: tcp://…, unix:…, rdma://…; repeatable
    #[arg(long, value_name = "ADDR", required = true)]
    pub(crate) listen: Vec<Address>,
    /// The target of its connections; one for each --listen
    #[arg(long, value_name = "ADDR", required = true)]
    pub(crate) connect: Vec<Address>,
    /// For rdma://: require, prefer or tcp-only [default: RDMA_POLICY]
    ///
    /// Whether these connections must use RDMA, or may use TCP. Without RDMA_POLICY it is prefer.
    #[arg(long, value_name = "POLICY", hide_possible_values = true)]
    pub(crate) policy: Option<PolicyName>,
    /// Connections at one time; further clients wait
    ///
    /// Over all routes. A client that waits is not accepted yet.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_connections: u32,
    /// Time to connect to the target, such as 5s or 300ms
    ///
    /// Without a unit it is in seconds. Then the client is reset. The client's wait while the target answers others does not count.
    #[arg(long, value_name = "TIME", default_value = "10", value_parser = parse_time)]
    pub(crate) connect_timeout: Duration,
    /// Time for connections to end after a signal
    #[arg(long, value_name = "TIME", default_value = "30", value_parser = parse_time)]
    pub(crate) drain_timeout: Duration,
    /// Start only if every target accepts a connection
    #[arg(long)]
    pub(crate) require_target: bool,
    /// Threads that carry connections, each on a core
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) threads: u16,
    /// Serve /metrics, /healthz and /ready over HTTP here
    ///
    /// For Prometheus and for probes, such as 127.0.0.1:9464.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) metrics: Option<String>,
    /// Log level, or a filter as in RUST_LOG [default: RUST_LOG]
    ///
    /// error, warn, info, debug, trace or off. Without RUST_LOG there are warnings and the transport of connections.
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log: Option<String>,
}

/// The library's policies, under the names that the variable accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyName {
    Require,
    Prefer,
    TcpOnly,
}

impl From<PolicyName> for tonic_rdma::Policy {
    fn from(name: PolicyName) -> Self {
        match name {
            PolicyName::Require => Self::Require,
            PolicyName::Prefer => Self::Prefer,
            PolicyName::TcpOnly => Self::TcpOnly,
        }
    }
}

/// Descriptors for everything except connections: listeners, devices, runtimes.
const OTHER_DESCRIPTORS: u64 = 128;

/// A route and its listening socket.
type Listening = (Bound, Arc<Route>);

/// Runs until a signal, and then until the connections have ended.
pub(crate) fn run(options: &BridgeOptions) -> Result<(), Failure> {
    let ends = pairs(options)?;
    let connections = fitting_connections(options.max_connections, &ends);
    let config = config(options, connections)?;
    let metrics = options.metrics.as_deref().map(open_metrics).transpose()?;
    let runtime = build_runtime()?;
    let routes = runtime.block_on(open_routes(ends, &config, options))?;

    let (phase, watched) = watch::channel(Phase::Running);
    let shared = Arc::new(BridgeState {
        room: Arc::new(Semaphore::new(connections as usize)),
        phase: watched.clone(),
        cut_off: AtomicU64::new(0),
        accepted: AtomicU64::new(0),
    });
    if let Some((listener, handle)) = metrics {
        runtime.spawn(meters::serve_metrics(listener, handle.clone(), move || {
            *watched.borrow() == Phase::Running
        }));
        runtime.spawn(meters::upkeep(handle));
    }
    let routes = Arc::new(routes);
    let threads: Vec<_> =
        (1..options.threads).map(|_| start_thread(&routes, &shared)).collect::<Result<_, _>>()?;
    let ended = runtime.block_on(async {
        accept(&routes, &shared).context("can't accept")?;
        let mut signals = Signals::new()?;
        announce(&routes)?;
        signals.next().await;
        drain(&phase, &shared, &mut signals, routes, connections, options).await
    });
    phase.send_replace(Phase::Over);
    for thread in threads {
        thread.join().map_err(|_| Failure::run("a thread panicked"))?;
    }
    ended
}

/// Pairs each address to listen on with its target.
fn pairs(options: &BridgeOptions) -> Result<Vec<(Address, Address)>, Failure> {
    let (listen, connect) = (&options.listen, &options.connect);
    if listen.len() != connect.len() {
        return Err(Failure::usage(format!(
            "--listen is given {} times and --connect {} times; each route needs one of both",
            listen.len(),
            connect.len()
        )));
    }
    if let Some(target) = connect.iter().find(|target| !target.can_be_connected_to()) {
        return Err(Failure::usage(format!("--connect {target}: port 0 is for listening alone")));
    }
    Ok(listen.iter().cloned().zip(connect.iter().cloned()).collect())
}

/// Raises the limit on open files as far as this process may. Returns the number of connections that fit, at
/// most `wanted`.
fn fitting_connections(wanted: u32, ends: &[(Address, Address)]) -> u32 {
    if let Err(error) = raise_open_files() {
        tracing::warn!(%error, "the limit on open files can't be raised");
    }
    let each = ends.iter().map(|(listen, connect)| descriptors(listen) + descriptors(connect)).max();
    let each = each.unwrap_or(1).max(1);
    let Some(limit) = getrlimit(Resource::Nofile).current else { return wanted };
    let possible = u32::try_from((limit.saturating_sub(OTHER_DESCRIPTORS) / each).max(1)).unwrap_or(u32::MAX);
    if possible < wanted {
        tracing::warn!(
            "--max-connections {wanted} needs {} open files, the limit is {limit}: {possible} connections at once, \
             more wait; raise it with `ulimit -n` or LimitNOFILE= in a systemd unit",
            u64::from(wanted) * each + OTHER_DESCRIPTORS
        );
    }
    wanted.min(possible)
}

/// Returns the descriptors that one end of a connection holds.
fn descriptors(address: &Address) -> u64 {
    match address {
        Address::Tcp(_) | Address::Unix(_) => 1,
        // The TCP connection, one descriptor of the software device, and one in reserve.
        Address::Rdma(_) => 3,
    }
}

fn config(options: &BridgeOptions, connections: u32) -> Result<Config, Failure> {
    let mut config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    if std::env::var_os("RDMA_PINNED_LIMIT").is_none() {
        config = config.pinned_limit(pinned(connections, 0));
    }
    if let Some(policy) = options.policy {
        config = config.policy(policy.into());
    }
    Ok(config.connect_timeout(options.connect_timeout))
}

/// Binds the address for metrics, and installs the recorder.
fn open_metrics(address: &str) -> Result<(std::net::TcpListener, PrometheusHandle), Failure> {
    let refused = |why: &dyn std::fmt::Display| {
        Failure::usage(format!("--metrics {address}: {why}; accepted: HOST:PORT, such as 127.0.0.1:9464"))
    };
    let addresses: Vec<_> = address.to_socket_addrs().map_err(|error| refused(&error))?.collect();
    let listener = std::net::TcpListener::bind(&addresses[..]).map_err(|error| refused(&error))?;
    listener.set_nonblocking(true).map_err(|error| refused(&error))?;
    let handle = recorder::install()?;
    meters::describe();
    if let Ok(address) = listener.local_addr() {
        tracing::info!("metrics at http://{address}/metrics");
    }
    Ok((listener, handle))
}

fn build_runtime() -> Result<Runtime, Failure> {
    Flavour::IdlePolling.build().context("can't start a runtime")
}

/// Binds all sockets, and checks the targets.
async fn open_routes(
    ends: Vec<(Address, Address)>,
    config: &Config,
    options: &BridgeOptions,
) -> Result<Vec<Listening>, Failure> {
    let mut routes = Vec::new();
    for (listen, target) in ends {
        let bound = Bound::new(&listen).context(format!("--listen {listen}: can't listen there"))?;
        let name = bound.address().to_string();
        let route = Route::new(&name, target, config.clone(), options.connect_timeout);
        routes.push((bound, Arc::new(route)));
    }
    for (_, route) in &routes {
        check_target(route, options.require_target).await?;
    }
    Ok(routes)
}

async fn check_target(route: &Route, required: bool) -> Result<(), Failure> {
    /// Time for a connection to a target that is not required at the start.
    const FIRST_ATTEMPT: Duration = Duration::from_secs(1);
    let dialer = Dialer::new(route.config.clone());
    if required {
        let found = route::dial(route, &dialer, 0).await.map_err(|error| {
            Failure::run(format!("--connect {}: --require-target is set, and there is {error}", route.target))
        })?;
        found.close();
        return Ok(());
    }
    let limit = route.connect_timeout;
    match route::attempt(&route.target, &dialer, limit.min(FIRST_ATTEMPT)).await {
        Ok(found) => found.close(),
        Err(error) => tracing::warn!(
            route = route.name,
            "the target is not there yet, clients wait {limit:?} for it: {error}"
        ),
    }
    Ok(())
}

/// Starts a task for each route within the calling runtime.
fn accept(routes: &[Listening], shared: &Arc<BridgeState>) -> io::Result<()> {
    for (bound, route) in routes {
        let acceptor = bound.acceptor(&route.config)?;
        tokio::spawn(serve::serve(acceptor, Arc::clone(route), Arc::clone(shared)));
    }
    Ok(())
}

/// Starts a thread that accepts beside the main thread, until the last phase.
fn start_thread(
    routes: &Arc<Vec<Listening>>,
    shared: &Arc<BridgeState>,
) -> Result<std::thread::JoinHandle<()>, Failure> {
    let runtime = build_runtime()?;
    let (routes, shared) = (Arc::clone(routes), Arc::clone(shared));
    let carry = move || {
        runtime.block_on(async {
            let started = accept(&routes, &shared);
            // From here on only the main thread holds the sockets. It closes them.
            drop(routes);
            if let Err(error) = started {
                tracing::error!(%error, "a thread can't accept");
            }
            let mut phase = shared.phase.clone();
            // An error means that the main thread has ended.
            let _ = phase.wait_for(|phase| *phase == Phase::Over).await;
        });
    };
    let thread = std::thread::Builder::new().name("bridge".to_owned()).spawn(carry);
    thread.context("can't start a thread")
}

/// Announces the listening sockets to scripts on stdout, and readiness to the service manager.
fn announce(routes: &[Listening]) -> Result<(), Failure> {
    for (bound, route) in routes {
        report_line(format!("listening on {}, connecting to {}", bound.address(), route.target))?;
    }
    notify(NotifyState::Ready);
    Ok(())
}

/// Notifies systemd, if it started this process (`Type=notify`).
fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "can't notify the service manager");
    }
}

/// Closes the sockets and waits for the connections, until --drain-timeout or the next signal.
async fn drain(
    phase: &watch::Sender<Phase>,
    shared: &BridgeState,
    signals: &mut Signals,
    routes: Arc<Vec<Listening>>,
    connections: u32,
    options: &BridgeOptions,
) -> Result<(), Failure> {
    /// Time for the resets to go out.
    const RESET_TIME: Duration = Duration::from_secs(2);
    phase.send_replace(Phase::Draining);
    notify(NotifyState::Stopping);
    drop(routes);
    let open = connections as usize - shared.room.available_permits();
    tracing::info!(connections = open, "draining, for {:?} at most", options.drain_timeout);
    let all = shared.room.acquire_many(connections);
    tokio::select! {
        _ = all => {}
        () = tokio::time::sleep(options.drain_timeout) => {}
        _ = signals.next() => {}
    }
    phase.send_replace(Phase::CuttingOff);
    let _ = timeout(RESET_TIME, shared.room.acquire_many(connections)).await;
    match shared.cut_off.load(Ordering::Relaxed) {
        0 => Ok(()),
        1 => Err(Failure::run("1 connection had not ended and was reset")),
        many => Err(Failure::run(format!("{many} connections had not ended and were reset"))),
    }
}
