//! Where things are in shared memory, in words of 64 bits. What two peers write to lies on lines of its own.

/// A completion queue's page: read by its owner, written to by peers that complete receives on it.
pub(super) mod queue_page {
    /// 1 if the owner wants an event with the next completion.
    pub(crate) const ARMED: usize = 0;
    /// One bit for each word of `READY` that is not zero.
    pub(crate) const SUMMARY: usize = 8;
    /// One bit for each queue pair: something was delivered.
    pub(crate) const READY: usize = 16;
    /// Queue pairs that a completion queue can serve.
    pub(crate) const QUEUE_PAIRS: usize = 64 * 64;
    /// Length of the page.
    pub(crate) const WORDS: usize = READY + 64;
}

/// A queue pair's page.
pub(super) mod pair_page {
    use super::super::super::QueuePairCapacity;

    /// Owner: whether peers may use it; 0 until it is connected.
    pub(crate) const STATE: usize = 0;
    /// Owner: the nonce of the probe.
    pub(crate) const NONCE: usize = 1;
    /// Owner: rights of the queue pair.
    pub(crate) const ACCESS: usize = 2;
    /// Peer: an error that takes this side down too.
    pub(crate) const FATAL: usize = 8;
    /// Owner: receives ever posted.
    pub(crate) const POSTED: usize = 16;
    /// Peer: waits for a receive.
    pub(crate) const WAITING: usize = 24;
    /// Peer: the key that it is working with.
    pub(crate) const HAZARD: usize = 32;
    /// Peer: messages ever delivered.
    pub(crate) const DELIVERED: usize = 40;
    const RINGS: usize = 48;

    /// Value of `STATE` while the peer may use the queue pair.
    pub(crate) const OPEN: u64 = 1;
    /// Value of `STATE` in Error, or when it is gone.
    pub(crate) const CLOSED: u64 = 2;

    /// Words of a receive: a count of segments, then (key, address, length) of each.
    const SEGMENT: usize = 3;
    /// Words of a delivery: kind and status, length, immediate.
    pub(crate) const DELIVERY: usize = 4;

    /// Sizes of the rings.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Rings {
        /// Entries of each ring, a power of two.
        pub(crate) entries: u64,
        /// Segments of a receive at most.
        pub(crate) segments: usize,
    }

    impl Rings {
        pub(crate) fn for_capacity(capacity: &QueuePairCapacity) -> Self {
            let entries = u64::from(capacity.receive_requests.max(1)).next_power_of_two();
            Self { entries, segments: capacity.receive_segments.max(1) as usize }
        }

        /// Sizes that a peer names, if they are possible.
        pub(crate) fn checked(entries: u64, segments: u64) -> Option<Self> {
            let possible = entries.is_power_of_two() && entries <= 1 << 16 && (1..=64).contains(&segments);
            possible.then_some(Self { entries, segments: segments as usize })
        }

        /// Length of the page.
        pub(crate) fn words(self) -> usize {
            RINGS + self.entries as usize * (1 + SEGMENT * self.segments + DELIVERY)
        }

        /// Where receive number `index` is.
        pub(crate) fn receive(self, index: u64) -> usize {
            RINGS + (index % self.entries) as usize * (1 + SEGMENT * self.segments)
        }

        /// Where delivery number `index` is.
        pub(crate) fn delivery(self, index: u64) -> usize {
            RINGS
                + self.entries as usize * (1 + SEGMENT * self.segments)
                + (index % self.entries) as usize * DELIVERY
        }
    }
}

/// A protection domain's table of regions: written by its owner, read by peers.
pub(super) mod table {
    /// Regions of a domain.
    pub(crate) const REGIONS: usize = 1024;
    /// Words of an entry.
    pub(crate) const ENTRY: usize = 8;
    /// Key, rights, and whether the entry is in use.
    pub(crate) const KEY: usize = 0;
    /// First address.
    pub(crate) const ADDRESS: usize = 1;
    /// Length in bytes.
    pub(crate) const LENGTH: usize = 2;
    /// Number of the memfd, 0 for memory that is not shared.
    pub(crate) const SEGMENT: usize = 3;
    /// Length of the table.
    pub(crate) const WORDS: usize = REGIONS * ENTRY;
    /// Bit of `KEY` that says that the entry is in use.
    pub(crate) const VALID: u64 = 1 << 63;

    /// The word of an entry in use.
    pub(crate) fn key_word(key: u32, access: u8) -> u64 {
        VALID | u64::from(access) << 32 | u64::from(key)
    }

    /// The entry that a key belongs to.
    pub(crate) fn index_of(key: u32) -> usize {
        key as usize % REGIONS
    }
}
