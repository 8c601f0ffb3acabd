//! What can be configured, by builder or by environment variable.

use std::time::Duration;

use super::pace::Pace;
use super::tuner::TuneCache;
use crate::verbs::PathSettings;

/// Settings of a connector or listener. [`Config::default`] suits most; [`Config::from_env`] starts from it and
/// applies the `RDMA_*` variables, whose names follow TensorFlow's verbs where it has them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Config {
    pub(crate) policy: Policy,
    pub(crate) stock_clients: StockClients,
    pub(crate) provider: ProviderChoice,
    pub(crate) device: Option<String>,
    pub(crate) device_port: Option<u8>,
    pub(crate) gid_index: Option<u8>,
    pub(crate) poll_mode: PollMode,
    pub(crate) poll_cpus: Vec<usize>,
    pub(crate) spin_limit: Duration,
    pub(crate) completion_queues: usize,
    pub(crate) eager_threshold: EagerThreshold,
    pub(crate) chunk_size: Option<usize>,
    pub(crate) tune_cache: TuneCache,
    pub(crate) receive_slots: u32,
    pub(crate) slot_size: u32,
    pub(crate) shared_receive: SharedReceive,
    pub(crate) max_inline: Option<u32>,
    pub(crate) queue_depth: u32,
    pub(crate) pinned_limit: Option<u64>,
    pub(crate) plaintext_tensors: bool,
    pub(crate) connect_timeout: Duration,
    pub(crate) handshake_timeout: Duration,
    pub(crate) ping_interval: Duration,
    pub(crate) ping_timeout: Duration,
    pub(crate) linger: Duration,
    pub(crate) path: PathSettings,
}

/// Whether RDMA is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// RDMA or an error.
    Require,
    /// RDMA where both ends can, else TCP, with the reason told.
    #[default]
    Prefer,
    /// Plain TCP, for comparison or for a way out.
    TcpOnly,
}

/// What a listener takes for a client that has no RDMA and is served over TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StockClients {
    /// One that speaks HTTP or TLS; others are refused.
    #[default]
    Grpc,
    /// Whoever connects, whatever it says: for listeners that pass bytes on. One that waits for the other end to speak first
    /// is known for such after the handshake timeout.
    Any,
}

/// Which RDMA device to use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProviderChoice {
    /// The best one that both ends have.
    #[default]
    Auto,
    /// The software device alone.
    Soft,
    /// Devices that libibverbs drives alone.
    Ibverbs,
}

/// How completions are waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PollMode {
    /// A thread for each completion queue spins, on one of the CPUs of [`Config::poll_cpus`] if any are set. While others
    /// want its core it stands back, and the runtime waits for events in its place.
    Busy,
    /// Spin for a budget that follows the observed arrival gap, then sleep until the device wakes us. Runs inside the
    /// tokio runtime, so that no other thread and no wake-up stands between a completion and the task.
    #[default]
    Adaptive,
    /// Sleep at once. Least CPU, and a wake-up for every arrival.
    Event,
}

/// From which length a write is offered by rendezvous (the receiver reads it) instead of being sent eagerly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EagerThreshold {
    /// What suits the device: as measured on it, then as seen on the connection.
    #[default]
    Auto,
    /// Writes of this many bytes and more.
    Bytes(u64),
}

