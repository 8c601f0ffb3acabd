//! The segments of a peer that this process has mapped for reading, within bounds ([`Segments`]), and those
//! that this process offers to a peer ([`Offers`]).
//!
//! A view of a segment keeps it mapped when the peer takes it back. The peer learns that the segment is
//! unmapped when the last view is gone, so that the peer's charges last as long as the mapping.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::message::{self, Answer, Reply};
use super::received::{Received, Socket, hang_up};
use crate::host_memory::Charge;
use crate::panics::lock;
use crate::soft::closer;
use crate::soft::shared::mapping::Mapping;

/// Most segments of one peer that this process maps.
const MOST: usize = 1024;
/// Most segments of all peers that this process maps. Linux allows 65530 mappings by default.
const MOST_OF_ALL: usize = 16384;
/// Most bytes of one peer that this process maps. Address space has 128 TiB.
const MOST_BYTES: u64 = 256 << 30;

/// Segments of all peers.
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// The segments of a peer.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    known: Mutex<Known>,
    usage: Arc<Usage>,
}

#[derive(Debug, Default)]
struct Known {
    /// The segments that the peer offers.
    offered: HashMap<u64, Arc<Segment>>,
    /// The number of views of each segment that has any.
    viewed: HashMap<u64, usize>,
    /// The answer that the peer gets when no view is left.
    leave: Option<LeaveAnswer>,
}

/// The number of mapped segments of a peer, and their bytes.
#[derive(Debug, Default)]
struct Usage {
    segments: AtomicUsize,
    bytes: AtomicU64,
}

/// A mapped segment.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) mapping: Mapping,
    /// Dropped after the mapping.
    _counted: Counted,
}

/// A segment that counts against the limits until it is unmapped.
#[derive(Debug)]
struct Counted {
    bytes: u64,
    usage: Arc<Usage>,
}

/// The answer to a peer that leaves: none of its segments is mapped any more.
#[derive(Debug)]
pub(crate) struct LeaveAnswer {
    pub(crate) socket: Weak<Socket>,
    pub(crate) sequence: u64,
}

impl LeaveAnswer {
    /// Sends the answer when the mappings that were dropped before are gone.
    fn send(self) {
        closer::free(move || {
            let Some(socket) = self.socket.upgrade() else { return };
            let reply = Reply { sequence: self.sequence, answer: Answer::Object };
            if message::send_reply(&*socket, &reply, &[]).is_err() {
                // The peer takes the end of the connection for the answer.
                hang_up(&*socket);
            }
        });
    }
}

impl Counted {
    fn new(bytes: u64, usage: &Arc<Usage>) -> Self {
        MAPPED.fetch_add(1, Relaxed);
        usage.segments.fetch_add(1, Relaxed);
        usage.bytes.fetch_add(bytes, Relaxed);
        Self { bytes, usage: Arc::clone(usage) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let (bytes, usage) = (self.bytes, Arc::clone(&self.usage));
        // The thread unmaps the segment first.
        closer::free(move || {
            MAPPED.fetch_sub(1, Relaxed);
            usage.segments.fetch_sub(1, Relaxed);
            usage.bytes.fetch_sub(bytes, Relaxed);
        });
    }
}

impl Segments {
    /// Maps a segment that the peer offers. Returns whether it is mapped.
    pub(crate) fn map(&self, id: u64, length: u64, fd: Received) -> bool {
        let mut known = lock(&self.known);
        if known.offered.contains_key(&id) {
            return true;
        }
        let Usage { segments, bytes } = &*self.usage;
        let (count, bytes) = (segments.load(Relaxed), bytes.load(Relaxed).saturating_add(length));
        if count >= MOST || bytes > MOST_BYTES || MAPPED.load(Relaxed) >= MOST_OF_ALL {
            crate::throttled!(
                warn,
                segments = count,
                bytes,
                "a peer offers more memory than this process maps: its data goes through the ring"
            );
            return false;
        }
        match Mapping::import(&fd, length) {
            Ok(mapping) => {
                fd.close_mapped();
                let _counted = Counted::new(mapping.length(), &self.usage);
                known.offered.insert(id, Arc::new(Segment { mapping, _counted }));
                true
            }
            Err(error) => {
                crate::throttled!(warn, %error, "memory that a peer offers can't be mapped: its data goes through the ring");
                false
            }
        }
    }

