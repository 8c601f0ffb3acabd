//! `tonic-rdma bridge`: carries byte streams unchanged between TCP or Unix sockets on one side and RDMA on the other, so
//! that programs without RDMA can use it.
//!
//! ```text
//!   client ──tcp──▶ bridge ══rdma══▶ bridge ──unix──▶ server        serve   accepts, a task for each connection
//!                   listen           listen                         dial    connects to the target, with back-off
//!                   relay            relay                          relay   two pumps, one for each direction
//! ```
//!
//! Each thread has its own runtime, which polls completion queues before it would go to sleep. All threads accept from the same
//! sockets. A connection stays on the thread that accepted it.

mod address;
mod dial;
mod listen;
mod meters;
mod options;
mod pump;
mod relay;
mod route;
mod scrape;
mod serve;
mod stream;

use std::io;
use std::net::ToSocketAddrs as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use rustix::process::{Resource, getrlimit};
use sd_notify::NotifyState;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tonic_rdma::{Config, Dialer};
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::{Context as _, Failure, Flavour};

pub(crate) use options::{BridgeOptions, HELP};

use crate::measure::process::{pinned, raise_open_files};
use address::Address;
use dial::AttemptError;
use listen::Bound;
use route::Route;
use serve::{Phase, Shared};

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
    let shared = Arc::new(Shared {
        room: Arc::new(Semaphore::new(connections as usize)),
        phase: watched.clone(),
        cut_off: AtomicU64::new(0),
        accepted: AtomicU64::new(0),
    });
    if let Some((listener, handle)) = metrics {
        runtime.spawn(scrape::serve(listener, handle.clone(), watched));
        runtime.spawn(scrape::upkeep(handle));
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

/// Raises the limit on open files as far as this process may. Returns the number of connections that fit, at most
/// `wanted`.
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
fn open_metrics(place: &str) -> Result<(std::net::TcpListener, PrometheusHandle), Failure> {
    let refused = |why: &dyn std::fmt::Display| {
        Failure::usage(format!("--metrics {place}: {why}; accepted: HOST:PORT, such as 127.0.0.1:9464"))
    };
    let addresses: Vec<_> = place.to_socket_addrs().map_err(|error| refused(&error))?.collect();
    let listener = std::net::TcpListener::bind(&addresses[..]).map_err(|error| refused(&error))?;
    listener.set_nonblocking(true).map_err(|error| refused(&error))?;
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).context("--metrics")?;
    meters::describe();
    if let Ok(address) = listener.local_addr() {
        tracing::info!("metrics at http://{address}/metrics");
    }
    Ok((listener, handle))
}

fn build_runtime() -> Result<Runtime, Failure> {
    Flavour::IdlePolling.build().context("can't start a runtime")
}

/// Binds all sockets, and looks for the targets.
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
        look_for_target(route, options.require_target).await?;
    }
    Ok(routes)
}

async fn look_for_target(route: &Route, required: bool) -> Result<(), Failure> {
    let dialer = Dialer::new(route.config.clone());
    if required {
        let found = dial::dial(route, &dialer, 0).await.map_err(|error| {
            Failure::run(format!("--connect {}: --require-target is set, and there is {error}", route.target))
        })?;
        found.close();
        return Ok(());
    }
    match dial::attempt(&route.target, &dialer, route.connect_timeout.min(LOOK)).await {
        Ok(found) => found.close(),
        Err(error) => warn_of_absence(route, &error),
    }
    Ok(())
}

/// Time to look for a target that is not required at the start.
const LOOK: std::time::Duration = std::time::Duration::from_secs(1);

fn warn_of_absence(route: &Route, error: &AttemptError) {
    let patience = route.connect_timeout;
    tracing::warn!(
        route = route.name,
        "the target is not there yet, clients wait {patience:?} for it: {error}"
    );
}

/// Starts a task for each route within the calling runtime.
fn accept(routes: &[Listening], shared: &Arc<Shared>) -> io::Result<()> {
    for (bound, route) in routes {
        let accepting = bound.accepting(&route.config)?;
        tokio::spawn(serve::serve(accepting, Arc::clone(route), Arc::clone(shared)));
    }
    Ok(())
}

/// Starts a thread that accepts beside the main thread, until the last phase.
fn start_thread(
    routes: &Arc<Vec<Listening>>,
    shared: &Arc<Shared>,
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
    shared: &Shared,
    signals: &mut Signals,
    routes: Arc<Vec<Listening>>,
    connections: u32,
    options: &BridgeOptions,
) -> Result<(), Failure> {
    /// Time for the resets to go out.
    const RESET_TIME: std::time::Duration = std::time::Duration::from_secs(2);
    phase.send_replace(Phase::Draining);
    notify(NotifyState::Stopping);
    drop(routes);
    let open = connections as usize - shared.room.available_permits();
    tracing::info!(connections = open, "draining, for {:?} at most", options.drain_timeout);
    let all = shared.room.acquire_many(connections);
    tokio::select! {
        _ = all => {}
        () = tokio::time::sleep(options.drain_timeout) => {}
        () = signals.next() => {}
    }
    phase.send_replace(Phase::CuttingOff);
    let _ = timeout(RESET_TIME, shared.room.acquire_many(connections)).await;
    match shared.cut_off.load(Ordering::Relaxed) {
        0 => Ok(()),
        1 => Err(Failure::run("1 connection had not ended and was reset")),
        many => Err(Failure::run(format!("{many} connections had not ended and were reset"))),
    }
}

/// The signals that end this process.
#[derive(Debug)]
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).context("can't listen for signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    /// Waits for the next signal.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
