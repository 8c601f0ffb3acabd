//! A link: two processes whose devices know one another. Queue pairs, words, and who has which slot.
//!
//! ```text
//!   Link ─┬─ Port ×N     a queue pair each: transfers in flight, frames beside them
//!         ├─ Words       what the peer writes here without a word: releases, and that it sleeps
//!         └─ End ×M      slots and regions by their pair of words: what arrives for whom
//! ```
//!
//! How an arrival is told depends on what both devices can do ([`Notification`]), but where it is seen does not: it is
//! always a word in memory that has reached a value. Where the device does not place in order, this end writes that word
//! itself, when the completion says so.

mod end;
mod lane;
pub(super) mod port;
mod prepare;
pub(super) mod token;
mod wait;
mod words;

use std::fmt;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;
use std::time::Instant;

use tokio::sync::watch;

pub(super) use end::{Arrivals, End, Owner, Tails};
pub(super) use port::Port;
pub(super) use prepare::{PeerEnd, Prepared};
pub(super) use wait::Wait;
use words::{PeerWords, Words};

use super::exchange::Exchange;
use super::landing::Landing;
use super::{ChannelError, lock};
use crate::wire::tensor_frame::Frame;
use tonic_rdma::internal::{Observation, Pace, Queue, Reactor, may_spin};
use tonic_rdma_verbs::internal::{Grant, KeptRegistrations};
use tonic_rdma_verbs::memory::{Lease, SharedRegion};
use tonic_rdma_verbs::{Access, ProtectionDomain, RemoteSegment};

/// How an end learns that something was written to its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification {
    /// It looks at a word that is written last. Where both devices place in order.
    Word,
    /// By a completion with immediate data. Where both devices have it.
    Immediate,
    /// By a message that follows the write.
    Message,
}

/// See the module's documentation.
pub(super) struct Link {
    id: LinkId,
    peer: Arc<str>,
    provider: &'static str,
    device: Arc<str>,
    notification: Notification,
    ports: Vec<Seat>,
    domain: Arc<dyn ProtectionDomain>,
    words: Words,
    peer_words: PeerWords,
    ends: Mutex<Vec<Option<Arc<End>>>>,
    fault: OnceLock<ChannelError>,
    failed: AtomicBool,
    /// Tells whoever keeps the link that it has ended.
    ended: watch::Sender<bool>,
    landing: Arc<Landing>,
    /// What the peer may still use of what was given up here.
    kept: Mutex<Vec<Grant>>,
    /// On the software device.
    anchors: Option<Mutex<KeptRegistrations>>,
    exchange: Exchange,
}

/// Names a link to those who have a right to it.
pub(super) type LinkId = [u8; 16];

/// A port's place in its queue.
#[derive(Debug)]
struct Seat {
    port: Arc<Port>,
    queue: Arc<Queue>,
    key: u32,
    /// Of the futures that look at a word themselves before they let their thread sleep: one at a time does.
    pace: Option<Mutex<Pace>>,
    /// Held so that the queue is polled.
    _reactor: Arc<Reactor>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.queue.remove(self.key, &*self.port);
    }
}

impl Link {
    /// Pairs of words that each end has: slots and regions that a link serves in its life.
    pub(super) const PAIRS: usize = Words::PAIRS;

    pub(super) fn id(&self) -> &LinkId {
        &self.id
    }

    /// The peer's device, where it listens or called from.
    pub(super) fn peer(&self) -> &Arc<str> {
        &self.peer
    }

