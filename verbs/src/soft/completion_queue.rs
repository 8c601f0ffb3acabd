//! Completion queues.
//!
//! A completion queue has no memory that a peer can write. Completions stay with their queue pairs until a
//! thread polls: a poll checks the next record of each queue pair, and the progress of its requests. Each
//! such visit leaves behind what the poll has to do when it has left the queue pair. See
//! [`events`](super::events) for threads that sleep.

use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use super::biased_lock::BiasedLock;
use super::device::Device;
use super::events::{EventEnd, Events};
use super::peers::received::Socket;
use super::shared::attention::{Arming, Attention};
use super::shared::platform::{Native, Shipping};
use crate::{CompletionQueue, VerbsError, WorkCompletion};

/// Maximum number of queue pairs of one completion queue.
const PAIRS: u32 = 64 * 64;

/// A completion queue.
#[derive(Debug)]
pub(super) struct Queue {
    device: Arc<Device>,
    pub(super) id: u64,
    capacity: AtomicUsize,
    /// Held during a poll, so one thread polls at a time. Locked before any lock of a queue pair, never
    /// after.
    members: BiasedLock<Members>,
    /// Signalled requests whose completions were not polled yet.
    signaled: AtomicUsize,
    overrun: AtomicBool,
    /// Whether the last poll has moved a part of a message, whose rest follows when the other side has
    /// continued.
    is_moving: AtomicBool,
    /// Whether the next completion makes an event.
    armed: Arming<Native, Shipping>,
    events: Arc<Events>,
}

/// A queue pair, as its completion queues use it.
pub(super) trait CompletionSource: Debug + Send + Sync {
    /// If there is something to do, carries out the peer's records and the own requests that can run now, and
    /// moves completions to `sink`. Without work this takes no lock of the queue pair. (A check of the peer
    /// that is owed may lock the list of guarded queue pairs.) Returns what is left to do, or `None` if there is
    /// work, of which nothing is done because `sink` is full.
    fn poll(&self, role: Role, poll: Poll, sink: &mut Sink<'_>) -> Option<Remaining>;

    /// Asks the peer for an event with its next record, and with the next progress of own requests.
    fn ask_for_events(&self, role: Role);

    /// Takes back all requests for wake-ups, because a thread polls.
    fn is_polled(&self, role: Role);

    /// Moves the queue pair to Error, because the completion queue has overrun.
    fn fail(&self);
}

/// Checks that a queue of the device may hold `capacity` completions.
fn check_capacity(device: &Device, capacity: u32) -> Result<(), VerbsError> {
    VerbsError::check_limits([("completion queue depth", capacity, device.attributes.max_completions)])
}

/// The queue pairs that report here.
#[derive(Debug, Default)]
struct Members {
    list: Vec<Member>,
    /// The number of queue pairs that are in the list, or have a place there reserved.
    used: u32,
    /// The member that is checked first.
    cursor: usize,
    /// Whether this poll checks for receives before sends.
    receives_first: bool,
}

#[derive(Debug)]
struct Member {
    number: u32,
    source: Arc<dyn CompletionSource>,
    role: Role,
}

/// The queues of a queue pair that complete on a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) sends: bool,
    pub(super) receives: bool,
}

/// A poll of a completion queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Poll {
    /// Completions of receives come before those of sends.
    pub(super) receives_first: bool,
    /// The queue is armed, so that queue pairs keep their requests for events.
    pub(super) armed: bool,
}

/// What a visit of a queue pair leaves to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Remaining {
    /// Nothing.
    Nothing,
    /// The rest of a message, of which this visit has moved a part. It follows when the other side has
    /// continued.
    Message,
    /// Work that the next visit can carry out.
    Work,
}

impl Remaining {
    /// Returns [`Message`](Self::Message) on the condition.
    #[inline]
    pub(super) fn message_if(condition: bool) -> Self {
        if condition { Self::Message } else { Self::Nothing }
    }

