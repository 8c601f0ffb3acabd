//! Completion queues with their completion channels.

mod channel;
pub(crate) mod members;
mod status;

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use ibverbs_sys as sys;

use self::channel::Channel;
use self::members::{Members, Role};
use super::device::Device;
use super::iwarp::manager::FetchCompletions;
use super::library::{Owned, check, last_error};
use super::posting::core::Core;
use super::sleeper::{Sleeper, Waker};
use super::ticket::Slot;
use crate::sync::lock;
use crate::{CompletionQueue, Context as _, QueuePairNumber, VerbsError, WorkCompletion};

/// Completions taken from the device at a time.
const BATCH: usize = 32;
/// Places for hellos in a completion queue on iWARP.
const HELLOS: u32 = 512;

/// A completion queue. It has its own channel, so each event of the channel belongs to this queue.
#[derive(Debug)]
pub(crate) struct Queue {
    queue: Owned<sys::ibv_cq>,
    /// On iWARP: sleepers wait for more than the channel. Dropped before the channel, whose descriptor it has.
    sleeper: Option<Sleeper>,
    channel: Channel,
    device: Arc<Device>,
    /// Completions that the device's queue holds.
    entries: usize,
    state: Mutex<QueueState>,
}

#[derive(Debug)]
struct QueueState {
    completions: Box<[sys::ibv_wc; BATCH]>,
    members: Members,
    /// Completions that found no room in an earlier poll, in their order.
    ready: VecDeque<WorkCompletion>,
}

impl Queue {
    pub(crate) fn create(device: Arc<Device>, capacity: u32) -> Result<Arc<Self>, VerbsError> {
        let limit = device.attributes().max_completions;
        VerbsError::check_limits([("completion queue depth", capacity, limit)])?;
        let channel = Channel::create(Arc::clone(&device))?;
        let sleeper = match &device.manager {
            Some(_) => Some(Sleeper::new(&[channel.fd()])?),
            None => None,
        };
        // A hello of each queue pair needs a place, too.
        let hellos = if sleeper.is_some() { HELLOS } else { 0 };
        let entries = capacity.max(1).saturating_add(hellos).min(limit.max(1));
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        let library = device.library();
        // SAFETY:
        // - the context is open, and the channel one of its own, and both are dropped after the queue; and
        // - queue pairs hold a reference to their completion queues, so none is left when the queue is dropped. Destroying waits for
        //   events that were taken and not acknowledged. There are none.
        let queue = unsafe {
            let (nothing, channel) = (std::ptr::null_mut(), channel.channel.as_ptr());
            let queue = (library.create_cq)(device.context(), entries, nothing, channel, 0);
            Owned::new(queue, library.destroy_cq, "destroying a completion queue")
        };
        let queue =
            queue.ok_or_else(|| last_error(format!("creating a completion queue of {capacity} entries")))?;
        let completions = Box::new([sys::ibv_wc::default(); BATCH]);
        let state =
            Mutex::new(QueueState { completions, members: Members::default(), ready: VecDeque::new() });
        // SAFETY: the queue was just created.
        let entries = usize::try_from(unsafe { (*queue.as_ptr()).cqe }).unwrap_or(0);
        Ok(Arc::new(Self { queue, sleeper, channel, device, entries, state }))
    }

    /// Returns the queue behind the trait object, if it is one of `device`.
    pub(crate) fn of(
        queue: &Arc<dyn CompletionQueue>,
        device: &Arc<Device>,
    ) -> Result<Arc<Self>, VerbsError> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(queue) as _;
        let own = any.downcast().ok().filter(|queue: &Arc<Self>| Arc::ptr_eq(&queue.device, device));
        own.ok_or(VerbsError::Foreign("completion queue"))
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ibv_cq {
        self.queue.as_ptr()
    }

    /// Returns the waker for its sleepers, if they may sleep for more than an event of the device.
    pub(crate) fn waker(&self) -> Option<Arc<Waker>> {
        self.sleeper.as_ref().map(|sleeper| Arc::clone(sleeper.waker()))
    }

    /// Reserves a place for a queue pair.
    pub(crate) fn enter(&self, core: &Arc<Core>, role: Role) -> Result<Slot, VerbsError> {
        lock(&self.state).members.enter(core, role)
    }

