//! A link: the RDMA connection between this process and one peer.
//!
//! ```text
//!   Link ─┬─ Port ×N       one queue pair each: transfers in flight, and frames beside them
//!         ├─ WordPage      memory of this side that the peer writes: what it has released, that it sleeps
//!         └─ WordPair ×M   one for each slot and region: the words of both sides that belong to it
//! ```
//!
//! How a side learns of an arrival depends on the two devices ([`Notification`]). The arrival itself is
//! always a word in memory that reaches a value. If the devices do not place in order, this side writes the
//! word itself when a completion reports the arrival.

pub(crate) mod pairs;
pub(crate) mod port;
pub(crate) mod wait;
pub(crate) mod words;

use std::collections::HashMap;
use std::fmt;
use std::io::IoSlice;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;
use std::time::Instant;

use tokio::sync::watch;

use self::pairs::{NoPairLeft, PairTable};
use self::port::{Port, Token};
use self::words::{Arrivals, Notification, PeerWordPage, WordPage, WordPair};
use crate::device::settings::Settings;
use crate::error::{TensorError, TensorErrorKind};
use crate::memory::{Content, Keeper, Payload, RegionCache};
use crate::named_driver::NamedTensors;
use crate::wire::tensor_frame::{Frame, RequestId};
use tonic_rdma::Provider;
use tonic_rdma::unstable::{Observation, Pace, Queue, Reactor, may_spin, open_device};
use tonic_rdma_verbs::memory::{Budget, Pool, PoolSettings, SharedRegion};
use tonic_rdma_verbs::unstable::{
    Grant, InFlight, LocalRegistrations, Notice, RegionLoan, RemoteRange, Transfer, TransferLimits, lock,
};
use tonic_rdma_verbs::{
    Access, Context, LocalQueuePair, ProtectionDomain, QueuePairAddress, QueuePairCapacity, RemoteSegment,
};

/// A link to one peer: its queue pairs, its words, and its slots and regions.
pub(crate) struct Link {
    pub(crate) id: LinkId,
    /// The address of the peer's device: where it listens, or where it called from.
    pub(crate) peer: Arc<str>,
    pub(crate) provider: &'static str,
    pub(crate) device: Arc<str>,
    pub(crate) notification: Notification,
    /// Whether every write of the peer makes an event of the armed queue, so that neither side needs bells.
    pub(crate) announces_writes: bool,
    ports: Vec<PolledPort>,
    domain: Arc<dyn ProtectionDomain>,
    /// The registrations of all queue pairs.
    registrations: Arc<LocalRegistrations>,
    words: WordPage,
    peer_words: PeerWordPage,
    pairs: Mutex<PairTable>,
    /// The number of ports that requests for named tensors are spread over.
    named_ports: u64,
    /// Whether a write into the sink of a named tensor may announce itself by immediate data: both devices have
    /// these, and the peer is not older than version 4.
    pub(crate) announces_named: bool,
    fault: OnceLock<TensorError>,
    /// Becomes true when the link has ended.
    ended: watch::Sender<bool>,
    pub(crate) region_cache: Arc<RegionCache>,
    /// Rights of the peer that last until it ends the pair of this number, because it may still use the memory.
    kept: Mutex<HashMap<u32, Vec<Grant>>>,
    /// Handles the frames of named tensors.
    pub(crate) named: NamedTensors,
    /// The life of the link, for subscribers of `tracing`.
    span: tracing::Span,
}

/// The name of a link. A peer that knows the name, on the connection that opened the link, may use the link.
pub(crate) type LinkId = [u8; 16];

impl Link {
    /// Gives the peer these rights to `memory`, by a registration, for longer than one transfer.
    pub(crate) fn grant(&self, memory: &SharedRegion, access: Access) -> Result<Grant, TensorError> {
        Grant::of_region(&*self.domain, memory, access).map_err(TensorError::memory)
    }

    /// Gives the peer the right to read a lent region.
    pub(crate) fn grant_loan(&self, loan: &RegionLoan) -> Result<Grant, TensorError> {
        Grant::of_loan(&*self.domain, loan).map_err(TensorError::memory)
    }

