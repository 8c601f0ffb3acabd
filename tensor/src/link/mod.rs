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

pub(crate) mod credits;
pub(crate) mod notification;
pub(crate) mod polled_port;
pub(crate) mod port;
pub(crate) mod prepare;
pub(crate) mod token;
pub(crate) mod wait;
pub(crate) mod word_pair;
pub(crate) mod words;

use std::fmt;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;
use std::time::Instant;

use tokio::sync::watch;

use crate::error::{Cause, ChannelError};
use crate::link::notification::Notification;
use crate::link::polled_port::PolledPort;
use crate::link::port::{Port, PortOwner};
use crate::link::token::{Bell, Token};
use crate::link::word_pair::{Arrivals, WordPair};
use crate::link::words::{PeerWords, Words};
use crate::lock::lock;
use crate::memory::landing::Landing;
use crate::wire::tensor_frame::Frame;
use tonic_rdma::internal::{Queue, Seen, may_spin};
use tonic_rdma_verbs::internal::{Anchors, Grant, Notice, Transfer, Way};
use tonic_rdma_verbs::memory::{Lease, SharedRegion};
use tonic_rdma_verbs::{Access, ProtectionDomain, RemoteSegment};

/// Takes the frames of the rendezvous, which a link does not understand itself.
pub(crate) trait RendezvousFrames: fmt::Debug + Send + Sync {
    /// Allows answers to the requests of the peer, from now on.
    fn begin(&self, link: &Arc<Link>);

    /// Takes a frame of the peer. Tasks to wake are added to `wakers`.
    ///
    /// # Errors
    /// The frame breaks the protocol.
    fn handle(&self, link: &Arc<Link>, frame: Frame<'_>, wakers: &mut Vec<Waker>)
    -> Result<(), ChannelError>;

    /// Ends all requests: the link has ended with `fault`, and its queue pairs are gone.
    fn link_ended(&self, fault: &ChannelError);
}

/// See the module's documentation.
pub(crate) struct Link {
    id: LinkId,
    peer: Arc<str>,
    provider: &'static str,
    device: Arc<str>,
    notification: Notification,
    ports: Vec<PolledPort>,
    domain: Arc<dyn ProtectionDomain>,
    words: Words,
    peer_words: PeerWords,
    pairs: Mutex<Vec<Option<Arc<WordPair>>>>,
    fault: OnceLock<ChannelError>,
    failed: AtomicBool,
    /// Tells whoever keeps the link that it has ended.
    ended: watch::Sender<bool>,
    landing: Arc<Landing>,
    /// What the peer may still use of what was given up here.
    kept: Mutex<Vec<Grant>>,
    /// On the software device.
    anchors: Option<Mutex<Anchors>>,
    rendezvous: Arc<dyn RendezvousFrames>,
}

/// Names a link to those who have a right to it.
pub(crate) type LinkId = [u8; 16];

impl Link {
    /// Pairs of words that each end has: slots and regions that a link serves in its life.
    pub(crate) const PAIRS: usize = Words::PAIRS;

    pub(crate) fn id(&self) -> &LinkId {
        &self.id
    }

    /// The peer's device, where it listens or called from.
    pub(crate) fn peer(&self) -> &Arc<str> {
        &self.peer
    }

    pub(crate) fn provider(&self) -> &'static str {
        self.provider
    }

    pub(crate) fn device(&self) -> &str {
        &self.device
    }

    pub(crate) fn notification(&self) -> Notification {
        self.notification
    }

