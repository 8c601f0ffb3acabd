//! Settings of connections, by builder or by environment variable (`variables.rs`). `rules.rs` has the values
//! that each setting accepts, and refuses others.

mod rules;
#[cfg(test)]
mod tests;
mod variables;

use std::time::Duration;

use crate::error::RdmaError;
use tonic_rdma_verbs::PathSettings;
use tonic_rdma_verbs::memory::Budget;

pub use self::variables::{known_variables, warn_of_unknown_variables};

/// Settings of a connector, a listener or a tensor device. [`Config::default`] suits most programs.
/// [`Config::from_env`] starts from it and applies the `RDMA_*` variables. The types of this crate that get
/// no configuration use [`Config::from_env`].
///
/// A setting and its variable have one name: `RDMA_POLL_MODE` sets what [`poll_mode`](Self::poll_mode) sets.
/// Where TensorFlow's verbs transport has the same setting, it has the same name, such as `RDMA_QP_SL`.
///
/// Setters take any value. [`validate`](Self::validate) refuses the values that the variables refuse;
/// connectors, listeners and tensor devices call it before they use a configuration, so that a bad value is
/// an error that names its setting.
///
/// ```
/// use std::time::Duration;
/// use tonic_rdma::{Config, Policy, PollMode, RdmaConnector};
///
/// let config = Config::default()
///     .policy(Policy::Require) // RDMA or an error
///     .poll_mode(PollMode::Event) // least processor time
///     .connect_timeout(Duration::from_secs(2));
/// let connector = RdmaConnector::new().config(config);
/// # drop(connector);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Config {
    pub(crate) policy: Policy,
    pub(crate) stock_clients: StockClients,
    pub(crate) provider: Option<Provider>,
    pub(crate) device: Option<String>,
    pub(crate) device_port: Option<u8>,
    pub(crate) gid_index: Option<u8>,
    pub(crate) poll_mode: PollMode,
    pub(crate) poll_cpus: Vec<usize>,
    pub(crate) spin_limit: Duration,
    pub(crate) completion_queues: usize,
    queue_pairs_per_peer: u32,
    pub(crate) eager_threshold: EagerThreshold,
    pub(crate) chunk_size: Option<usize>,
    pub(crate) receive_slots: u32,
    pub(crate) slot_size: u32,
    pub(crate) shared_receive: SharedReceive,
    pub(crate) max_inline: Option<u32>,
    pub(crate) qp_queue_depth: u32,
    pub(crate) pinned_limit: Option<u64>,
    pub(crate) connection_limit: u64,
    held_limit: Option<u64>,
    pub(crate) plaintext_tensors: bool,
    pub(crate) connect_timeout: Duration,
    pub(crate) handshake_timeout: Duration,
    pub(crate) ping_interval: Duration,
    pub(crate) ping_timeout: Duration,
    pub(crate) linger: Duration,
    in_process: Option<bool>,
    pub(crate) histograms: bool,
    pub(crate) path: PathSettings,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            stock_clients: StockClients::default(),
            provider: None,
            device: None,
            device_port: None,
            gid_index: None,
            poll_mode: PollMode::default(),
            poll_cpus: Vec::new(),
            spin_limit: Self::SPIN_LIMIT,
            completion_queues: 1,
            queue_pairs_per_peer: 1,
            eager_threshold: EagerThreshold::default(),
            chunk_size: None,
            receive_slots: 96,
            // An HTTP/2 frame of the default size with its header, and the header of the message.
            slot_size: 17 * 1024,
            shared_receive: SharedReceive::default(),
            max_inline: None,
            qp_queue_depth: 1024,
            pinned_limit: None,
            connection_limit: 256 << 20,
            held_limit: None,
            plaintext_tensors: false,
            connect_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(3),
            ping_interval: Duration::from_secs(5),
            ping_timeout: Duration::from_secs(10),
            linger: Duration::from_secs(5),
            in_process: None,
            histograms: false,
            path: PathSettings::default(),
        }
    }
}

impl Config {
    /// Longest spin by default: about as long as three wake-ups. So a spin without an arrival costs no more
    /// than a successful spin saves.
    const SPIN_LIMIT: Duration = Duration::from_micros(120);

