//! The common part of a queue pair's two queues: the state, the own end and the connection.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::panics::lock;
use crate::queue_pair::random;
use crate::soft::completion_queue::{CompletionSource, Queue, Role};
use crate::soft::device::Device;
use crate::soft::domain::Domain;
use crate::soft::events::{EventEnd, PeerWaker};
use crate::soft::peers::clients::{ClientMemory, SendAnswer, ServedQueuePair};
use crate::soft::peers::message::{Address, Answer, EndAnswer, Object};
use crate::soft::peers::peer::Peer;
use crate::soft::peers::received::Socket;
use crate::soft::peers::segments::Segments;
use crate::soft::shared::attention::{Attention, Guarded, Watch};
use crate::soft::shared::end::{EndState, Failure, PairEnd};
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::table::RegionTable;
use crate::{Access, PathSettings, QueuePairAddress, QueuePairCapacity, QueuePairState, VerbsError};

/// A queue pair without its two queues.
#[derive(Debug)]
pub(crate) struct Core {
    /// Set when the queue pair is complete.
    pair: OnceLock<Weak<dyn ServedQueuePair>>,
    pub(crate) domain: Arc<Domain>,
    pub(super) number: u32,
    pub(super) token: u64,
    pub(super) nonce: u64,
    pub(crate) capacity: QueuePairCapacity,
    pub(crate) send_queue: Arc<Queue>,
    pub(crate) receive_queue: Arc<Queue>,
    /// Our own end, which the peer reads.
    pub(crate) end: PairEnd,
    grant: Mutex<Grant>,
    state: AtomicU8,
    /// Whether the peer's last records are still taken, although the queue pair is in Error: because it is
    /// the peer that ended.
    drains: AtomicBool,
    access: OnceLock<Access>,
    settings: OnceLock<PathSettings>,
    connection: OnceLock<Connection>,
    /// The peer's memory that this process has mapped. Set when the peer takes our end.
    segments: OnceLock<Arc<Segments>>,
    debt: Debt,
    /// The position up to which this side has carried out the peer's records. The end shows it later: see
    /// [`report_taken`](Self::report_taken).
    taken: AtomicU64,
    /// The position in our ring up to which records are published. Written with the send queue locked.
    pub(crate) published: AtomicU64,
    /// Whether the device's thread guards the records of this queue pair.
    pub(in crate::soft) guarded: Guarded<Native, Shipping>,
    guard: Mutex<Guard>,
    /// Whether the peer has slept in its completion queue lately, so that it learns of records itself.
    peer_sleeps: AtomicBool,
}

/// The descriptor of the end, until the peer has taken it, and the token of the one queue pair that may take
/// it.
#[derive(Debug)]
struct Grant {
    fd: Option<OwnedFd>,
    to: Option<u64>,
    /// Completion queues to whose pollers the peer has a connection.
    events: Vec<u64>,
    /// Where these connections are kept as long as the peer's process lives.
    event_ends: Weak<Mutex<Vec<EventEnd>>>,
}

/// What the last checks of the guard have found.
#[derive(Debug, Default)]
struct Guard {
    /// The position that the peer had taken.
    taken: u64,
    /// The number of checks without a change of it.
    idle: u32,
    /// The number of checks since there were records for which the peer was not called, the number of checks
    /// that these records get, and when the last of them was.
    often: u32,
    most: u32,
    last: Option<Instant>,
    /// The peer's last request for an event, and when it was seen first.
    request: u64,
    asked: Option<Instant>,
}

impl Guard {
    /// Notes a check for records for which the peer was not called. Returns whether there were enough checks.
    /// There are the more, the sooner such records follow one another, because the threads that publish them
    /// have to wake the guard whenever it has begun to check seldom.
    fn has_checked(&mut self, now: Instant) -> bool {
        const LEAST: u32 = 2;
        const MOST: u32 = 32;
        const SOON: Duration = Duration::from_millis(16);
        if self.often == 0 {
            let is_soon = self.last.is_some_and(|last| now.saturating_duration_since(last) < SOON);
            self.most = if is_soon { (2 * self.most).min(MOST) } else { LEAST };
        }
        self.last = Some(now);
        self.often += 1;
        self.often > self.most
    }
}

