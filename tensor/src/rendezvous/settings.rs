//! Bounds of memory and time.

use std::time::Duration;

/// Bounds of a [`Provider`](super::Provider).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderSettings {
    /// Number of offers at a time.
    pub max_offers: usize,
    /// Bytes of all offered tensors together.
    pub max_bytes: u64,
    /// Number of requests of one peer at a time.
    pub max_requests_per_peer: usize,
    /// Number of deliveries, and of finished requests, that the provider remembers of each peer, to recognise repetitions.
    pub max_remembered: usize,
    /// Time that a request waits for an offer, and then for a sink. `None`: until its link ends.
    pub request_timeout: Option<Duration>,
    /// Time that an offer waits for its readers. `None`: without limit.
    pub offer_timeout: Option<Duration>,
}

impl Default for ProviderSettings {
    /// Returns the defaults: 16 384 offers of 16 GiB together, 1 024 requests of each peer, one minute for a request, and ten
    /// minutes for an offer.
    fn default() -> Self {
        Self {
            max_offers: 16_384,
            max_bytes: 16 << 30,
            max_requests_per_peer: 1_024,
            max_remembered: 4_096,
            request_timeout: Some(Duration::from_secs(60)),
            offer_timeout: Some(Duration::from_secs(600)),
        }
    }
}

/// Bounds of a [`Requester`](super::Requester).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequesterSettings {
    /// Number of requests at a time, with cancelled requests that have no answer yet. Not more than the provider takes.
    pub max_requests: usize,
    /// Number of names whose metadata the requester remembers. It forgets the least recently used name. 0: none.
    pub max_cached: usize,
    /// Length of the longest tensor that the requester accepts, in bytes.
    pub max_tensor_bytes: u64,
    /// Bytes of all tensors together that the requester keeps for readers that gave up. It keeps the newest one also if that one is longer.
    pub max_untaken_bytes: u64,
    /// Whether each tensor has to come with a checksum.
    pub validate: bool,
}

impl Default for RequesterSettings {
    /// Returns the defaults: 1 024 requests, 4 096 names, tensors of 64 GiB, 256 MiB of untaken tensors, no checksums.
    fn default() -> Self {
        Self {
            max_requests: 1_024,
            max_cached: 4_096,
            max_tensor_bytes: 64 << 30,
            max_untaken_bytes: 256 << 20,
            validate: false,
        }
    }
}
