//! What is due when.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::{Duration, Instant};

/// At most one moment for each `K`.
#[derive(Debug)]
pub(super) struct Deadlines<K> {
    order: BTreeSet<(Instant, K)>,
    of: HashMap<K, Instant>,
}

impl<K: Clone + Ord + Hash> Deadlines<K> {
    pub(super) fn new() -> Self {
        Self { order: BTreeSet::new(), of: HashMap::new() }
    }

    /// `what` is due after `timeout`, in place of when it was due before; never, if there is none.
    pub(super) fn set(&mut self, what: &K, now: Instant, timeout: Option<Duration>) {
        self.clear(what);
        let Some(at) = timeout.and_then(|timeout| now.checked_add(timeout)) else { return };
        self.of.insert(what.clone(), at);
        self.order.insert((at, what.clone()));
    }

    /// `what` is not due any more.
    pub(super) fn clear(&mut self, what: &K) {
        if let Some((what, at)) = self.of.remove_entry(what) {
            self.order.remove(&(at, what));
        }
    }

    /// When the next is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.order.first().map(|&(at, _)| at)
    }

    /// Something that is due.
    pub(super) fn pop(&mut self, now: Instant) -> Option<K> {
        if self.next()? > now {
            return None;
        }
        let (_, what) = self.order.pop_first()?;
        self.of.remove(&what);
        Some(what)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty() && self.of.is_empty()
    }
}