    pub(super) fn provider(&self) -> &'static str {
        self.provider
    }

    pub(super) fn device(&self) -> &str {
        &self.device
    }

    pub(super) fn notification(&self) -> Notification {
        self.notification
    }

    /// Gives the peer these rights to `range` of `memory`.
    pub(super) fn grant(
        &self,
        memory: &SharedRegion,
        range: Range<usize>,
        access: Access,
    ) -> Result<Grant, ChannelError> {
        if let Some(anchors) = &self.anchors {
            lock(anchors).region(memory);
        }
        Grant::of_part(&*self.domain, memory, range, access).map_err(ChannelError::memory)
    }

    /// Lets the peer read what `lease` has.
    pub(super) fn grant_lease(&self, lease: &Lease) -> Result<Grant, ChannelError> {
        if let Some(anchors) = &self.anchors {
            lock(anchors).lease(lease);
        }
        Grant::of_lease(&*self.domain, lease).map_err(ChannelError::memory)
    }

    /// The port of queue pair `index`, which is taken modulo their number.
    pub(super) fn port(&self, index: u32) -> &Arc<Port> {
        &self.ports[index as usize % self.ports.len()].port
    }

    pub(super) fn ports(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.ports.iter().map(|seat| &seat.port)
    }

    /// Takes what has come on the queue of a port.
    pub(super) fn poll(&self, port: u32) {
        self.ports[port as usize % self.ports.len()].queue.poll();
    }

    /// Takes what has come on any.
    pub(super) fn poll_all(&self) {
        for seat in &self.ports {
            seat.queue.poll();
        }
    }

    /// Looks for what `has_come` says, for as long as that pays, and takes what comes on the port's queue meanwhile. Not
    /// at all where the runtime's only thread has others to serve.
    pub(super) fn spin(&self, port: u32, has_come: impl Fn() -> bool) -> bool {
        let seat = &self.ports[port as usize % self.ports.len()];
        let Some(mut pace) = seat.pace.as_ref().and_then(|pace| pace.try_lock().ok()) else { return false };
        if !may_spin() {
            return false;
        }
        let look = || {
            // A task that this poll woke may wait for this thread: it goes first.
            if has_come() || seat.queue.poll().woken > 0 { Observation::Wanted } else { Observation::Nothing }
        };
        pace.spin(|| (), look) && has_come()
    }

    /// What was waited for has come to one that slept.
    pub(super) fn slept_for(&self, port: u32) {
        if let Some(pace) = &self.ports[port as usize % self.ports.len()].pace
            && let Ok(mut pace) = pace.try_lock()
        {
            pace.arrived(Instant::now());
        }
    }

    /// The queue of a port, to be told when a word is there.
    pub(super) fn queue(&self, port: u32) -> &Arc<Queue> {
        &self.ports[port as usize % self.ports.len()].queue
    }

    /// Tensors by name and step.
    pub(super) fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    /// Why it has ended, if it has.
    pub(super) fn fault(&self) -> Option<&ChannelError> {
        self.failed.load(Ordering::Acquire).then(|| self.fault.get()).flatten()
    }

    /// An error if it has ended.
    pub(super) fn check(&self) -> Result<(), ChannelError> {
        self.fault().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// Looks whether a device has noticed the end of a queue pair, which a thread that only looks at memory would not.
    pub(super) fn look(&self) -> Result<(), ChannelError> {
        self.check()?;
        let ended = |port: &Arc<Port>| {
            use tonic_rdma_verbs::QueuePairState::Error;
            port.with_queue_pair(|queue_pair| queue_pair.state() == Error).unwrap_or(true)
        };
        if self.ports().any(ended) {
            let reason = "its device does not answer any more".into();
            return Err(self.fail(ChannelError::PeerLost { peer: Arc::clone(&self.peer), reason }));
        }
        Ok(())
    }

    /// Waits until it has ended, without holding it.
    pub(super) fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut ended = self.ended.subscribe();
        async move {
            let _ = ended.wait_for(|ended| *ended).await;
        }
    }

    /// Regions to land in, and to copy to.
    pub(super) fn landing(&self) -> &Arc<Landing> {
        &self.landing
    }

    /// Keeps rights of the peer's until the link ends.
    pub(super) fn keep(&self, grants: impl IntoIterator<Item = Grant>) {
        lock(&self.kept).extend(grants);
    }

    /// Ends it because of `error`, or finds that it has ended; yields the reason why it did. Everything in flight is over
    /// when this returns, and memory is where it belongs.
    pub(super) fn fail(&self, error: ChannelError) -> ChannelError {
        let fault = self.end(error);
        // Those that wait for a word of the peer's learn that it never comes.
        for seat in &self.ports {
            seat.queue.wake_watched();
        }
        fault
    }

    fn end(&self, error: ChannelError) -> ChannelError {
        let mut first = false;
        let fault = self.fault.get_or_init(|| {
            first = true;
            error
        });
        if first {
            self.failed.store(true, Ordering::Release);
            match fault {
                ChannelError::Violation { .. } => {
                    tonic_rdma_verbs::internal::throttled!(warn, peer = &*self.peer, %fault, "a tensor link has ended");
                }
                fault => tracing::debug!(peer = &*self.peer, %fault, "a tensor link has ended"),
            }
            for seat in &self.ports {
                seat.port.end(fault);
            }
            let ends = std::mem::take(&mut *lock(&self.ends));
            for end in ends.into_iter().flatten() {
                end.link_ended(fault);
            }
            self.exchange.link_ended(fault);
            lock(&self.kept).clear();
            self.ended.send_replace(true);
        }
        fault.clone()
    }

    /// The peer broke the protocol.
    pub(super) fn violation(&self, reason: impl fmt::Display) -> ChannelError {
        ChannelError::Violation { peer: Arc::clone(&self.peer), reason: reason.to_string().into() }
    }

    /// Gives a slot or region a pair of words. A pair serves once in the link's life, so that what comes late for its last
    /// owner does no harm to the next.
    pub(super) fn add_end(&self, make: impl FnOnce(u32) -> End) -> Result<Arc<End>, ChannelError> {
        let mut ends = lock(&self.ends);
        self.check()?;
        if ends.len() >= Words::PAIRS {
            let most = Words::PAIRS;
            return Err(ChannelError::local(format!("a link serves {most} slots and regions in its life")));
        }
        let end = Arc::new(make(ends.len() as u32));
        ends.push(Some(Arc::clone(&end)));
        Ok(end)
    }

    /// Nothing is to arrive at `end` any more.
    pub(super) fn remove_end(&self, end: &End) {
        let mut ends = lock(&self.ends);
        let removed = ends.get_mut(end.pair() as usize).and_then(Option::take);
        drop(ends);
        drop(removed);
    }

    fn end_of(&self, pair: u32) -> Option<Arc<End>> {
        lock(&self.ends).get(pair as usize).cloned().flatten()
    }

    /// The memory and offset of the count of a pair.
    pub(super) fn count(&self, pair: u32) -> (&SharedRegion, usize) {
        self.words.count(pair)
    }

    /// The count of a pair.
    pub(super) fn load_count(&self, pair: u32) -> u64 {
        let (memory, offset) = self.words.count(pair);
        memory.load_u64(offset).unwrap_or(0)
    }

    /// Where the peer keeps the count of its pair, for a notice.
    pub(super) fn peer_count(&self, pair: u32) -> Option<RemoteSegment> {
        self.peer_words.count(pair)
    }

    /// Tells the peer that `epoch` has been reached at `end`: a release, or a change to a region.
    pub(super) fn tell(
        &self,
        end: &End,
        epoch: u64,
        port: u32,
        frame: &Frame<'_>,
    ) -> Result<(), ChannelError> {
        if self.notification != Notification::Word {
            return self.port(port).send_frame(frame);
        }
        let Some(place) = self.peer_words.count(end.peer_pair()) else {
            return Err(self.violation("it has no such words"));
        };
        self.port(port).write_small(&[IoSlice::new(&epoch.to_ne_bytes())], place, None)?;
        self.ring_sleeper(end, epoch, port)
    }

    /// Rings the peer's bell if it sleeps until `epoch`, which has just been brought.
    pub(super) fn ring_sleeper(&self, end: &End, epoch: u64, port: u32) -> Result<(), ChannelError> {
        if self.notification != Notification::Word {
            return Ok(());
        }
        // SYNC: what was brought comes before this look; the peer says that it sleeps before it looks for the last time. One
        // of us sees the other.
        fence(Ordering::SeqCst);
        if self.words.sleeper(end.pair()) == epoch {
            self.port(port).send_frame(&Frame::Bell { slot: end.peer_pair() })?;
        }
        Ok(())
    }

    /// Tells the peer that this end sleeps until `epoch`.
    pub(super) fn say_asleep(&self, end: &End, epoch: u64, port: u32) -> Result<(), ChannelError> {
        if self.notification != Notification::Word {
            return Ok(());
        }
        let Some(place) = self.peer_words.sleeper(end.peer_pair()) else {
            return Err(self.violation("it has no such words"));
        };
        self.port(port).write_small(&[IoSlice::new(&epoch.to_ne_bytes())], place, None)?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// The slot with this pair has been written, for the first time or with this epoch.
    pub(super) fn placed(&self, pair: u32, epoch: Option<u64>) -> Result<(), ChannelError> {
        let Some(end) = self.end_of(pair) else {
            // It was given up here while the peer wrote.
            return Ok(());
        };
        match end.arrivals() {
            Arrivals::Tails(tails) => tails.arrived(epoch).map_err(|reason| self.violation(reason)),
            Arrivals::Count => {
                self.words.set_count(pair, epoch.unwrap_or_else(|| self.load_count(pair) + 1));
                Ok(())
            }
        }
    }

    /// A frame of the peer's.
    fn handle(self: &Arc<Self>, frame: Frame<'_>, wakers: &mut Vec<Waker>) -> Result<(), ChannelError> {
        match frame {
            Frame::Credit => Ok(()),
            // Its completion has woken the poller, which is all that it is for.
            Frame::Bell { slot } => {
                if let Some(end) = self.end_of(slot) {
                    end.ring();
                }
                Ok(())
            }
            Frame::Placed { slot, epoch } => self.placed(slot, Some(epoch)),
            Frame::Released { slot, epoch } => {
                if epoch > self.load_count(slot) && PeerWords::has(slot) {
                    self.words.set_count(slot, epoch);
                }
                Ok(())
            }
            Frame::Goodbye => Err(ChannelError::PeerLost {
                peer: Arc::clone(&self.peer),
                reason: "it closed the link".into(),
            }),
            frame => self.exchange.handle(self, frame, wakers),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Each wait holds the link: there is none to wake.
        self.end(ChannelError::Closed(Arc::clone(&self.peer)));
    }
}

impl fmt::Debug for Link {
    /// Names the link; all that belongs to it would fill pages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("peer", &self.peer).field("device", &self.device).finish_non_exhaustive()
    }
}
