//! A map with a bound.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::hash::Hash;

/// A map that forgets its oldest item when it is full.
#[derive(Debug)]
pub(super) struct RecentMap<K, V> {
    capacity: usize,
    order: VecDeque<K>,
    map: HashMap<K, V>,
}

/// A set that forgets its oldest item when it is full.
pub(super) type RecentSet<K> = RecentMap<K, ()>;

impl<K: Clone + Eq + Hash, V> RecentMap<K, V> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, order: VecDeque::new(), map: HashMap::new() }
    }

    /// Adds an item. An item that is there already keeps its value.
    pub(super) fn insert(&mut self, item: K, value: V) {
        let Entry::Vacant(entry) = self.map.entry(item.clone()) else { return };
        if self.capacity == 0 {
            return;
        }
        entry.insert(value);
        if self.order.len() == self.capacity
            && let Some(oldest) = self.order.pop_front()
        {
            self.map.remove(&oldest);
        }
        self.order.push_back(item);
    }

    pub(super) fn get(&self, item: &K) -> Option<&V> {
        self.map.get(item)
    }

    pub(super) fn contains(&self, item: &K) -> bool {
        self.map.contains_key(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_the_oldest() {
        let mut recent = RecentSet::new(2);
        for what in [1, 2, 2, 1, 3] {
            recent.insert(what, ());
        }
        assert_eq!([1, 2, 3].map(|what| recent.contains(&what)), [false, true, true]);
        assert_eq!((recent.order.len(), recent.map.len()), (2, 2));
        let mut nothing = RecentSet::new(0);
        nothing.insert(1, ());
        assert!(!nothing.contains(&1));
    }
}
