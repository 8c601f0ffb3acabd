//! Where each element of an operation is valid, while a plan is compiled.

use std::ops::Range;

/// A set of memories in which an element is valid.
pub(super) type Homes = u8;

pub(super) const INPUT: Homes = 1;
pub(super) const OUT: Homes = 2;
pub(super) const STAGING: Homes = 4;

/// The homes of all elements, as ranges in order without gaps.
#[derive(Debug)]
pub(super) struct HomeMap {
    ranges: Vec<(Range<usize>, Homes)>,
}

impl HomeMap {
    /// Returns a map of `elements` elements that are valid nowhere.
    pub(super) fn new(elements: usize) -> Self {
        Self { ranges: vec![(0..elements, 0)] }
    }

    /// Returns the parts of `range` and their homes, in order.
    pub(super) fn parts(&self, range: &Range<usize>) -> Vec<(Range<usize>, Homes)> {
        let first = self.ranges.partition_point(|(part, _)| part.end <= range.start);
        self.ranges[first..]
            .iter()
            .take_while(|(part, _)| part.start < range.end)
            .map(|(part, homes)| (part.start.max(range.start)..part.end.min(range.end), *homes))
            .filter(|(part, _)| !part.is_empty())
            .collect()
    }

    /// Returns the homes in which all elements of `range` are valid.
    pub(super) fn common(&self, range: &Range<usize>) -> Homes {
        self.parts(range).iter().fold(!0, |all, (_, homes)| all & homes)
    }

    /// Changes the homes of all elements of `range`.
    pub(super) fn change(&mut self, range: &Range<usize>, change: impl Fn(Homes) -> Homes) {
        if range.is_empty() {
            return;
        }
        let mut ranges: Vec<(Range<usize>, Homes)> = Vec::with_capacity(self.ranges.len() + 2);
        let mut push = |part: Range<usize>, homes: Homes| {
            if part.is_empty() {
                return;
            }
            match ranges.last_mut() {
                Some((last, same)) if *same == homes && last.end == part.start => last.end = part.end,
                _ => ranges.push((part, homes)),
            }
        };
        for (part, homes) in &self.ranges {
            push(part.start..part.end.min(range.start), *homes);
            let inside = part.start.max(range.start)..part.end.min(range.end);
            if !inside.is_empty() {
                push(inside, change(*homes));
            }
            push(part.start.max(range.end)..part.end, *homes);
        }
        self.ranges = ranges;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_splits_and_joins_ranges() {
        let mut map = HomeMap::new(10);
        map.change(&(2..5), |_| OUT);
        map.change(&(4..8), |homes| homes | STAGING);
        assert_eq!(
            map.parts(&(0..10)),
            [(0..2, 0), (2..4, OUT), (4..5, OUT | STAGING), (5..8, STAGING), (8..10, 0)]
        );
        assert_eq!(map.parts(&(3..6)), [(3..4, OUT), (4..5, OUT | STAGING), (5..6, STAGING)]);
        assert_eq!(map.common(&(2..5)), OUT);
        assert_eq!(map.common(&(2..6)), 0);
        map.change(&(0..10), |_| INPUT);
        assert_eq!(map.parts(&(0..10)), [(0..10, INPUT)]);
        map.change(&(3..3), |_| OUT);
        assert_eq!(map.parts(&(0..10)), [(0..10, INPUT)]);
    }
}
