//! Deadlines, in the order of time.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::{Duration, Instant};

/// At most one deadline for each key.
#[derive(Debug)]
pub(super) struct Deadlines<K> {
    order: BTreeSet<(Instant, K)>,
    of: HashMap<K, Instant>,
}

impl<K: Clone + Ord + Hash> Deadlines<K> {
    pub(super) fn new() -> Self {
        Self { order: BTreeSet::new(), of: HashMap::new() }
    }

    /// Sets the deadline of `key` to `timeout` from now, in place of an earlier deadline. Without a timeout `key` has no
    /// deadline.
    pub(super) fn set(&mut self, key: &K, now: Instant, timeout: Option<Duration>) {
        self.clear(key);
        let Some(at) = timeout.and_then(|timeout| now.checked_add(timeout)) else { return };
        self.of.insert(key.clone(), at);
        self.order.insert((at, key.clone()));
    }

    /// Removes the deadline of `key`.
    pub(super) fn clear(&mut self, key: &K) {
        if let Some((key, at)) = self.of.remove_entry(key) {
            self.order.remove(&(at, key));
        }
    }

    /// Returns the earliest deadline.
    pub(super) fn next(&self) -> Option<Instant> {
        self.order.first().map(|&(at, _)| at)
    }

    /// Removes a key whose deadline has passed, and returns the key.
    pub(super) fn pop(&mut self, now: Instant) -> Option<K> {
        if self.next()? > now {
            return None;
        }
        let (_, key) = self.order.pop_first()?;
        self.of.remove(&key);
        Some(key)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty() && self.of.is_empty()
    }
}