    /// Gives the peer these rights to `range` of `memory`.
    pub(crate) fn grant(
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
    pub(crate) fn grant_lease(&self, lease: &Lease) -> Result<Grant, ChannelError> {
        if let Some(anchors) = &self.anchors {
            lock(anchors).lease(lease);
        }
        Grant::of_lease(&*self.domain, lease).map_err(ChannelError::memory)
    }

    /// The port of queue pair `index`, which is taken modulo their number.
    pub(crate) fn port(&self, index: u32) -> &Arc<Port> {
        &self.ports[index as usize % self.ports.len()].port
    }

    pub(crate) fn ports(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.ports.iter().map(|polled| &polled.port)
    }

    /// Takes what has come on the queue of a port.
    pub(crate) fn poll(&self, port: u32) {
        self.ports[port as usize % self.ports.len()].queue.poll();
    }

    /// Takes what has come on any.
    pub(crate) fn poll_all(&self) {
        for polled in &self.ports {
            polled.queue.poll();
        }
    }

    /// Looks for what `has_come` says, for as long as that pays, and takes what comes on the port's queue meanwhile. Not
    /// at all where the runtime's only thread has others to serve.
    pub(crate) fn spin(&self, port: u32, has_come: impl Fn() -> bool) -> bool {
        let polled = &self.ports[port as usize % self.ports.len()];
        let Some(mut pace) = polled.pace.as_ref().and_then(|pace| pace.try_lock().ok()) else { return false };
        if !may_spin() {
            return false;
        }
        let look = || {
            // A task that this poll woke may wait for this thread: it goes first.
            if has_come() || polled.queue.poll().woken > 0 { Seen::Wanted } else { Seen::Nothing }
        };
        pace.spin(|| (), look) && has_come()
    }

    /// What was waited for has come to one that slept.
    pub(crate) fn slept_for(&self, port: u32) {
        if let Some(pace) = &self.ports[port as usize % self.ports.len()].pace
            && let Ok(mut pace) = pace.try_lock()
        {
            pace.arrived(Instant::now());
        }
    }

    /// The queue of a port, to be told when a word is there.
    pub(crate) fn queue(&self, port: u32) -> &Arc<Queue> {
        &self.ports[port as usize % self.ports.len()].queue
    }

    /// Why it has ended, if it has.
    pub(crate) fn fault(&self) -> Option<&ChannelError> {
        self.failed.load(Ordering::Acquire).then(|| self.fault.get()).flatten()
    }

    /// An error if it has ended.
    pub(crate) fn check(&self) -> Result<(), ChannelError> {
        self.fault().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// Looks whether a device has noticed the end of a queue pair, which a thread that only looks at memory would not.
    pub(crate) fn look(&self) -> Result<(), ChannelError> {
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
    pub(crate) fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut ended = self.ended.subscribe();
        async move {
            let _ = ended.wait_for(|ended| *ended).await;
        }
    }

    /// Regions to land in, and to copy to.
    pub(crate) fn landing(&self) -> &Arc<Landing> {
        &self.landing
    }

    /// Keeps rights of the peer's until the link pairs.
    pub(crate) fn keep(&self, grants: impl IntoIterator<Item = Grant>) {
        lock(&self.kept).extend(grants);
    }

    /// Ends it because of `error`, or finds that it has ended; yields the reason why it did. Everything in flight is over
    /// when this returns, and memory is where it belongs.
    pub(crate) fn fail(&self, error: ChannelError) -> ChannelError {
        let fault = self.end(error);
        // Those that wait for a word of the peer's learn that it never comes.
        for polled in &self.ports {
            polled.queue.wake_watched();
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
            for polled in &self.ports {
                polled.port.end(fault);
            }
            let pairs = std::mem::take(&mut *lock(&self.pairs));
            for pair in pairs.into_iter().flatten() {
                pair.link_ended(fault);
            }
            self.rendezvous.link_ended(fault);
            lock(&self.kept).clear();
            self.ended.send_replace(true);
        }
        fault.clone()
    }

    /// The peer broke the protocol.
    pub(crate) fn violation(
        &self,
        error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> ChannelError {
        ChannelError::Violation { peer: Arc::clone(&self.peer), cause: Cause::new(error) }
    }

    /// Gives a slot or region a pair of words. A pair serves once in the link's life, so that what comes late for its last
    /// owner does no harm to the next.
    pub(crate) fn add_pair(&self, make: impl FnOnce(u32) -> WordPair) -> Result<Arc<WordPair>, ChannelError> {
        let mut pairs = lock(&self.pairs);
        self.check()?;
        if pairs.len() >= Words::PAIRS {
            let most = Words::PAIRS;
            return Err(ChannelError::local(format!("a link serves {most} slots and regions in its life")));
        }
        let pair = Arc::new(make(pairs.len() as u32));
        pairs.push(Some(Arc::clone(&pair)));
        Ok(pair)
    }

    /// Forgets a pair: what arrives for it from now on is ignored.
    pub(crate) fn remove_pair(&self, pair: &WordPair) {
        let mut pairs = lock(&self.pairs);
        let removed = pairs.get_mut(pair.number() as usize).and_then(Option::take);
        drop(pairs);
        drop(removed);
    }

    fn pair_of(&self, pair: u32) -> Option<Arc<WordPair>> {
        lock(&self.pairs).get(pair as usize).cloned().flatten()
    }

    /// The memory and offset of the count of a pair.
    pub(crate) fn count(&self, pair: u32) -> (&SharedRegion, usize) {
        self.words.count(pair)
    }

    /// The count of a pair.
    pub(crate) fn load_count(&self, pair: u32) -> u64 {
        let (memory, offset) = self.words.count(pair);
        memory.load_u64(offset).unwrap_or(0)
    }

    /// Where the peer keeps the count of its pair, for a notice.
    pub(crate) fn peer_count(&self, pair: u32) -> Option<RemoteSegment> {
        self.peer_words.count(pair)
    }

    /// Tells the peer that `epoch` has been reached at `end`: a release, or a change to a region.
    pub(crate) fn tell(
        &self,
        pair: &WordPair,
        epoch: u64,
        port: u32,
        frame: &Frame<'_>,
    ) -> Result<(), ChannelError> {
        if self.notification != Notification::Word {
            return self.port(port).send_frame(frame);
        }
        let Some(place) = self.peer_words.count(pair.peer_number()) else {
            return Err(self.violation("it has no such words"));
        };
        self.port(port).write_small(&[IoSlice::new(&epoch.to_ne_bytes())], place, None)?;
        self.ring_sleeper(pair, epoch, port)
    }

    /// Submits a write, at the end of which the peer is told that `epoch` has arrived at `end`: by a word, where the peer
    /// sees `word`, with the write's completion, or by a frame behind it.
    pub(crate) fn submit_noticed(
        &self,
        transfer: Transfer<Token>,
        length: u64,
        pair: &WordPair,
        epoch: u64,
        port: u32,
        word: impl FnOnce() -> Option<RemoteSegment>,
    ) -> Result<(), ChannelError> {
        let (slot, port) = (pair.peer_number(), self.port(port));
        match self.notification() {
            Notification::Word => match word() {
                Some(place) => port.submit(transfer.notify(Notice::Word(place, epoch)), length, Way::Write),
                None => Err(self.fail(self.violation("it has no such words"))),
            },
            Notification::Immediate => {
                port.submit(transfer.notify(Notice::Immediate(slot)), length, Way::Write)
            }
            Notification::Message => {
                port.submit(transfer, length, Way::Write)?;
                port.send_frame(&Frame::Placed { slot, epoch })
            }
        }
    }

    /// Tells the peer that this end sleeps until `epoch`.
    pub(crate) fn say_asleep(&self, pair: &WordPair, epoch: u64, port: u32) -> Result<(), ChannelError> {
        if self.notification != Notification::Word {
            return Ok(());
        }
        let Some(place) = self.peer_words.sleeper(pair.peer_number()) else {
            return Err(self.violation("it has no such words"));
        };
        self.port(port).write_small(&[IoSlice::new(&epoch.to_ne_bytes())], place, None)?;
        fence(Ordering::SeqCst);
        Ok(())
    }
}

impl PortOwner for Link {
    fn poll(&self, port: u32) {
        Self::poll(self, port);
    }

    fn peer(&self) -> &Arc<str> {
        &self.peer
    }

    fn fault(&self) -> Option<&ChannelError> {
        Self::fault(self)
    }

    fn fail(&self, error: ChannelError) -> ChannelError {
        Self::fail(self, error)
    }

    /// The slot with this pair has been written, for the first time or with this epoch.
    fn placed(&self, pair: u32, epoch: Option<u64>) -> Result<(), ChannelError> {
        let Some(found) = self.pair_of(pair) else {
            // It was given up here while the peer wrote.
            return Ok(());
        };
        match found.arrivals() {
            Arrivals::Tails(tails) => tails.arrived(epoch).map_err(|error| self.violation(error)),
            Arrivals::Count => {
                self.words.set_count(pair, epoch.unwrap_or_else(|| self.load_count(pair) + 1));
                Ok(())
            }
        }
    }

    /// A frame of the peer's.
    fn handle(self: Arc<Self>, frame: Frame<'_>, wakers: &mut Vec<Waker>) -> Result<(), ChannelError> {
        match frame {
            Frame::Credit => Ok(()),
            // Its completion has woken the poller, which is all that it is for.
            Frame::Bell { slot } => {
                if let Some(pair) = self.pair_of(slot) {
                    pair.ring();
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
            frame => self.rendezvous.handle(&self, frame, wakers),
        }
    }
}

impl Bell for Link {
    /// Rings the peer's bell if it sleeps until `epoch`, which has just been brought.
    fn ring_sleeper(&self, pair: &WordPair, epoch: u64, port: u32) -> Result<(), ChannelError> {
        if self.notification != Notification::Word {
            return Ok(());
        }
        // SYNC: what was brought comes before this look; the peer says that it sleeps before it looks for the last time. One
        // of us sees the other.
        fence(Ordering::SeqCst);
        if self.words.sleeper(pair.number()) == epoch {
            self.port(port).send_frame(&Frame::Bell { slot: pair.peer_number() })?;
        }
        Ok(())
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
