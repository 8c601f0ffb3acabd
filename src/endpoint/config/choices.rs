//! Settings with a fixed set of values.

use std::path::PathBuf;

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
    /// RDMA where both ends have it, otherwise TCP. [`RdmaConnectInfo::reason`](crate::RdmaConnectInfo::reason) has the reason.
    #[default]
    Prefer,
    /// Plain TCP: to compare with, or to do without RDMA for a while.
    TcpOnly,
}

/// The clients without RDMA that a listener serves over TCP, set with [`Config::stock_clients`](crate::Config::stock_clients).
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
    /// Any client, whatever bytes it sends: for listeners that pass bytes on. A client that sends nothing until the server has
    /// sent something is served after the handshake timeout.
    Any,
}

/// The kind of RDMA device to use, set with [`Config::provider`](crate::Config::provider).
///
/// ```
/// use tonic_rdma::{Config, ProviderChoice};
///
/// let config = Config::default().provider(ProviderChoice::Soft);
/// # drop(config);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProviderChoice {
    /// The best device that both ends have: the software device within a host, ibverbs between hosts.
    #[default]
    Auto,
    /// The software device alone.
    Soft,
    /// Devices that libibverbs drives alone.
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
    /// A thread for each completion queue spins, on one of the CPUs of [`Config::poll_cpus`](crate::Config::poll_cpus) if any
    /// are set. While other threads want its core the thread sleeps, and the runtime waits for events in its place.
    Busy,
    /// Spins for a time that follows the observed gap between arrivals, at most
    /// [`Config::spin_limit`](crate::Config::spin_limit), then sleeps until the device wakes it. It runs inside the tokio
    /// runtime, so that no other thread is between a completion and the task.
    #[default]
    Adaptive,
    /// Sleeps at once. It takes the least processor time, and costs a wake-up for each arrival.
    Event,
}

/// The length from which on a write is offered by rendezvous (the receiver reads it) instead of being sent eagerly, set with
/// [`Config::eager_threshold`](crate::Config::eager_threshold).
///
/// ```
/// use tonic_rdma::{Config, EagerThreshold};
///
/// let config = Config::default().eager_threshold(EagerThreshold::Bytes(64 << 10));
/// # drop(config);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EagerThreshold {
    /// The length that was measured on the device. On the software device no write goes by rendezvous, and nothing is measured.
    #[default]
    Auto,
    /// Writes of this many bytes and more.
    Bytes(u64),
}

/// The directory in which calibrations of devices are kept, set with [`Config::tune_cache`](crate::Config::tune_cache).
///
/// ```
/// use tonic_rdma::{Config, TuneCache};
///
/// let config = Config::default().tune_cache(TuneCache::Off);
/// # drop(config);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum TuneCache {
    /// The directory that the environment names: `RDMA_TUNE_CACHE` (`off`: nowhere), or else
    /// `$XDG_CACHE_HOME/tonic-rdma` or `$HOME/.cache/tonic-rdma`.
    #[default]
    Environment,
    /// This directory, which is created if it does not exist.
    Directory(PathBuf),
    /// Nowhere: every process measures.
    Off,
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
    /// Connections share receive buffers if the device keeps their other memory apart. A test on the device shows that, once.
    #[default]
    Auto,
    /// Connections share receive buffers even if the device does not keep their memory apart (Soft-RoCE). A peer that guesses
    /// key and address could then read memory that is registered for another peer. Use this for peers that trust one another.
    Always,
    /// Every connection has its own receive buffers.
    Never,
}