    /// Gives the peer the right to read the bytes of `payload`, for one transfer through a port: by a window, or
    /// by a copy in memory of this peer if the device has no window for it. Returns whether the bytes were copied.
    pub(crate) fn grant_payload(&self, payload: &Payload, port: u32) -> Result<(Grant, bool), TensorError> {
        let port = self.port(port);
        let window = match &payload.content {
            Content::Registered(lease, range) => {
                let part = lease.part(range.clone()).map_err(TensorError::local)?;
                let window = port.open_window(|flights| flights.grant_lease(&part))?;
                window.map(|grant| (grant, false))
            }
            Content::Bytes(bytes) if port.has_windows() => {
                let copy = self.region_cache.copy_of(bytes)?.share();
                let window = port.open_window(|flights| flights.grant_region(&copy, Access::REMOTE_READ))?;
                window.map(|grant| (grant, true))
            }
            Content::Bytes(_) => None,
        };
        if let Some(window) = window {
            return Ok(window);
        }
        let copy = || self.registrations.grant_copy(payload.as_slice());
        match (self.region_cache.obtain(copy), &payload.content) {
            (Ok(grant), _) => Ok((grant, true)),
            // There is no memory for a copy.
            (Err(_), Content::Registered(lease, range)) => {
                let part = lease.part(range.clone()).map_err(TensorError::local)?;
                Ok((Grant::of_lease(&*self.domain, &part).map_err(TensorError::memory)?, false))
            }
            (Err(error), Content::Bytes(_)) => Err(error),
        }
    }

    /// Gives the peer the right to write `length` bytes, for one transfer through a port: by a window, or in
    /// memory of this peer if the device has no window for them.
    pub(crate) fn grant_sink(&self, length: u64, port: u32) -> Result<(Grant, SharedRegion), TensorError> {
        let port = self.port(port);
        if port.has_windows() {
            let sink = self.region_cache.take(length)?.share();
            let window = port.open_window(|flights| flights.grant_region(&sink, Access::REMOTE_WRITE))?;
            if let Some(window) = window {
                return Ok((window, sink));
            }
        }
        let length = usize::try_from(length).map_err(TensorError::memory)?.max(1);
        self.region_cache.obtain(|| self.registrations.grant_sink(length))
    }

    /// Returns the port of queue pair `index`, modulo their number.
    pub(crate) fn port(&self, index: u32) -> &Arc<Port> {
        &self.ports[index as usize % self.ports.len()].port
    }

    /// Returns the index of the port by which all frames and the write of a request for a named tensor go, so
    /// that they stay in order.
    pub(crate) fn port_of_request(&self, request_id: RequestId) -> u32 {
        (request_id.0 % self.named_ports) as u32
    }

    pub(crate) fn ports(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.ports.iter().map(|polled| &polled.port)
    }

    /// Polls the completions of the queue of a port.
    pub(crate) fn poll(&self, port: u32) {
        self.ports[port as usize % self.ports.len()].queue.poll();
    }

    /// Polls the completions of all queues.
    pub(crate) fn poll_all(&self) {
        for polled in &self.ports {
            polled.queue.poll();
        }
    }

    /// Carries out what the peer has asked of the queue pair of a port, for a thread that polls words and
    /// takes no completions. On most devices there is nothing to do.
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

    /// Calls `has_arrived` again and again for as long as that pays, and takes the completions of the port's
    /// queue meanwhile. Returns whether the word has arrived. Returns false at once if other tasks need the
    /// only thread of the runtime.
    pub(crate) fn spin(&self, port: u32, has_arrived: impl Fn() -> bool) -> bool {
        let polled = &self.ports[port as usize % self.ports.len()];
        let Some(mut pace) = polled.pace.as_ref().and_then(|pace| pace.try_lock().ok()) else { return false };
        if !may_spin() {
            return false;
        }
        let look = || {
            // A task that this poll woke may wait for this thread, so that task runs first.
            if has_arrived() || polled.queue.poll().woken > 0 {
                Observation::Wanted
            } else {
                Observation::Nothing
            }
        };
        pace.spin(Instant::now(), || (), look) && has_arrived()
    }