const RTS: u8 = QueuePairState::Rts as u8;
const ERROR: u8 = QueuePairState::Error as u8;
/// In Error, and the user has dropped the queue pair.
const DESTROYED: u8 = ERROR + 1;

impl Core {
    /// Creates a queue pair in Reset. Reserves its places in the completion queues, but does not enter it there.
    pub(super) fn create(
        domain: &Arc<Domain>,
        send_queue: Arc<Queue>,
        receive_queue: Arc<Queue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<Self>, VerbsError> {
        let os = |error| VerbsError::os("creating a queue pair", error);
        let (token, nonce, key) = (random().map_err(os)?, random().map_err(os)?, random().map_err(os)?);
        let (end, fd) = PairEnd::create(PairEnd::ring_for(capacity.inline), nonce, key).map_err(os)?;
        let number = domain.device.queue_pair_number();
        send_queue.reserve()?;
        if !Arc::ptr_eq(&send_queue, &receive_queue) {
            receive_queue.reserve().inspect_err(|_| send_queue.leave(number))?;
        }
        Ok(Arc::new(Self {
            pair: OnceLock::new(),
            domain: Arc::clone(domain),
            number,
            token,
            nonce,
            capacity: capacity.clone(),
            send_queue,
            receive_queue,
            end,
            grant: Mutex::new(Grant { fd: Some(fd), to: None, events: Vec::new(), event_ends: Weak::new() }),
            state: AtomicU8::new(QueuePairState::Reset as u8),
            drains: AtomicBool::new(false),
            access: OnceLock::new(),
            settings: OnceLock::new(),
            connection: OnceLock::new(),
            segments: OnceLock::new(),
            debt: Debt::default(),
            taken: AtomicU64::new(0),
            published: AtomicU64::new(0),
            guarded: Guarded::default(),
            guard: Mutex::default(),
            peer_sleeps: AtomicBool::new(false),
        }))
    }

    /// Takes the reserved places in the completion queues. Polls visit `pair` from now on, and peers can find
    /// the queue pair.
    pub(super) fn enter<P>(&self, pair: &Arc<P>)
    where
        P: ServedQueuePair + CompletionSource,
    {
        let local = Arc::clone(pair) as Arc<dyn ServedQueuePair>;
        self.pair.get_or_init(|| Arc::downgrade(&local));
        let source: Arc<dyn CompletionSource> = Arc::clone(pair) as Arc<dyn CompletionSource>;
        let same = Arc::ptr_eq(&self.send_queue, &self.receive_queue);
        let role = Role { sends: true, receives: same };
        self.send_queue.enter(self.number, Arc::clone(&source), role);
        if !same {
            let role = Role { sends: false, receives: true };
            self.receive_queue.enter(self.number, source, role);
        }
        self.domain.add_queue_pair(self.number, Arc::downgrade(&local));
        self.domain.device.service.add_queue_pair(local);
    }

    #[inline]
    pub(crate) fn connection(&self) -> Option<&Connection> {
        self.connection.get()
    }

    /// Returns the peer's memory that this process has mapped, once the peer has taken our end.
    pub(crate) fn segments(&self) -> Option<&Arc<Segments>> {
        self.segments.get()
    }

    /// Returns the settings given to [`to_rts`](Self::to_rts).
    pub(crate) fn settings(&self) -> Option<&PathSettings> {
        self.settings.get()
    }

    /// Returns the rights that peers have at most.
    pub(crate) fn access(&self) -> Access {
        self.access.get().copied().unwrap_or(Access::LOCAL_READ)
    }

    pub(crate) fn state(&self) -> QueuePairState {
        if self.peer_is_gone() {
            return QueuePairState::Error;
        }
        QueuePairState::of(self.state.load(Acquire))
    }

    /// Returns whether this side is in Rts. Does not check the peer: if the peer has ended, this side moves
    /// to Error with the next poll. [`state`](Self::state) checks the peer, too.
    #[inline]
    pub(super) fn is_ready_to_send(&self) -> bool {
        self.state.load(Acquire) == RTS
    }

    /// Returns whether the queue pair is in Error.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.state.load(Acquire) >= ERROR
    }

