//! The order of completions, for a device that does not keep it.
//!
//! soft-iWARP reports a send or write when TCP has taken it, even while an earlier RDMA READ is still under
//! way. (RFC 5040 requires completions in the order of posting.) So early completions wait here for the READs
//! before them.

use std::collections::VecDeque;

use crate::{CompletionStatus, WorkCompletion};

/// The completions of one send queue.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// READs that are under way, oldest first, and whether to report their success.
    reads: VecDeque<(u32, bool)>,
    /// Requests that completed before an earlier READ, in the order of posting.
    early: VecDeque<(u32, WorkCompletion)>,
}

impl Order {
    /// Notes a posted READ. Every READ is signalled to the device.
    pub(crate) fn post_read(&mut self, position: u32, signaled: bool) {
        self.reads.push_back((position, signaled));
    }

    /// Removes a READ again that the device refused.
    pub(crate) fn take_back_read(&mut self, position: u32) {
        self.reads.retain(|(read, _)| *read != position);
    }

    /// Notes that the request at `position` has completed. Reports it, and requests that waited for it, as
    /// soon as all earlier READs have completed.
    pub(crate) fn arrive(
        &mut self,
        position: u32,
        completion: WorkCompletion,
        mut report: impl FnMut(u32, WorkCompletion),
    ) {
        if let Some(&(read, signaled)) = self.reads.front()
            && read == position
        {
            self.reads.pop_front();
            if signaled || completion.status != CompletionStatus::Success {
                report(position, completion);
            }
        } else {
            self.early.push_back((position, completion));
        }
        while let Some(&(early, completion)) = self.early.front()
            && self.reads.front().is_none_or(|(read, _)| is_before(early, *read))
        {
            self.early.pop_front();
            report(early, completion);
        }
    }

    /// Takes the early completion of the request at `position`, because the device will report nothing more.
    pub(crate) fn take_early(&mut self, position: u32) -> Option<WorkCompletion> {
        let found = self.early.iter().position(|(early, _)| *early == position)?;
        self.early.remove(found).map(|(_, completion)| completion)
    }
}

/// Returns whether a position is before another one. Positions wrap around, and are never far apart.
fn is_before(position: u32, other: u32) -> bool {
    position.wrapping_sub(other) > u32::MAX / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(wr_id: u64) -> WorkCompletion {
        WorkCompletion { wr_id, ..WorkCompletion::EMPTY }
    }

    #[test]
    fn early_completions_wait_for_the_reads_before_them() {
        for first in [0u32, u32::MAX - 2] {
            let at = |offset: u32| first.wrapping_add(offset);
            let mut order = Order::default();
            order.post_read(at(1), true);
            order.post_read(at(3), false);
            let mut reported = Vec::new();
            for offset in [0, 2, 4, 1, 5, 3, 6] {
                order.arrive(at(offset), completion(offset.into()), |position, completion| {
                    assert_eq!(position, at(completion.wr_id as u32));
                    reported.push(completion.wr_id);
                });
            }
            // The second read was not to be reported.
            assert_eq!(reported, [0, 1, 2, 4, 5, 6]);
        }
    }
}
