//! The segments that this process offers to a peer of this user: shared memory that the peer may map for reading.
//!
//! ```text
//!  offered ──▶ mapped by the peer ──▶ withdrawn, because the memory is gone here ──▶ unmapped by the peer
//! ```
//! While the peer may have a segment mapped, the segment stays charged to the budget, even if the memory is gone in this process.
//!
//! Each word between the two devices can get lost: the socket may be full, and the queue pair that a word names may be gone, or may not be
//! connected yet. Therefore an offer, and a word that a segment is withdrawn, are said again until the peer confirms them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::host_memory::Charge;
use crate::sync::lock;

/// Most segments that one peer is offered at a time.
const MOST: usize = 1024;
/// Time after which a peer that has not confirmed an offer gets it once more.
const AGAIN: Duration = Duration::from_secs(1);
/// Time after which a peer that has not confirmed that it has unmapped a segment is told once more. Each further time doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest time between two reminders. A view can keep a segment mapped for long.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Most segments that a peer is reminded of at once, so that the words do not fill the socket.
const REMINDERS: usize = 64;

/// The segments that this process offers to a peer.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    offered: Mutex<HashMap<u64, Arc<Offer>>>,
    withdrawn: Mutex<HashMap<u64, Withdrawn>>,
}

/// One segment that this process offers to a peer.
#[derive(Debug)]
pub(crate) struct Offer {
    id: u64,
    mapped: AtomicBool,
    offered: Mutex<Option<Instant>>,
    charge: Option<Charge>,
}

/// A segment whose memory is gone here, and which the peer may have mapped.
#[derive(Debug)]
struct Withdrawn {
    charge: Option<Charge>,
    /// When the peer is told once more, and the time until the reminder after that.
    again: Instant,
    pause: Duration,
}

impl Offer {
    /// Returns the number of the segment.
    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Returns whether the peer has mapped the segment.
    #[inline]
    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.load(Relaxed)
    }

    /// Returns whether the offer is to be sent now, because it was not sent before, or was not confirmed for a while.
    pub(crate) fn is_due(&self) -> bool {
        let mut offered = lock(&self.offered);
        let due = !self.is_mapped() && offered.is_none_or(|last| last.elapsed() > AGAIN);
        if due {
            *offered = Some(Instant::now());
        }
        due
    }
}

impl Offers {
    /// Returns the offer of segment `id`, and whether it is new; `None` if the peer has as many offers as it may have.
    pub(crate) fn get(&self, id: u64, charge: impl FnOnce() -> Option<Charge>) -> Option<(Arc<Offer>, bool)> {
        let mut offered = lock(&self.offered);
        if let Some(offer) = offered.get(&id) {
            return Some((Arc::clone(offer), false));
        }
        if offered.len() >= MOST {
            return None;
        }
        let offer = Arc::new(Offer {
            id,
            mapped: AtomicBool::new(false),
            offered: Mutex::default(),
            charge: charge(),
        });
        offered.insert(id, Arc::clone(&offer));
        Some((offer, true))
    }

    /// Notes that the peer has mapped segment `id`.
    pub(crate) fn mapped(&self, id: u64) {
        if let Some(offer) = lock(&self.offered).get(&id) {
            offer.mapped.store(true, Relaxed);
        }
    }

    /// Takes segment `id` back. Returns whether the peer must be told.
    pub(crate) fn withdraw(&self, id: u64) -> bool {
        let Some(offer) = lock(&self.offered).remove(&id) else { return false };
        offer.mapped.store(false, Relaxed);
        let sent = lock(&offer.offered).is_some();
        if sent {
            let (charge, again) = (offer.charge.clone(), Instant::now() + FIRST_PAUSE);
            lock(&self.withdrawn).insert(id, Withdrawn { charge, again, pause: 2 * FIRST_PAUSE });
        }
        sent
    }

    /// Notes that the peer has segment `id` not mapped any more.
    pub(crate) fn unmapped(&self, id: u64) {
        drop(lock(&self.withdrawn).remove(&id));
    }

    /// Returns the withdrawn segments that the peer is to be told of once more at `now`, a limited number of them.
    pub(crate) fn reminders(&self, now: Instant) -> Vec<u64> {
        let mut withdrawn = lock(&self.withdrawn);
        let due = withdrawn.iter_mut().filter(|(_, segment)| segment.again <= now).take(REMINDERS);
        due.map(|(id, segment)| {
            segment.again = now + segment.pause;
            segment.pause = (2 * segment.pause).min(LONGEST_PAUSE);
            *id
        })
        .collect()
    }

    /// Returns when the next reminder is due; `None` if the peer has no segment mapped that is withdrawn.
    pub(crate) fn next_reminder(&self) -> Option<Instant> {
        lock(&self.withdrawn).values().map(|segment| segment.again).min()
    }

    /// Notes that the peer is dead, so that it has no withdrawn segment mapped any more.
    pub(crate) fn peer_died(&self) {
        let withdrawn = std::mem::take(&mut *lock(&self.withdrawn));
        drop(withdrawn);
    }

