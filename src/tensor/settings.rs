//! What a device is made with.

use std::time::Duration;

use super::Notification;
use super::tls::Tls;
use crate::endpoint::Config;

/// What an [`RdmaDevice`](super::RdmaDevice) is made with.
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
    /// Queue pairs that a link may have.
    pub const MAX_QPS: u32 = 64;
    /// Completion queues that a device may have.
    pub const MAX_CQS: u32 = 64;

    /// A device with `cqs` completion queues, over which the `qps_per_peer` queue pairs of each link are spread in turn.
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

    /// Which RDMA device to use, how to poll it, how much memory to pin: as for connections.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Demands a way to tell of arrivals, instead of the best one that both devices have.
    pub fn notification(mut self, notification: Notification) -> Self {
        self.notification = Some(notification);
        self
    }

    /// Bytes of one request at most, and bytes outstanding on a queue pair, beyond which no further request is posted. 64 and
    /// 256 MiB. On the software device a request is carried out by the thread that posts it: others wait as long.
    pub fn pieces(mut self, piece: u64, window: u64) -> Self {
        self.piece = piece.clamp(4096, 1 << 31);
        self.window = window.max(self.piece);
        self
    }

    /// How long a peer may take to answer when a link or a slot is made, or to confirm a link that it has opened. 10 seconds.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Links that peers may open. 1024.
    pub fn max_links(mut self, links: usize) -> Self {
        self.links = links;
        self
    }

    /// Bytes of a tensor that a peer may have this device make room for. 64 GiB.
    pub fn longest_tensor(mut self, bytes: u64) -> Self {
        self.longest = bytes;
        self
    }

    /// Has every tensor of a rendezvous carry a checksum, which is verified on arrival. A way to find a fault, at the price of
    /// reading each tensor once more at both ends.
    pub fn validate(mut self, validate: bool) -> Self {
        self.validate = validate;
        self
    }

    /// How long an offered tensor waits to be asked for, and a request for its tensor. 60 seconds.
    pub fn rendezvous_timeout(mut self, timeout: Duration) -> Self {
        self.rendezvous_timeout = timeout;
        self
    }

    /// Whether to make links over connections with TLS. By default a device refuses to, at either end, and on every RDMA device:
    /// TLS encrypts calls, and would seem to protect tensors, which no device encrypts. Goes before
    /// [`Config::plaintext_tensors`](crate::Config::plaintext_tensors).
    pub fn plaintext_tensors(mut self, allow: bool) -> Self {
        self.plaintext = Some(allow);
        self
    }

    pub(super) fn allows_plaintext(&self) -> bool {
        self.plaintext.unwrap_or_else(|| self.config.allows_plaintext_tensors())
    }
}
