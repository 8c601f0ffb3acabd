//! Completion queues.
//!
//! The thread that carried out a send adds the completion of the send to the queue. Completions of receives stay in the
//! links of the queue pairs until a thread polls: the peer that filled a receive only sets the queue pair's ready bit (see
//! [`bell`](super::shared::bell)).

use std::any::Any;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use super::device::Device;
use super::shared::bell::{Bell, SLOTS};
use crate::sync::lock;
use crate::{CompletionQueue, VerbsError, WorkCompletion};

/// A completion queue.
#[derive(Debug)]
pub(super) struct Queue {
    device: Arc<Device>,
    id: u64,
    capacity: usize,
    bell: Bell,
    page: OwnedFd,
    /// Held during a poll, so one thread polls at a time. Locked before any lock of a queue pair, never after.
    members: Mutex<Members>,
    /// Locked last of all.
    finished: Mutex<VecDeque<Finished>>,
    /// Length of `finished`. A poll that finds 0 here does not lock `finished`.
    finished_length: AtomicUsize,
    overrun: AtomicBool,
}

/// A queue pair, as its completion queues use it.
pub(super) trait CompletionSource: Debug + Send + Sync {
    /// Carries out the requests that can run now, and moves finished receives to `sink`. Returns true if `sink` has no
    /// room for the rest.
    fn visit(&self, role: Role, sink: &mut Sink<'_>) -> bool;

    /// Frees `places` of the send queue, because a poll returned their completion.
    fn free_places(&self, places: u32);

    /// Moves the queue pair to Error, because the completion queue has overrun.
    fn fail(&self);
}

/// The completion of a send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    pub(super) completion: WorkCompletion,
    /// The queue pair's slot in this queue.
    pub(super) slot: u32,
    /// Number of places in the send queue that this completion frees: the place of its request, and the places of the
    /// unsignalled requests before that request.
    pub(super) frees: u32,
}

/// The queue pairs that report here, by slot.
#[derive(Debug, Default)]
struct Members {
    slots: Vec<Option<Member>>,
    free: Vec<u32>,
    /// The slot that is visited first.
    cursor: u32,
    /// Whether this poll looks for receives before sends.
    receives_first: bool,
}

#[derive(Debug)]
struct Member {
    source: Arc<dyn CompletionSource>,
    role: Role,
}

/// The queues of a queue pair that complete on a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) sends: bool,
    pub(super) receives: bool,
}

/// The caller's array, which polling fills.
#[derive(Debug)]
pub(super) struct Sink<'a> {
    completions: &'a mut [WorkCompletion],
    filled: usize,
}

impl Sink<'_> {
    /// Returns whether there is no room left.
    pub(super) fn is_full(&self) -> bool {
        self.filled == self.completions.len()
    }

    /// Adds a completion. The caller has checked that there is room.
    pub(super) fn push(&mut self, completion: WorkCompletion) {
        if let Some(place) = self.completions.get_mut(self.filled) {
            *place = completion;
            self.filled += 1;
        }
    }
}

impl Queue {
    /// Creates a queue for `capacity` completions of sends.
    pub(super) fn new(device: &Arc<Device>, capacity: u32) -> Result<Self, VerbsError> {
        let limit = device.limits().max_completions;
        if capacity > limit {
            let (asked, limit) = (capacity.into(), limit.into());
            return Err(VerbsError::Limit { what: "completion queue capacity", asked, limit });
        }
        let (bell, page) =
            Bell::create().map_err(|error| VerbsError::os("creating a completion queue", error))?;
        Ok(Self {
            device: Arc::clone(device),
            id: device.object_id(),
            capacity: capacity as usize,
            bell,
            page,
            members: Mutex::default(),
            finished: Mutex::new(VecDeque::with_capacity(capacity.min(1024) as usize)),
            finished_length: AtomicUsize::new(0),
            overrun: AtomicBool::new(false),
        })
    }

