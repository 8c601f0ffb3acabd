//! The segments that this process offers to a peer of this user: shared memory that the peer may map for reading.
//!
//! ```text
//!  offered ──▶ mapped by the peer ──▶ withdrawn, because the memory is gone here ──▶ unmapped by the peer
//! ```
//! While the peer may have a segment mapped, the segment stays charged to the budget, even if the memory is gone in this process.

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

/// The segments that this process offers to a peer.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    offered: Mutex<HashMap<u64, Arc<Offer>>>,
    /// Segments whose memory is gone here, and which the peer may have mapped.
    withdrawn: Mutex<HashMap<u64, Option<Charge>>>,
}

/// One segment that this process offers to a peer.
#[derive(Debug)]
pub(crate) struct Offer {
    id: u64,
    mapped: AtomicBool,
    offered: Mutex<Option<Instant>>,
    charge: Option<Charge>,
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
            lock(&self.withdrawn).insert(id, offer.charge.clone());
        }
        sent
    }

    /// Notes that the peer has segment `id` not mapped any more.
    pub(crate) fn unmapped(&self, id: u64) {
        drop(lock(&self.withdrawn).remove(&id));
    }

    /// Returns the charges of all segments that the peer may have mapped.
    pub(crate) fn charges(&self) -> Vec<Charge> {
        let withdrawn: Vec<_> = lock(&self.withdrawn).values().flatten().cloned().collect();
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
