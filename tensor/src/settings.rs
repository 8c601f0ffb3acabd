//! Settings of a device.

use std::time::Duration;

use super::Notification;
use super::tls::Tls;
use tonic_rdma::Config;

/// Settings of an [`RdmaDevice`](super::RdmaDevice).
///
/// ```
/// use std::time::Duration;
/// use tonic_rdma::Config;
/// use tonic_rdma_tensor::Settings;
///
/// let settings = Settings::new(1, 2)
///     .config(Config::from_env()?)
///     .longest_tensor(1 << 30)
///     .rendezvous_timeout(Duration::from_secs(10));
/// # drop(settings);
/// # Ok::<(), tonic_rdma::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Settings {
    pub(super) config: Config,
    pub(super) cqs: u32,
    pub(super) qps_per_peer: u32,
    pub(super) notification: Option<Notification>,
    pub(super) piece: u64,
    pub(super) window: u64,
    pub(super) patience: Duration,
    pub(super) links: usize,
    pub(super) longest: u64,
    pub(super) validate: bool,
    pub(super) rendezvous_timeout: Duration,
    pub(super) plaintext: Option<bool>,
    pub(super) tls: Tls,
}

impl Settings {
    /// Most queue pairs that a link may have.
    pub const MAX_QPS: u32 = 64;
    /// Most completion queues that a device may have.
    pub const MAX_CQS: u32 = 64;

    /// Makes settings for `cqs` completion queues, over which the `qps_per_peer` queue pairs of each link are spread in turn.
    ///
    /// ```
    /// use tonic_rdma_tensor::Settings;
    ///
    /// let settings = Settings::new(1, 2);
    /// # drop(settings);
    /// ```
    pub fn new(cqs: u32, qps_per_peer: u32) -> Self {
        Self {
            config: Config::default(),
            cqs,
            qps_per_peer,
            notification: None,
            piece: 64 << 20,
            window: 256 << 20,
            patience: Duration::from_secs(10),
            links: 1024,
            longest: 64 << 30,
            validate: false,
            rendezvous_timeout: Duration::from_secs(60),
            plaintext: None,
            tls: Tls::default(),
        }
    }

    /// Sets which RDMA device to use, how to poll it, and how much memory to pin, as for connections. Default:
    /// [`Config::default`].
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Demands this way of telling the peer of arrivals. Default: the best one that both devices have.
    pub fn notification(mut self, notification: Notification) -> Self {
        self.notification = Some(notification);
        self
    }

    /// Sets the most bytes of one request, and the most bytes outstanding on a queue pair, beyond which no further request is
    /// posted. Default: 64 MiB and 256 MiB. On the software device the thread that posts a request carries it out, and other
    /// work of that thread waits as long.
    pub fn pieces(mut self, piece: u64, window: u64) -> Self {
        self.piece = piece.clamp(4096, 1 << 31);
        self.window = window.max(self.piece);
        self
    }

    /// Sets how long a peer may take to answer when a link or a slot is made, or to confirm a link that it has opened.
    /// Default: 10 s.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets how many links peers may open. Default: 1024.
    pub fn max_links(mut self, links: usize) -> Self {
        self.links = links;
        self
    }

    /// Sets the longest tensor, in bytes, that a peer may have this device make room for. Default: 64 GiB.
    pub fn longest_tensor(mut self, bytes: u64) -> Self {
        self.longest = bytes;
        self
    }

    /// Sets whether each tensor of a rendezvous carries a checksum, which is verified on arrival. It helps to find a fault, and
    /// costs reading each tensor once more at both ends. Default: no.
    pub fn validate(mut self, validate: bool) -> Self {
        self.validate = validate;
        self
    }

    /// Sets how long an offered tensor waits for its readers, and a request for its tensor. Default: 60 s.
    pub fn rendezvous_timeout(mut self, timeout: Duration) -> Self {
        self.rendezvous_timeout = timeout;
        self
    }

    /// Sets whether to make links over connections with TLS. By default a device refuses to, at either end, and on every RDMA
    /// device: TLS encrypts calls, and would seem to protect tensors, which no device encrypts. It overrides
    /// [`Config::plaintext_tensors`](crate::Config::plaintext_tensors).
    ///
    /// ```
    /// use tonic_rdma_tensor::Settings;
    ///
    /// // The network is trusted: tensors may cross it unencrypted.
    /// let settings = Settings::new(1, 2).plaintext_tensors(true);
    /// # drop(settings);
    /// ```
    pub fn plaintext_tensors(mut self, allow: bool) -> Self {
        self.plaintext = Some(allow);
        self
    }

    pub(super) fn allows_plaintext(&self) -> bool {
        self.plaintext.unwrap_or_else(|| self.config.allows_plaintext_tensors())
    }
}
