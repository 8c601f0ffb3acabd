//! The device's thread: sends descriptors to peers that ask for them, notices when peers die, wakes pollers
//! at deadlines, and carries out the records of queue pairs that no thread polls.
//!
//! The thread never waits for a peer, and takes no lock that is held across a call to a peer, so two devices
//! can't wait for each other.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::SocketFlags;

use super::clients::{Client, Clients, ServedQueuePair};
use super::level::Policy;
use super::message::{self, Answer, Object, Reply, Request};
use super::peer::{self, Peer};
use super::received::{Received, Socket};
use super::segments::LeaveAnswer;
use super::sockets::Listener;
use crate::host_memory::Charge;
use crate::panics::lock;
use crate::soft::shared::attention::Watch;
use crate::soft::system::timespec;
use crate::soft::{biased_lock, closer};

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
/// Most requests of one client that are answered before the requests of the other clients.
const REQUESTS_PER_ROUND: usize = 8;

/// Time between two checks of the guarded queue pairs while a peer may have records that no thread takes.
const SHORT_PAUSE: Duration = Duration::from_millis(4);
/// The same while all peers have got events, or sleep at times and are awake.
const LONG_PAUSE: Duration = Duration::from_millis(32);

/// The checks for segments that peers are to be reminded of.
#[derive(Debug)]
struct Reminders {
    /// The last check, and the next one.
    checked: Instant,
    next: Option<Instant>,
}

/// Charges of memory that a peer may have mapped, after the last connection to the peer has gone.
#[derive(Debug)]
struct Kept {
    socket: Socket,
    /// Dropped with this value.
    _charges: Vec<Charge>,
    /// The number of answers that may come before the one that says that the memory is unmapped.
    late_answers: u64,
}

/// State that the thread and the device share.
#[derive(Debug)]
pub(crate) struct Service {
    epoll: OwnedFd,
    listener: Listener,
    policy: Policy,
    wake: OwnedFd,
    stop: AtomicBool,
    next_token: AtomicU64,
    /// Peers whose death is watched.
    peers: Mutex<HashMap<u64, Weak<Peer>>>,
    /// Queue pairs of this device, by number.
    queue_pairs: Mutex<HashMap<u32, Weak<dyn ServedQueuePair>>>,
    deadlines: Mutex<BTreeMap<(Instant, u32), Weak<dyn ServedQueuePair>>>,
    /// Queue pairs whose records this thread watches.
    guarded: Mutex<Vec<Weak<dyn ServedQueuePair>>>,
    /// Whether the next check of them is due after the short pause.
    hurries: AtomicBool,
    /// Whether a segment was withdrawn since the last check for those that peers are to be reminded of.
    reminding: AtomicBool,
    /// Charges of memory that a peer may have mapped, by the token of the socket to that peer.
    kept: Mutex<HashMap<u64, Kept>>,
}

