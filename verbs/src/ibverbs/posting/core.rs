//! A queue pair of the device, with its state and its outstanding requests, as completion queues,
//! asynchronous events and the connection manager use it.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};

use ibverbs_sys as sys;

use super::lists::Sends;
use super::windows::Windows;
use crate::ibverbs::iwarp::order::Order;
use crate::ibverbs::library::{Library, check};
use crate::ibverbs::sleeper::Waker;
use crate::panics::lock;
use crate::{QueuePairCapacity, QueuePairState, VerbsError};

const ERROR: u8 = QueuePairState::Error as u8;

/// A queue pair of the device. Its owner, the [`VerbsPair`](crate::ibverbs::queue_pair::VerbsPair), takes it
/// out of every table before it destroys `pair`.
#[derive(Debug)]
pub(crate) struct Core {
    library: &'static Library,
    pair: NonNull<sys::ibv_qp>,
    pub(crate) number: u32,
    state: AtomicU8,
    failure: OnceLock<String>,
    /// On iWARP: puts completions in order.
    pub(crate) order: Option<Mutex<Order>>,
    /// Whether this module flushes requests that are posted in Error, because the device would ignore them.
    pub(crate) flushes_here: bool,
    /// Whether the device has flushed in Error all that it will ever flush.
    flushed: AtomicBool,
    /// Whether the user of the queue pair has dropped it.
    ending: AtomicBool,
    /// Whether the device has reported that the queue pair takes no more receives from a shared receive
    /// queue.
    last_receive: AtomicBool,
    /// Wakers of the completion queues, for requests that this module flushes.
    pub(crate) wakers: OnceLock<[Option<Arc<Waker>>; 2]>,
    pub(crate) sends: Outstanding,
    pub(crate) receives: Outstanding,
    /// Builds the lists of sends, and holds sends until there is a connection.
    pub(crate) poster: Mutex<Sends>,
    /// `None` if the device has no windows.
    pub(crate) windows: Option<Windows>,
    /// On iWARP: whether the peer's hello has come.
    hello: AtomicBool,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for Core {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for Core {}

impl Core {
    pub(crate) fn new(
        library: &'static Library,
        pair: NonNull<sys::ibv_qp>,
        capacity: &QueuePairCapacity,
        flushes_here: bool,
        poster: Sends,
        windows: Option<Windows>,
    ) -> Self {
        Self {
            library,
            pair,
            // SAFETY: the queue pair was just created, and its number never changes.
            number: unsafe { pair.as_ref() }.qp_num,
            state: AtomicU8::new(QueuePairState::Reset as u8),
            failure: OnceLock::new(),
            order: flushes_here.then(Mutex::default),
            flushes_here,
            flushed: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            last_receive: AtomicBool::new(false),
            wakers: OnceLock::new(),
            sends: Outstanding::new(capacity.send_requests),
            receives: Outstanding::new(capacity.receive_requests),
            poster: Mutex::new(poster),
            windows,
            hello: AtomicBool::new(false),
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ibv_qp {
        self.pair.as_ptr()
    }

    pub(crate) fn state(&self) -> QueuePairState {
        QueuePairState::of(self.state.load(SeqCst))
    }

    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Notes that the device has moved the queue pair from `from` to `to`. Fails if another thread moved it
    /// to Error meanwhile, and then moves it there again, because the two moves may have overtaken each
    /// other.
    pub(crate) fn advance(
        &self,
        call: &'static str,
        from: QueuePairState,
        to: QueuePairState,
    ) -> Result<(), VerbsError> {
        match self.state.compare_exchange(from as u8, to as u8, SeqCst, SeqCst) {
            Ok(_) => Ok(()),
            Err(_) => {
                self.flush();
                Err(match self.failure() {
                    Some(reason) => VerbsError::unreachable(reason.to_owned()),
                    None => VerbsError::state(call, self.state()),
                })
            }
        }
    }

    /// Returns whether one of its queues completes on `queue`.
    pub(crate) fn completes_on(&self, queue: *mut sys::ibv_cq) -> bool {
        // SAFETY: the queue pair is alive, see the type's documentation, and its queues never change.
        let (send_queue, receive_queue) = unsafe { ((*self.as_ptr()).send_cq, (*self.as_ptr()).recv_cq) };
        queue == send_queue || queue == receive_queue
    }

    /// Moves the queue pair to Error. Keeps `reason`, unless the queue pair is in Error already.
    pub(crate) fn fail(&self, reason: impl FnOnce() -> String) {
        if self.state.load(SeqCst) == ERROR {
            return;
        }
        self.failure.get_or_init(reason);
        self.close();
    }

    /// Moves the queue pair to Error because its user wants it there.
    pub(crate) fn close(&self) {
        if self.state.swap(ERROR, SeqCst) != ERROR {
            self.flush();
            if self.flushes_here {
                self.flushed.store(true, SeqCst);
                self.wake();
            }
        }
    }

    /// Returns whether the device will never complete the requests that are outstanding when the completion
    /// queue is empty.
    pub(crate) fn is_flushed(&self) -> bool {
        self.flushed.load(SeqCst)
    }

    /// Notes that the user of the queue pair has dropped it.
    pub(crate) fn set_ending(&self) {
        self.ending.store(true, SeqCst);
    }

    /// Returns whether the user of the queue pair has dropped it.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(SeqCst)
    }

    /// Notes that the queue pair takes no more receives from a shared receive queue, and that all that it
    /// took have completed.
    pub(crate) fn last_receive_reached(&self) {
        self.last_receive.store(true, SeqCst);
    }

    /// Returns whether [`last_receive_reached`](Self::last_receive_reached) was called.
    pub(crate) fn has_reached_last_receive(&self) -> bool {
        self.last_receive.load(SeqCst)
    }

    /// Wakes the threads that sleep for completions that do not come from the device.
    pub(crate) fn wake(&self) {
        for waker in self.wakers.get().into_iter().flatten().flatten() {
            waker.wake();
        }
    }

    /// Notes the peer's hello: the peer receives.
    pub(crate) fn hello_arrived(&self) {
        self.hello.store(true, SeqCst);
        self.open_gate();
    }

    /// Returns whether the peer's hello has come.
    pub(crate) fn has_hello(&self) -> bool {
        self.hello.load(SeqCst)
    }

    /// Sends a write of no bytes, which only the peer's device notices.
    pub(crate) fn nudge(&self) {
        if let Err(error) = lock(&self.poster).nudge(self) {
            tracing::debug!(queue_pair = self.number, %error, "nudging the peer");
        }
    }

    /// Sends the hello and posts all requests that were held, because the peer receives now.
    pub(crate) fn open_gate(&self) {
        if let Err(error) = lock(&self.poster).open(self) {
            self.fail(|| format!("the device refused the first requests: {error}"));
        }
    }

    /// Lets the device flush its queues in Error. This is necessary even if it is in Error: Soft-RoCE does
    /// not flush a receive that is posted later.
    pub(crate) fn flush(&self) {
        let mut attributes =
            sys::ibv_qp_attr { qp_state: sys::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        // SAFETY: the queue pair is alive, see the type's documentation.
        let result = unsafe {
            let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
            (self.library.modify_qp)(self.as_ptr(), &raw mut attributes, mask)
        };
        if let Err(error) = check("taking the queue pair to Error", result) {
            tracing::debug!(queue_pair = self.number, %error);
        }
    }
}

/// The identifiers of the requests that are outstanding on one queue, in the order of posting.
///
/// Devices round up the depth of a queue, and only they know when a slot of theirs is free again. So this
/// type counts the slots, and a queue is full at exactly the depth that it was created for. One thread posts
/// at a time, and one polls.
#[derive(Debug)]
pub(crate) struct Outstanding {
    /// Indexed by position, modulo the length, which is a power of two.
    ids: Box<[AtomicU64]>,
    capacity: u32,
    /// Position of the next request.
    posted: AtomicU32,
    /// Position after the last request that is known to have completed.
    completed: AtomicU32,
}

impl Outstanding {
    pub(crate) fn new(capacity: u32) -> Self {
        let length = capacity.max(1).next_power_of_two() as usize;
        Self {
            ids: (0..length).map(|_| AtomicU64::new(0)).collect(),
            capacity,
            posted: AtomicU32::new(0),
            completed: AtomicU32::new(0),
        }
    }

    /// Returns the position of the next request. Only the posting thread calls this.
    pub(crate) fn position(&self) -> u32 {
        self.posted.load(Relaxed)
    }

    /// Returns how many more requests can be posted. Only the posting thread calls this.
    pub(crate) fn room(&self) -> u32 {
        self.capacity.saturating_sub(self.position().wrapping_sub(self.completed.load(Acquire)))
    }

    /// Stores a request's identifier at `position`. There must be room.
    pub(crate) fn put(&self, position: u32, wr_id: u64) {
        self.at(position).store(wr_id, Relaxed);
    }

    /// Counts all requests before `position` as posted. The caller does this before the device gets them,
    /// because a completion may be polled at once.
    pub(crate) fn post(&self, position: u32) {
        // SYNC: with `complete`, so that identifiers are seen there.
        self.posted.store(position, Release);
    }

    /// Returns the identifier of the request at `position`, which completed together with all requests before
    /// it. `None` if no such request is outstanding.
    pub(crate) fn complete(&self, position: u32) -> Option<u64> {
        let posted = self.posted.load(Acquire);
        let completed = self.completed.load(Relaxed);
        if position.wrapping_sub(completed) >= posted.wrapping_sub(completed) {
            return None;
        }
        let wr_id = self.at(position).load(Relaxed);
        // SYNC: with `room`, so that the identifier was read before its slot is used again.
        self.completed.store(position.wrapping_add(1), Release);
        Some(wr_id)
    }

    /// Returns the identifier of the oldest request, for a device that is gone and completes nothing any
    /// more.
    pub(crate) fn complete_oldest(&self) -> Option<u64> {
        self.complete(self.oldest())
    }

    /// Returns the position of the oldest request, if there is one.
    pub(crate) fn oldest(&self) -> u32 {
        self.completed.load(Relaxed)
    }

    fn at(&self, position: u32) -> &AtomicU64 {
        &self.ids[position as usize & (self.ids.len() - 1)]
    }
}

#[cfg(test)]
mod outstanding_tests {
    use super::*;

    #[test]
    fn a_queue_is_full_at_what_it_was_created_for() {
        let queue = Outstanding::new(5);
        queue.post(u32::MAX - 2);
        queue.completed.store(u32::MAX - 2, Relaxed);
        for round in 0..20 {
            assert_eq!(queue.room(), 5, "round {round}");
            let first = queue.position();
            for offset in 0..5 {
                queue.put(first.wrapping_add(offset), u64::from(round * 10 + offset));
            }
            queue.post(first.wrapping_add(5));
            assert_eq!(queue.room(), 0);
            assert_eq!(queue.complete(first.wrapping_sub(1)), None);
            assert_eq!(queue.complete(first.wrapping_add(5)), None);
            assert_eq!(queue.complete(first.wrapping_add(2)), Some(u64::from(round * 10 + 2)));
            assert_eq!(queue.complete(first), None, "already freed");
            assert_eq!(queue.room(), 3);
            assert_eq!(queue.complete_oldest(), Some(u64::from(round * 10 + 3)));
            assert_eq!(queue.complete_oldest(), Some(u64::from(round * 10 + 4)));
            assert_eq!(queue.complete_oldest(), None);
        }
    }
}