    /// Returns [`Work`](Self::Work) on the condition.
    #[inline]
    pub(super) fn work_if(condition: bool) -> Self {
        if condition { Self::Work } else { Self::Nothing }
    }
}

/// The caller's array, which polling fills.
#[derive(Debug)]
pub(super) struct Sink<'a> {
    completions: &'a mut [WorkCompletion],
    filled: usize,
}

impl Sink<'_> {
    /// Returns whether there is no room left.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.filled == self.completions.len()
    }

    /// Adds a completion. The caller has checked that there is room.
    #[inline]
    pub(super) fn push(&mut self, completion: WorkCompletion) {
        if let Some(entry) = self.completions.get_mut(self.filled) {
            *entry = completion;
            self.filled += 1;
        }
    }
}

impl Queue {
    /// Creates a queue for `capacity` completions of sends.
    pub(super) fn new(device: &Arc<Device>, capacity: u32) -> Result<Self, VerbsError> {
        check_capacity(device, capacity)?;
        let events = Events::new().map_err(|error| VerbsError::os("creating a completion queue", error))?;
        Ok(Self {
            device: Arc::clone(device),
            id: device.object_id(),
            capacity: AtomicUsize::new(capacity as usize),
            members: BiasedLock::new(Members::default()),
            signaled: AtomicUsize::new(0),
            overrun: AtomicBool::new(false),
            is_moving: AtomicBool::new(false),
            armed: Arming::default(),
            events: Arc::new(events),
        })
    }

    /// Returns the queue behind the trait object, if it is one of this device.
    pub(super) fn of(
        queue: &Arc<dyn CompletionQueue>,
        device: &Arc<Device>,
    ) -> Result<Arc<Self>, VerbsError> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(queue) as _;
        let own = any.downcast().ok().filter(|queue: &Arc<Self>| Arc::ptr_eq(&queue.device, device));
        own.ok_or_else(|| VerbsError::foreign("completion queue"))
    }

    /// Takes over a connection by which a peer wakes the poller of this queue, until the result is
    /// dropped.
    pub(super) fn add_event_socket(&self, socket: &Arc<Socket>) -> io::Result<EventEnd> {
        self.events.add_socket(socket)
    }

    /// Takes the events that peers have made. Returns their number.
    #[cfg(test)]
    pub(super) fn take_peers_events(&self) -> usize {
        self.events.take_peers_events()
    }

    /// Reserves a place for a queue pair that is about to be created.
    pub(super) fn reserve(&self) -> Result<(), VerbsError> {
        let mut members = self.members.lock();
        if members.used == PAIRS {
            let asked = u64::from(PAIRS) + 1;
            return Err(VerbsError::limit("queue pairs of one completion queue", asked, PAIRS.into()));
        }
        members.used += 1;
        Ok(())
    }

    /// Enters queue pair `number` at a reserved place.
    pub(super) fn enter(&self, number: u32, source: Arc<dyn CompletionSource>, role: Role) {
        self.members.lock().list.push(Member { number, source, role });
    }

    /// Frees the place of queue pair `number`, which may not have entered yet.
    pub(super) fn leave(&self, number: u32) {
        let mut members = self.members.lock();
        let index = members.list.iter().position(|member| member.number == number);
        let gone = index.map(|index| members.list.swap_remove(index));
        members.used -= 1;
        drop(members);
        drop(gone);
    }

    /// Counts a signalled request. Returns false if its completion has no room: the queue overruns.
    pub(super) fn expect_completion(&self) -> bool {
        let fits = self.signaled.fetch_add(1, Relaxed) < self.capacity.load(Relaxed);
        if !fits {
            self.overrun.store(true, Relaxed);
            self.notify();
        }
        fits
    }

    /// Notes that the completions of `count` signalled requests were polled, or will never come.
    pub(super) fn forget_completions(&self, count: usize) {
        if count > 0 {
            self.signaled.fetch_sub(count, Relaxed);
        }
    }

    /// Wakes the poller if it sleeps, because a thread of this process has changed something. That thread has
    /// stored the change before.
    pub(super) fn notify(&self) {
        if self.armed.wants_event() {
            self.events.signal();
        }
    }

    /// Returns whether the next completion makes an event.
    #[inline]
    pub(super) fn is_armed(&self) -> bool {
        self.armed.is_armed()
    }

    /// Takes back the requests for events.
    fn stop_asking(&self, members: &Members) {
        if self.armed.disarm() {
            members.list.iter().for_each(|member| member.source.is_polled(member.role));
        }
    }

    /// Makes the event that the queue is armed for, because this poll has found completions or has left work.
    /// Otherwise a caller that has armed the queue, and relies on an event after this poll, would sleep
    /// forever.
    #[cold]
    fn fire(&self, members: &Members) {
        self.stop_asking(members);
        self.events.signal();
    }

    /// Visits the queue pairs that have news, beginning after the one that filled the last poll, so that a
    /// busy queue pair does not starve the others. Returns true if there is more to do.
    #[inline]
    fn visit_all(&self, members: &mut Members, sink: &mut Sink<'_>) -> bool {
        if self.overrun.load(Relaxed) && self.overrun.swap(false, Relaxed) {
            members.list.iter().for_each(|member| member.source.fail());
        }
        let poll = Poll { receives_first: members.receives_first, armed: self.armed.is_armed() };
        let count = members.list.len();
        let mut next = members.cursor;
        let (mut more, mut moving) = (false, false);
        for _ in 0..count {
            let index = if next < count { next } else { 0 };
            next = index + 1;
            let member = &members.list[index];
            match member.source.poll(member.role, poll, sink) {
                Some(Remaining::Nothing) => {}
                Some(Remaining::Message) => moving = true,
                Some(Remaining::Work) => {
                    members.cursor = index + 1;
                    more = true;
                }
                None => {
                    members.cursor = index;
                    more = true;
                    break;
                }
            }
        }
        self.is_moving.store(moving, Relaxed);
        more
    }
}

