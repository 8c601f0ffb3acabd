//! A process that waits for the other parts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tonic::transport::Server;
use tonic_rdma::{CallConfig, Config, Policy, RdmaIncoming, RdmaServer};
use tonic_rdma_tensor::RdmaDevice;

use crate::dataflow::Topology;
use crate::error::GraphError;
use crate::placement::{Part, Placements};
use crate::session::connect;
use crate::session::service::Service;
use crate::session::state::Hall;
use crate::session::threads::Threads;
use crate::session::{Fingerprint, Session};
use crate::transfer::Mode;
use crate::transfer::proto::parts_server::PartsServer;

/// HTTP/2 windows and frames in bytes, of both ends. The command `tonic-rdma compare` found them best for tensors of 64 KiB to 64 MiB over
/// TCP; larger windows carried no more (`cli/src/measure/transport/http2.rs`).
pub(super) const STREAM_WINDOW: u32 = 16 << 20;
pub(super) const CONNECTION_WINDOW: u32 = 32 << 20;
pub(super) const MAX_FRAME: u32 = 512 << 10;

/// How often a quiet connection is checked, and how long the answer may take. A host that vanishes is found so.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(10);
pub(super) const PING_LIMIT: Duration = Duration::from_secs(20);

/// What a message has beside the content of its tensor, at most.
pub(super) const MESSAGE_MARGIN: u64 = 4096;

/// The settings of a part's connections.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// The RDMA device and its settings. The policy in it has no effect. The default is [`Config::default`].
    pub config: Config,
    /// The number of threads that carry calls. The default is the number of cores, from 2 to 8.
    pub threads: usize,
    /// The largest crossing tensor, in bytes, that this part accepts if its shape is not known before, and in the modes with calls. The
    /// default is 2 GiB.
    pub largest_tensor: u64,
    /// The most registered memory, in bytes, for copies of dynamic tensors in mode `rdma-cp`. The default is 2 GiB.
    pub copies: u64,
}

impl Default for Settings {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            config: Config::default(),
            threads: cores.clamp(2, 8),
            largest_tensor: 2 << 30,
            copies: 2 << 30,
        }
    }
}

impl Settings {
    /// Returns the defaults, with the RDMA settings of the `RDMA_*` variables.
    ///
    /// ```
    /// use tonic_rdma_graph::session::Settings;
    ///
    /// let settings = Settings::from_env()?;
    /// assert!(settings.threads >= 2);
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// A variable has a bad value.
    pub fn from_env() -> Result<Self, GraphError> {
        let config = Config::from_env().map_err(|error| setting("RDMA_*", error.to_string()))?;
        Ok(Self { config, ..Self::default() })
    }
}

/// With whom a part connects, and for what.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Peering {
    /// The part of this process.
    pub part: Part,
    /// The address of each part: `host:port`, in the order of the parts. That of this part is not used.
    pub peers: Vec<String>,
    /// How the graph is split.
    pub placements: Arc<Placements>,
    /// What all parts must have in common.
    pub fingerprint: Fingerprint,
    /// The modes in which tensors are to cross. The default is all modes that need no RDMA device: `grpc-tcp`.
    pub modes: Vec<Mode>,
    /// The number of buffers of each crossing tensor: the steps in flight. The default is 1.
    pub window: usize,
    /// The longest time until all parts are connected. The default is 30 s.
    pub timeout: Duration,
}

impl Peering {
    /// Makes a peering with the default settings.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma_graph::dataflow::Topology;
    /// use tonic_rdma_graph::placement::{Part, Placements};
    /// use tonic_rdma_graph::session::Peering;
    /// use tonic_rdma_graph::transfer::Mode;
    ///
    /// fn peering(graph: &Topology, placements: &Arc<Placements>) -> Peering {
    ///     let peers = vec!["10.0.0.1:7000".to_owned(), "10.0.0.2:7000".to_owned()];
    ///     let mut peering = Peering::new(Part(0), peers, graph, placements);
    ///     peering.modes = vec![Mode::GrpcTcp, Mode::RdmaZerocp];
    ///     peering.window = 4;
    ///     peering
    /// }
    /// ```
    pub fn new(part: Part, peers: Vec<String>, graph: &Topology, placements: &Arc<Placements>) -> Self {
        Self {
            part,
            peers,
            placements: Arc::clone(placements),
            fingerprint: Fingerprint::of(graph, placements),
            modes: vec![Mode::GrpcTcp],
            window: 1,
            timeout: Duration::from_secs(30),
        }
    }

    /// Checks the numbers.
    pub(super) fn check(&self) -> Result<(), GraphError> {
        let (part, parts) = (self.part, self.placements.partition().count());
        if self.peers.len() != parts {
            let reason =
                format!("{} addresses for {parts} parts; there must be one for each", self.peers.len());
            return Err(setting("peers", reason));
        }
        if part.0 >= parts {
            return Err(setting("part", format!("{part} of {parts}: the first part is 0")));
        }
        if !(1..=MOST_BUFFERS).contains(&self.window) {
            return Err(setting("window", format!("{}; it takes 1 to {MOST_BUFFERS}", self.window)));
        }
        if self.modes.is_empty() {
            return Err(setting("modes", "none is given".to_owned()));
        }
        Ok(())
    }
}