    /// Tells the pace of the port that a word has arrived for a future that did not spin any more. The length
    /// of the next spin follows from this.
    pub(crate) fn arrived_after_sleep(&self, port: u32) {
        if let Some(pace) = &self.ports[port as usize % self.ports.len()].pace
            && let Ok(mut pace) = pace.try_lock()
        {
            pace.arrived_now();
        }
    }

    /// Returns the queue of a port, which checks watched words.
    pub(crate) fn queue(&self, port: u32) -> &Arc<Queue> {
        &self.ports[port as usize % self.ports.len()].queue
    }

    /// Returns why the link has ended, if it has.
    pub(crate) fn fault(&self) -> Option<&TensorError> {
        self.fault.get()
    }

    /// Returns an error if the link has ended.
    pub(crate) fn check(&self) -> Result<(), TensorError> {
        self.fault().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// Asks the devices whether a queue pair has ended. A thread that only polls memory gets no completion
    /// that says so.
    pub(crate) fn check_devices(&self) -> Result<(), TensorError> {
        self.check()?;
        let ended = |port: &Arc<Port>| {
            use tonic_rdma_verbs::QueuePairState::Error;
            port.with_queue_pair(|queue_pair| queue_pair.state() == Error).unwrap_or(true)
        };
        if self.ports().any(ended) {
            return Err(self.fail(TensorError::peer_lost(&self.peer, "its device does not answer any more")));
        }
        Ok(())
    }

    /// Helps a word to arrive that `misses` polls have not found: carries out what the peer has asked, takes
    /// the completions of the queue in each `poll_every`-th call, and in some calls asks the devices whether
    /// the peer lives.
    pub(crate) fn missed(&self, port: u32, misses: u32, poll_every: u32) -> Result<(), TensorError> {
        /// The number of polls after which the devices are asked.
        const CHECK_DEVICE_EVERY: u32 = 1 << 12;
        if self.notification != Notification::Word || misses.is_multiple_of(poll_every) {
            self.poll(port);
        } else {
            self.progress(port);
        }
        if misses.is_multiple_of(CHECK_DEVICE_EVERY) { self.check_devices() } else { Ok(()) }
    }

    /// Waits until the link has ended, without holding the link.
    pub(crate) fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut ended = self.ended.subscribe();
        async move {
            let _ = ended.wait_for(|ended| *ended).await;
        }
    }

    /// Keeps rights of the peer until it ends a pair of this side, or the link ends. A peer that ends a pair reads
    /// nothing more for it.
    pub(crate) fn keep(&self, pair: &WordPair, grants: Vec<Grant>) {
        let pairs = lock(&self.pairs);
        if !grants.is_empty() && !pairs.is_ended_by_peer(pair.number) {
            lock(&self.kept).insert(pair.number, grants);
        }
    }

    /// Ends the link because of `error`, unless it has ended. Returns why it ended. When this returns,
    /// nothing is in flight, and all memory is back with its owner.
    pub(crate) fn fail(&self, error: TensorError) -> TensorError {
        let fault = self.end(error);
        // Futures that wait for a word of the peer find that the link has ended.
        for polled in &self.ports {
            polled.queue.wake_watched();
        }
        fault
    }

    /// Ends the link, because the peer has left. What the peer has got before, it has got: the completions that
    /// say so are taken first. (Over a network, the acknowledgement of a tensor can be lost with the peer.) This
    /// waits for a thread that polls, so no such thread may call it.
    pub(crate) fn peer_left(&self, reason: &str) {
        for polled in &self.ports {
            polled.queue.drain();
        }
        self.fail(TensorError::peer_lost(&self.peer, reason));
    }

