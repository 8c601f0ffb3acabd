//! The last few of what there was.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// A set that forgets the oldest.
#[derive(Debug)]
pub(super) struct RecentSet<K> {
    most: usize,
    order: VecDeque<K>,
    set: HashSet<K>,
}

impl<K: Clone + Eq + Hash> RecentSet<K> {
    pub(super) fn new(most: usize) -> Self {
        Self { most, order: VecDeque::new(), set: HashSet::new() }
    }

    pub(super) fn insert(&mut self, what: K) {
        if self.most == 0 || !self.set.insert(what.clone()) {
            return;
        }
        if self.order.len() == self.most
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
        self.order.push_back(what);
    }

    pub(super) fn contains(&self, what: &K) -> bool {
        self.set.contains(what)
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