    /// Returns the queue behind the trait object, if it is one of this device.
    pub(super) fn of(
        queue: &Arc<dyn CompletionQueue>,
        device: &Arc<Device>,
    ) -> Result<Arc<Self>, VerbsError> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(queue) as Arc<dyn Any + Send + Sync>;
        match any.downcast::<Self>() {
            Ok(queue) if Arc::ptr_eq(&queue.device, device) => Ok(queue),
            _ => Err(VerbsError::Foreign("completion queue")),
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    pub(super) fn page(&self) -> &OwnedFd {
        &self.page
    }

    /// Reserves a slot for a queue pair that is about to be created.
    pub(super) fn reserve(&self) -> Result<u32, VerbsError> {
        let mut members = lock(&self.members);
        if let Some(slot) = members.free.pop() {
            return Ok(slot);
        }
        let slot = members.slots.len() as u32;
        if slot == SLOTS {
            let (asked, limit) = (u64::from(SLOTS) + 1, u64::from(SLOTS));
            return Err(VerbsError::Limit { what: "queue pairs of one completion queue", asked, limit });
        }
        members.slots.push(None);
        Ok(slot)
    }

    /// Enters a queue pair at a reserved slot.
    pub(super) fn occupy(&self, slot: u32, source: Arc<dyn CompletionSource>, role: Role) {
        if let Some(place) = lock(&self.members).slots.get_mut(slot as usize) {
            *place = Some(Member { source, role });
        }
    }

    /// Frees the slot, and drops those of its completions that were not polled.
    pub(super) fn vacate(&self, slot: u32) {
        let mut members = lock(&self.members);
        let gone = members.slots.get_mut(slot as usize).and_then(Option::take);
        let mut finished = lock(&self.finished);
        finished.retain(|entry| entry.slot != slot);
        self.finished_length.store(finished.len(), SeqCst);
        drop(finished);
        members.free.push(slot);
        drop(members);
        drop(gone);
    }

    /// Adds the completion of a send. Returns false if there is no room: the queue has overrun.
    pub(super) fn push(&self, entry: Finished) -> bool {
        let mut finished = lock(&self.finished);
        let fits = finished.len() < self.capacity;
        if fits {
            finished.push_back(entry);
            // SYNC: SeqCst, before the check whether the queue is armed. Dekker's algorithm: the owner arms, then polls.
            self.finished_length.store(finished.len(), SeqCst);
        }
        drop(finished);
        if fits {
            self.bell.wake();
        } else {
            self.overrun.store(true, SeqCst);
            self.bell.ring(entry.slot);
        }
        fits
    }

    /// Moves completions of sends to `sink`.
    fn take_finished(&self, members: &Members, sink: &mut Sink<'_>) {
        let mut finished = lock(&self.finished);
        while !sink.is_full() {
            let Some(entry) = finished.pop_front() else { break };
            if let Some(Some(member)) = members.slots.get(entry.slot as usize) {
                member.source.free_places(entry.frees);
            }
            sink.push(entry.completion);
        }
        self.finished_length.store(finished.len(), SeqCst);
    }

    /// Visits the queue pairs whose ready bits are set. A queue pair stays ready if its completions do not all fit. The next
    /// visit begins after the queue pair that filled the sink, so that a busy queue pair does not starve the others.
    fn visit_ready(&self, members: &mut Members, sink: &mut Sink<'_>) {
        if self.overrun.swap(false, SeqCst) {
            members.slots.iter().flatten().for_each(|member| member.source.fail());
        }
        let (first_word, first_bit) = (members.cursor / 64, members.cursor % 64);
        let mut summary = self.bell.take_summary().rotate_right(first_word);
        while summary != 0 {
            let word = (summary.trailing_zeros() + first_word) % 64;
            let mut bits = self.bell.take_word(word).rotate_right(first_bit);
            while bits != 0 {
                let slot = word * 64 + (bits.trailing_zeros() + first_bit) % 64;
                if sink.is_full() {
                    members.cursor = slot;
                    self.bell.put_back(word, bits.rotate_left(first_bit));
                    self.bell.put_back_summary((summary & (summary - 1)).rotate_left(first_word));
                    return;
                }
                // If the slot is free, a peer has set a wrong bit, or the bit belongs to a queue pair that is gone.
                let more = match members.slots.get(slot as usize) {
                    Some(Some(member)) => member.source.visit(member.role, sink),
                    _ => false,
                };
                bits &= bits - 1;
                if more {
                    self.bell.put_back(word, 1 << (slot % 64));
                    members.cursor = (slot + 1) % SLOTS;
                }
            }
            summary &= summary - 1;
        }
    }
}

impl crate::sealed::Sealed for Queue {}

impl CompletionQueue for Queue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> usize {
        if self.finished_length.load(SeqCst) == 0 && !self.bell.is_ready() {
            return 0;
        }
        let mut members = lock(&self.members);
        let mut sink = Sink { completions, filled: 0 };
        // Every other poll takes sends first, so that neither sends nor receives starve.
        members.receives_first = !members.receives_first;
        if !members.receives_first {
            self.take_finished(&members, &mut sink);
        }
        if self.bell.is_ready() {
            self.visit_ready(&mut members, &mut sink);
        }
        // The visits may have added completions: of requests that they carried out or flushed.
        if self.finished_length.load(SeqCst) != 0 {
            self.take_finished(&members, &mut sink);
        }
        sink.filled
    }

    fn arm(&self) -> Result<(), VerbsError> {
        self.bell.arm();
        Ok(())
    }

    fn disarm(&self) {
        self.bell.disarm();
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.bell.event()
    }

    fn acknowledge_events(&self) {
        self.bell.acknowledge();
    }
}
