//! A message of the peer while its records are taken.

/// Messages of at least this length go past the caches, because they are as long as the last-level cache and would not stay
/// there.
const PAST_CACHES: u64 = 32 << 20;

/// A message of the peer.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) destination: Destination,
    pub(super) immediate: Option<u32>,
    pub(super) total: u64,
    pub(super) done: u64,
}

/// The destination of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// The oldest posted receive.
    Receive,
    /// The place that the peer names.
    Memory { address: u64, key: u32 },
}

impl Message {
    /// Returns whether the bytes go past the caches.
    pub(super) fn goes_past_caches(&self) -> bool {
        self.total >= PAST_CACHES
    }
}