    fn end(&self, error: TensorError) -> TensorError {
        let mut first = false;
        let fault = self.fault.get_or_init(|| {
            first = true;
            error
        });
        if first {
            self.span.in_scope(|| match fault.kind() {
                TensorErrorKind::Protocol => {
                    tonic_rdma_verbs::unstable::throttled!(warn, peer = &*self.peer, %fault, "a tensor link has ended");
                }
                TensorErrorKind::Closed => tracing::debug!(peer = &*self.peer, "a tensor link was closed"),
                _ => tracing::debug!(peer = &*self.peer, %fault, "a tensor link has ended"),
            });
            for polled in &self.ports {
                polled.port.end(fault);
            }
            let pairs = lock(&self.pairs).take_all();
            for pair in pairs {
                pair.link_ended(fault);
            }
            self.named.link_ended(fault);
            drop(std::mem::take(&mut *lock(&self.kept)));
            self.ended.send_replace(true);
        }
        fault.clone()
    }

    /// Makes the error of a peer that broke the protocol.
    pub(crate) fn violation(&self, error: impl fmt::Display) -> TensorError {
        TensorError::violation(&self.peer, error)
    }

    /// Gives a slot or region a pair of words. Nothing that the peer sent for an earlier slot or region reaches
    /// the pair ([`pairs`]).
    pub(crate) fn add_pair(&self, make: impl FnOnce(u32) -> WordPair) -> Result<Arc<WordPair>, TensorError> {
        let mut pairs = lock(&self.pairs);
        self.check()?;
        let added = pairs.add(|number| {
            self.words.clear(number);
            make(number)
        });
        added.map_err(|NoPairLeft| {
            let most = WordPage::PAIRS;
            TensorError::other(format!("a link serves {most} slots and regions at a time"))
        })
    }

    /// Gives a pair up at this side, and tells the peer. Later arrivals for the pair are ignored.
    pub(crate) fn remove_pair(&self, pair: &WordPair) {
        if self.forget_pair(pair) {
            self.leave_pair(pair);
        }
    }

    /// Gives a pair up at this side. If it returns true, the caller calls [`leave_pair`](Self::leave_pair)
    /// next, when it holds no lock.
    #[must_use]
    pub(crate) fn forget_pair(&self, pair: &WordPair) -> bool {
        let removed = lock(&self.pairs).remove(pair.number, pair.is_known());
        // Dropped here, outside the lock.
        removed.is_some()
    }

    /// Ends a use of a pair. The last one tells the peer that this side writes nothing more for the pair. The
    /// frame goes by each queue pair, behind what was written there.
    pub(crate) fn leave_pair(&self, pair: &WordPair) {
        if pair.leave() && pair.is_known() {
            for port in self.ports() {
                // If this fails, the link ends, and all its pairs end.
                let _ = port.send_frame(&Frame::Ended { slot: pair.peer_number });
            }
        }
    }

    fn pair_of(&self, pair: u32) -> Option<Arc<WordPair>> {
        lock(&self.pairs).get(pair).cloned()
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

    /// Returns the address of a pair's count at the peer, for a notice.
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
    ) -> Result<(), TensorError> {
        if self.notification != Notification::Word {
            return self.port(port).send_frame(frame);
        }
        match self.write_word(pair, self.peer_words.count(pair.peer_number), epoch, port)? {
            true => self.ring_sleeper(pair, epoch, port),
            false => Ok(()),
        }
    }

    /// Writes `epoch` to a word of the peer for `pair`. Returns false if the slot was given up here meanwhile, so that
    /// nobody waits for the word.
    fn write_word(
        &self,
        pair: &WordPair,
        word: Option<RemoteSegment>,
        epoch: u64,
        port: u32,
    ) -> Result<bool, TensorError> {
        let word = word.ok_or_else(|| self.violation("it has no such words"))?;
        if !pair.enter() {
            return Ok(false);
        }
        let written = self.port(port).write_small(&[IoSlice::new(&epoch.to_ne_bytes())], word, None);
        self.leave_pair(pair);
        written.map(|()| true)
    }