impl Service {
    /// Serves the processes that connect to `listener`, if `policy` lets them in.
    pub(crate) fn new(listener: Listener, policy: Policy) -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, listener.socket(), EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self {
            epoll,
            listener,
            policy,
            wake,
            stop: AtomicBool::new(false),
            next_token: AtomicU64::new(WAKE + 1),
            peers: Mutex::default(),
            queue_pairs: Mutex::default(),
            deadlines: Mutex::default(),
            guarded: Mutex::default(),
            hurries: AtomicBool::new(false),
            reminding: AtomicBool::new(false),
            kept: Mutex::default(),
        })
    }

    /// Takes the device's socket away, and asks the thread to end.
    pub(crate) fn stop(&self) {
        self.listener.remove();
        self.stop.store(true, SeqCst);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn add_queue_pair(&self, queue_pair: Arc<dyn ServedQueuePair>) {
        lock(&self.queue_pairs).insert(queue_pair.number(), Arc::downgrade(&queue_pair));
    }

    pub(crate) fn remove_queue_pair(&self, number: u32) {
        lock(&self.queue_pairs).remove(&number);
    }

    pub(crate) fn has_queue_pair(&self, number: u32) -> bool {
        lock(&self.queue_pairs).contains_key(&number)
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn queue_pair(&self, number: u32) -> Option<Arc<dyn ServedQueuePair>> {
        lock(&self.queue_pairs).get(&number).and_then(Weak::upgrade)
    }

    /// Watches `peer`. The thread calls [`Peer::mark_dead`] when the peer's end of the socket closes.
    pub(crate) fn watch(&self, peer: &Arc<Peer>) -> io::Result<()> {
        let token = self.next_token.fetch_add(1, SeqCst);
        let mut peers = lock(&self.peers);
        peers.retain(|_, peer| peer.strong_count() > 0);
        peers.insert(token, Arc::downgrade(peer));
        drop(peers);
        // epoll always reports hang-ups. Data is not watched, because the thread that sent a request reads
        // the reply.
        epoll::add(&self.epoll, peer.socket(), EventData::new_u64(token), EventFlags::RDHUP)?;
        Ok(())
    }

    /// Keeps the charges until the peer at the other side of `socket` says that it has unmapped the memory of
    /// this process, or is gone. Up to `late_answers` other answers may come first.
    pub(crate) fn keep_until_unmapped(&self, socket: Socket, charges: Vec<Charge>, late_answers: u64) {
        let token = self.next_token.fetch_add(1, SeqCst);
        let flags = EventFlags::IN | EventFlags::RDHUP;
        // The socket is watched without its earlier token, which belongs to a peer that is gone.
        let _ = epoll::delete(&self.epoll, &socket);
        let mut kept = lock(&self.kept);
        if epoll::add(&self.epoll, &socket, EventData::new_u64(token), flags).is_ok() {
            kept.insert(token, Kept { socket, _charges: charges, late_answers });
        }
    }

    /// Reminds peers from now on of the segments that are withdrawn, until the peers have confirmed all of
    /// them.
    pub(crate) fn remind_later(&self) {
        if !self.reminding.swap(true, SeqCst) {
            self.wake();
        }
    }

    /// Reminds peers of segments that are withdrawn, if a reminder is due. Returns when the next one is due;
    /// `None` if the peers have confirmed all.
    fn remind(&self, reminders: &mut Reminders) -> Option<Instant> {
        /// Least time between two checks for segments that peers are to be reminded of.
        const PAUSE: Duration = Duration::from_millis(100);
        let soonest = reminders.checked + PAUSE;
        let due = if self.reminding.load(SeqCst) { Some(soonest) } else { reminders.next }?;
        let now = Instant::now();
        if due > now {
            return Some(due);
        }
        // Before the check, so that a segment that is withdrawn meanwhile is not overlooked.
        self.reminding.store(false, SeqCst);
        let peers: Vec<_> = lock(&self.peers).values().filter_map(Weak::upgrade).collect();
        let next = peers.iter().filter_map(|peer| peer.remind(now)).min();
        *reminders = Reminders { checked: now, next: next.map(|next| next.max(now + PAUSE)) };
        reminders.next
    }

    /// Wakes the pollers of the completion queues of queue pair `number` at `when`, so that a poll finds the
    /// deadline passed.
    pub(crate) fn notify_at(&self, when: Instant, number: u32, queue_pair: Weak<dyn ServedQueuePair>) {
        let mut deadlines = lock(&self.deadlines);
        let earliest = deadlines.first_key_value().is_none_or(|(&(first, _), _)| when < first);
        deadlines.insert((when, number), queue_pair);
        drop(deadlines);
        if earliest {
            self.wake();
        }
    }

    /// Watches the records of one more queue pair as often as `watch`, or of a known one more often than
    /// before, until it needs that no longer.
    pub(crate) fn guard(&self, queue_pair: Option<Weak<dyn ServedQueuePair>>, watch: Watch) {
        let mut guarded = lock(&self.guarded);
        let first = guarded.is_empty();
        guarded.extend(queue_pair);
        drop(guarded);
        let hurries = watch == Watch::Often && !self.hurries.swap(true, SeqCst);
        if first || hurries {
            self.wake();
        }
    }

    /// Watches the guarded queue pairs. Returns the time until the next check; `None` if there are none.
    fn watch_guarded(&self) -> Option<Duration> {
        // Before the checks, so that a queue pair that hurries meanwhile is not overlooked.
        self.hurries.store(false, SeqCst);
        let mut checked = std::mem::take(&mut *lock(&self.guarded));
        let mut often = Watch::Never;
        checked.retain(|queue_pair| {
            let watch = queue_pair.upgrade().map_or(Watch::Never, |queue_pair| queue_pair.watch());
            often = often.max(watch);
            watch != Watch::Never
        });
        let mut guarded = lock(&self.guarded);
        guarded.append(&mut checked);
        if guarded.is_empty() {
            return None;
        }
        drop(guarded);
        // There is traffic, so the locks of queue pairs are worth a bias.
        biased_lock::prepare();
        Some(if often == Watch::Often { SHORT_PAUSE } else { LONG_PAUSE })
    }

    /// Returns the time until the next check of the guarded queue pairs is due, after a pause of `pause`;
    /// `None` if there are none.
    fn next_check(&self, pause: Duration) -> Option<Duration> {
        let pause = if self.hurries.load(SeqCst) { SHORT_PAUSE } else { pause };
        (!lock(&self.guarded).is_empty()).then_some(pause)
    }

    /// Carries out records of the queue pairs that peers have asked for, a limited number of each. Returns
    /// whether there are more.
    fn carry_out(&self, asked: &mut Vec<Weak<dyn ServedQueuePair>>) -> bool {
        asked.retain(|queue_pair| queue_pair.upgrade().is_some_and(|queue_pair| queue_pair.carry_out()));
        !asked.is_empty()
    }

    /// Runs the thread until [`stop`](Self::stop).
    pub(crate) fn run(&self) {
        let mut clients = Clients::default();
        let mut events = Vec::with_capacity(64);
        let mut asked = Vec::new();
        let (mut checked, mut pause) = (Instant::now(), SHORT_PAUSE);
        let mut reminders = Reminders { checked: Instant::now(), next: None };
        while !self.stop.load(SeqCst) {
            let deadline = self.notify_due();
            let is_asked = !asked.is_empty();
            let more = self.carry_out(&mut asked);
            if is_asked {
                // There is traffic, perhaps only of the peer, so the locks of queue pairs are worth a bias.
                biased_lock::prepare();
            }
            let mut check = self.next_check(pause);
            if check.is_some_and(|pause| checked.elapsed() >= pause) {
                checked = Instant::now();
                pause = self.watch_guarded().unwrap_or(LONG_PAUSE);
                check = self.next_check(pause);
            }
            let limit = match more {
                true => Some(Duration::ZERO),
                false => check.map(|pause| pause.saturating_sub(checked.elapsed())),
            };
            let reminder =
                self.remind(&mut reminders).map(|due| due.saturating_duration_since(Instant::now()));
            let timeout = [deadline, limit, reminder].into_iter().flatten().min().map(timespec);
            events.clear();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, spare, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the soft device's thread can't wait for events and ends");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(&mut clients),
                    WAKE => {
                        let _ = rustix::io::read(&self.wake, &mut [0u8; 8][..]);
                    }
                    token => self.handle(token, &mut clients, &mut asked),
                }
            }
        }
    }

    fn handle(&self, token: u64, clients: &mut Clients, asked: &mut Vec<Weak<dyn ServedQueuePair>>) {
        if self.end_kept(token) {
            return;
        }
        if clients.get(token).is_some() {
            if !self.serve(token, clients, asked) {
                clients.remove(token);
            }
            return;
        }
        let peer = lock(&self.peers).remove(&token).and_then(|peer| peer.upgrade());
        if let Some(peer) = peer {
            let _ = epoll::delete(&self.epoll, peer.socket());
            tracing::debug!(process = peer.process, "a process that this one had connections with has ended");
            peer.mark_dead();
        }
    }

    /// Drops the charges that are kept for the peer at the socket `token`, if the peer has unmapped the
    /// memory or is gone. Returns false if none are kept.
    fn end_kept(&self, token: u64) -> bool {
        let mut kept = lock(&self.kept);
        let Some(Kept { socket, late_answers, .. }) = kept.get_mut(&token) else { return false };
        let over = match message::receive_reply(&*socket) {
            // A late answer to an earlier request, which a thread has given up.
            Ok((reply, _)) if reply.sequence != message::LEAVE && *late_answers > 0 => {
                *late_answers -= 1;
                false
            }
            Ok(_) => true,
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        };
        let ended = if over { kept.remove(&token) } else { None };
        drop(kept);
        drop(ended);
        true
    }

    fn accept(&self, clients: &mut Clients) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accepted = if closer::is_full() {
            Err(rustix::io::Errno::MFILE)
        } else {
            rustix::net::accept_with(self.listener.socket(), flags)
        };
        let client = match accepted {
            Ok(client) => Socket::new(client),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {
                return;
            }
            Err(error) => {
                // Most likely no descriptors are left, or too many of peers are not closed yet. The listener
                // stays readable, so this thread would spin without the pause.
                crate::throttled!(warn, %error, "the soft device can't accept a peer");
                std::thread::sleep(Duration::from_millis(10));
                return;
            }
        };
        let identity = match peer::check_owner(&client, self.policy) {
            Ok(identity) => identity,
            Err(error) => {
                crate::throttled!(warn, %error, "the soft device refused a peer");
                return;
            }
        };
        if clients.are_many() {
            clients.prune(&lock(&self.queue_pairs));
        }
        clients.make_room();
        let token = self.next_token.fetch_add(1, SeqCst);
        if epoll::add(&self.epoll, &client, EventData::new_u64(token), EventFlags::IN).is_ok() {
            clients.insert(token, client, identity);
        }
    }

    /// Answers requests that have come, a limited number of them. The epoll descriptor then reports the
    /// client again, after the other clients, because it reports descriptors in turn as long as they are
    /// readable. Returns false if the connection has ended or failed.
    fn serve(&self, token: u64, clients: &mut Clients, asked: &mut Vec<Weak<dyn ServedQueuePair>>) -> bool {
        for _ in 0..REQUESTS_PER_ROUND {
            let Some(client) = clients.get(token) else { return false };
            let (request, fd) = match message::receive_request(&client.socket) {
                Ok(Some(request)) => request,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Ok(None) | Err(_) => return false,
            };
            match self.answer(client, &request, fd, asked) {
                Ok(Served::Proven) if clients.prove(token, request.number) => {
                    clients.prune(&lock(&self.queue_pairs));
                }
                Ok(Served::Proven | Served::Unproven) => {}
                Ok(Served::Taken) | Err(_) => return false,
            }
        }
        true
    }

    /// Answers a request.
    fn answer(
        &self,
        client: &Client,
        request: &Request,
        fd: Option<Received>,
        asked: &mut Vec<Weak<dyn ServedQueuePair>>,
    ) -> io::Result<Served> {
        let reply = |answer, fds: &[BorrowedFd<'_>]| {
            message::send_reply(&client.socket, &Reply { sequence: request.sequence, answer }, fds)
        };
        let segments = &client.memory.segments;
        if request.object == Object::Leave {
            let (socket, sequence) = (Arc::downgrade(&client.socket), request.sequence);
            segments.unmap_all(LeaveAnswer { socket, sequence });
            return Ok(Served::Unproven);
        }
        let found = lock(&self.queue_pairs).get(&request.number).cloned();
        let named = found.as_ref().and_then(Weak::upgrade).filter(|named| named.token() == request.token);
        let unmapped = match request.object {
            Object::Withdraw { id } => segments.unmap(id),
            _ => false,
        };
        let Some(queue_pair) = named else {
            if request.object.has_reply() {
                reply(Answer::Refused, &[])?;
            }
            return Ok(Served::Unproven);
        };
        if let Object::EventSocket(id) = request.object {
            let Some(added) = queue_pair.add_event_socket(id, &client.socket) else {
                reply(Answer::Refused, &[])?;
                return Ok(Served::Unproven);
            };
            added?;
            // From here on, the thread that polls the queue reads the socket.
            let _ = epoll::delete(&self.epoll, &client.socket);
            reply(Answer::Object, &[])?;
            return Ok(Served::Taken);
        }
        if request.object != Object::Waits {
            client.take_descriptors();
        }
        match request.object {
            Object::Nothing => {
                let known = |other: &Weak<dyn ServedQueuePair>| {
                    other.upgrade().is_some_and(|other| other.number() == request.number)
                };
                if !asked.iter().any(known) {
                    asked.extend(found);
                }
            }
            Object::Offer { id, length } => {
                if client.memory.is_shared
                    && let Some(fd) = fd
                    && segments.map(id, length, fd)
                {
                    queue_pair.confirm(Object::Mapped { id });
                }
            }
            Object::Withdraw { id } if unmapped => {
                let queue_pair = Arc::downgrade(&queue_pair);
                closer::free(move || {
                    if let Some(queue_pair) = queue_pair.upgrade() {
                        queue_pair.confirm(Object::Unmapped { id });
                    }
                });
            }
            // The last view says it.
            Object::Withdraw { .. } => {}
            Object::Mapped { .. } | Object::Unmapped { .. } => queue_pair.take_news(request.object),
            Object::End { .. } | Object::Table | Object::EventSocket(_) | Object::Leave | Object::Waits => {
                let granted =
                    queue_pair.grant(request.object, &client.memory, &mut |answer, fds| reply(answer, fds));
                granted.unwrap_or_else(|| reply(Answer::Refused, &[]))?;
            }
        }
        Ok(if request.object == Object::Waits { Served::Unproven } else { Served::Proven })
    }

    /// Wakes the pollers of the queue pairs whose deadlines have passed. Returns the time until the next
    /// deadline.
    fn notify_due(&self) -> Option<Duration> {
        loop {
            let mut deadlines = lock(&self.deadlines);
            let first = deadlines.first_entry()?;
            let left = first.key().0.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                return Some(left);
            }
            let due = first.remove();
            drop(deadlines);
            if let Some(queue_pair) = due.upgrade() {
                queue_pair.notify();
            }
        }
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    /// It named a queue pair and its token.
    Proven,
    /// It did not, or only asked whether the queue pair waits.
    Unproven,
    /// The connection belongs to a completion queue now.
    Taken,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use crate::soft::peers::level::Identity;
    use std::os::fd::AsFd;

    use super::*;
    use crate::soft::forked::Origin;
    use crate::soft::peers::message::{DeviceId, Object};
    use crate::soft::peers::received::tests::{ends_soon, lingering, socket_pair};
    use crate::soft::peers::sockets::Sockets;

    /// One round of a client that has asked very often takes a bounded time.
    #[test]
    fn a_flood_of_requests_is_answered_in_turns() {
        let device = DeviceId { process: 1, nonce: crate::queue_pair::random().unwrap(), directory: 0 };
        let listener = Sockets::Namespace.listen(device, Policy::User, Origin::here().unwrap()).unwrap();
        let service = Service::new(listener, Policy::User).unwrap();
        let (ours, theirs) = socket_pair();
        for sequence in 0..100 {
            let request = Request { sequence, number: 1, token: 2, object: Object::Table };
            message::send_request(&theirs, &request, None).unwrap();
        }
        let identity = Identity::of(&ours, true).unwrap();
        let mut clients = Clients::default();
        clients.insert(5, Socket::new(ours), identity);
        let mut answered = 0;
        for round in 1..=100_usize.div_ceil(REQUESTS_PER_ROUND) {
            assert!(service.serve(5, &mut clients, &mut Vec::new()));
            while message::receive_reply(&theirs).is_ok() {
                answered += 1;
            }
            assert_eq!(answered, 100.min(round * REQUESTS_PER_ROUND));
        }
        drop(theirs);
        assert!(!service.serve(5, &mut clients, &mut Vec::new()));
    }

    /// A thread that asked the peer gave up, and the peer's answer comes after the request to leave.
    #[test]
    fn a_late_answer_is_no_word_that_memory_is_unmapped() {
        let device = DeviceId { process: 1, nonce: crate::queue_pair::random().unwrap(), directory: 0 };
        let listener = Sockets::Namespace.listen(device, Policy::User, Origin::here().unwrap()).unwrap();
        let service = Service::new(listener, Policy::User).unwrap();
        for ends in [false, true] {
            let (ours, theirs) = socket_pair();
            let charge: Charge = Arc::new(());
            let token = service.next_token.load(SeqCst);
            service.keep_until_unmapped(Socket::new(ours), vec![Arc::clone(&charge)], 2);
            let handle = || service.handle(token, &mut Clients::default(), &mut Vec::new());
            handle();
            for (sequence, answer) in [(1, Answer::Object), (2, Answer::Refused)] {
                message::send_reply(&theirs, &Reply { sequence, answer }, &[]).unwrap();
                handle();
                assert_eq!(Arc::strong_count(&charge), 2, "the peer has not said that it has unmapped");
            }
            if ends {
                drop(theirs);
            } else {
                let reply = Reply { sequence: message::LEAVE, answer: Answer::Object };
                message::send_reply(&theirs, &reply, &[]).unwrap();
            }
            handle();
            assert_eq!(Arc::strong_count(&charge), 1);
        }
    }

    /// A descriptor that a client sends with a request can block its last close. The thread must not be the
    /// one that closes it.
    #[test]
    fn a_descriptor_that_lingers_does_not_stop_the_thread() {
        let (ours, theirs) = socket_pair();
        let (socket, other_end) = lingering();
        let request = Request { sequence: 1, number: 1, token: 2, object: Object::Table };
        message::send_request(&theirs, &request, Some(socket.as_fd())).unwrap();
        drop(socket);
        let served = ends_soon(move || {
            let device = DeviceId { process: 1, nonce: crate::queue_pair::random().unwrap(), directory: 0 };
            let listener = Sockets::Namespace.listen(device, Policy::User, Origin::here().unwrap()).unwrap();
            let service = Service::new(listener, Policy::User).unwrap();
            let identity = Identity::of(&ours, true).unwrap();
            let mut clients = Clients::default();
            clients.insert(5, Socket::new(ours), identity);
            service.serve(5, &mut clients, &mut Vec::new())
        });
        assert!(!served);
        drop(other_end);
    }
}