    /// Returns whether this side takes no more records of the peer.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        match self.state.load(Acquire) {
            ERROR => !self.drains.load(Relaxed),
            state => state == DESTROYED,
        }
    }

    /// Returns whether the peer takes no more records, because its queue pair is in Error or destroyed, or
    /// its process is dead.
    #[inline]
    pub(crate) fn peer_has_ended(&self) -> bool {
        self.connection()
            .is_some_and(|connection| connection.end.state() == EndState::Ended || connection.peer.is_dead())
    }

    /// Returns whether the connection is over for both sides: the peer's process is dead, or the peer refused
    /// a record of ours. Its last records may still be in its ring.
    #[inline]
    pub(crate) fn peer_is_gone(&self) -> bool {
        self.connection()
            .is_some_and(|connection| connection.peer.is_dead() || connection.end.failure().is_some())
    }

    /// Moves to Error. The next poll flushes the outstanding requests. This function neither waits nor locks.
    pub(crate) fn fail(&self) {
        if self.domain.device.is_forked() {
            return;
        }
        if self.state.fetch_max(ERROR, AcqRel) < ERROR {
            self.show_progress();
            self.end.advance(EndState::Ended);
            self.notify();
            if let Some(connection) = self.connection() {
                connection.announce_end();
            }
        }
    }

    /// Moves to Error because requests can't be carried out. If the reason is the end of the peer, the last
    /// records of the peer are still taken.
    pub(crate) fn fail_requests(&self) {
        if self.peer_has_ended() && !self.has_failed() {
            self.drains.store(true, Relaxed);
        }
        self.fail();
    }

    /// Notes that a record of the peer can't be taken. No later record is taken, even if the peer has ended.
    pub(crate) fn stop_draining(&self) {
        self.drains.store(false, Relaxed);
    }

    /// Moves to Error because this side refuses a record of the peer, and tells the peer why.
    pub(crate) fn refuse(&self, failure: Failure) {
        self.show_progress();
        if !self.has_failed() {
            self.end.report(failure);
        }
        self.fail();
    }

    /// Logs that the peer broke the rules of the shared memory.
    pub(super) fn warn_of_violation(&self) {
        crate::throttled!(
            warn,
            queue_pair = self.number,
            "the connection ends: the peer wrote invalid values into the shared memory"
        );
    }

    /// Wakes the pollers of our own completion queues, if they sleep.
    pub(crate) fn notify(&self) {
        self.send_queue.notify();
        if !Arc::ptr_eq(&self.send_queue, &self.receive_queue) {
            self.receive_queue.notify();
        }
    }

    /// Tells the peer of new records, up to the position `published`; `debt` is their kind. Returns whether the
    /// peer has got an event.
    #[inline]
    pub(super) fn announce_news(&self, published: u64, debt: u8) -> bool {
        self.published.store(published, Relaxed);
        let Some(connection) = self.connection() else { return false };
        let is_called = connection.announce_news(debt);
        self.owe(connection, debt) | is_called
    }

    /// Notes that this side has carried out the peer's records up to the position `taken`. Before the visit
    /// ends, it tells the peer (see [`report_taken`](Self::report_taken)).
    #[inline]
    pub(super) fn carried_out(&self, taken: u64) {
        // SYNC: pairs with `show_progress`, which another thread may run: it shows the position after this
        // thread's copies.
        self.taken.store(taken, Release);
    }

    /// Tells the peer of the records that this side has [carried out](Self::carried_out), up to the position
    /// `taken`. `awaited`: the peer waits for one of them.
    ///
    /// Tells the peer now if the peer waits for it, or if the records fill an eighth of the ring; otherwise
    /// with the next poll that finds nothing else to do. So an answer to the peer's message does not wait for
    /// the cache line with the progress.
    #[inline]
    pub(super) fn report_taken(&self, connection: &Connection, taken: u64, awaited: bool) {
        let shown = self.end.taken_word().load(Relaxed);
        if awaited
            || taken.saturating_sub(shown) >= connection.end.ring_bytes() / 8
            || connection.awaits_progress()
            || self.is_armed()
        {
            self.show_progress();
            connection.announce_progress();
        }
        self.owe(connection, Debt::PROGRESS);
    }

    /// Shows the peer that `posted` receives were posted so far. Called with the target locked, so that one
    /// thread stores the number at a time. The number has a cache line of its own, which the peer reads only
    /// when it knows of no receive.
    #[inline]
    pub(super) fn show_posted(&self, posted: u64) {
        self.end.posted_word().store(posted, Release);
        if let Some(connection) = self.connection() {
            connection.announce_progress();
            self.owe(connection, Debt::PROGRESS);
        }
    }

    /// Shows the peer this side's progress. Several threads may do this at a time.
    fn show_progress(&self) {
        self.end.taken_word().fetch_max(self.taken.load(Acquire), Release);
    }

    /// Returns whether a poller of this queue pair sleeps, or is about to.
    #[inline]
    fn is_armed(&self) -> bool {
        self.receive_queue.is_armed() || self.send_queue.is_armed()
    }

    /// Leaves the check with a fence to the next poll; makes it now if the poller sleeps. Returns whether the
    /// peer has got an event for new records.
    #[inline]
    fn owe(&self, connection: &Connection, debt: u8) -> bool {
        if self.is_armed() {
            return self.check_attention(connection, debt);
        }
        self.debt.add(debt);
        false
    }

    /// Shows this side's progress, and checks the peer's attention with the fence. Returns whether the peer
    /// has got an event for new records.
    fn check_attention(&self, connection: &Connection, debt: u8) -> bool {
        if debt & Debt::PROGRESS != 0 {
            // The queue may have been armed after the caller had decided to show the progress later.
            self.show_progress();
        }
        connection.settle(debt)
    }

    /// Returns whether this side owes the peer a check.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        self.debt.is_any() || self.connection().is_some_and(Connection::is_unpoked)
    }

    /// Makes the checks that this side owes.
    #[cold]
    pub(super) fn settle(&self) {
        let mut debt = self.debt.take();
        let Some(connection) = self.connection() else { return };
        if connection.take_unpoked() {
            debt |= Debt::NEWS | Debt::PROGRESS;
        }
        if self.all_is_taken(connection) {
            // The peer may have asked for the next event since. These records make none.
            debt &= Debt::PROGRESS;
        }
        let is_called = self.check_attention(connection, debt);
        // SYNC: after the fence of `settle`: either the guard that ends sees the records, or this thread sees
        // that it has ended.
        if debt & (Debt::NEWS | Debt::WRITES) != 0 {
            self.guard_news(is_called, debt);
        }
    }

    /// Returns whether the peer has taken all our records, so that none of them makes it wake this side.
    pub(super) fn all_is_taken(&self, connection: &Connection) -> bool {
        connection.end.taken_word().load(Relaxed) == self.published.load(Relaxed)
    }

    /// Asks the service to notify the pollers of this queue pair at `when`.
    pub(crate) fn notify_at(&self, when: Instant) {
        if let Some(pair) = self.pair.get() {
            self.domain.device.service.notify_at(when, self.number, pair.clone());
        }
    }

    /// Has the device's thread guard new records. It seldom looks after those for which the peer `is_called`,
    /// and those for a peer that sleeps at times and is awake now.
    #[inline]
    pub(super) fn guard_news(&self, is_called: bool, debt: u8) {
        // A peer that sleeps asks for no event for WRITEs that it watches.
        let is_seldom = is_called || debt & Debt::NEWS != 0 && self.peer_sleeps.load(Relaxed);
        self.guard(if is_seldom { Watch::Seldom } else { Watch::Often });
    }

    /// Has the device's thread guard the records of this queue pair: if the peer takes none for a while, that
    /// thread asks the peer's device to carry them out.
    #[inline]
    pub(super) fn guard(&self, watch: Watch) {
        if !self.guarded.is(watch) {
            self.begin_to_guard(watch);
        }
    }

    #[cold]
    fn begin_to_guard(&self, watch: Watch) {
        let before = self.guarded.ask(watch);
        if let Some(pair) = self.pair.get()
            && before < watch
        {
            self.domain.device.service.guard((before == Watch::Never).then(|| pair.clone()), watch);
        }
    }

    /// Checks whether the peer takes our records. `is_unfinished`: requests of this side or READs of the peer
    /// wait, too. Returns how often to check from now on.
    pub(crate) fn watch_records(&self, unseen_progress: bool, is_unfinished: impl Fn() -> bool) -> Watch {
        /// Number of checks without progress after which the guard ends, if nothing waits for progress.
        const IDLE: u32 = 4;
        /// Number of checks without progress after which they are seldom, although something waits for it.
        const STUCK: u32 = 8;
        /// Time for which a peer that has slept counts as one that sleeps at times.
        const LATELY: Duration = Duration::from_millis(100);
        let Some(connection) = self.connection() else { return Watch::Never };
        self.settle();
        let published = self.published.load(Relaxed);
        let taken = connection.end.taken_word().load(Relaxed);
        let ended = self.has_failed() || self.peer_has_ended();
        let has_records = || !ended && (self.published.load(Relaxed) != taken || is_unfinished());
        let waits = taken != published || unseen_progress || is_unfinished();
        let now = Instant::now();
        let mut guard = lock(&self.guard);
        let request = Attention::of_own::<Native>(connection.end.attention_word()).request();
        if std::mem::replace(&mut guard.request, request) != request {
            guard.asked = Some(now);
        }
        let lately = |asked| now.saturating_duration_since(asked) < LATELY;
        self.peer_sleeps.store(guard.asked.is_some_and(lately), Relaxed);
        guard.idle = if guard.taken == taken { guard.idle + 1 } else { 0 };
        guard.taken = taken;
        let idle = guard.idle;
        // A record that was published before is guarded again, by this thread or by the one that published
        // it.
        if (ended || !waits && idle > IDLE) && self.guarded.lower(Watch::Never, has_records) {
            *guard = Guard { request, ..Guard::default() };
            self.peer_sleeps.store(false, Relaxed);
            return Watch::Never;
        }
        let may_wait = !self.guarded.is(Watch::Often)
            || guard.has_checked(now) && self.guarded.lower(Watch::Seldom, has_records);
        if may_wait {
            guard.often = 0;
        }
        drop(guard);
        if taken != published && idle > 0 {
            connection.poke();
        } else if unseen_progress {
            self.notify();
        }
        if may_wait && (!waits || idle > STUCK) { Watch::Seldom } else { Watch::Often }
    }

    /// Returns the attributes of this queue pair that its peer needs.
    fn describe(&self, access: Access, shares_memory: bool) -> EndAnswer {
        EndAnswer {
            access,
            shares_memory,
            ring: self.end.ring_bytes(),
            domain: self.domain.id,
            send_queue: self.send_queue.id,
            receive_queue: self.receive_queue.id,
        }
    }

    fn connect(&self, address: Address) -> Result<Connection, VerbsError> {
        let mut grant = lock(&self.grant);
        if grant.to.is_some_and(|to| to != address.token) {
            return Err(VerbsError::unreachable("another queue pair has connected to this one"));
        }
        grant.to = Some(address.token);
        drop(grant);
        Connection::import(&self.domain.device, address, self.token).inspect_err(|_| {
            // While no peer has taken the end, this queue pair may try another peer.
            let mut grant = lock(&self.grant);
            if grant.fd.is_some() {
                grant.to = None;
            }
        })
    }

    /// Moves the state from Reset to Init. Peers get `access` at most.
    pub(super) fn to_init(&self, access: Access) -> Result<(), VerbsError> {
        self.change("to_init", QueuePairState::Reset, QueuePairState::Init)?;
        self.access.get_or_init(|| access);
        Ok(())
    }

    /// Connects to the queue pair with the address `peer`, and moves the state from Init to Rtr.
    pub(super) fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError> {
        let state = self.state();
        if state != QueuePairState::Init || self.connection().is_some() {
            return Err(VerbsError::state("to_rtr", state));
        }
        let connection = self.connect(Address::decode(peer)?)?;
        if self.connection.set(connection).is_err() {
            return Err(VerbsError::state("to_rtr", self.state()));
        }
        self.end.set_rnr_timer(settings.min_rnr_timer);
        self.change("to_rtr", QueuePairState::Init, QueuePairState::Rtr)?;
        self.end.advance(EndState::Ready);
        if let (Some(connection), Some(pair)) = (self.connection(), self.pair.get().and_then(Weak::upgrade)) {
            connection.peer.add_user(pair);
            connection.settle(Debt::PROGRESS);
        }
        Ok(())
    }

    /// Moves the state from Rtr to Rts.
    pub(super) fn to_rts(&self, settings: &PathSettings) -> Result<(), VerbsError> {
        self.settings.get_or_init(|| settings.clone());
        self.change("to_rts", QueuePairState::Rtr, QueuePairState::Rts)
    }

    /// Returns the address that peers connect to.
    pub(super) fn address(&self) -> Address {
        Address { device: self.domain.device.id, number: self.number, token: self.token }
    }

    fn change(&self, call: &str, from: QueuePairState, to: QueuePairState) -> Result<(), VerbsError> {
        let changed = self.state.compare_exchange(from as u8, to as u8, AcqRel, Acquire);
        changed.map(|_| ()).map_err(|_| VerbsError::state(call, self.state()))
    }

    /// Moves to Error without a wake-up of the peer. No thread takes another record of the peer.
    pub(super) fn end(&self) {
        self.state.store(DESTROYED, Release);
        self.show_progress();
        self.end.advance(EndState::Ended);
    }

    /// Destroys the queue pair, because its user dropped it, after [`end`](Self::end). Waits for no peer: the
    /// peer only reads this end, and finds its state.
    pub(super) fn destroy(&self) {
        self.domain.device.service.remove_queue_pair(self.number);
        if let Some(connection) = self.connection() {
            connection.announce_end();
            connection.peer.remove_user(self.number);
        }
        self.send_queue.leave(self.number);
        if !Arc::ptr_eq(&self.send_queue, &self.receive_queue) {
            self.receive_queue.leave(self.number);
        }
        self.domain.remove_queue_pair(self.number);
    }

    /// Asks the peer for `attention`, as a new request. The owner calls [`Attention::fence`] before it checks
    /// for news.
    pub(crate) fn ask(&self, attention: Attention) {
        attention.ask::<Native>(self.end.attention_word());
    }

    /// Shows that this side wants `attention`. The owner calls [`Attention::fence`] before it checks for
    /// news.
    pub(crate) fn want(&self, attention: Attention) {
        attention.add::<Native>(self.end.attention_word());
    }

    /// Shows that this side does not want `attention` any more. Returns whether this side wanted a part of
    /// it.
    #[inline]
    pub(crate) fn want_no_more(&self, attention: Attention) -> bool {
        let wanted = Attention::of_own::<Native>(self.end.attention_word()).wants(attention);
        if wanted {
            attention.remove::<Native>(self.end.attention_word());
        }
        wanted
    }

    /// Answers a peer's request for `object` with `send`, if this queue pair may share the object. Returns
    /// what `send` returned.
    pub(super) fn grant(
        &self,
        object: Object,
        client: &ClientMemory,
        send: &mut SendAnswer<'_>,
    ) -> Option<io::Result<()>> {
        let device = &self.domain.device;
        match object {
            Object::End { requester } => {
                let access = *self.access.get()?;
                let mut grant = lock(&self.grant);
                if grant.to.is_some_and(|to| to != requester) {
                    return None;
                }
                let fd = grant.fd.take()?;
                grant.to = Some(requester);
                grant.event_ends = Arc::downgrade(&client.event_ends);
                self.segments.get_or_init(|| Arc::clone(&client.segments));
                Some(send(Answer::End(self.describe(access, client.is_shared)), &[fd.as_fd()]))
            }
            Object::Waits => lock(&self.grant).fd.as_ref().map(|_| send(Answer::Object, &[])),
            Object::Table if client.is_shared => Some(send(Answer::Object, &[device.table_fd.as_fd()])),
            _ => None,
        }
    }

    /// Takes over the one connection by which the process that has taken our end may wake the poller of the
    /// completion queue `id`.
    pub(super) fn add_event_socket(&self, id: u64, socket: &Arc<Socket>) -> Option<io::Result<()>> {
        let queue = [&self.send_queue, &self.receive_queue].into_iter().find(|queue| queue.id == id)?;
        let mut grant = lock(&self.grant);
        let ends = grant.event_ends.upgrade().filter(|_| !grant.events.contains(&id))?;
        Some(queue.add_event_socket(socket).map(|end| {
            grant.events.push(id);
            end.keep(&ends);
        }))
    }
}

