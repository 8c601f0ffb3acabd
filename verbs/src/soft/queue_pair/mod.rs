//! Queue pairs: what users call, and the visits by which polls carry out requests. The states and the
//! connection are in `core`, the send queue in `send`, and the receive queue in `target`.

pub(super) mod core;
mod message;
mod outstanding;
mod pulls;
mod send;
mod source;
mod target;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst, fence};

use self::core::Core;
use self::send::SendQueue;
use self::target::{Output, Target};
use super::completion_queue::{CompletionSource, Poll, Queue, Remaining, Role, Sink};
use super::domain::{Domain, Window};
use super::peers::clients::{ClientMemory, SendAnswer, ServedQueuePair};
use super::peers::message::{Address, Object};
use super::peers::received::Socket;
use super::shared::attention::{Attention, Watch};
use super::shared::end::EndState;
use super::shared::platform::{Native, Shipping};
use crate::{
    Access, LocalQueuePair, LocalSegment, MemoryRegion, MemoryWindow, PathSettings, PostError, Probe,
    QueuePair, QueuePairAddress, QueuePairCapacity, QueuePairNumber, QueuePairState, ReceiveRequest,
    RemoteSegment, RemoteView, SendRequest, VerbsError,
};

/// All news in the ring make an event of the completion queue of receives.
const ALL_NEWS: Attention = Attention::NEWS.with(Attention::WRITES);

/// A queue pair.
#[derive(Debug)]
pub(super) struct SoftPair {
    pub(super) core: Arc<Core>,
    sends: SendQueue,
    target: Target,
    /// Whether threads check for work of the peer again and again, so that WRITEs need no events.
    is_watched: AtomicBool,
}

/// Creates a queue pair in Reset.
pub(super) fn create(
    domain: &Arc<Domain>,
    send_queue: Arc<Queue>,
    receive_queue: Arc<Queue>,
    capacity: &QueuePairCapacity,
) -> Result<Arc<dyn QueuePair>, VerbsError> {
    let limits = &domain.device.attributes;
    capacity.check(limits)?;
    VerbsError::check_limits([("inline bytes", capacity.inline, limits.max_inline)])?;
    let core = Core::create(domain, send_queue, receive_queue, capacity)?;
    let (sends, target) = (SendQueue::new(&core), Target::new(&core));
    let pair = Arc::new(SoftPair { core, sends, target, is_watched: AtomicBool::new(false) });
    pair.core.enter(&pair);
    let local = Arc::clone(&pair) as Arc<dyn LocalQueuePair>;
    Ok(Arc::new(Handle { pair, local }))
}

#[cfg(any(test, fuzzing))]
impl SoftPair {
    /// Carries out the peer's records, as a thread that polls. Waits twice at `barrier`, with the locks of
    /// both queues held.
    #[cfg(test)]
    pub(super) fn visit_with_pause(&self, barrier: &Arc<std::sync::Barrier>) {
        let sends = self.sends.lock();
        self.target.pause_next_visit(Arc::clone(barrier));
        self.target.visit(&self.sends, &mut Output::Keep);
        drop(sends);
    }

    /// Returns whether threads check for work of the peer again and again.
    #[cfg(test)]
    pub(super) fn is_watched(&self) -> bool {
        self.is_watched.load(Relaxed)
    }
}

impl SoftPair {
    /// Carries out records of the peer, and leaves the completions to the next poll. Returns whether there
    /// were any. Also continues what found no room in the ring, if the peer has made room. In a forked child
    /// this does nothing.
    #[inline]
    fn work(&self) -> bool {
        if self.sends.has_new_room() && !self.is_forked() && self.use_room() {
            return true;
        }
        if !self.target.has_record() {
            if self.core.owes() && !self.is_forked() {
                self.core.settle();
            }
            return false;
        }
        if self.is_forked() {
            return false;
        }
        self.visit_without_poll();
        true
    }

    /// Continues requests of this side, and READs of the peer, that found no room in the ring. Returns
    /// whether that was a visit, which carries out records of the peer, too.
    #[cold]
    fn use_room(&self) -> bool {
        if self.sends.has_waiting() {
            self.sends.run_waiting();
        }
        let serves = self.target.serves();
        if serves {
            self.visit_without_poll();
        }
        serves
    }

    /// Visits the target, and leaves the completions to the next poll.
    #[inline]
    fn visit_without_poll(&self) {
        // This thread watches the records, so the peer need not ask the device.
        self.core.want_no_more(Attention::DEVICE);
        self.target.visit(&self.sends, &mut Output::Keep);
        if self.target.is_busy() {
            // Completions, or more work.
            self.core.notify();
        }
    }