    /// Takes the queue pair with this number out, and drops its completions, except those of shared receives, which then name
    /// no queue pair. The queue does not use the queue pair any more when this returns.
    pub(crate) fn leave(&self, slot: Slot, number: u32) {
        let state = &mut *lock(&self.state);
        state.members.leave(slot);
        for completion in &mut state.ready {
            if completion.queue_pair.0 == number {
                completion.queue_pair = QueuePairNumber(0);
            }
        }
    }

    /// Takes all completions from the device that are there now, for later polls.
    pub(crate) fn fetch_all(&self) {
        let state = &mut *lock(&self.state);
        // Bounds the loop, because the device may add completions meanwhile.
        for _ in 0..=self.entries / BATCH {
            let count = self.take(&mut state.completions[..]);
            for completion in &state.completions[..count] {
                let report = |completion| state.ready.push_back(completion);
                state.members.translate(&self.device, completion, report);
            }
            if count < BATCH {
                break;
            }
        }
    }

    /// Takes completions from the device. Returns their number, which is less than the length of the array if the
    /// queue is empty.
    fn take(&self, completions: &mut [sys::ibv_wc]) -> usize {
        // SAFETY:
        // - the queue is alive, and with it its context, whose table never changes, and
        // - the array is writable for as many completions as the call says.
        let count = unsafe {
            let context = (*self.as_ptr()).context;
            match (*context).ops.poll_cq {
                Some(poll) => poll(self.as_ptr(), completions.len() as i32, completions.as_mut_ptr()),
                None => 0,
            }
        };
        usize::try_from(count).map_or(0, |count| count.min(completions.len()))
    }
}

impl FetchCompletions for Queue {
    fn fetch(&self) {
        let state = &mut *lock(&self.state);
        let count = self.take(&mut state.completions[..]);
        for completion in &state.completions[..count] {
            state.members.translate(&self.device, completion, |completion| state.ready.push_back(completion));
        }
    }
}

impl crate::sealed::Sealed for Queue {}

impl CompletionQueue for Queue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> usize {
        let state = &mut *lock(&self.state);
        // Asked before the device is polled: the completions that a removed device flushed are in the queue by then.
        let removed = self.device.is_removed();
        if self.sleeper.is_some() {
            state.members.note_flushed();
        }
        let mut filled = 0;
        while filled < completions.len()
            && let Some(completion) = state.ready.pop_front()
        {
            completions[filled] = completion;
            filled += 1;
        }
        // Completions of a queue pair that is gone are skipped. They must not look like an empty queue.
        while filled < completions.len() {
            let wanted = (completions.len() - filled).min(BATCH);
            let count = self.take(&mut state.completions[..wanted]);
            for completion in &state.completions[..count] {
                state.members.translate(&self.device, completion, |completion| {
                    match completions.get_mut(filled) {
                        Some(place) => {
                            *place = completion;
                            filled += 1;
                        }
                        // One completion may release others that waited for it.
                        None => state.ready.push_back(completion),
                    }
                });
            }
            if count < wanted {
                break;
            }
        }
        if removed || self.sleeper.is_some() {
            filled += state.members.flush(&mut completions[filled..], removed);
        }
        filled
    }

    fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue is alive, and with it its context, whose table never changes.
        let result = unsafe {
            let context = (*self.as_ptr()).context;
            match (*context).ops.req_notify_cq {
                Some(arm) => arm(self.as_ptr(), 0),
                None => libc::EOPNOTSUPP,
            }
        };
        match check("arming a completion queue", result) {
            // A removed device flushes everything, see `poll`. No thread should sleep for it.
            Err(_) if self.device.is_removed() => Ok(()),
            result => result,
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.sleeper.as_ref().map_or_else(|| self.channel.fd(), Sleeper::fd)
    }

    fn acknowledge_events(&self) {
        if let Some(sleeper) = &self.sleeper {
            sleeper.acknowledge();
        }
        let mut count = 0;
        while self.channel.take_event() {
            count += 1;
        }
        if count > 0 {
            // SAFETY: as many events of this queue were taken.
            unsafe { (self.device.library().ack_cq_events)(self.as_ptr(), count) };
        }
    }
}