    /// Checks every setting. A setting that has an environment variable follows the rule of that variable.
    /// [`from_env`](Self::from_env) calls this. Connectors, listeners and tensor devices call it, too, before
    /// they use a configuration. Setters take any value, so that calls of setters can be chained.
    ///
    /// ```
    /// use tonic_rdma::Config;
    ///
    /// assert!(Config::default().qp_queue_depth(256).validate().is_ok());
    /// let error = Config::default().qp_queue_depth(1).validate().unwrap_err();
    /// assert_eq!((error.setting(), error.variable()), (Some("qp_queue_depth"), Some("RDMA_QP_QUEUE_DEPTH")));
    /// ```
    ///
    /// # Errors
    /// A setting has a value that it does not accept. The error names the setting, its variable and the
    /// values that it accepts.
    pub fn validate(&self) -> Result<(), RdmaError> {
        rules::each(&rules::Pass::Check, &mut self.clone())
    }

    /// Returns the value of [`pinned_limit`](Self::pinned_limit), if it is set.
    pub fn get_pinned_limit(&self) -> Option<u64> {
        self.pinned_limit
    }

    /// Returns the value of [`queue_pairs_per_peer`](Self::queue_pairs_per_peer).
    pub fn get_queue_pairs_per_peer(&self) -> u32 {
        self.queue_pairs_per_peer
    }

    /// Returns the value of [`qp_queue_depth`](Self::qp_queue_depth).
    pub fn get_qp_queue_depth(&self) -> u32 {
        self.qp_queue_depth
    }

    /// Sets whether a connection has to be RDMA. Default: [`Policy::Prefer`]. Variable `RDMA_POLICY`:
    /// `require`, `prefer`, `tcp-only`.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Sets which clients without RDMA a listener serves over TCP. Default: [`StockClients::Grpc`].
    pub fn stock_clients(mut self, clients: StockClients) -> Self {
        self.stock_clients = clients;
        self
    }

    /// Sets which provider's device to use. Default: none, which takes the best device that both sides have:
    /// the software device within a host, ibverbs between hosts. Variable `RDMA_PROVIDER`: `auto`, `soft`,
    /// `ibverbs`.
    pub fn provider(mut self, provider: impl Into<Option<Provider>>) -> Self {
        self.provider = provider.into();
        self
    }

    /// Sets the device to use, such as `mlx5_0` or `soft0`. Default: the software device within a host,
    /// otherwise the first device with an active port. Variable `RDMA_DEVICE`.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// Sets the device's port, from 1. Default: the first active port. Variable `RDMA_DEVICE_PORT`.
    pub fn device_port(mut self, port: u8) -> Self {
        self.device_port = Some(port);
        self
    }

    /// Sets the index into the port's table of global identifiers. Default: the best identifier, which is
    /// RoCE version 2 with an address that is not link-local. Variable `RDMA_GID_INDEX`.
    pub fn gid_index(mut self, index: u8) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// Sets how completions are waited for. Default: [`PollMode::Adaptive`]. Variable `RDMA_POLL_MODE`:
    /// `busy`, `adaptive`, `event`.
    pub fn poll_mode(mut self, mode: PollMode) -> Self {
        self.poll_mode = mode;
        self
    }

    /// Sets the CPUs for the threads of [`PollMode::Busy`], taken in turn. Default: none, which leaves the
    /// choice to the scheduler. Variable `RDMA_POLL_CPUS`: a list such as `2,3`.
    pub fn poll_cpus(mut self, cpus: impl Into<Vec<usize>>) -> Self {
        self.poll_cpus = cpus.into();
        self
    }

    /// Sets the longest time that [`PollMode::Adaptive`] spins for a completion before it sleeps. Default:
    /// 120 µs, about three wake-ups. With a longer limit, answers that take longer than 120 µs have a lower
    /// latency, and the spins cost more processor time. Zero means never to spin. At most 1 s. Variable
    /// `RDMA_SPIN_LIMIT`, in microseconds or with a unit.
    pub fn spin_limit(mut self, limit: Duration) -> Self {
        self.spin_limit = limit;
        self
    }

    /// Sets the number of completion queues of each runtime, 1 to 64. A new queue pair, of a connection or of a
    /// link of tensors, gets the one with the most room. Default: 1. Variable `RDMA_COMPLETION_QUEUES`.
    pub fn completion_queues(mut self, count: usize) -> Self {
        self.completion_queues = count;
        self
    }

    /// Sets the number of queue pairs to each peer of a tensor device, of a rank and of a part of a graph, 1 to
    /// 64. A connection of calls always has one queue pair. Default: 1. Variable `RDMA_QUEUE_PAIRS_PER_PEER`.
    ///
    /// ```
    /// use tonic_rdma::Config;
    ///
    /// // As in the paper's experiments.
    /// let config = Config::default().completion_queues(4).queue_pairs_per_peer(4);
    /// assert!(config.validate().is_ok());
    /// ```
    pub fn queue_pairs_per_peer(mut self, count: u32) -> Self {
        self.queue_pairs_per_peer = count;
        self
    }