/// The most buffers of a slot.
const MOST_BUFFERS: usize = 1024;

/// A process that listens for the other parts of a graph. They may call before this process knows its graph; they wait until it
/// [connects](Self::connect).
#[derive(Debug)]
pub struct Listener {
    pub(super) address: SocketAddr,
    pub(super) settings: Settings,
    pub(super) threads: Threads,
    pub(super) hall: Arc<Hall>,
    pub(super) device: RdmaDevice,
}

impl Listener {
    /// Listens on `address`, `host:port`. With port 0 the system chooses a free port. One port serves the calls of the parts, over TCP and
    /// RDMA, and the tensor device. The threads of the listener belong to it, so it needs no runtime, and a thread of a runtime must not
    /// call this.
    ///
    /// ```
    /// use tonic_rdma_graph::session::{Listener, Settings};
    ///
    /// let listener = Listener::bind("127.0.0.1:0", Settings::from_env()?)?;
    /// assert_ne!(listener.address().port(), 0);
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// The address can't be listened on, a setting has a bad value, or the system gives no threads.
    pub fn bind(address: &str, settings: Settings) -> Result<Self, GraphError> {
        let runtime = runtime(settings.threads)?;
        let hall = Arc::new(Hall::default());
        let watchers = Arc::new(AtomicUsize::new(0));
        let threads = Threads::new(runtime, Arc::clone(&hall), Arc::clone(&watchers));
        let service = Service::new(Arc::clone(&hall), watchers);
        let listening = listen(address.to_owned(), settings.clone(), service);
        let (address, device) = threads.run(listening)?;
        Ok(Self { address, settings, threads, hall, device })
    }

    /// Returns the address that other parts call.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to all other parts: compares what they run, makes the slots of this part, learns the addresses of the slots of the other
    /// parts, and returns when all parts have done so (§3.4, "address distribution"). All parts call this; the order does not matter.
    ///
    /// # Errors
    /// - [`Differs`](GraphError::Differs), [`Version`](GraphError::Version): a part runs something else.
    /// - [`Unreachable`](GraphError::Unreachable): a part did not come in time.
    /// - [`NoRdma`](GraphError::NoRdma): a mode needs RDMA, and there is none to a part.
    /// - [`PeerLost`](GraphError::PeerLost), [`PeerFailed`](GraphError::PeerFailed): a part ended meanwhile.
    /// - [`Setting`](GraphError::Setting): a number is out of range, or there is no memory for the slots.
    pub fn connect(self, peering: Peering) -> Result<Session, GraphError> {
        connect::connect(self, peering)
    }
}

fn runtime(threads: usize) -> Result<Runtime, GraphError> {
    let threads = threads.max(1);
    let built =
        Builder::new_multi_thread().worker_threads(threads).thread_name("graph-session").enable_all().build();
    built.map_err(|error| setting("threads", format!("the system gives no {threads} threads: {error}")))
}

/// Starts the server of this process.
async fn listen(
    address: String,
    settings: Settings,
    service: Service,
) -> Result<(SocketAddr, RdmaDevice), GraphError> {
    // Calls need no RDMA. The modes that do refuse to be without.
    let config = settings.config.clone().policy(Policy::Prefer);
    let device = RdmaDevice::builder()
        .config(config.clone())
        .max_tensor_bytes(settings.largest_tensor)
        .without_listener()
        .map_err(|error| setting("config", error.to_string()))?;
    let incoming = RdmaIncoming::bind_with(&*address, config.clone())
        .await
        .map_err(|source| GraphError::Listen { address, source: Box::new(source) })?;
    let local = incoming.local_addr();
    let largest = settings.largest_tensor.saturating_add(MESSAGE_MARGIN);
    let service =
        PartsServer::new(service).max_decoding_message_size(usize::try_from(largest).unwrap_or(usize::MAX));
    let http2 = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_LIMIT));
    let server = RdmaServer::new().http2(http2).calls(calls(&settings)).add_service(device.service());
    let server = server.add_service(service).serve_with_incoming(incoming);
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(error = %error, "the server of a part has ended");
        }
    });
    Ok((local, device))
}

/// Returns the limits of native calls: room for two of the largest messages.
pub(super) fn calls(settings: &Settings) -> CallConfig {
    let budget = settings.largest_tensor.saturating_mul(2).clamp(256 << 20, 1 << 50);
    CallConfig::default().landing_budget(budget)
}

/// Makes the error of a setting.
pub(super) fn setting(setting: &'static str, reason: String) -> GraphError {
    GraphError::Setting { setting, reason }
}
