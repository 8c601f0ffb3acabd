//! A link: the RDMA connection between this process and one peer.
//!
//! ```text
//!   Link ─┬─ Port ×N       one queue pair each: transfers in flight, and frames beside them
//!         ├─ Words         memory of this end that the peer writes: releases, and notes that the peer sleeps
//!         └─ WordPair ×M   one for each slot and region: the words of both ends that belong to it
//! ```
//!
//! The two devices decide how an end learns of an arrival ([`Notification`]). The arrival itself is always a word in memory
//! that reaches a value. Where the device does not place in order, this end writes that word itself, when a completion reports
//! the arrival.

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
use crate::exchange::Exchange;
use crate::link::notification::Notification;
use crate::link::polled_port::PolledPort;
use crate::link::port::Port;
use crate::link::token::Token;
use crate::link::word_pair::{Arrivals, WordPair};
use crate::link::words::{PeerWords, Words};
use crate::memory::landing::Landing;
use crate::wire::tensor_frame::Frame;
use tonic_rdma::internal::{Observation, Queue, may_spin};
use tonic_rdma_verbs::internal::{Grant, Notice, RegionLoan, Transfer, TransferKind, lock};
use tonic_rdma_verbs::memory::{Lease, SharedRegion};
use tonic_rdma_verbs::{Access, ProtectionDomain, RemoteSegment};

/// A link to one peer: its queue pairs, its words, and its slots and regions.
pub(crate) struct Link {
    pub(crate) id: LinkId,
    /// The address of the peer's device: where it listens, or where it called from.
    pub(crate) peer: Arc<str>,
    pub(crate) provider: &'static str,
    pub(crate) device: Arc<str>,
    pub(crate) notification: Notification,
    /// Whether every write of the peer makes an event of the armed queue, so that no end needs bells.
    pub(crate) announces_writes: bool,
    ports: Vec<PolledPort>,
    domain: Arc<dyn ProtectionDomain>,
    words: Words,
    peer_words: PeerWords,
    pairs: Mutex<Vec<Option<Arc<WordPair>>>>,
    fault: OnceLock<ChannelError>,
    failed: AtomicBool,
    /// Becomes true when the link has ended.
    ended: watch::Sender<bool>,
    /// The pool of regions for tensors that arrive, and for copies of tensors that are sent.
    pub(crate) landing: Arc<Landing>,
    /// Rights of the peer that last until the link ends, because the peer may still use the memory.
    kept: Mutex<Vec<Grant>>,
    /// Takes the frames of the rendezvous, which a link does not understand itself.
    rendezvous: Exchange,
}

/// The name of a link. A peer that knows the name, on the connection that opened the link, may use the link.
pub(crate) type LinkId = [u8; 16];

impl Link {
    /// The number of word pairs of each end. One pair serves one slot or region for the life of the link.
    pub(crate) const PAIRS: usize = Words::PAIRS;

    /// Frees what the rendezvous has kept for a while.
    pub(crate) fn age_rendezvous(self: &Arc<Self>) {
        self.rendezvous.age(self);
    }

    /// Gives the peer these rights to `range` of `memory`.
    pub(crate) fn grant(
        &self,
        memory: &SharedRegion,
        range: Range<usize>,
        access: Access,
    ) -> Result<Grant, ChannelError> {
        Grant::of_part(&*self.domain, memory, range, access).map_err(ChannelError::memory)
    }

    /// Gives the peer the right to read a lent region.
    pub(crate) fn grant_loan(&self, loan: &RegionLoan) -> Result<Grant, ChannelError> {
        Grant::of_loan(&*self.domain, loan).map_err(ChannelError::memory)
    }

    /// Gives the peer the right to read the memory of `lease`.
    pub(crate) fn grant_lease(&self, lease: &Lease) -> Result<Grant, ChannelError> {
        Grant::of_lease(&*self.domain, lease).map_err(ChannelError::memory)
    }

    /// Returns the port of queue pair `index`, modulo their number.
    pub(crate) fn port(&self, index: u32) -> &Arc<Port> {
        &self.ports[index as usize % self.ports.len()].port
    }