    /// Forgets segment `id`, which [`closer::free`] unmaps as soon as no thread copies from it. Returns false
    /// if views keep it mapped: [`end_view`](Self::end_view) then says when the last of them is gone.
    pub(crate) fn unmap(&self, id: u64) -> bool {
        let mut known = lock(&self.known);
        known.offered.remove(&id);
        !known.viewed.contains_key(&id)
    }

    /// Forgets all segments. Sends the peer `answer` when no view keeps one of them mapped.
    pub(crate) fn unmap_all(&self, answer: LeaveAnswer) {
        let mut known = lock(&self.known);
        known.offered.clear();
        if known.viewed.is_empty() {
            drop(known);
            answer.send();
        } else {
            known.leave = Some(answer);
        }
    }

    /// Returns segment `id`, if it is mapped.
    pub(crate) fn find(&self, id: u64) -> Option<Weak<Segment>> {
        lock(&self.known).offered.get(&id).map(Arc::downgrade)
    }

    /// Returns segment `id` for a view, if it is mapped. The caller ends the view by
    /// [`end_view`](Self::end_view).
    pub(crate) fn begin_view(&self, id: u64) -> Option<Arc<Segment>> {
        let mut known = lock(&self.known);
        let segment = Arc::clone(known.offered.get(&id)?);
        *known.viewed.entry(id).or_default() += 1;
        Some(segment)
    }

    /// Ends a view of segment `id`. Returns whether the caller then has to notify the peer, in
    /// [`closer::free`], that the segment is unmapped.
    pub(crate) fn end_view(&self, id: u64, segment: Arc<Segment>) -> bool {
        // It comes first, because the peer may be notified afterwards.
        drop(segment);
        let mut known = lock(&self.known);
        let Some(count) = known.viewed.get_mut(&id) else { return false };
        *count -= 1;
        if *count > 0 {
            return false;
        }
        known.viewed.remove(&id);
        let unmapped = !known.offered.contains_key(&id);
        let answer = if known.viewed.is_empty() { known.leave.take() } else { None };
        drop(known);
        if let Some(answer) = answer {
            answer.send();
        }
        unmapped
    }
}

/// Most segments that one peer is offered at a time.
const MOST_OFFERED: usize = 1024;
/// Time after which a peer that has not confirmed an offer gets it once more.
const REPEAT_AFTER: Duration = Duration::from_secs(1);
/// Time after which a peer that has not confirmed that it has unmapped a segment is notified once more. Each
/// further time doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest time between two reminders. A view can keep a segment mapped for long.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Most segments that a peer is reminded of at once, so that the messages do not fill the
/// socket.
const REMINDERS: usize = 64;

/// The segments that this process offers to a peer.
///
/// ```text
///  offered ──▶ mapped by the peer ──▶ withdrawn, because the memory is gone here ──▶ unmapped by the peer
/// ```
/// While the peer may have a segment mapped, the segment stays charged to the budget, even if the memory is
/// gone in this process.
///
/// Each message between the two devices can get lost: the socket may be full, and the queue pair that a
/// message names may be gone, or may not be connected yet. Therefore an offer, and a message that a segment
/// is withdrawn, are repeated until the peer confirms them.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    offered: Mutex<HashMap<u64, Arc<Offer>>>,
    withdrawn: Mutex<HashMap<u64, Withdrawn>>,
}

/// One segment that this process offers to a peer.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) id: u64,
    mapped: AtomicBool,
    offered: Mutex<Option<Instant>>,
    charge: Option<Charge>,
}

/// A segment whose memory is gone here, and which the peer may have mapped.
#[derive(Debug)]
struct Withdrawn {
    charge: Option<Charge>,
    /// When the peer is notified once more, and the time until the reminder after that.
    again: Instant,
    pause: Duration,
}