    /// Submits a write that brings `epoch` to `pair` of the peer. The peer learns of it from the word at
    /// `word`, from the completion of the write, or from a frame behind the write.
    pub(crate) fn submit_noticed(
        &self,
        transfer: Transfer<Token>,
        pair: &WordPair,
        epoch: u64,
        port: u32,
        word: impl FnOnce() -> Option<RemoteSegment>,
    ) -> Result<(), TensorError> {
        let (slot, port) = (pair.peer_number, self.port(port));
        match self.notification {
            Notification::Word => match word() {
                Some(place) => port.submit(transfer.notify(Notice::Word(place, epoch))),
                None => Err(self.fail(self.violation("it has no such words"))),
            },
            Notification::Immediate => port.submit(transfer.notify(Notice::Immediate(slot))),
            Notification::Message => {
                port.submit(transfer)?;
                port.send_frame(&Frame::Placed { slot, epoch })
            }
        }
    }

    /// Writes `parts` to memory of the peer, inline, and brings `epoch` to `pair` of the peer behind them.
    /// The caller's memory is free when this returns.
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
    ) -> Result<(), TensorError> {
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

    /// Writes into the page of the peer that this side sleeps until `epoch`.
    pub(crate) fn send_sleeper(&self, pair: &WordPair, epoch: u64, port: u32) -> Result<(), TensorError> {
        if self.notification != Notification::Word || self.announces_writes {
            return Ok(());
        }
        if self.write_word(pair, self.peer_words.sleeper(pair.peer_number), epoch, port)? {
            fence(Ordering::SeqCst);
        }
        Ok(())
    }

    /// Notes that the peer has written to the slot or region with this pair of words: `epoch`, or the next
    /// epoch if `epoch` is `None`.
    fn placed(&self, pair: u32, epoch: Option<u64>) -> Result<(), TensorError> {
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
    fn handle(self: &Arc<Self>, frame: Frame<'_>, wakers: &mut Vec<Waker>) -> Result<(), TensorError> {
        match frame {
            Frame::Credit => Ok(()),
            // The completion of this frame has woken the poller, and that is the purpose of the frame.
            Frame::Bell { slot } => {
                if let Some(pair) = self.pair_of(slot) {
                    pair.count_bell();
                }
                Ok(())
            }
            Frame::Placed { slot, epoch } => self.placed(slot, Some(epoch)),
            Frame::Released { slot, epoch } => {
                if self.pair_of(slot).is_some() && epoch > self.load_count(slot) {
                    self.words.set_count(slot, epoch);
                }
                Ok(())
            }
            Frame::Ended { slot } => {
                let ended = lock(&self.pairs).ended_by_peer(slot);
                if let Some(pair) = ended.map_err(|error| self.violation(error))? {
                    pair.ended_by_peer();
                }
                if lock(&self.pairs).is_ended_by_peer(slot) {
                    let kept = lock(&self.kept).remove(&slot);
                    // Dropped outside the locks.
                    drop(kept);
                }
                Ok(())
            }
            Frame::Goodbye => Err(TensorError::peer_lost(&self.peer, "it closed the link")),
            frame => self.named.handle(self, frame, wakers),
        }
    }

    /// Rings the peer's bell if the peer sleeps until `epoch`, which has just been brought to `pair`.
    pub(crate) fn ring_sleeper(&self, pair: &WordPair, epoch: u64, port: u32) -> Result<(), TensorError> {
        // Both sides have the same kind of device, so the peer's device announces writes, too.
        if self.notification != Notification::Word || self.announces_writes {
            return Ok(());
        }
        // SYNC: this side brings the epoch and then reads the sleeper. The peer writes the sleeper and then
        // checks for the epoch a last time. So at least one side sees the word of the other side.
        fence(Ordering::SeqCst);
        if self.words.sleeper(pair.number) == epoch {
            self.port(port).send_frame(&Frame::Bell { slot: pair.peer_number })?;
        }
        Ok(())
    }
}

impl Keeper for Link {
    fn give_back(&self) {
        self.named.requests.free_untaken();
    }

    fn trim(&self) {
        self.registrations.trim();
    }

    fn end_period(&self) {
        self.registrations.end_period();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Each wait holds the link, so no wait is left to wake.
        self.end(TensorError::closed(&self.peer));
    }
}

impl fmt::Debug for Link {
    /// Shows the link's name only, because all its parts would fill pages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("peer", &self.peer).field("device", &self.device).finish_non_exhaustive()
    }
}