    pub(crate) fn ports(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.ports.iter().map(|polled| &polled.port)
    }

    /// Takes the completions of the queue of a port.
    pub(crate) fn poll(&self, port: u32) {
        self.ports[port as usize % self.ports.len()].queue.poll();
    }

    /// Takes the completions of all queues.
    pub(crate) fn poll_all(&self) {
        for polled in &self.ports {
            polled.queue.poll();
        }
    }

    /// Carries out what the peer has asked of the queue pair of a port, for a thread that looks at words and does not poll. On most
    /// devices there is nothing to do.
    #[inline]
    pub(crate) fn progress(&self, port: u32) {
        self.ports[port as usize % self.ports.len()].progress();
    }

    /// Carries out what the peer has asked of all queue pairs.
    pub(crate) fn progress_all(&self) {
        self.ports.iter().for_each(PolledPort::progress);
    }

    /// Notes that a future begins to wait for a write of the peer through `port`, or through any port.
    pub(crate) fn begin_wait(&self, port: Option<u32>) {
        self.polled_ports(port).for_each(PolledPort::begin_wait);
    }

    /// Asks for events with the writes of the peer through `port`, or through any port.
    pub(crate) fn need_events(&self, port: Option<u32>) {
        self.polled_ports(port).for_each(PolledPort::need_events);
    }

    /// Returns this port, or all ports.
    fn polled_ports(&self, port: Option<u32>) -> impl Iterator<Item = &PolledPort> {
        let count = self.ports.len();
        let chosen = move |index| port.is_none_or(|port| port as usize % count == index);
        self.ports.iter().enumerate().filter(move |(index, _)| chosen(*index)).map(|(_, polled)| polled)
    }

    /// Calls `has_come` again and again for as long as that pays, and takes the completions of the port's queue meanwhile.
    /// Returns whether the word has come. Returns false at once if other tasks need the only thread of the runtime.
    pub(crate) fn spin(&self, port: u32, has_come: impl Fn() -> bool) -> bool {
        let polled = &self.ports[port as usize % self.ports.len()];
        let Some(mut pace) = polled.pace.as_ref().and_then(|pace| pace.try_lock().ok()) else { return false };
        if !may_spin() {
            return false;
        }
        let look = || {
            // A task that this poll woke may wait for this thread, so that task goes first.
            if has_come() || polled.queue.poll().woken > 0 {
                Observation::Wanted
            } else {
                Observation::Nothing
            }
        };
        pace.spin(|| (), look) && has_come()
    }

    /// Notes that a word has come to a future that slept. The pace of the next spin follows this.
    pub(crate) fn slept_for(&self, port: u32) {
        if let Some(pace) = &self.ports[port as usize % self.ports.len()].pace
            && let Ok(mut pace) = pace.try_lock()
        {
            pace.arrived(Instant::now());
        }
    }

    /// Returns the queue of a port, which looks at watched words.
    pub(crate) fn queue(&self, port: u32) -> &Arc<Queue> {
        &self.ports[port as usize % self.ports.len()].queue
    }

    /// Returns why the link has ended, if it has.
    pub(crate) fn fault(&self) -> Option<&ChannelError> {
        self.failed.load(Ordering::Acquire).then(|| self.fault.get()).flatten()
    }

    /// Returns an error if the link has ended.
    pub(crate) fn check(&self) -> Result<(), ChannelError> {
        self.fault().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// Asks the devices whether a queue pair has ended. A thread that only looks at memory takes no completion that says so.
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

    /// Looks for the reason why a word has not come, after `misses` looks at it: carries out what the peer has asked, takes the
    /// completions of the queue at each `poll_every`-th look, and asks the devices sometimes.
    pub(crate) fn missed(&self, port: u32, misses: u32, poll_every: u32) -> Result<(), ChannelError> {
        /// The number of looks after which the devices are asked.
        const LOOK_EVERY: u32 = 1 << 12;
        if self.notification != Notification::Word || misses.is_multiple_of(poll_every) {
            self.poll(port);
        } else {
            self.progress(port);
        }
        if misses.is_multiple_of(LOOK_EVERY) { self.look() } else { Ok(()) }
    }

    /// Waits until the link has ended, without holding the link.
    pub(crate) fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut ended = self.ended.subscribe();
        async move {
            let _ = ended.wait_for(|ended| *ended).await;
        }
    }