    /// Sets the length from which on writes go by rendezvous, also those from registered memory. Default:
    /// [`EagerThreshold::Auto`]. With [`EagerThreshold::Bytes`], and on the software device, nothing is measured.
    /// Variable `RDMA_EAGER_THRESHOLD`: `auto` or bytes.
    pub fn eager_threshold(mut self, threshold: EagerThreshold) -> Self {
        self.eager_threshold = threshold;
        self
    }

    /// Sets the length of the chunks that a rendezvous is read in, in bytes, 4096 to 16 MiB. Default: the
    /// length that suits the device. Variable `RDMA_CHUNK_SIZE`: `auto` or bytes.
    pub fn chunk_size(mut self, bytes: usize) -> Self {
        self.chunk_size = Some(bytes);
        self
    }

    /// Sets the number of receive buffers of each connection, 16 to 1024. Where connections share buffers,
    /// this is the most that one connection has. An eager message fills one buffer. Default: 96. Variable
    /// `RDMA_RECEIVE_SLOTS`.
    pub fn receive_slots(mut self, slots: u32) -> Self {
        self.receive_slots = slots;
        self
    }

    /// Sets the length of a receive buffer, in bytes, 1024 to 65 536. Default: 17 408. Variable
    /// `RDMA_SLOT_SIZE`.
    pub fn slot_size(mut self, bytes: u32) -> Self {
        self.slot_size = bytes;
        self
    }

    /// Sets whether connections share receive buffers. Default: [`SharedReceive::Auto`]. Variable
    /// `RDMA_SHARED_RECEIVE`: `auto`, `always`, `never`.
    pub fn shared_receive(mut self, shared: SharedReceive) -> Self {
        self.shared_receive = shared;
        self
    }

