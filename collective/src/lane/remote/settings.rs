//! Settings and counts of lanes.

use std::time::Duration;

use crate::error::CollectiveError;
use crate::lane::remote::message::{Layout, MOST_INLINE, REFERENCE};

/// How messages reach a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LaneKind {
    /// By views, where both ranks see the memory of the other; otherwise by writes.
    #[default]
    Auto,
    /// By writes, for tests of what happens where ranks see no memory of one another.
    #[cfg(test)]
    Write,
}

/// Settings of all lanes of a rank. The numbers must be equal on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct LaneSettings {
    /// The first part of the names of the regions. Each set of lanes of a device has another.
    pub(crate) names: String,
    pub(crate) kind: LaneKind,
    /// The number of messages that one rank may send to another before the other takes one: a power of two.
    pub(crate) slots: u32,
    /// The largest inline message in bytes. Writes may have a lower limit, that of their device.
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
            kind: LaneKind::Auto,
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

    /// Returns an error that names the first setting that is out of range.
    pub(super) fn check(&self) -> Result<(), CollectiveError> {
        let wrong = |what: String| Err(CollectiveError::Setup(format!("settings of lanes: {what}").into()));
        let Self { slots, inline, piece, reads, attached, .. } = *self;
        if !slots.is_power_of_two() || !(2..=1024).contains(&slots) {
            return wrong(format!("{slots} slots; the number is a power of two from 2 to 1024"));
        }
        if !(REFERENCE..=MOST_INLINE).contains(&(inline as usize)) {
            return wrong(format!(
                "inline messages of {inline} bytes; the limit is from {REFERENCE} to {MOST_INLINE}"
            ));
        }
        if piece == 0 || piece % 64 != 0 {
            return wrong(format!("pieces of {piece} bytes; the number is a multiple of 64"));
        }
        if !(1..=64).contains(&reads) || !(1..=4096).contains(&attached) {
            return wrong(format!(
                "{reads} reads and {attached} regions; the limits are from 1 to 64, and from 1 to 4096"
            ));
        }
        Ok(())
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
    /// Bytes received inline.
    pub(crate) inline_received: u64,
    /// Bytes pulled from memory of peers.
    pub(crate) pulled_bytes: u64,
    /// Bytes copied by this rank on their way: into a message, or out of memory into which they were read. Bytes that the
    /// receiver moves straight from the memory of the sender to their place are not in this count.
    pub(crate) copied_bytes: u64,
}
