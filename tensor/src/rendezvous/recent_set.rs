//! A set with a bound.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// A set that forgets its oldest item when it is full.
#[derive(Debug)]
pub(super) struct RecentSet<K> {
    capacity: usize,
    order: VecDeque<K>,
    set: HashSet<K>,
}

impl<K: Clone + Eq + Hash> RecentSet<K> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, order: VecDeque::new(), set: HashSet::new() }
    }

    pub(super) fn insert(&mut self, item: K) {
        if self.capacity == 0 || !self.set.insert(item.clone()) {
            return;
        }
        if self.order.len() == self.capacity
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
        self.order.push_back(item);
    }

    pub(super) fn contains(&self, item: &K) -> bool {
        self.set.contains(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_the_oldest() {
        let mut recent = RecentSet::new(2);
        for what in [1, 2, 2, 1, 3] {
            recent.insert(what);
        }
        assert_eq!([1, 2, 3].map(|what| recent.contains(&what)), [false, true, true]);
        assert_eq!((recent.order.len(), recent.set.len()), (2, 2));
        let mut nothing = RecentSet::new(0);
        nothing.insert(1);
        assert!(!nothing.contains(&1));
    }
}