    /// Sets the longest message that is handed to the device inline, in bytes. The device takes the bytes of
    /// such a message at once, so that this side neither copies nor keeps them. Default: as many as the
    /// device takes: a whole message on the software device, some hundred bytes on other devices. Variable
    /// `RDMA_MAX_INLINE`.
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = Some(bytes);
        self
    }

    /// Sets how many send requests may be outstanding on a queue pair, 64 to 4096. Default: 1024. Variable
    /// `RDMA_QP_QUEUE_DEPTH`.
    pub fn qp_queue_depth(mut self, depth: u32) -> Self {
        self.qp_queue_depth = depth;
        self
    }

    /// Sets how much registered memory all connections of this process may use together, in bytes, from 1 MiB
    /// on. The setting of the first connection counts. Default: 2 GiB. Variable `RDMA_PINNED_LIMIT`.
    pub fn pinned_limit(mut self, bytes: u64) -> Self {
        self.pinned_limit = Some(bytes);
        self
    }

    /// Sets how much one connection of native calls holds for its peer, in bytes, 1 MiB to 1 PiB: content that
    /// lands up to this number, and other content up to as much again. Default: 256 MiB.
    /// [`CallConfig::connection_limit`](crate::CallConfig::connection_limit), which says what counts, has
    /// precedence over this. Variable `RDMA_CONNECTION_LIMIT`.
    pub fn connection_limit(mut self, bytes: u64) -> Self {
        self.connection_limit = bytes;
        self
    }

    /// Sets how much all connections of native calls of this process hold for their peers together, in bytes, 1
    /// MiB to 1 PiB. The setting of the first connection counts. Default: twice the
    /// [`pinned_limit`](Self::pinned_limit), so 4 GiB. Variable `RDMA_HELD_LIMIT`.
    ///
    /// Each connection always has 1 MiB, and a reader that waits gets the next 512 KiB of its message. A
    /// connection gets more only while it then holds at most as much as it leaves to others. Beyond that
    /// messages wait at the peer, senders wait here, and a call whose peer sends more small messages, which are
    /// not read, ends with RESOURCE_EXHAUSTED.
    pub fn held_limit(mut self, bytes: u64) -> Self {
        self.held_limit = Some(bytes);
        self
    }

    /// Returns how much all connections of native calls may hold together, in bytes.
    pub(crate) fn most_held(&self) -> u64 {
        // What lands lies in registered memory, and all else may be as much.
        let registered = self.pinned_limit.unwrap_or(Budget::DEFAULT_LIMIT);
        self.held_limit.unwrap_or(registered.saturating_mul(2))
    }

    /// Sets whether tensors may be exchanged beside connections with TLS. No device encrypts the bytes that
    /// it moves, so tensors cross the network unencrypted, even where calls are encrypted. Default: no.
    /// Variable `RDMA_PLAINTEXT_TENSORS`: `refuse`, `allow`.
    pub fn plaintext_tensors(mut self, allow: bool) -> Self {
        self.plaintext_tensors = allow;
        self
    }

    /// Returns the value of [`plaintext_tensors`](Self::plaintext_tensors).
    pub fn get_plaintext_tensors(&self) -> bool {
        self.plaintext_tensors
    }

    /// Sets how long a TCP connection may take to be established, 1 ms to a day. Default: 10 s. If a host has
    /// several addresses, the next one is tried after at most 300 ms without an answer, while the attempts
    /// before it go on (RFC 8305). Variable `RDMA_CONNECT_TIMEOUT`, in milliseconds or with a unit.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the longest time that the peer may take for each message of the negotiation, 1 ms to 600 s.
    /// Default: 3 s; machines that are very busy, or emulated, need more. Variable `RDMA_HANDSHAKE_TIMEOUT`,
    /// in milliseconds or with a unit.
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// Sets the length of silence after which this side pings the peer, 1 ms to a day. Default: 5 s. Variable
    /// `RDMA_PING_INTERVAL`, in milliseconds or with a unit.
    pub fn ping_interval(mut self, interval: Duration) -> Self {
        self.ping_interval = interval;
        self
    }

    /// Sets the time that the peer has to answer a ping, 1 ms to a day. Default: 10 s. So a peer that hangs is
    /// given up after 15 s. Time in which this process did not run, because it was stopped or had no processor,
    /// does not count. Variable `RDMA_PING_TIMEOUT`, in milliseconds or with a unit.
    pub fn ping_timeout(mut self, timeout: Duration) -> Self {
        self.ping_timeout = timeout;
        self
    }

    /// Sets how long a closed connection may go on sending bytes that were written before, up to a day.
    /// Default: 5 s.
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// Sets whether calls of an [`RdmaChannel`](crate::RdmaChannel) stay in this process if the
    /// [`RdmaServer`](crate::RdmaServer) is in it, too: then no device carries them, and they cost less. Both
    /// ends have to allow it. Default: as the variable says when the connection is made, also for a
    /// configuration that did not come from [`from_env`](Self::from_env); yes if it is not set. Variable
    /// `RDMA_IN_PROCESS`: `yes`, `no`.
    pub fn in_process(mut self, allow: bool) -> Self {
        self.in_process = Some(allow);
        self
    }

    /// Returns whether calls may stay in this process.
    pub(crate) fn allows_in_process(&self) -> bool {
        self.in_process.unwrap_or_else(variables::in_process_by_environment)
    }

    /// Sets whether native calls are timed, for the histograms `tonic_rdma_call_seconds` and
    /// `tonic_rdma_queue_seconds` of the `metrics` facade. Default: no. Variable `RDMA_HISTOGRAMS`: `yes`,
    /// `no`.
    pub fn histograms(mut self, timed: bool) -> Self {
        self.histograms = timed;
        self
    }

    /// Returns the attributes of new connections' queue pairs, which the settings `qp_*` and
    /// [`traffic_class`](Self::traffic_class) change.
    pub fn path(&self) -> &PathSettings {
        &self.path
    }

    /// Sets how long a queue pair waits for an acknowledgement, as an exponent from 0 to 31: 4.096 µs × 2^n.
    /// Default: 14. Variable `RDMA_QP_TIMEOUT`.
    pub fn qp_timeout(mut self, exponent: u8) -> Self {
        self.path.timeout = exponent;
        self
    }

    /// Sets how often a queue pair sends again without an acknowledgement, 0 to 7. Default: 7. Variable
    /// `RDMA_QP_RETRY_COUNT`.
    pub fn qp_retry_count(mut self, count: u8) -> Self {
        self.path.retry_count = count;
        self
    }

    /// Sets the service level of queue pairs, 0 to 15. Default: 0. Variable `RDMA_QP_SL`.
    pub fn qp_sl(mut self, level: u8) -> Self {
        self.path.service_level = level;
        self
    }

    /// Sets the path MTU of queue pairs in bytes: 256, 512, 1024, 2048 or 4096. Default: that of the port.
    /// Variable `RDMA_QP_MTU`.
    pub fn qp_mtu(mut self, bytes: u16) -> Self {
        self.path.mtu = Some(bytes);
        self
    }

    /// Sets the index of the partition key of queue pairs. Default: 0. Variable `RDMA_QP_PKEY_INDEX`.
    pub fn qp_pkey_index(mut self, index: u16) -> Self {
        self.path.pkey_index = index;
        self
    }

    /// Sets the traffic class of queue pairs. Default: 0. Variable `RDMA_TRAFFIC_CLASS`.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.path.traffic_class = class;
        self
    }
}

