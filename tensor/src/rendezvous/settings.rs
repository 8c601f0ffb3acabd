//! How much is kept, and how long.

use std::time::Duration;

/// Bounds of a [`Provider`](super::Provider).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderSettings {
    /// Offers kept at a time.
    pub max_offers: usize,
    /// Bytes of all tensors that are kept.
    pub max_bytes: u64,
    /// Requests of one peer at a time.
    pub max_requests_per_peer: usize,
    /// Deliveries, and numbers of requests that are over, that are remembered of each peer, to tell what is asked twice.
    pub max_remembered: usize,
    /// How long a request waits: for an offer, and then for the requester to ask again with a sink. `None`: as long as
    /// its link lives.
    pub request_timeout: Option<Duration>,
    /// How long an offer waits for its readers. `None`: as long as there is room.
    pub offer_timeout: Option<Duration>,
}

impl Default for ProviderSettings {
    /// 16 384 offers of 16 GiB together, 1 024 requests of each peer, a minute for a request, ten for an offer.
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
    /// Requests at a time, those included that are cancelled and not answered yet. No more than the provider takes.
    pub max_requests: usize,
    /// Names whose metadata is remembered; the one that was not used for longest is forgotten. 0: none.
    pub max_cached: usize,
    /// Longest tensor that is accepted, in bytes.
    pub max_tensor_bytes: u64,
    /// Whether each tensor shall come with a checksum.
    pub validate: bool,
}

impl Default for RequesterSettings {
    /// 1 024 requests, 4 096 names, 64 GiB, no checksums.
    fn default() -> Self {
        Self { max_requests: 1_024, max_cached: 4_096, max_tensor_bytes: 64 << 30, validate: false }
    }
}