    /// Returns the charges of all segments that the peer may have mapped.
    pub(crate) fn charges(&self) -> Vec<Charge> {
        let withdrawn: Vec<_> =
            lock(&self.withdrawn).values().filter_map(|segment| segment.charge.clone()).collect();
        let offered = lock(&self.offered);
        let sent = offered.values().filter(|offer| lock(&offer.offered).is_some());
        sent.filter_map(|offer| offer.charge.clone()).chain(withdrawn).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn charge() -> Option<Charge> {
        Some(Arc::new(()))
    }

    #[test]
    fn a_charge_stays_until_the_peer_has_unmapped_the_segment() {
        let (offers, charge) = (Offers::default(), charge().unwrap());
        let (offer, new) = offers.get(1, || Some(Arc::clone(&charge))).unwrap();
        assert!(new && offer.is_due() && !offer.is_mapped());
        offers.mapped(1);
        assert!(offer.is_mapped() && !offer.is_due());
        assert!(offers.withdraw(1) && !offer.is_mapped(), "the next message goes through the ring");
        drop(offer);
        assert_eq!((Arc::strong_count(&charge), offers.charges().len()), (2, 1));
        // Confirmations of other segments, and of offers that are gone, change nothing.
        offers.unmapped(2);
        offers.mapped(1);
        assert_eq!(Arc::strong_count(&charge), 2);
        offers.unmapped(1);
        assert_eq!((Arc::strong_count(&charge), offers.charges().len()), (1, 0));
    }

    /// A peer that says that it has unmapped a segment, before it was told to, has still a charge.
    #[test]
    fn a_segment_that_is_offered_stays_charged() {
        let (offers, charge) = (Offers::default(), charge().unwrap());
        let (offer, _) = offers.get(1, || Some(Arc::clone(&charge))).unwrap();
        assert!(offer.is_due());
        offers.mapped(1);
        offers.unmapped(1);
        assert_eq!(offers.charges().len(), 1);
    }

    /// The word that a segment is withdrawn, or the answer to it, may be lost.
    #[test]
    fn a_peer_is_reminded_until_it_has_unmapped_the_segment() {
        let (offers, charge) = (Offers::default(), charge().unwrap());
        let (offer, _) = offers.get(1, || Some(Arc::clone(&charge))).unwrap();
        assert!(offer.is_due());
        drop(offer);
        // Before the peer is told, because this thread may have to wait for its turn then.
        let mut now = Instant::now();
        assert!(offers.next_reminder().is_none() && offers.withdraw(1));
        assert!(offers.reminders(now).is_empty(), "the peer was just told");
        let mut pauses = Vec::new();
        while pauses.len() < 10 {
            // The device's thread looks when a reminder is due, and not before.
            let due = offers.next_reminder().unwrap();
            assert!(offers.reminders(due - Duration::from_millis(1)).is_empty());
            assert_eq!(offers.reminders(due), [1]);
            pauses.push(due - now);
            now = due;
        }
        assert!(pauses[1..].is_sorted() && pauses[9] == LONGEST_PAUSE, "{pauses:?}");
        offers.unmapped(1);
        assert!(offers.next_reminder().is_none() && offers.reminders(now + LONGEST_PAUSE).is_empty());
        assert_eq!(Arc::strong_count(&charge), 1);
    }

    #[test]
    fn a_peer_is_reminded_of_all_segments_in_turn() {
        let offers = Offers::default();
        let count = 2 * REMINDERS as u64 + 1;
        for id in 0..count {
            assert!(offers.get(id, charge).is_some_and(|(offer, _)| offer.is_due()));
            assert!(offers.withdraw(id));
        }
        let later = Instant::now() + FIRST_PAUSE;
        let turns: Vec<_> = (0..4).map(|_| offers.reminders(later)).collect();
        assert_eq!(turns.iter().map(Vec::len).collect::<Vec<_>>(), [REMINDERS, REMINDERS, 1, 0]);
        let mut all = turns.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..count));
        offers.peer_died();
        assert!(offers.next_reminder().is_none() && offers.charges().is_empty());
    }

    #[test]
    fn an_offer_that_was_never_sent_needs_no_answer() {
        let (offers, charge) = (Offers::default(), charge().unwrap());
        assert!(offers.get(1, || Some(Arc::clone(&charge))).is_some());
        assert!(!offers.withdraw(1));
        assert_eq!(Arc::strong_count(&charge), 1);
    }

    #[test]
    fn a_peer_is_offered_a_limited_number_of_segments() {
        let offers = Offers::default();
        assert!((0..MOST as u64).all(|id| offers.get(id, charge).is_some()));
        assert!(offers.get(MOST as u64, charge).is_none());
        assert!(offers.get(0, charge).is_some_and(|(_, new)| !new));
        assert!(!offers.withdraw(0));
        assert!(offers.get(MOST as u64, charge).is_some());
    }
}