/// Longest time that the peer's device may take, for the connection and all answers together.
const TIMEOUT: Duration = Duration::from_millis(2500);

/// The peer's side of a connected queue pair.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: Arc<Peer>,
    pub(crate) address: Address,
    unpoked: AtomicBool,
    /// The peer's end.
    pub(crate) end: PairEnd,
    /// The peer's table of regions; `None` if the peer or this side does not trust the other with its memory.
    pub(crate) table: Option<Arc<RegionTable>>,
    pub(crate) domain: u64,
    pub(crate) access: Access,
    send_event: PeerWaker,
    receive_event: PeerWaker,
}

/// The checks of the peer's attention that an end owes.
pub(super) type Debt = crate::soft::shared::attention::Debt<Native, Shipping>;

impl Connection {
    /// Connects the queue pair with the token `own_token` to the queue pair at `address`: maps the peer's end
    /// and table, and takes the sockets of its completion queues. The peer's device may take [`TIMEOUT`] for
    /// all that together.
    pub(crate) fn import(device: &Device, address: Address, own_token: u64) -> Result<Self, VerbsError> {
        device.check_answers(address.device)?;
        Self::ask(device, address, own_token).inspect_err(|error| {
            if error.system().is_some_and(|cause| cause.kind() == io::ErrorKind::TimedOut) {
                device.note_silence(address.device);
            }
        })
    }

