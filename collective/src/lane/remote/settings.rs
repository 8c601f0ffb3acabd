//! Settings and counts of lanes.

use std::time::Duration;

use crate::lane::remote::message::Layout;

/// Settings of all lanes of a rank. The numbers must be equal on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct LaneSettings {
    /// The first part of the names of the regions. Each set of lanes of a device has another.
    pub(crate) names: String,
    /// Whether messages go by views, where both ranks see the memory of the other. Not in tests of what happens elsewhere.
    pub(crate) views: bool,
    /// The number of messages that one rank may send to another before the other takes one: a power of two, at least 2.
    pub(crate) slots: u32,
    /// The largest inline message in bytes, from 24 to 32 KiB. Writes may have a lower limit, that of their device.
    pub(crate) inline: u32,
    /// The most bytes that one call of `receive` gives: a multiple of 64.
    pub(crate) piece: usize,
    /// The number of READs of one message that are under way at once.
    pub(crate) reads: usize,
    /// The number of regions of a peer that stay attached.
    pub(crate) attached: usize,
    /// How long the set-up, or the attachment of a region, may take.
    pub(crate) limit: Duration,
}

impl Default for LaneSettings {
    fn default() -> Self {
        Self {
            names: "tonic-rdma-collective/lanes".into(),
            views: true,
            slots: 8,
            // Up to here, a copy is faster than a reference also for registered memory, although the sender copies: the receiver has
            // to wait for each cache line of a reference, and the sender for the receiver. An all-reduce of 2 ranks by
            // halving-doubling with messages of 8 KiB took 3.5 µs with copies and 4.4 µs with references, and with messages of
            // 16 KiB 5.1 and 5.7 µs. To compare, change this number and run
            // `tonic-rdma-allreduce --ranks 2 --sizes 4KiB,8KiB,16KiB,32KiB --algorithm halving-doubling`.
            inline: 16 << 10,
            piece: 256 << 10,
            reads: 3,
            attached: 64,
            limit: Duration::from_secs(10),
        }
    }
}

impl LaneSettings {
    /// Returns the arrangement of slots.
    pub(super) fn layout(&self) -> Layout {
        Layout { slots: self.slots, inline: self.inline }
    }
}

/// Counts of all lanes of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneCounters {
    /// Messages sent.
    pub(crate) sent: u64,
    /// Messages taken.
    pub(crate) taken: u64,
    /// Bytes sent inline.
    pub(crate) inline_bytes: u64,
    /// Bytes that peers were asked to pull.
    pub(crate) offered_bytes: u64,
    /// Bytes pulled from memory of peers.
    pub(crate) pulled_bytes: u64,
    /// Bytes copied by this rank on their way: into a message, or out of memory into which they were read. Bytes that the
    /// receiver moves straight from the memory of the sender to their place are not in this count.
    pub(crate) copied_bytes: u64,
}