    /// Carries out records of the peer, in the device's thread. If no thread polls, the peer asks the device
    /// at once from now on, until a thread polls.
    fn carry_out_unpolled(&self) -> bool {
        // This visit waits for a thread that is carrying out records now. If the thread has taken all of
        // them, it polls: if the peer asked the device from now on, the device's thread would come between
        // the thread and the next record, and find this record.
        let mut output = Output::Unpolled { found_work: self.sends.has_waiting() };
        let more = self.target.visit(&self.sends, &mut output) == Remaining::Work;
        let Output::Unpolled { found_work: true } = output else { return false };
        self.core.want(Attention::DEVICE);
        Attention::fence::<Native, Shipping>();
        // A record that came before the peer could see that this side wants to be asked for.
        more || self.target.visit(&self.sends, &mut output) == Remaining::Work
    }

    fn is_forked(&self) -> bool {
        self.core.domain.device.is_forked()
    }

    /// Returns whether a visit may have something to do. Takes no lock of the queue pair.
    #[inline]
    fn has_news(&self, role: Role) -> bool {
        let news = (role.receives && self.target.has_news())
            || (role.sends && self.sends.has_news())
            || (self.core.peer_is_gone() && !self.core.has_failed());
        if !news && self.core.owes() {
            self.core.settle();
        }
        news
    }

    /// Carries out the peer's records and the own requests that can run now. Returns [`Remaining::Work`],
    /// too, if `sink` has no room for all completions.
    #[inline]
    fn visit(&self, role: Role, receives_first: bool, sink: &mut Sink<'_>) -> Remaining {
        let mut remaining = Remaining::Nothing;
        if role.receives && receives_first {
            remaining = self.target.visit(&self.sends, &mut Output::Poll(sink));
        }
        if role.sends && self.sends.has_news() {
            remaining = remaining.max(self.sends.poll(sink));
        }
        if role.receives && !receives_first {
            remaining = remaining.max(self.target.visit(&self.sends, &mut Output::Poll(sink)));
            // The records may have completed READs.
            if role.sends && self.sends.has_news() {
                remaining = remaining.max(self.sends.poll(sink));
            }
        }
        if !role.receives && self.core.peer_is_gone() {
            self.core.fail_requests();
        }
        remaining
    }
}

impl CompletionSource for SoftPair {
    fn poll(&self, role: Role, poll: Poll, sink: &mut Sink<'_>) -> Option<Remaining> {
        if !self.has_news(role) {
            return Some(Remaining::Nothing);
        }
        if sink.is_full() {
            return None;
        }
        if !poll.armed {
            self.is_polled(role);
        }
        Some(self.visit(role, poll.receives_first, sink))
    }

    fn ask_for_events(&self, role: Role) {
        if role.receives {
            let is_watched = self.is_watched.load(Relaxed);
            self.core.ask(if is_watched { Attention::NEWS } else { ALL_NEWS });
        }
        // SYNC: a thread that stores news or posts requests holds one of the two locks while it checks
        // whether the queue is armed, and while it notes its debt and counts its requests. So either this
        // thread sees them, or that thread sees that the queue is armed.
        self.wait_for_own_threads();
        if self.core.owes() {
            self.core.settle();
        }
        if role.sends {
            if self.sends.wants_progress() {
                self.core.ask(Attention::PROGRESS);
            } else if !role.receives {
                // A request that is posted later belongs to this sleep: see `SendQueue::after_post`.
                self.core.ask(Attention::NONE);
            }
        }
    }

    #[inline]
    fn is_polled(&self, role: Role) {
        const OF_RECEIVES: Attention = ALL_NEWS.with(Attention::DEVICE);
        const OF_BOTH: Attention = OF_RECEIVES.with(Attention::PROGRESS);
        self.core.want_no_more(match role {
            Role { receives: true, sends: true } => OF_BOTH,
            Role { receives: true, sends: false } => OF_RECEIVES,
            Role { receives: false, sends: true } => Attention::PROGRESS,
            Role { receives: false, sends: false } => Attention::NONE,
        });
    }

    fn fail(&self) {
        self.core.fail();
    }
}

impl ServedQueuePair for SoftPair {
    fn number(&self) -> u32 {
        self.core.number
    }

    fn token(&self) -> u64 {
        self.core.token
    }

    fn peer_address(&self) -> Option<(Address, EndState)> {
        let connection = self.core.connection()?;
        Some((connection.address, connection.end.state()))
    }

    fn grant(
        &self,
        object: Object,
        client: &ClientMemory,
        send: &mut SendAnswer<'_>,
    ) -> Option<io::Result<()>> {
        self.core.grant(object, client, send)
    }

    fn add_event_socket(&self, id: u64, socket: &Arc<Socket>) -> Option<io::Result<()>> {
        self.core.add_event_socket(id, socket)
    }

    fn confirm(&self, news: Object) {
        if let Some(connection) = self.core.connection() {
            // If the message is lost, the peer offers or withdraws the segment again.
            let _ = connection.peer.send(&connection.address, news, None);
        }
    }

    fn take_news(&self, news: Object) {
        if let Some(connection) = self.core.connection() {
            connection.peer.take_news(news);
        }
    }

    fn notify(&self) {
        self.core.notify();
    }