/// Whether connections take their receive buffers from a shared receive queue, on a device that has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SharedReceive {
    /// Where the device keeps the memory of connections apart all the same; it is tried.
    #[default]
    Auto,
    /// Even where it does not (Soft-RoCE): whoever connects could then read what is registered for another peer to read,
    /// if it guesses key and address. For peers that trust one another.
    Always,
    /// Every connection has buffers of its own.
    Never,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            stock_clients: StockClients::default(),
            provider: ProviderChoice::default(),
            device: None,
            device_port: None,
            gid_index: None,
            poll_mode: PollMode::default(),
            poll_cpus: Vec::new(),
            spin_limit: Pace::LONGEST,
            completion_queues: 1,
            eager_threshold: EagerThreshold::default(),
            chunk_size: None,
            tune_cache: TuneCache::default(),
            receive_slots: 96,
            // An HTTP/2 frame of the default size, with its header and ours.
            slot_size: 17 * 1024,
            shared_receive: SharedReceive::default(),
            max_inline: None,
            queue_depth: 1024,
            pinned_limit: None,
            plaintext_tensors: false,
            connect_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(3),
            ping_interval: Duration::from_secs(10),
            ping_timeout: Duration::from_secs(30),
            linger: Duration::from_secs(5),
            path: PathSettings::default(),
        }
    }
}

impl Config {
    /// Lengths that a chunk may have, in bytes: from, to.
    pub(super) const CHUNKS: [usize; 2] = [4096, 16 << 20];

    /// The limit on pinned memory, if one is set.
    pub(crate) fn pinned(&self) -> Option<u64> {
        self.pinned_limit
    }

    /// Requests on a send queue.
    pub(crate) fn depth(&self) -> u32 {
        self.queue_depth
    }

    /// Whether RDMA is wanted. Variable `RDMA_POLICY`: `require`, `prefer`, `tcp-only`.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// What a listener serves over TCP.
    pub fn stock_clients(mut self, clients: StockClients) -> Self {
        self.stock_clients = clients;
        self
    }

    /// Which provider's device to use. Variable `RDMA_PROVIDER`: `auto`, `soft`, `ibverbs`.
    pub fn provider(mut self, provider: ProviderChoice) -> Self {
        self.provider = provider;
        self
    }

    /// The device to use, such as `mlx5_0` or `soft0`; the best one otherwise. Variable `RDMA_DEVICE`.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// The device's port, from 1; its first active one otherwise. Variable `RDMA_DEVICE_PORT`.
    pub fn device_port(mut self, port: u8) -> Self {
        self.device_port = Some(port);
        self
    }

    /// Index into the port's table of global identifiers; the best one otherwise: RoCE version 2, with an address that
    /// is not link-local. Variable `RDMA_GID_INDEX`.
    pub fn gid_index(mut self, index: u8) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// How completions are waited for. Variable `RDMA_POLL_MODE`: `busy`, `adaptive`, `event`.
    pub fn poll_mode(mut self, mode: PollMode) -> Self {
        self.poll_mode = mode;
        self
    }

    /// CPUs for the threads of [`PollMode::Busy`], taken in turn; empty leaves the choice to the scheduler.
    /// Variable `RDMA_POLL_CPUS`: a list such as `2,3`.
    pub fn poll_cpus(mut self, cpus: impl Into<Vec<usize>>) -> Self {
        self.poll_cpus = cpus.into();
        self
    }

    /// How long [`PollMode::Adaptive`] spins for a completion at most before it sleeps; 120 µs, about three wake-ups, if
    /// nobody says otherwise. More gives a lower latency where answers take longer than that, for as much CPU time; zero
    /// never spins. Variable `RDMA_SPIN_LIMIT`, in microseconds.
    pub fn spin_limit(mut self, limit: Duration) -> Self {
        self.spin_limit = limit;
        self
    }

    /// Completion queues over which connections are spread in turn, at least 1. Variable `RDMA_CQS`.
    pub fn completion_queues(mut self, count: usize) -> Self {
        self.completion_queues = count.max(1);
        self
    }

    /// From which length writes go by rendezvous. Bytes are taken as they are; nothing is measured then. Variable
    /// `RDMA_EAGER_THRESHOLD`: `auto` or bytes.
    pub fn eager_threshold(mut self, threshold: EagerThreshold) -> Self {
        self.eager_threshold = threshold;
        self
    }