    fn ask(device: &Device, address: Address, own_token: u64) -> Result<Self, VerbsError> {
        let deadline = Instant::now() + TIMEOUT;
        let peer = device.peer(address.device, deadline)?;
        let event_socket = |id| peer.event_socket(&address, id, device.reach(), deadline);
        let (end, answer) = peer.import_end(&address, own_token, deadline)?;
        let shares = answer.shares_memory && peer.shares_memory();
        Ok(Self {
            table: if shares { Some(peer.table(&address, deadline)?) } else { None },
            send_event: PeerWaker::new(event_socket(answer.send_queue)?),
            receive_event: PeerWaker::new(event_socket(answer.receive_queue)?),
            domain: answer.domain,
            access: answer.access,
            peer,
            address,
            unpoked: AtomicBool::new(false),
            end,
        })
    }

    /// Returns whether both sides let the other map their memory for reading.
    pub(crate) fn shares_memory(&self) -> bool {
        self.table.is_some()
    }

    /// Wakes the peer because there are new records, if the peer shows that it wants that. `debt` is the kind
    /// of records. Without a fence before the call, this side may overlook what the peer has just shown: see
    /// [`Debt`]. Returns whether the peer has got an event.
    #[inline]
    pub(super) fn announce_news(&self, debt: u8) -> bool {
        let attention = Attention::of_own::<Native>(self.end.attention_word());
        !attention.is_polled() && self.wake_for_news(attention, debt)
    }

