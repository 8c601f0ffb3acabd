//! The settings of a device, checked.

use std::time::Duration;

use crate::device::tls::Tls;
use crate::error::ChannelError;
use crate::link::notification::Notification;
use tonic_rdma::Config;

/// The settings of [`DeviceBuilder`](crate::DeviceBuilder). Each field has the name of its method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) config: Config,
    pub(crate) completion_queues: u32,
    pub(crate) queue_pairs_per_peer: u32,
    pub(crate) notification: Option<Notification>,
    pub(crate) max_request_bytes: u64,
    pub(crate) max_outstanding_bytes: u64,
    pub(crate) answer_timeout: Duration,
    pub(crate) max_links: usize,
    pub(crate) max_tensor_bytes: u64,
    pub(crate) checksums: bool,
    pub(crate) listed: bool,
    pub(crate) rendezvous_timeout: Duration,
    pub(crate) plaintext_tensors: Option<bool>,
    pub(crate) tls: Tls,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            config: Config::default(),
            completion_queues: 1,
            queue_pairs_per_peer: 1,
            notification: None,
            max_request_bytes: 64 << 20,
            max_outstanding_bytes: 256 << 20,
            answer_timeout: Duration::from_secs(10),
            max_links: 1024,
            max_tensor_bytes: 64 << 30,
            checksums: false,
            listed: true,
            rendezvous_timeout: Duration::from_secs(60),
            plaintext_tensors: None,
            tls: Tls::default(),
        }
    }
}

impl Settings {
    /// The most queue pairs that a link may have.
    pub(crate) const MAX_QUEUE_PAIRS: u32 = 64;
    /// The most links of peers that have not confirmed them.
    pub(crate) const UNCONFIRMED: usize = 64;
    /// The time that a peer has to confirm its link before another peer may take its place.
    pub(crate) const LEAST_WAIT: Duration = Duration::from_millis(250);
    /// The most calls that wait for such a place. One source has half of them.
    pub(crate) const WAITING: usize = 320;
    /// The most peers whose device is asked at a time whether it answers. If there are more, the peer that was asked first loses.
    pub(crate) const ASKING: usize = 1024;
    /// The most completion queues that a device may have.
    pub(crate) const MAX_COMPLETION_QUEUES: u32 = 64;

    /// Returns an error that names the first number that is out of range.
    pub(crate) fn check(&self) -> Result<(), ChannelError> {
        self.config.validate()?;
        let request = self.max_request_bytes;
        let numbers = [
            ("completion_queues", self.completion_queues.into(), 1..=u64::from(Self::MAX_COMPLETION_QUEUES)),
            ("queue_pairs_per_peer", self.queue_pairs_per_peer.into(), 1..=u64::from(Self::MAX_QUEUE_PAIRS)),
            ("max_request_bytes", request, 4096..=1 << 31),
            ("max_outstanding_bytes", self.max_outstanding_bytes, request..=u64::MAX),
        ];
        match numbers.into_iter().find(|(_, given, accepted)| !accepted.contains(given)) {
            Some((setting, given, accepted)) => Err(ChannelError::BadSetting { setting, given, accepted }),
            None => Ok(()),
        }
    }

    /// Returns whether tensors may go unencrypted to peers that are reached over TLS.
    pub(crate) fn allows_plaintext(&self) -> bool {
        self.plaintext_tensors.unwrap_or_else(|| self.config.allows_plaintext_tensors())
    }
}
