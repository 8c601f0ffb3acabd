//! Completion queues: local completions in a list, deliveries of peers in the rings of their queue pairs.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::event::EventfdFlags;

use super::super::{CompletionQueue, HostMemory, VerbsError, WorkCompletion};
use super::device::Device;
use super::layout::queue_page;
use super::lock;
use super::queue_pair::SoftQueuePair;
use super::shared::Words;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct SoftCompletionQueue {
    device: Arc<Device>,
    id: u64,
    page: Words,
    memory: Arc<HostMemory>,
    event: OwnedFd,
    capacity: usize,
    local: Mutex<VecDeque<Local>>,
    /// Length of `local`, so that a poll that finds nothing takes no lock.
    waiting: AtomicUsize,
    /// Queue pairs by their bit.
    queue_pairs: Mutex<Vec<Weak<SoftQueuePair>>>,
    overrun: AtomicBool,
    this: Weak<Self>,
}

/// A completion of this side's own making.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) completion: WorkCompletion,
    /// Places of the send queue that it frees when taken.
    pub(super) retires: u32,
    /// How many places are in use.
    pub(super) used: Arc<AtomicU32>,
}

impl SoftCompletionQueue {
    pub(super) fn new(device: Arc<Device>, capacity: u32) -> Result<Arc<Self>, VerbsError> {
        let limit = device.attributes().max_completions;
        if capacity > limit {
            let (asked, limit) = (capacity.into(), limit.into());
            return Err(VerbsError::Limit { what: "completion queue", asked, limit });
        }
        let (page, memory) = Words::create(queue_page::WORDS)?;
        let event = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|error| VerbsError::os("making an event descriptor", error))?;
        Ok(Arc::new_cyclic(|this| Self {
            id: device.next_id(),
            device,
            page,
            memory,
            event,
            capacity: capacity.max(1) as usize,
            local: Mutex::default(),
            waiting: AtomicUsize::new(0),
            queue_pairs: Mutex::default(),
            overrun: AtomicBool::new(false),
            this: Weak::clone(this),
        }))
    }

    /// Another reference to this queue.
    pub(super) fn handle(&self) -> Option<Arc<Self>> {
        self.this.upgrade()
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// What peers map, to tell of deliveries.
    pub(super) fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// Gives a queue pair its bit.
    pub(super) fn attach(&self, queue_pair: &Weak<SoftQueuePair>) -> Result<usize, VerbsError> {
        let mut queue_pairs = lock(&self.queue_pairs);
        let slot =
            queue_pairs.iter().position(|other| other.strong_count() == 0).unwrap_or(queue_pairs.len());
        if slot >= queue_page::QUEUE_PAIRS {
            let limit = queue_page::QUEUE_PAIRS as u64;
            return Err(VerbsError::Limit {
                what: "queue pairs of a completion queue",
                asked: limit + 1,
                limit,
            });
        }
        match queue_pairs.get_mut(slot) {
            Some(free) => *free = Weak::clone(queue_pair),
            None => queue_pairs.push(Weak::clone(queue_pair)),
        }
        Ok(slot)
    }

    /// Adds a completion of our own; false if there are more than the queue was made for.
    pub(super) fn push(&self, local: Local) -> bool {
        let mut list = lock(&self.local);
        if list.len() >= self.capacity {
            self.overrun.store(true, Ordering::Relaxed);
            return false;
        }
        list.push_back(local);
        self.waiting.store(list.len(), Ordering::SeqCst);
        drop(list);
        self.wake();
        true
    }

    /// Has the queue pair of bit `slot` looked at with the next poll.
    pub(super) fn mark(&self, slot: usize) {
        Ring { page: &self.page, event: self.event.as_fd() }.mark(slot);
    }

    fn wake(&self) {
        Ring { page: &self.page, event: self.event.as_fd() }.wake();
    }

    fn take_local(&self, completions: &mut [WorkCompletion]) -> usize {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut list = lock(&self.local);
        let count = list.len().min(completions.len());
        for (place, local) in completions.iter_mut().zip(list.drain(..count)) {
            *place = local.completion;
            local.used.fetch_sub(local.retires, Ordering::Relaxed);
        }
        self.waiting.store(list.len(), Ordering::SeqCst);
        count
    }

    /// Looks at the queue pairs whose bits are set.
    fn take_delivered(&self, completions: &mut [WorkCompletion]) -> usize {
        let mut count = 0;
        // SYNC: takes the bits before looking at the rings; a peer writes its ring before setting its bit, so what is
        // not seen in the ring now has its bit set again afterwards.
        let mut words = self.page.at(queue_page::SUMMARY).swap(0, Ordering::SeqCst);
        while words != 0 {
            let word = words.trailing_zeros() as usize;
            words &= words - 1;
            let mut bits = self.page.at(queue_page::READY + word).swap(0, Ordering::SeqCst);
            while bits != 0 {
                let bit = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let slot = word * 64 + bit;
                let queue_pair = lock(&self.queue_pairs).get(slot).and_then(Weak::upgrade);
                let Some(queue_pair) = queue_pair else { continue };
                let (taken, more) = queue_pair.progress(self, &mut completions[count..]);
                count += taken;
                if more {
                    self.page.at(queue_page::READY + word).fetch_or(1 << bit, Ordering::SeqCst);
                    self.page.at(queue_page::SUMMARY).fetch_or(1 << word, Ordering::SeqCst);
                }
            }
        }
        count
    }
}

impl CompletionQueue for SoftCompletionQueue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> usize {
        let mut count = self.take_local(completions);
        if self.page.at(queue_page::SUMMARY).load(Ordering::Acquire) != 0 {
            count += self.take_delivered(&mut completions[count..]);
            // A queue pair that was looked at may have finished requests of ours.
            count += self.take_local(&mut completions[count..]);
        }
        count
    }

    fn arm(&self) -> Result<(), VerbsError> {
        // SYNC: sequentially consistent with `Ring::wake`: either the completion sees the queue armed, or the caller's
        // next poll sees the completion.
        self.page.at(queue_page::ARMED).store(1, Ordering::SeqCst);
        Ok(())
    }

    fn disarm(&self) {
        self.page.at(queue_page::ARMED).store(0, Ordering::SeqCst);
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn acknowledge_events(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

/// The way to tell a completion queue, our own or a peer's, of something new.
#[derive(Debug)]
pub(super) struct Ring<'a> {
    pub(super) page: &'a Words,
    pub(super) event: BorrowedFd<'a>,
}

impl Ring<'_> {
    /// Sets a queue pair's bit, and wakes the poller if it sleeps.
    pub(super) fn mark(&self, slot: usize) {
        let (word, bit) = (slot / 64 % 64, 1 << (slot % 64));
        // SYNC: after the ring was written, before `ARMED` is read. If the bit was set already, whoever takes it takes
        // the ring's news along.
        if self.page.at(queue_page::READY + word).fetch_or(bit, Ordering::SeqCst) & bit == 0 {
            self.page.at(queue_page::SUMMARY).fetch_or(1 << word, Ordering::SeqCst);
        }
        self.wake();
    }

    /// Writes an event if one was asked for.
    pub(super) fn wake(&self) {
        let armed = self.page.at(queue_page::ARMED);
        if armed.load(Ordering::SeqCst) != 0 && armed.swap(0, Ordering::SeqCst) != 0 {
            // A full counter means that an event is pending anyway.
            let _ = rustix::io::write(self.event, &1_u64.to_ne_bytes());
        }
    }
}