    #[cold]
    fn wake_for_news(&self, attention: Attention, debt: u8) -> bool {
        let wanted = if debt & Debt::NEWS != 0 { Attention::NEWS } else { Attention::WRITES };
        let is_called = attention.wants(wanted);
        if is_called {
            self.receive_event.answer(attention);
        } else if attention.wants(Attention::DEVICE) {
            self.poke();
        }
        is_called
    }

    /// Returns whether the peer shows that it waits for progress of this side.
    #[inline]
    pub(super) fn awaits_progress(&self) -> bool {
        let attention = Attention::of_own::<Native>(self.end.attention_word());
        attention.wants(Attention::PROGRESS.with(Attention::STUCK))
    }

    /// Wakes the peer because this side has taken records or posted receives, if the peer shows that it waits
    /// for that. Without a fence before the call, this side may overlook what the peer has just shown: see
    /// [`Debt`].
    #[inline]
    pub(super) fn announce_progress(&self) {
        let attention = Attention::of_own::<Native>(self.end.attention_word());
        if attention.wants(Attention::PROGRESS.with(Attention::STUCK)) {
            self.wake_for_progress(attention);
        }
    }

    #[cold]
    fn wake_for_progress(&self, attention: Attention) {
        if attention.wants(Attention::PROGRESS) {
            self.send_event.answer(attention);
        }
        if attention.wants(Attention::STUCK) {
            // READs that the peer serves may wait for room in its ring, which the poller of its receives
            // watches.
            self.wake_for_news(attention, Debt::NEWS);
        }
    }