/// The choice between RDMA and TCP, set with [`Config::policy`](crate::Config::policy).
///
/// ```
/// use tonic_rdma::{Config, Policy};
///
/// let config = Config::default().policy(Policy::TcpOnly);
/// # drop(config);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// RDMA or an error.
    Require,
    /// RDMA where both sides have it, otherwise TCP.
    /// [`RdmaConnectInfo::reason`](crate::RdmaConnectInfo::reason) has the reason.
    #[default]
    Prefer,
    /// Plain TCP: to compare with, or to do without RDMA for a while.
    TcpOnly,
}

/// The clients without RDMA that a listener serves over TCP, set with
/// [`Config::stock_clients`](crate::Config::stock_clients).
///
/// ```
/// use tonic_rdma::{Config, StockClients};
///
/// // For a proxy, which passes on any bytes.
/// let config = Config::default().stock_clients(StockClients::Any);
/// # drop(config);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StockClients {
    /// Clients that use HTTP or TLS; others are refused.
    #[default]
    Grpc,
    /// Any client, whatever bytes it sends: for listeners that pass bytes on. A client that sends nothing
    /// until the server has sent something is served after the handshake timeout.
    Any,
}

/// A driver of RDMA devices, set with [`Config::provider`](crate::Config::provider).
///
/// ```
/// use tonic_rdma::{Config, Provider};
///
/// let config = Config::default().provider(Provider::Soft);
/// # drop(config);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The software device, for processes of one host.
    Soft,
    /// Devices with a driver in the kernel, through libibverbs.
    Ibverbs,
}

/// The way of waiting for completions, set with [`Config::poll_mode`](crate::Config::poll_mode).
///
/// ```
/// use tonic_rdma::{Config, PollMode};
///
/// // A thread on CPU 3 spins for each queue.
/// let config = Config::default().poll_mode(PollMode::Busy).poll_cpus([3]);
/// # drop(config);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PollMode {
    /// A thread for each completion queue spins, on one of the CPUs of
    /// [`Config::poll_cpus`](crate::Config::poll_cpus) if any are set. While other threads want its core the
    /// thread sleeps, and the runtime waits for events in its place.
    Busy,
    /// Spins for a time that follows the observed gap between arrivals, at most
    /// [`Config::spin_limit`](crate::Config::spin_limit), then sleeps until the device wakes it. It runs
    /// inside the tokio runtime, so that no other thread is between a completion and the task.
    #[default]
    Adaptive,
    /// Sleeps at once. It takes the least processor time, and costs a wake-up for each arrival.
    Event,
}

/// The length from which on a write is offered by rendezvous (the receiver reads it) instead of being sent
/// eagerly, set with [`Config::eager_threshold`](crate::Config::eager_threshold).
///
/// ```
/// use tonic_rdma::{Config, EagerThreshold};
///
/// let config = Config::default().eager_threshold(EagerThreshold::Bytes(64 << 10));
/// # drop(config);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EagerThreshold {
    /// The lengths that were measured on the device, one for payloads in registered memory and one for other
    /// writes. On the software device no write goes by rendezvous, and nothing is measured.
    #[default]
    Auto,
    /// Writes of this many bytes and more.
    Bytes(u64),
}

/// The use of shared receive queues, on a device that has them, set with
/// [`Config::shared_receive`](crate::Config::shared_receive).
///
/// ```
/// use tonic_rdma::{Config, SharedReceive};
///
/// let config = Config::default().shared_receive(SharedReceive::Never);
/// # drop(config);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SharedReceive {
    /// Connections share receive buffers if the device keeps their other memory apart. A test on the device
    /// shows that, once.
    #[default]
    Auto,
    /// Connections share receive buffers even if the device does not keep their memory apart (Soft-RoCE). A
    /// peer that guesses key and address could then read memory that is registered for another peer. Use this
    /// for peers that trust one another.
    Always,
    /// Every connection has its own receive buffers.
    Never,
}
