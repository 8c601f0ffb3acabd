//! How a mode sent tensors in turns that compute. Replays send the same tensors again, and are not counted.

use tonic_rdma_graph::placement::CrossingId;
use tonic_rdma_graph::schedule::CrossingCounts;

/// The counts of each crossing tensor, by number.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    turns: u64,
    first: Vec<CrossingCounts>,
    all: Vec<CrossingCounts>,
}

impl Tally {
    /// Adds a turn that computed, by the counters before and after it.
    pub(super) fn add(&mut self, before: &[CrossingCounts], after: &[CrossingCounts]) {
        self.all.resize(self.all.len().max(after.len()), CrossingCounts::default());
        for ((all, before), after) in self.all.iter_mut().zip(before).zip(after) {
            all.sent += after.sent.saturating_sub(before.sent);
            all.bytes += after.bytes.saturating_sub(before.bytes);
            all.copied += after.copied.saturating_sub(before.copied);
            all.inline += after.inline.saturating_sub(before.inline);
        }
        if self.turns == 0 {
            self.first.clone_from(&self.all);
        }
        self.turns += 1;
    }

    /// Returns the counts of a crossing tensor in the first turn, and in all turns.
    pub(super) fn of(&self, crossing: CrossingId) -> (CrossingCounts, CrossingCounts) {
        let of = |counts: &[CrossingCounts]| counts.get(crossing.0).copied().unwrap_or_default();
        (of(&self.first), of(&self.all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(sent: u64, copied: u64) -> [CrossingCounts; 2] {
        [CrossingCounts::default(), CrossingCounts { sent, bytes: 8 * sent, copied, inline: 0 }]
    }

    #[test]
    fn a_copy_in_a_turn_that_computes_is_counted_and_replays_are_not() {
        let mut tally = Tally::default();
        assert_eq!(tally.of(CrossingId(1)), Default::default());
        tally.add(&counts(0, 0), &counts(1, 1));
        // A replay sends 5000 tensors in between.
        tally.add(&counts(5001, 1), &counts(5004, 2));
        let (first, all) = tally.of(CrossingId(1));
        assert_eq!((first.sent, first.copied), (1, 1));
        assert_eq!((all.sent, all.copied, all.bytes), (4, 2, 32));
        assert_eq!(tally.of(CrossingId(0)), Default::default());
    }
}
