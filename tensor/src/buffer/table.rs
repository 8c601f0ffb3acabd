//! The leases of a pool by their numbers. It does no IO.
//!
//! A number is used again, under the next generation, when many other leases have ended since. Until then a
//! handle of the lease that had the number is told how the lease ended.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::lease::{Ended, LeaseState};
use super::proto::{Fault, FaultKind};

/// Numbers that rest before the first of them is used again.
const RESTING: usize = 4096;
/// Most leases.
const MOST: usize = 1 << 20;

/// The leases of a pool.
#[derive(Debug, Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    /// The numbers of leases that have ended, the oldest end first.
    resting: VecDeque<u64>,
    /// The leases with a time limit, by its end.
    deadlines: BTreeSet<(Instant, u64)>,
    /// The number of leases that have not ended, and their bytes.
    pub(super) leases: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
struct Slot {
    generation: u64,
    lease: Result<Arc<LeaseState>, Ended>,
}

impl Table {
    /// Adds a lease, which `make` makes with its number and generation. Returns `None` if there are too many.
    pub(super) fn insert(
        &mut self,
        make: impl FnOnce(u64, u64) -> Arc<LeaseState>,
    ) -> Option<Arc<LeaseState>> {
        let reused = if self.resting.len() > RESTING { self.resting.pop_front() } else { None };
        let id = match reused {
            Some(id) => id,
            None if self.slots.len() < MOST + RESTING => self.slots.len() as u64,
            None => return None,
        };
        let generation = self.slots.get(id as usize).map_or(1, |slot| slot.generation + 1);
        let lease = make(id, generation);
        self.leases += 1;
        self.bytes += lease.length;
        self.deadlines.extend(lease.deadline.map(|deadline| (deadline, id)));
        let slot = Slot { generation, lease: Ok(Arc::clone(&lease)) };
        match self.slots.get_mut(id as usize) {
            Some(rested) => *rested = slot,
            None => self.slots.push(slot),
        }
        Some(lease)
    }

    /// Returns the lease of a handle.
    pub(super) fn find(&self, id: u64, generation: u64) -> Result<Arc<LeaseState>, Fault> {
        let slot = usize::try_from(id).ok().and_then(|id| self.slots.get(id));
        match slot.filter(|slot| slot.generation == generation) {
            Some(slot) => slot.lease.clone().map_err(Ended::fault),
            None => Err(Fault::new(FaultKind::Gone, "its lease ended long ago, or there was none")),
        }
    }

    /// Removes a lease that has ended.
    pub(super) fn remove(&mut self, lease: &LeaseState, ended: Ended) {
        let Some(slot) = self.slots.get_mut(lease.id as usize) else { return };
        if slot.generation != lease.generation || slot.lease.is_err() {
            return;
        }
        slot.lease = Err(ended);
        self.leases -= 1;
        self.bytes -= lease.length;
        if let Some(deadline) = lease.deadline {
            self.deadlines.remove(&(deadline, lease.id));
        }
        self.resting.push_back(lease.id);
    }

    /// Returns a lease whose time is over at `now`, or the time at which the next one's is.
    pub(super) fn overdue(&self, now: Instant) -> Result<Arc<LeaseState>, Option<Instant>> {
        let Some(&(deadline, id)) = self.deadlines.first() else { return Err(None) };
        match self.slots.get(id as usize) {
            Some(Slot { lease: Ok(lease), .. }) if deadline <= now => Ok(Arc::clone(lease)),
            _ => Err(Some(deadline)),
        }
    }

    /// Returns the time at which the first lease ends.
    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Returns the leases that have not ended.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<LeaseState>> {
        self.slots.iter().filter_map(|slot| slot.lease.as_ref().ok())
    }
}