    /// Checks once more whether the peer wants to be woken, so that it is woken for all that this side has
    /// stored before. Returns whether the peer has got an event for new records.
    pub(super) fn settle(&self, debt: u8) -> bool {
        let attention = Attention::of_peer::<Native, Shipping>(self.end.attention_word());
        let has_news = debt & (Debt::NEWS | Debt::WRITES) != 0;
        let is_called = has_news && !attention.is_polled() && self.wake_for_news(attention, debt);
        if debt & Debt::PROGRESS != 0 && attention.wants(Attention::PROGRESS.with(Attention::STUCK)) {
            self.wake_for_progress(attention);
        }
        is_called
    }

    /// Wakes the peer because this side has ended.
    pub(crate) fn announce_end(&self) {
        let attention = Attention::of_peer::<Native, Shipping>(self.end.attention_word());
        if attention.wants(Attention::NEWS) {
            self.receive_event.wake();
        }
        if attention.wants(Attention::PROGRESS) {
            self.send_event.wake();
        }
    }

    /// Asks the peer's device to check its queue pair, because no thread of the peer seems to poll it.
    pub(crate) fn poke(&self) {
        if !self.peer.poke(&self.address) {
            self.unpoked.store(true, Relaxed);
        }
    }

    /// Returns whether the peer's device could not be asked, because the socket was full. Other queue pairs
    /// of both processes may have filled the socket.
    #[inline]
    pub(super) fn is_unpoked(&self) -> bool {
        self.unpoked.load(Relaxed)
    }

    /// Notes that the peer's device is asked again now, if it is still needed. Returns whether it could not
    /// be asked before.
    pub(super) fn take_unpoked(&self) -> bool {
        self.unpoked.swap(false, Relaxed)
    }
}
