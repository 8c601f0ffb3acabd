//! The pairs of words of one side of a link, and which of them may be used again.
//!
//! A pair is given up at both sides, in any order. Each side tells the other one by a frame
//! [`Ended`](crate::wire::tensor_frame::Frame::Ended) on each queue pair, behind everything that it has
//! written for the pair there. When this side has given its pair up, and all these frames of the peer are
//! here, the peer writes nothing more to the words of the pair, and another slot or region may get them.
//!
//! The new pair has another number: behind the position of the words, a number counts their users. So a bell
//! for an earlier user, which may come late, finds no pair.

use std::collections::VecDeque;
use std::sync::Arc;

use super::words::{WordPage, WordPair};

/// The pairs of this side.
#[derive(Debug)]
pub(crate) struct PairTable {
    entries: Vec<Entry>,
    /// The positions of words that no pair has any more, the first given up first.
    free: VecDeque<usize>,
    /// The number of frames by which the peer ends a pair.
    frames: u32,
}

/// The words of one position.
#[derive(Debug)]
struct Entry {
    /// The number of the pair that has the words, or had them last.
    number: u32,
    /// `None` once this side has given the pair up.
    pair: Option<Arc<WordPair>>,
    /// The number of the peer's frames that are missing.
    missing: u32,
}

/// All pairs of words are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoPairLeft;

/// The peer has ended a pair that it does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it ends slot {0}, which it has not attached, or has ended before")]
pub(crate) struct NotAttached(u32);

impl PairTable {
    /// Makes an empty table. The peer ends each pair by `frames` frames.
    pub(crate) fn new(frames: u32) -> Self {
        Self { entries: Vec::new(), free: VecDeque::new(), frames }
    }

    /// Adds the pair that `make` makes of a number. Its words are at a position that no other pair has.
    pub(crate) fn add(&mut self, make: impl FnOnce(u32) -> WordPair) -> Result<Arc<WordPair>, NoPairLeft> {
        let missing = self.frames;
        if let Some(position) = self.free.pop_front()
            && let Some(entry) = self.entries.get_mut(position)
        {
            entry.number = entry.number.wrapping_add(WordPage::PAIRS as u32) & WordPage::LAST;
            let pair = Arc::new(make(entry.number));
            (entry.pair, entry.missing) = (Some(Arc::clone(&pair)), missing);
            return Ok(pair);
        }
        if self.entries.len() >= WordPage::PAIRS {
            return Err(NoPairLeft);
        }
        let number = self.entries.len() as u32;
        let pair = Arc::new(make(number));
        self.entries.push(Entry { number, pair: Some(Arc::clone(&pair)), missing });
        Ok(pair)
    }

    /// Returns the pair of this number, unless this side has given it up.
    pub(crate) fn get(&self, number: u32) -> Option<&Arc<WordPair>> {
        let entry = self.entries.get(WordPage::position(number))?;
        entry.pair.as_ref().filter(|_| entry.number == number)
    }

    /// Gives up a pair. `is_known` says whether the peer knows of it. Returns `None` if it was given up
    /// before.
    pub(crate) fn remove(&mut self, number: u32, is_known: bool) -> Option<Arc<WordPair>> {
        let position = WordPage::position(number);
        let entry = self.entries.get_mut(position).filter(|entry| entry.number == number)?;
        let pair = entry.pair.take()?;
        if entry.missing == 0 || !is_known {
            entry.missing = 0;
            self.free.push_back(position);
        }
        Some(pair)
    }

    /// Counts a frame by which the peer ends a pair. Returns the pair if this was the last frame and this side
    /// has not given up the pair.
    ///
    /// # Errors
    /// The peer has no such pair.
    pub(crate) fn ended_by_peer(&mut self, number: u32) -> Result<Option<Arc<WordPair>>, NotAttached> {
        let position = WordPage::position(number);
        let entry = self.entries.get_mut(position).filter(|entry| entry.number == number);
        let entry = entry.filter(|entry| entry.missing > 0).ok_or(NotAttached(number))?;
        entry.missing -= 1;
        if entry.missing == 0 && entry.pair.is_none() {
            self.free.push_back(position);
        }
        Ok(if entry.missing == 0 { entry.pair.clone() } else { None })
    }