impl crate::sealed::Sealed for Queue {}

impl CompletionQueue for Queue {
    #[inline]
    fn poll(&self, completions: &mut [WorkCompletion]) -> usize {
        if self.device.is_forked() {
            return 0;
        }
        let mut members = self.members.lock();
        let mut sink = Sink { completions, filled: 0 };
        // Every other poll takes sends first, so that neither sends nor receives starve.
        members.receives_first = !members.receives_first;
        let more = self.visit_all(&mut members, &mut sink);
        if (sink.filled > 0 || more) && self.armed.is_armed() {
            self.fire(&members);
        }
        sink.filled
    }

    /// A queue has no memory for completions, so only its limit changes.
    fn resize(&self, capacity: u32) -> Result<(), VerbsError> {
        check_capacity(&self.device, capacity)?;
        self.capacity.fetch_max(capacity as usize, Relaxed);
        Ok(())
    }

    #[inline]
    fn is_moving(&self) -> bool {
        self.is_moving.load(Relaxed) && !self.device.is_forked()
    }

    fn arm(&self) -> Result<(), VerbsError> {
        if self.device.is_forked() {
            return Ok(());
        }
        let members = self.members.lock();
        self.armed.arm();
        // SYNC: before the checks whether other threads watch the queue pairs. Pairs with
        // `ServedQueuePair::carry_out` and `LocalQueuePair::need_events`.
        Attention::fence::<Native, Shipping>();
        members.list.iter().for_each(|member| member.source.ask_for_events(member.role));
        Attention::fence::<Native, Shipping>();
        Ok(())
    }

    fn disarm(&self) {
        if self.device.is_forked() {
            return;
        }
        let members = self.members.lock();
        self.stop_asking(&members);
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.descriptor()
    }

    fn acknowledge_events(&self) {
        // The child has the sockets of its parent, and would take the events of the parent.
        if !self.device.is_forked() && self.events.take() {
            // The event that the queue was armed for has come. The next poll of each queue pair takes its
            // requests for events back.
            self.armed.disarm();
        }
    }
}