    /// Length of the pieces that a rendezvous is read in, in bytes, 4096 to 16 MiB; what suits the device otherwise.
    /// Variable `RDMA_CHUNK_SIZE`: `auto` or bytes.
    pub fn chunk_size(mut self, bytes: usize) -> Self {
        self.chunk_size = Some(bytes.clamp(Self::CHUNKS[0], Self::CHUNKS[1]));
        self
    }

    /// Where calibrations of devices are kept on disk. Of all configurations of a process the first that uses a device
    /// counts. Variable `RDMA_TUNE_CACHE`: `off` or the path of a directory.
    pub fn tune_cache(mut self, cache: TuneCache) -> Self {
        self.tune_cache = cache;
        self
    }

    /// Receive buffers of each connection (the most that it has, if they are shared): `slots` (at least 16) of `size` bytes each (at least 1024). An eager message
    /// fills one. Variables `RDMA_RECEIVE_SLOTS` (to 1024) and `RDMA_SLOT_SIZE` (to 65536).
    pub fn receive_buffers(mut self, slots: u32, size: u32) -> Self {
        self.receive_slots = slots.clamp(16, 1024);
        self.slot_size = size.clamp(1024, 64 * 1024);
        self
    }

    /// Whether connections share receive buffers. Variable `RDMA_SHARED_RECEIVE`: `auto`, `always`, `never`.
    pub fn shared_receive(mut self, shared: SharedReceive) -> Self {
        self.shared_receive = shared;
        self
    }

    /// Longest message that is handed to the device inline, in bytes: the device takes it over at once, and nothing has to
    /// be copied or kept for it. As many as the device takes, if nobody says otherwise: a whole message on the software
    /// device, some hundred bytes on others. Variable `RDMA_MAX_INLINE`.
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = Some(bytes);
        self
    }

    /// Send requests that may be outstanding on a queue pair. Variable `RDMA_QP_QUEUE_DEPTH`, 64 to 4096.
    pub fn queue_depth(mut self, depth: u32) -> Self {
        self.queue_depth = depth.clamp(64, 4096);
        self
    }

    /// Registered memory that this process may use over all connections, in bytes. The first connection of a process
    /// settles it. Variable `RDMA_PINNED_LIMIT`.
    pub fn pinned_limit(mut self, bytes: u64) -> Self {
        self.pinned_limit = Some(bytes);
        self
    }

    /// Whether tensors may be exchanged beside connections with TLS: no device encrypts what it moves, so they cross the
    /// network as they are, even where calls are encrypted. Variable `RDMA_PLAINTEXT_TENSORS`: `refuse`, the default, and
    /// `allow`.
    pub fn plaintext_tensors(mut self, allow: bool) -> Self {
        self.plaintext_tensors = allow;
        self
    }

    /// Whether tensors may be exchanged beside connections with TLS.
    pub(crate) fn allows_plaintext_tensors(&self) -> bool {
        self.plaintext_tensors
    }

    /// How long a TCP connection may take to be established.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long the other end may take for each of its messages of the negotiation; 3 s by default. Variable
    /// `RDMA_HANDSHAKE_TIMEOUT`, in milliseconds: machines that are very busy, or emulated, need more.
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// After how long a silence the peer is asked whether it is alive, and how long it has to answer.
    pub fn ping(mut self, interval: Duration, timeout: Duration) -> Self {
        self.ping_interval = interval;
        self.ping_timeout = timeout;
        self
    }

    /// How long a closed connection may go on delivering what was written before.
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// Attributes that queue pairs are connected with.
    pub fn path(&self) -> &PathSettings {
        &self.path
    }

    /// Attributes that queue pairs are connected with. Variables `RDMA_QP_TIMEOUT`, `RDMA_QP_RETRY_COUNT`,
    /// `RDMA_QP_SL`, `RDMA_QP_MTU`, `RDMA_QP_PKEY_INDEX`, `RDMA_TRAFFIC_CLASS`.
    pub fn path_settings(mut self, path: PathSettings) -> Self {
        self.path = path;
        self
    }
}
