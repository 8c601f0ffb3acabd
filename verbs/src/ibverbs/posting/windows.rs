//! The windows of a queue pair: which are open, and their requests that are outstanding. The requests are posted
//! by [`Window`](crate::ibverbs::window::Window).

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use ibverbs_sys as sys;

use crate::MemoryRegion;
use crate::ibverbs::library::Owned;
use crate::ibverbs::ticket::Slot;
use crate::panics::lock;

/// Requests for windows that are outstanding on one queue pair at most.
pub(crate) const REQUESTS: u32 = 128;

/// The windows of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct Windows(pub(crate) Mutex<State>);

/// The state that the lock guards.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// The slot of the queue pair in the table of its completion queue.
    pub(crate) slot: Slot,
    /// All windows, by their index. Empty once the queue pair is being destroyed.
    pub(crate) all: Vec<Owned<sys::ibv_mw>>,
    /// Indices of windows that can be opened.
    pub(crate) free: Vec<usize>,
    /// Number of open windows.
    pub(crate) open: u32,
    /// Number of requests posted so far, and number of them that are known to have completed.
    pub(crate) posted: u32,
    pub(crate) completed: u32,
    /// Number of requests since the last signalled one.
    pub(crate) unsignaled: u32,
    /// Windows whose invalidation was posted, in this order.
    pub(crate) closing: VecDeque<Closing>,
    /// What those windows keep that the device does not close. They end with the queue pair.
    pub(crate) lost: Vec<Kept>,
    pub(crate) ended: bool,
}

/// A window whose invalidation was posted.
#[derive(Debug)]
pub(crate) struct Closing {
    /// Number of the request that invalidates the window.
    pub(crate) request: u32,
    pub(crate) index: usize,
    pub(crate) kept: Kept,
}

/// What a window keeps until its right has ended.
#[derive(Debug)]
pub(crate) struct Kept {
    _owner: Option<Box<dyn Any + Send + Sync>>,
    _region: Arc<dyn MemoryRegion>,
}

impl Kept {
    pub(crate) fn new(owner: Option<Box<dyn Any + Send + Sync>>, region: Arc<dyn MemoryRegion>) -> Self {
        Self { _owner: owner, _region: region }
    }
}

impl Windows {
    /// Sets the slot of the queue pair in the table of its completion queue.
    pub(crate) fn set_slot(&self, slot: Slot) {
        lock(&self.0).slot = slot;
    }

    /// Notes that the request `request`, and all requests for windows before it, have completed. Adds to `over`
    /// the memory of the rights that have ended, for a drop without locks.
    pub(crate) fn completed(&self, request: u32, over: &mut Vec<Kept>) {
        let state = &mut *lock(&self.0);
        let outstanding = state.posted.wrapping_sub(state.completed);
        let done = request.wrapping_sub(state.completed).wrapping_add(1);
        if done == 0 || done > outstanding {
            return;
        }
        state.completed = request.wrapping_add(1);
        while let Some(first) = state.closing.front()
            && state.completed.wrapping_sub(first.request).wrapping_sub(1) < REQUESTS
            && let Some(Closing { index, kept, .. }) = state.closing.pop_front()
        {
            state.free.push(index);
            over.push(kept);
        }
    }

    /// Ends all windows, because the queue pair is about to be destroyed. Devices refuse to deregister memory
    /// with windows, and may wait for the windows of a queue pair that is being destroyed.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.0);
        state.ended = true;
        let all = std::mem::take(&mut state.all);
        let kept = (std::mem::take(&mut state.closing), std::mem::take(&mut state.lost));
        drop(state);
        // The rights end before the owners of the memory are dropped.
        drop(all);
        drop(kept);
    }
}

impl State {
    /// Returns whether there are slots for the opening and the closing of another window.
    pub(crate) fn has_room(&self) -> bool {
        let outstanding = self.posted.wrapping_sub(self.completed);
        !self.ended && outstanding + self.open + 2 <= REQUESTS
    }
}