impl Offer {
    /// Returns whether the peer has mapped the segment.
    #[inline]
    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.load(Relaxed)
    }

    /// Returns whether the offer is to be sent now, because it was not sent before, or was not confirmed for
    /// a while.
    pub(crate) fn is_due(&self) -> bool {
        let mut offered = lock(&self.offered);
        let due = !self.is_mapped() && offered.is_none_or(|last| last.elapsed() > REPEAT_AFTER);
        if due {
            *offered = Some(Instant::now());
        }
        due
    }
}

impl Offers {
    /// Returns the offer of segment `id`, and whether it is new; `None` if the peer has as many offers as it
    /// may have.
    pub(crate) fn get(&self, id: u64, charge: impl FnOnce() -> Option<Charge>) -> Option<(Arc<Offer>, bool)> {
        let mut offered = lock(&self.offered);
        if let Some(offer) = offered.get(&id) {
            return Some((Arc::clone(offer), false));
        }
        if offered.len() >= MOST_OFFERED {
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

    /// Takes segment `id` back. Returns whether the peer must be notified.
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

    /// Notes that the peer does not have segment `id` mapped any more.
    pub(crate) fn unmapped(&self, id: u64) {
        drop(lock(&self.withdrawn).remove(&id));
    }

    /// Returns the withdrawn segments that the peer is to be notified of once more at `now`, a limited number
    /// of them.
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
    use crate::HostMemory;
    use crate::soft::peers::received::tests::socket_pair;

    /// Returns a function that returns descriptors of a page of shared memory.
    fn page() -> impl Fn() -> Received {
        let memory = HostMemory::shared(4096, 4096).unwrap();
        move || Received::new(memory.shared_fd().unwrap().try_clone_to_owned().unwrap(), None)
    }

    /// Waits until the segments that were dropped are unmapped.
    fn unmapped() {
        closer::wait_until_free();
    }

    /// Returns an answer to a peer whose connection is gone.
    fn unheard() -> LeaveAnswer {
        LeaveAnswer { socket: Weak::new(), sequence: 0 }
    }

    #[test]
    fn a_view_keeps_its_segment_mapped_and_counted() {
        let (segments, fd) = (Segments::default(), page());
        assert!(segments.begin_view(1).is_none(), "not mapped");
        assert!(segments.map(1, 4096, fd()) && segments.map(2, 4096, fd()));
        let (first, second) = (segments.begin_view(1).unwrap(), segments.begin_view(1).unwrap());
        assert!(segments.unmap(2), "no view of this one");
        assert!(!segments.unmap(1) && segments.find(1).is_none());
        unmapped();
        assert_eq!(segments.usage.bytes.load(Relaxed), 4096);
        assert!(!segments.end_view(1, first), "there is another view");
        assert!(segments.end_view(1, second));
        unmapped();
        assert_eq!(segments.usage.bytes.load(Relaxed), 0);
        // A view that ends while the peer offers the segment needs no message.
        assert!(segments.map(3, 4096, fd()));
        let view = segments.begin_view(3).unwrap();
        assert!(!segments.end_view(3, view) && segments.unmap(3));
    }

    /// A peer that leaves hears that its memory is unmapped when the last view is gone.
    #[test]
    fn a_peer_that_leaves_is_answered_after_the_last_view() {
        let (ours, theirs) = socket_pair();
        let ours = Arc::new(Socket::new(ours));
        let answer = |sequence| LeaveAnswer { socket: Arc::downgrade(&ours), sequence };
        let (segments, fd) = (Segments::default(), page());
        assert!(segments.map(1, 4096, fd()) && segments.map(2, 4096, fd()));
        let (first, second) = (segments.begin_view(1).unwrap(), segments.begin_view(2).unwrap());
        segments.unmap_all(answer(7));
        unmapped();
        assert!(message::receive_reply(&theirs).is_err(), "views are left");
        segments.end_view(1, first);
        unmapped();
        assert!(message::receive_reply(&theirs).is_err(), "a view is left");
        segments.end_view(2, second);
        unmapped();
        assert_eq!(message::receive_reply(&theirs).unwrap().0, Reply { sequence: 7, answer: Answer::Object });
        segments.unmap_all(answer(8));
        unmapped();
        assert_eq!(message::receive_reply(&theirs).unwrap().0.sequence, 8);
    }

    #[test]
    fn a_peer_has_a_limited_number_of_segments() {
        let (segments, other, fd) = (Segments::default(), Segments::default(), page());
        assert!((0..MOST as u64).all(|id| segments.map(id, 4096, fd())));
        assert!(!segments.map(MOST as u64, 4096, fd()), "one too many");
        assert!(segments.map(0, 4096, fd()), "mapped already");
        assert!(other.map(MOST as u64, 4096, fd()), "another peer");
        segments.unmap(7);
        assert!(segments.find(7).is_none());
        unmapped();
        // A refusal is not permanent.
        assert!(segments.map(MOST as u64, 4096, fd()));
        segments.unmap_all(unheard());
        assert!(segments.find(8).is_none());
        unmapped();
        assert!((0..MOST as u64).all(|id| segments.map(id, 4096, fd())));
    }

    #[test]
    fn a_peer_has_a_limited_number_of_bytes() {
        let (segments, fd) = (Segments::default(), page());
        assert!(segments.map(1, 4096, fd()));
        assert!(!segments.map(2, MOST_BYTES, fd()), "more than the peer may have");
        assert!(!segments.map(2, u64::MAX, fd()), "more than any memory has");
        segments.usage.bytes.store(MOST_BYTES - 8191, Relaxed);
        assert!(segments.map(2, 4096, fd()) && !segments.map(3, 4096, fd()));
        segments.unmap(1);
        unmapped();
        assert!(segments.map(3, 4096, fd()));
    }

    #[test]
    fn a_number_that_is_not_mapped_changes_no_count() {
        let (segments, fd) = (Segments::default(), page());
        assert!(segments.map(1, 4096, fd()));
        for _ in 0..3 {
            segments.unmap(2);
        }
        unmapped();
        assert_eq!(segments.usage.bytes.load(Relaxed), 4096);
        segments.unmap(1);
        segments.unmap(1);
        unmapped();
        assert_eq!(segments.usage.bytes.load(Relaxed), 0);
    }
}

#[cfg(test)]
mod offers_tests {
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

    /// A peer that says that it has unmapped a segment, although the segment was not withdrawn, keeps its
    /// charge.
    #[test]
    fn a_segment_that_is_offered_stays_charged() {
        let (offers, charge) = (Offers::default(), charge().unwrap());
        let (offer, _) = offers.get(1, || Some(Arc::clone(&charge))).unwrap();
        assert!(offer.is_due());
        offers.mapped(1);
        offers.unmapped(1);
        assert_eq!(offers.charges().len(), 1);
    }

    /// The message that a segment is withdrawn, or the answer to it, may be lost.
    #[test]
    fn a_peer_is_reminded_until_it_has_unmapped_the_segment() {
        let (offers, charge) = (Offers::default(), charge().unwrap());
        let (offer, _) = offers.get(1, || Some(Arc::clone(&charge))).unwrap();
        assert!(offer.is_due());
        drop(offer);
        // Before the peer is notified, because this thread may have to wait for its turn then.
        let mut now = Instant::now();
        assert!(offers.next_reminder().is_none() && offers.withdraw(1));
        assert!(offers.reminders(now).is_empty(), "the peer was just told");
        let mut pauses = Vec::new();
        while pauses.len() < 10 {
            // The device's thread checks when a reminder is due, and not before.
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
        assert!((0..MOST_OFFERED as u64).all(|id| offers.get(id, charge).is_some()));
        assert!(offers.get(MOST_OFFERED as u64, charge).is_none());
        assert!(offers.get(0, charge).is_some_and(|(_, new)| !new));
        assert!(!offers.withdraw(0));
        assert!(offers.get(MOST_OFFERED as u64, charge).is_some());
    }
}