/// A port in its queue. The port leaves the queue when this is dropped.
#[derive(Debug)]
struct PolledPort {
    port: Arc<Port>,
    queue: Arc<Queue>,
    /// The work that the peer asks of the queue pair. `None` on devices that work without the CPU.
    work: Option<Arc<dyn LocalQueuePair>>,
    /// The number of polls since the last one that found work, or the last wait. Threads may overwrite one
    /// another's counts.
    idle_polls: AtomicU32,
    /// The number of the port in the queue.
    key: u32,
    /// The time for which a future polls a word itself before its thread sleeps. Only one future at a time
    /// does so.
    pace: Option<Mutex<Pace>>,
    /// Keeps the reactor alive, which polls the queue.
    _reactor: Arc<Reactor>,
}

impl PolledPort {
    /// A thread that has polled so many times in a row without finding work counts as one that spins: a
    /// future polls once or twice before it waits.
    const SPIN: u32 = 8;

    /// Carries out what the peer has asked of the queue pair, for a thread that polls words of its memory.
    #[inline]
    fn progress(&self) {
        let Some(work) = &self.work else { return };
        let idle_polls = self.idle_polls.load(Ordering::Relaxed);
        if work.progress() {
            self.idle_polls.store(0, Ordering::Relaxed);
            self.progressed(&**work, idle_polls >= Self::SPIN);
        } else {
            self.idle_polls.store(idle_polls.saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Notes that a future begins to wait, so that its polls are not mistaken for those of a thread that
    /// spins.
    fn begin_wait(&self) {
        self.idle_polls.store(0, Ordering::Relaxed);
    }

    fn progressed(&self, work: &dyn LocalQueuePair, spins: bool) {
        // SYNC: Dekker's algorithm with `Wait`: this thread has stored words, and `LocalQueuePair::progress`
        // has executed a fence. The task that waits has added its word to the list, then checks the word.
        if self.queue.has_watched() {
            self.queue.wake_watched();
        } else if spins && work.need_no_events() {
            // SYNC: a task that begins to wait asks for events after it has added its word to the list.
            // Either this thread sees the word, or that task asks later.
            fence(Ordering::SeqCst);
            if self.queue.has_watched() {
                self.need_events();
            }
        }
    }

    /// Asks for events with the peer's writes, because a task waits for a word and the poller sleeps.
    fn need_events(&self) {
        if let Some(work) = &self.work {
            work.need_events();
            if work.progress() {
                self.queue.wake_watched();
            }
        }
    }
}

impl Drop for PolledPort {
    fn drop(&mut self) {
        self.queue.remove(self.key, &*self.port);
    }
}

/// Queue pairs and their memory, not connected yet. A link is made in two steps: first the queue pairs here,
/// then their connection to those of the peer.
#[derive(Debug)]
pub(crate) struct Prepared {
    context: Arc<dyn Context>,
    domain: Arc<dyn ProtectionDomain>,
    registrations: Arc<LocalRegistrations>,
    pub(crate) words: WordPage,
    ports: Vec<PolledPort>,
    /// Polls all queue pairs.
    pub(crate) reactor: Arc<Reactor>,
    settings: Settings,
    region_cache: Arc<RegionCache>,
}

/// The peer's side, as the peer describes it.
#[derive(Clone, Debug)]
pub(crate) struct PeerParameters {
    pub(crate) name: Arc<str>,
    /// The address of each queue pair, and the number of its receives.
    pub(crate) queue_pairs: Vec<(QueuePairAddress, u32)>,
    pub(crate) words: RemoteRange,
    pub(crate) places_in_order: bool,
    pub(crate) immediate: bool,
    /// The version of the tensor service that both sides use.
    pub(crate) version: u32,
}

impl PeerParameters {
    /// Returns the number of queue pairs that requests for named tensors are spread over. Peers before version 4
    /// know only the first one.
    pub(crate) fn named_queue_pairs(&self) -> u64 {
        if self.version >= 4 { self.queue_pairs.len().max(1) as u64 } else { 1 }
    }
}

/// The operations that a queue pair allows the peer. The grants limit which memory the peer may touch.
const ACCESS: fn() -> Access = || Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;

impl Prepared {
    /// The number of inline bytes to ask for. A network card takes some hundred at most. The software device
    /// copies all bytes in any case.
    const INLINE: u32 = 4096 + 64;

    /// Creates queue pairs on the device that `provider` opens.
    pub(crate) fn new(
        provider: Provider,
        queue_pairs: u32,
        settings: &Settings,
        budget: &Arc<Budget>,
        region_cache: &Arc<RegionCache>,
    ) -> Result<Self, TensorError> {
        let config = &settings.config;
        let context = open_device(provider, config).map_err(TensorError::local)?;
        let attributes = context.attributes().clone();
        let reactor = Reactor::current(&context, config).map_err(TensorError::local)?;
        let domain = context.alloc_protection_domain().map_err(TensorError::local)?;
        let pool_settings = PoolSettings { access: Access::LOCAL_WRITE, ..PoolSettings::default() };
        let pool = Pool::new(Arc::clone(&domain), pool_settings, Arc::clone(budget));
        let memory = region_cache.allocate_sink(WordPage::LENGTH)?.share();
        let words = WordPage::new(memory, &*domain)?;
        let capacity = QueuePairCapacity {
            send_requests: config.get_qp_queue_depth().min(attributes.max_work_requests),
            receive_requests: Port::RECEIVES,
            send_segments: 1,
            receive_segments: 1,
            inline: attributes.max_inline.min(Self::INLINE),
        };
        let limits = TransferLimits {
            requests: capacity.send_requests,
            message: attributes.max_message_size.min(settings.max_request_bytes),
            window: settings.max_outstanding_bytes,
        };
        let registrations = Arc::new(LocalRegistrations::new(Arc::clone(&domain), Arc::clone(budget)));
        let port = |index: u32| {
            let queue = Arc::clone(reactor.assign());
            let completions = queue.completion_queue();
            let queue_pair =
                domain.create_queue_pair(completions, completions, &capacity).map_err(TensorError::local)?;
            queue_pair.to_init(ACCESS()).map_err(TensorError::local)?;
            let work = queue_pair.local().cloned();
            let flights: InFlight<Token> = InFlight::new(queue_pair, Arc::clone(&registrations), limits);
            let places = capacity.send_requests + capacity.receive_requests + attributes.window_requests;
            let made = queue.add(places, |key| Port::new(flights, index, key, pool.clone()).map(Arc::new));
            let (key, port) = made.map_err(TensorError::local)??;
            let pace = reactor.pace_of_callers().map(Mutex::new);
            let idle_polls = AtomicU32::new(0);
            Ok(PolledPort { port, queue, work, idle_polls, key, pace, _reactor: Arc::clone(&reactor) })
        };
        let ports = (0..queue_pairs).map(port).collect::<Result<Vec<_>, TensorError>>()?;
        let (settings, region_cache) = (settings.clone(), Arc::clone(region_cache));
        Ok(Self { context, domain, registrations, words, ports, reactor, settings, region_cache })
    }

    /// Returns the address of each queue pair, and the number of its receives, for the peer.
    pub(crate) fn queue_pairs(&self) -> Vec<(Vec<u8>, u32)> {
        let address = |polled: &PolledPort| {
            let bytes = polled.port.with_queue_pair(|it| it.local_address().as_bytes().to_vec());
            (bytes.unwrap_or_default(), Port::RECEIVES)
        };
        self.ports.iter().map(address).collect()
    }

    /// Returns the name of the device.
    pub(crate) fn device(&self) -> &str {
        &self.context.attributes().name
    }

    /// Returns whether this side can learn of writes from memory alone.
    pub(crate) fn places_in_order(&self) -> bool {
        let in_order =
            |polled: &PolledPort| polled.port.with_queue_pair(|it| it.places_in_order()).unwrap_or(false);
        self.settings.notification.is_none_or(|wanted| wanted == Notification::Word)
            && self.ports.iter().all(in_order)
    }

    /// Returns whether the device has immediate data.
    pub(crate) fn immediate(&self) -> bool {
        let wanted = self.settings.notification;
        wanted != Some(Notification::Message) && self.context.attributes().immediate
    }

    /// Connects to the peer's side. This may block, as
    /// [`QueuePair::to_rtr`](tonic_rdma_verbs::QueuePair::to_rtr) does, because it needs the peer's device.
    pub(crate) fn connect(
        self,
        id: LinkId,
        peer: &PeerParameters,
        named: NamedTensors,
    ) -> Result<Arc<Link>, TensorError> {
        let notification = self.agree(peer)?;
        if peer.queue_pairs.len() != self.ports.len() {
            let (ours, theirs) = (self.ports.len(), peer.queue_pairs.len());
            return Err(TensorError::other(format!("{theirs} queue pairs were offered for {ours}")));
        }
        let peer_words = PeerWordPage::new(peer.words)
            .ok_or_else(|| TensorError::other("the peer's words are too few"))?;
        for (polled, (address, _)) in self.ports.iter().zip(&peer.queue_pairs) {
            let path = self.settings.config.path();
            let connected = polled.port.with_queue_pair(|queue_pair| {
                queue_pair.to_rtr(address, path)?;
                queue_pair.to_rts(path)
            });
            connected.transpose().map_err(TensorError::local)?;
        }
        let attributes = self.context.attributes();
        let announces_writes = self.ports.iter().all(|polled| polled.work.is_some());
        let announces_named = peer.version >= 4 && self.immediate() && peer.immediate;
        let pairs = PairTable::new(self.ports.len() as u32);
        let (name, queue_pairs) = (&*peer.name, self.ports.len());
        let span = tracing::info_span!("tensor_link", peer = name, device = &*attributes.name, queue_pairs);
        let link = Arc::new(Link {
            id,
            peer: Arc::clone(&peer.name),
            provider: attributes.provider,
            device: attributes.name.as_str().into(),
            notification,
            announces_writes,
            ports: self.ports,
            domain: self.domain,
            registrations: self.registrations,
            words: self.words,
            peer_words,
            pairs: Mutex::new(pairs),
            named_ports: peer.named_queue_pairs(),
            announces_named,
            fault: OnceLock::new(),
            ended: watch::Sender::new(false),
            region_cache: self.region_cache,
            kept: Mutex::default(),
            named,
            span,
        });
        link.named.begin(&link);
        let keeper: Arc<dyn Keeper> = Arc::clone(&link) as _;
        link.region_cache.add_keeper(Arc::downgrade(&keeper));
        for (port, (_, receives)) in link.ports().zip(&peer.queue_pairs) {
            port.set_owner(Arc::downgrade(&link), *receives);
        }
        link.span.in_scope(|| tracing::debug!(peer = &*link.peer, ?notification, "a tensor link is open"));
        Ok(link)
    }

    /// Returns how the sides of this link learn of arrivals.
    fn agree(&self, peer: &PeerParameters) -> Result<Notification, TensorError> {
        let found = if self.places_in_order() && peer.places_in_order {
            Notification::Word
        } else if self.immediate() && peer.immediate {
            Notification::Immediate
        } else {
            Notification::Message
        };
        let (name, lacks) = match self.settings.notification {
            Some(Notification::Word) if found != Notification::Word => ("word", "does not place in order"),
            Some(Notification::Immediate) if found != Notification::Immediate => {
                ("immediate data", "has none")
            }
            _ => return Ok(found),
        };
        let text = format!(
            "notification by {name} was demanded, but {} or the peer's device {lacks}",
            self.device()
        );
        Err(TensorError::new(TensorErrorKind::InvalidSetting, text))
    }
}

#[cfg(test)]
mod churn_tests;
