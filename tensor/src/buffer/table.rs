//! The leases of a pool by their numbers, each of which is used once. It does no IO.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::lease::{Ended, LeaseState};
use super::proto::{Fault, FaultKind};

/// The last leases that have ended, whose handles are told how.
const KNOWN: usize = 4096;
/// Most leases.
pub(super) const MOST: usize = 1 << 20;

/// The leases of a pool.
#[derive(Debug, Default)]
pub(super) struct Table {
    leases: HashMap<u64, Result<Arc<LeaseState>, Ended>>,
    /// The numbers of those that have ended, the oldest end first.
    ended: VecDeque<u64>,
    /// The number of the next lease.
    next: u64,
    /// Bytes of the leases that have not ended.
    pub(super) bytes: u64,
}

impl Table {
    /// Adds a lease, which `make` makes with its number. Returns `None` if there are too many.
    pub(super) fn insert(&mut self, make: impl FnOnce(u64) -> Arc<LeaseState>) -> Option<Arc<LeaseState>> {
        if self.count() >= MOST {
            return None;
        }
        let lease = make(self.next);
        self.leases.insert(self.next, Ok(Arc::clone(&lease)));
        self.next += 1;
        self.bytes += lease.length;
        Some(lease)
    }

    /// Returns the number of leases that have not ended.
    pub(super) fn count(&self) -> usize {
        self.leases.len() - self.ended.len()
    }

    /// Returns the lease of a handle.
    pub(super) fn find(&self, id: u64) -> Result<Arc<LeaseState>, Fault> {
        match self.leases.get(&id) {
            Some(lease) => lease.clone().map_err(Ended::fault),
            None => Err(Fault::new(FaultKind::Gone, "its lease ended long ago, or there was none")),
        }
    }

    /// Notes that a lease has ended.
    pub(super) fn end(&mut self, lease: &LeaseState, ended: Ended) {
        self.leases.insert(lease.id, Err(ended));
        self.bytes -= lease.length;
        self.ended.push_back(lease.id);
        if self.ended.len() > KNOWN
            && let Some(oldest) = self.ended.pop_front()
        {
            self.leases.remove(&oldest);
        }
    }

    /// Returns the leases that have not ended.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<LeaseState>> {
        self.leases.values().filter_map(|lease| lease.as_ref().ok())
    }
}