    /// Returns whether the peer has ended the pair of this number.
    pub(crate) fn is_ended_by_peer(&self, number: u32) -> bool {
        let entry = self.entries.get(WordPage::position(number));
        entry.is_none_or(|entry| entry.number != number || entry.missing == 0)
    }

    /// Returns all pairs that this side has not given up, and forgets them.
    pub(crate) fn take_all(&mut self) -> Vec<Arc<WordPair>> {
        self.free.clear();
        std::mem::take(&mut self.entries).into_iter().filter_map(|entry| entry.pair).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::words::Arrivals;

    fn add(table: &mut PairTable) -> Result<u32, NoPairLeft> {
        table.add(|number| WordPair::new(number, 0, Arrivals::Count, None)).map(|pair| pair.number)
    }

    #[test]
    fn words_are_used_again_when_both_sides_have_ended_the_pair() {
        for peer_first in [false, true] {
            let mut table = PairTable::new(2);
            let (first, other) = (add(&mut table).unwrap(), add(&mut table).unwrap());
            assert_eq!((first, other), (0, 1));
            if !peer_first {
                assert!(table.remove(first, true).is_some());
                assert!(table.remove(first, true).is_none(), "a second time");
            }
            assert!(table.ended_by_peer(first).unwrap().is_none(), "a frame is missing");
            let ended = table.ended_by_peer(first).unwrap();
            assert_eq!(ended.is_some(), peer_first, "the owner learns of it, if there is one");
            assert_eq!(table.ended_by_peer(first).unwrap_err(), NotAttached(first));
            if peer_first {
                assert_eq!(add(&mut table).unwrap(), 2, "the owner has it still");
                assert!(table.remove(first, true).is_some());
            }
            let again = add(&mut table).unwrap();
            assert_ne!(again, first);
            assert_eq!(WordPage::position(again), WordPage::position(first));
            assert!(table.get(again).is_some() && table.get(first).is_none() && table.get(other).is_some());
            assert_eq!(table.ended_by_peer(first).unwrap_err(), NotAttached(first), "a late frame");
            assert!(table.remove(first, true).is_none() && table.get(again).is_some());
        }
    }

    #[test]
    fn a_table_never_grows_beyond_the_words() {
        let mut table = PairTable::new(1);
        let mut numbers: VecDeque<_> = (0..WordPage::PAIRS).map(|_| add(&mut table).unwrap()).collect();
        assert_eq!(add(&mut table), Err(NoPairLeft));
        let mut ever: std::collections::HashSet<_> = numbers.iter().copied().collect();
        for round in 0..WordPage::PAIRS * 5 {
            let oldest = numbers.pop_front().unwrap();
            assert!(table.remove(oldest, true).is_some());
            if round.is_multiple_of(3) {
                assert_eq!(add(&mut table), Err(NoPairLeft), "the peer may still write there");
            }
            table.ended_by_peer(oldest).unwrap();
            let number = add(&mut table).unwrap();
            assert!(ever.insert(number), "{number} comes again");
            numbers.push_back(number);
        }
        // A peer that refused a request never learnt of the pair.
        let last = numbers.pop_back().unwrap();
        assert!(table.remove(last, false).is_some());
        assert!(add(&mut table).is_ok());
    }

    #[test]
    fn numbers_count_on_from_the_start() {
        let mut table = PairTable::new(1);
        let first = add(&mut table).unwrap();
        table.entries[0].number = WordPage::LAST - (WordPage::PAIRS as u32 - 1);
        let last = table.entries[0].number;
        assert!(table.remove(last, false).is_some());
        assert_eq!(add(&mut table).unwrap(), first);
    }
}
