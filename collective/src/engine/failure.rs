//! Failures: deadlines, calls that differ, and the end of all operations.

use std::sync::Arc;
use std::time::Instant;

use super::round::{Fault, check};
use super::under::{Course, Under};
use super::{Engine, Finished, Holding, Kind, OperationId, Supply};
use crate::error::{CollectiveError, Place};
use crate::lane::{Lanes, Tag};
use tonic_rdma::internal::wake_all;

/// An operation whose deadline has passed, and the rank that it waits for.
#[derive(Debug)]
pub(super) struct Late {
    id: OperationId,
    rank: usize,
    told: bool,
}

impl<L: Lanes> Engine<L> {
    /// Looks for messages of another call, also on lanes on which no message is due: then the ranks wait for each other, because
    /// they carry out different plans.
    fn find_mismatch(&mut self) -> Option<(usize, Fault)> {
        for from in (0..self.ranks).filter(|from| *from != self.rank) {
            // A lane that has failed is found elsewhere.
            let Ok(Some((tag, _))) = self.lanes.peek(from) else { continue };
            let of_group = |under: &Under<_>| matches!(under.call.kind, Kind::Group(_));
            let mut candidates = self.under.iter().enumerate().filter(|(_, under)| of_group(under));
            if let Some((at, under)) = candidates.find(|(_, under)| under.number == tag.operation)
                && under.packed != tag.call
            {
                let due = Tag { operation: under.number, step: 0, call: under.packed };
                return check(from, &due, &tag, 0, 0, 0, 0).err().map(|fault| (at, fault));
            }
        }
        None
    }

    /// Fails the operations whose deadline has passed, and says where this rank is.
    pub(super) fn check_time(&mut self, now: Instant) {
        if let Some((at, fault)) = self.find_mismatch() {
            return self.fail_at(at, fault);
        }
        let mut late = None;
        for (at, under) in self.under.iter_mut().enumerate() {
            let started = *under.started.get_or_insert(now);
            if late.is_none() && now.saturating_duration_since(started) >= under.limit {
                late = Some(at);
            }
        }
        // An operation may wait for an earlier one.
        let Some(first) = self.under.iter().find(|under| under.waits_for().is_some()) else {
            if let Some(at) = late {
                self.fail_at(at, Fault::Error(self.own_fault(at)));
            }
            return;
        };
        // The first operation that waits holds up the others. This rank is at fault if the operation waits for its own future.
        let neglected = first.neglected;
        let (place, waits_for) = (first.place(), first.waits_for());
        let waits_for = waits_for.filter(|_| !neglected);
        self.position = (place, waits_for);
        if let Some(at) = late {
            let under = &self.under[at];
            let waits_for = under.waits_for().filter(|_| !neglected).or(waits_for);
            if self.asks
                && let Some(rank) = waits_for
            {
                self.late.get_or_insert(Late { id: under.id, rank, told: false });
                return;
            }
            let error = match waits_for {
                Some(rank) => CollectiveError::Deadline { rank, place: under.place(), limit: under.limit },
                None => self.own_fault(at),
            };
            self.fail_at(at, Fault::Error(error));
        }
    }

    /// The operation waits for no rank, so its own future was not polled.
    fn own_fault(&self, at: usize) -> CollectiveError {
        let under = &self.under[at];
        CollectiveError::Deadline { rank: self.rank, place: under.place(), limit: under.limit }
    }

    /// Takes the operation whose deadline has passed. Each one comes once.
    pub(crate) fn take_late(&mut self) -> Option<(OperationId, usize)> {
        let late = self.late.as_mut().filter(|late| !late.told)?;
        late.told = true;
        Some((late.id, late.rank))
    }

    /// Fails an operation whose deadline has passed, because of `culprit`.
    pub(crate) fn expire(&mut self, id: OperationId, culprit: usize) {
        self.late = None;
        if let Some(at) = self.under.iter().position(|under| under.id == id) {
            let under = &self.under[at];
            let (place, limit) = (under.place(), under.limit);
            self.fail_at(at, Fault::Error(CollectiveError::Deadline { rank: culprit, place, limit }));
        }
    }

    /// Ends all operations, because the one at `at` failed.
    pub(super) fn fail_at(&mut self, at: usize, fault: Fault) {
        let place = self.under.get(at).map(Under::place);
        let error = fault.into_error(place.unwrap_or_else(|| self.idle_place()));
        self.fail_all(at, error);
    }

    pub(super) fn fail_all(&mut self, first: usize, error: CollectiveError) {
        let shared = Arc::new(error.clone());
        if self.failure.is_none() {
            self.failure = Some(Arc::clone(&shared));
        }
        for (at, mut under) in std::mem::take(&mut self.under).into_iter().enumerate() {
            let result =
                if at == first { error.clone() } else { CollectiveError::Revoked(Arc::clone(&shared)) };
            self.told = true;
            if let Course::Planned(planned) = &mut under.course
                && planned.has_outstanding()
            {
                self.kept.extend(planned.staging.take());
                self.kept.extend(planned.scratch.take());
                keep(&mut under.holding, &mut self.supply, &mut self.kept);
            }
            wake_all(under.waker);
            if !under.detached {
                self.finished.push(Finished { id: under.id, result: Err(result), holding: under.holding });
            }
        }
    }

    /// Ends all operations because of an event outside the lanes. Only the first failure counts.
    pub(crate) fn fail(&mut self, error: CollectiveError) {
        if self.failure.is_none() {
            self.fail_all(0, error);
        }
    }

    pub(super) fn idle_place(&self) -> Place {
        Place { operation: self.numbers.group, step: 0, steps: 0 }
    }
}

/// Exchanges the memory of a failed operation for copies, because a peer may still pull from it, and the caller may change what
/// comes back. Where there is no memory for a copy, nothing comes back.
fn keep<M: std::ops::DerefMut<Target = [u8]>>(
    holding: &mut Holding<M>,
    supply: &mut Supply<M>,
    kept: &mut Vec<M>,
) {
    let Holding::Owned { input, out } = holding else { return };
    for memory in [input, out] {
        let Some(old) = memory.take() else { continue };
        if let Ok(mut new) = supply(old.len()) {
            let length = old.len().min(new.len());
            new[..length].copy_from_slice(&old[..length]);
            *memory = Some(new);
        }
        kept.push(old);
    }
}