    /// Keeps rights of the peer until the link ends.
    pub(crate) fn keep(&self, grants: impl IntoIterator<Item = Grant>) {
        lock(&self.kept).extend(grants);
    }

    /// Ends the link because of `error`, unless it has ended. Returns why it ended. When this returns, nothing is in flight,
    /// and all memory is back with its owner.
    pub(crate) fn fail(&self, error: ChannelError) -> ChannelError {
        let fault = self.end(error);
        // Futures that wait for a word of the peer find that the link has ended.
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

    /// Makes the error of a peer that broke the protocol.
    pub(crate) fn violation(
        &self,
        error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> ChannelError {
        ChannelError::Violation { peer: Arc::clone(&self.peer), cause: Cause::new(error) }
    }

    /// Gives a slot or region a pair of words. A pair serves once in the life of the link, so that a late write for its last
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

    /// Removes a pair. Later arrivals for the pair are ignored.
    pub(crate) fn remove_pair(&self, pair: &WordPair) {
        let mut pairs = lock(&self.pairs);
        let removed = pairs.get_mut(pair.number as usize).and_then(Option::take);
        drop(pairs);
        drop(removed);
    }

    fn pair_of(&self, pair: u32) -> Option<Arc<WordPair>> {
        lock(&self.pairs).get(pair as usize).cloned().flatten()
    }

    /// Returns the memory of a pair's count, and its offset.
    pub(crate) fn count(&self, pair: u32) -> (&SharedRegion, usize) {
        self.words.count(pair)
    }

    /// Returns the count of a pair.
    pub(crate) fn load_count(&self, pair: u32) -> u64 {
        let (memory, offset) = self.words.count(pair);
        memory.load_u64(offset).unwrap_or(0)
    }

    /// Returns the place of a pair's count at the peer, for a notice.
    pub(crate) fn peer_count(&self, pair: u32) -> Option<RemoteSegment> {
        self.peer_words.count(pair)
    }

    /// Reports to the peer that the receiver has released `epoch` at `pair`.
    pub(crate) fn report(
        &self,
        pair: &WordPair,
        epoch: u64,
        port: u32,
        frame: &Frame<'_>,
    ) -> Result<(), ChannelError> {
        if self.notification != Notification::Word {
            return self.port(port).send_frame(frame);
        }
        let Some(place) = self.peer_words.count(pair.peer_number) else {
            return Err(self.violation("it has no such words"));
        };
        self.port(port).write_small(&[IoSlice::new(&epoch.to_ne_bytes())], place, None)?;
        self.ring_sleeper(pair, epoch, port)
    }

    /// Submits a write that brings `epoch` to `pair` of the peer. The peer learns of it from the word at `word`, from the
    /// completion of the write, or from a frame behind the write.
    pub(crate) fn submit_noticed(
        &self,
        transfer: Transfer<Token>,
        length: u64,
        pair: &WordPair,
        epoch: u64,
        port: u32,
        word: impl FnOnce() -> Option<RemoteSegment>,
    ) -> Result<(), ChannelError> {
        let (slot, port) = (pair.peer_number, self.port(port));
        match self.notification {
            Notification::Word => match word() {
                Some(place) => {
                    port.submit(transfer.notify(Notice::Word(place, epoch)), length, TransferKind::Write)
                }
                None => Err(self.fail(self.violation("it has no such words"))),
            },
            Notification::Immediate => {
                port.submit(transfer.notify(Notice::Immediate(slot)), length, TransferKind::Write)
            }
            Notification::Message => {
                port.submit(transfer, length, TransferKind::Write)?;
                port.send_frame(&Frame::Placed { slot, epoch })
            }
        }
    }

    /// Writes `parts` to a place of the peer, inline, and brings `epoch` to `pair` of the peer behind them. The caller's memory is
    /// free when this returns.
    ///
    /// # Errors
    /// There is no room, so nothing was written; or the link has failed.
    pub(crate) fn write_noticed(
        &self,
        parts: &[IoSlice<'_>],
        remote: RemoteSegment,
        pair: &WordPair,
        epoch: u64,
        port: u32,
    ) -> Result<(), ChannelError> {
        let (slot, its_port) = (pair.peer_number, self.port(port));
        match self.notification {
            Notification::Word => {
                let Some(word) = self.peer_words.count(slot) else {
                    return Err(self.fail(self.violation("it has no such words")));
                };
                its_port.write_now(parts, remote, None)?;
                // The bytes are on their way, so the count waits for room if it has to.
                its_port.write_small(&[IoSlice::new(&epoch.to_ne_bytes())], word, None)?;
                self.ring_sleeper(pair, epoch, port)
            }
            Notification::Immediate => its_port.write_now(parts, remote, Some(slot)),
            Notification::Message => {
                its_port.write_now(parts, remote, None)?;
                its_port.send_frame(&Frame::Placed { slot, epoch })
            }
        }
    }

    /// Writes to the peer that this end sleeps until `epoch`.
    pub(crate) fn say_asleep(&self, pair: &WordPair, epoch: u64, port: u32) -> Result<(), ChannelError> {
        if self.notification != Notification::Word || self.announces_writes {
            return Ok(());
        }
        let Some(place) = self.peer_words.sleeper(pair.peer_number) else {
            return Err(self.violation("it has no such words"));
        };
        self.port(port).write_small(&[IoSlice::new(&epoch.to_ne_bytes())], place, None)?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Notes that the peer has written to the slot or region with this pair of words: `epoch`, or the next epoch if `epoch` is
    /// `None`.
    fn placed(&self, pair: u32, epoch: Option<u64>) -> Result<(), ChannelError> {
        let Some(found) = self.pair_of(pair) else {
            // The slot was given up here while the peer wrote.
            return Ok(());
        };
        match &found.arrivals {
            Arrivals::Tails(tails) => tails.arrived(epoch).map_err(|error| self.violation(error)),
            Arrivals::Count => {
                self.words.set_count(pair, epoch.unwrap_or_else(|| self.load_count(pair) + 1));
                Ok(())
            }
        }
    }

    /// Takes a frame of the peer. Tasks to wake are added to `wakers`.
    fn handle(self: &Arc<Self>, frame: Frame<'_>, wakers: &mut Vec<Waker>) -> Result<(), ChannelError> {
        match frame {
            Frame::Credit => Ok(()),
            // The completion of this frame has woken the poller, and that is the purpose of the frame.
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
            frame => self.rendezvous.handle(self, frame, wakers),
        }
    }

    /// Rings the peer's bell if the peer sleeps until `epoch`, which has just been brought to `pair`.
    pub(crate) fn ring_sleeper(&self, pair: &WordPair, epoch: u64, port: u32) -> Result<(), ChannelError> {
        // Both ends have the same kind of device, so the peer's device announces writes, too.
        if self.notification != Notification::Word || self.announces_writes {
            return Ok(());
        }
        // SYNC: this end brings the epoch and then reads the sleeper. The peer writes the sleeper and then looks for the epoch
        // a last time. So at least one end sees the word of the other end.
        fence(Ordering::SeqCst);
        if self.words.sleeper(pair.number) == epoch {
            self.port(port).send_frame(&Frame::Bell { slot: pair.peer_number })?;
        }
        Ok(())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Each wait holds the link, so no wait is left to wake.
        self.end(ChannelError::Closed(Arc::clone(&self.peer)));
    }
}

impl fmt::Debug for Link {
    /// Shows the link's name only, because all its parts would fill pages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("peer", &self.peer).field("device", &self.device).finish_non_exhaustive()
    }
}