    fn carry_out(&self) -> bool {
        self.is_watched.store(false, Relaxed);
        // SYNC: pairs with the fence after `arm`: either this thread sees that the queue is armed, or the
        // thread that arms it sees this store.
        fence(SeqCst);
        // A thread that sleeps in the completion queue learns of all news itself.
        let more = if self.core.receive_queue.is_armed() {
            self.core.ask(ALL_NEWS);
            Attention::fence::<Native, Shipping>();
            self.target.visit(&self.sends, &mut Output::Keep) == Remaining::Work
        } else {
            self.carry_out_unpolled()
        };
        if self.sends.has_waiting() {
            self.sends.run_waiting();
        }
        self.core.settle();
        self.core.notify();
        more
    }

    fn watch(&self) -> Watch {
        if self.sends.has_waiting() {
            self.sends.run_waiting();
        }
        let serves = self.target.serves();
        if serves && self.core.connection().is_some_and(|connection| self.core.all_is_taken(connection)) {
            // A thread has taken a READ of the peer from the ring, and has not polled since.
            self.carry_out();
        }
        self.core.watch_records(self.sends.has_unseen_progress(), || serves || self.sends.has_waiting())
    }

    fn fail(&self) {
        self.core.notify();
    }

    fn wait_for_own_threads(&self) {
        self.target.wait_for_visit();
        drop(self.sends.lock());
    }
}

impl crate::sealed::Sealed for SoftPair {}

impl LocalQueuePair for SoftPair {
    fn probe(&self) -> Probe {
        let peers = self.core.connection().map(|connection| connection.end.nonce());
        Probe { ours: Some(self.core.nonce), peers }
    }

    fn read_at_once(&self, into: &[LocalSegment], remote: RemoteSegment) -> bool {
        self.sends.read_at_once(into, remote)
    }

    fn reads_by_copy(&self) -> bool {
        self.core.connection().is_some_and(|connection| connection.shares_memory())
    }

    fn view(&self, remote: RemoteSegment, length: u64) -> Result<RemoteView, VerbsError> {
        Ok(self.core.view(remote, length)?)
    }

    #[inline]
    fn progress(&self) -> bool {
        let worked = self.work();
        if worked {
            // SYNC: the caller checks for threads that wait for the stored words.
            fence(SeqCst);
        }
        worked
    }

    #[inline]
    fn need_no_events(&self) -> bool {
        if self.is_forked() {
            return false;
        }
        if !self.is_watched.load(Relaxed) {
            self.is_watched.store(true, Relaxed);
        }
        let unneeded = Attention::WRITES.with(Attention::DEVICE);
        self.core.want_no_more(unneeded)
    }

    fn need_events(&self) {
        if !self.is_forked() && self.is_watched.swap(false, Relaxed) {
            // A queue that is armed later asks itself.
            fence(SeqCst);
            if self.core.receive_queue.is_armed() {
                self.core.ask(ALL_NEWS);
                Attention::fence::<Native, Shipping>();
            }
        }
    }
}

/// The user's reference to a queue pair. Dropping it destroys the queue pair.
#[derive(Debug)]
struct Handle {
    pair: Arc<SoftPair>,
    /// The same, for [`QueuePair::local`].
    local: Arc<dyn LocalQueuePair>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.pair.core.domain.device.is_forked() {
            return;
        }
        // After this wait no thread uses memory for this queue pair, so `Domain::remove_region` need not find
        // it.
        self.pair.core.end();
        self.pair.wait_for_own_threads();
        self.pair.core.destroy();
        self.pair.sends.forget();
    }
}

impl crate::sealed::Sealed for Handle {}

impl QueuePair for Handle {
    fn number(&self) -> QueuePairNumber {
        QueuePairNumber(self.pair.core.number)
    }

    fn state(&self) -> QueuePairState {
        self.pair.core.state()
    }

    fn capacity(&self) -> &QueuePairCapacity {
        &self.pair.core.capacity
    }

    fn local_address(&self) -> QueuePairAddress {
        self.pair.core.address().into()
    }

    fn to_init(&self, access: Access) -> Result<(), VerbsError> {
        self.pair.core.to_init(access)
    }

    fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError> {
        self.pair.core.to_rtr(peer, settings)?;
        self.pair.target.connect();
        // The peer may have sent records before this side was connected.
        self.pair.core.notify();
        Ok(())
    }

    fn to_rts(&self, settings: &PathSettings) -> Result<(), VerbsError> {
        self.pair.core.to_rts(settings)
    }

    fn to_error(&self) {
        self.pair.core.fail();
        self.pair.target.check_again();
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        self.pair.sends.post(requests)
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        self.pair.target.post(requests)
    }

    fn places_in_order(&self) -> bool {
        true
    }

    fn has_windows(&self) -> bool {
        true
    }

    fn open_window(
        &self,
        region: &Arc<dyn MemoryRegion>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Option<Arc<dyn MemoryWindow>>, VerbsError> {
        let core = &self.pair.core;
        Ok(Some(Arc::new(Window::open(&core.domain, core.number, region, &range, access)?)))
    }

    fn local(&self) -> Option<&Arc<dyn LocalQueuePair>> {
        Some(&self.local)
    }
}
