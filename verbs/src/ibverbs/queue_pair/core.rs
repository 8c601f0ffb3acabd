//! What completion queues and asynchronous events have to know of a queue pair: its state, and which requests are
//! outstanding.

use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

use std::sync::{Arc, Mutex, OnceLock};

use ibverbs_sys as sys;

use super::library::{Library, check};
use super::lock;
use super::order::Order;
use super::post::Sends;
use super::wake::Waker;
use crate::{QueuePairCapacity, QueuePairState, VerbsError};

const RESET: u8 = 0;
const INIT: u8 = 1;
const RTR: u8 = 2;
const RTS: u8 = 3;
const ERROR: u8 = 4;

/// See the module's documentation. The queue pair that owns it takes it out of every table before it destroys `pair`.
#[derive(Debug)]
pub(super) struct Core {
    library: &'static Library,
    pub(super) pair: NonNull<sys::ibv_qp>,
    pub(super) number: u32,
    state: AtomicU8,
    failure: OnceLock<String>,
    /// Where sends are put together, and held until there is a connection.
    pub(super) poster: Mutex<Sends>,
    /// On iWARP: whether the peer's hello has come.
    heard: AtomicBool,
    /// On iWARP: puts completions in order.
    pub(super) order: Option<Mutex<Order>>,
    /// Whether requests that are posted in Error are flushed here, because the device would leave them lying.
    pub(super) flushes_here: bool,
    /// Whether the device has flushed in Error all that it ever will.
    flushed: AtomicBool,
    /// Completion queues to wake up for what is flushed here.
    pub(super) wakers: OnceLock<[Option<Arc<Waker>>; 2]>,
    pub(super) sends: Outstanding,
    pub(super) receives: Outstanding,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for Core {}
// SAFETY: as above.
unsafe impl Sync for Core {}

impl Core {
    pub(super) fn new(
        library: &'static Library,
        pair: NonNull<sys::ibv_qp>,
        capacity: &QueuePairCapacity,
        flushes_here: bool,
        poster: Sends,
    ) -> Self {
        Self {
            library,
            pair,
            // SAFETY: the queue pair was just created, and its number never changes.
            number: unsafe { pair.as_ref() }.qp_num,
            state: AtomicU8::new(RESET),
            failure: OnceLock::new(),
            poster: Mutex::new(poster),
            heard: AtomicBool::new(false),
            order: flushes_here.then(Mutex::default),
            flushes_here,
            flushed: AtomicBool::new(false),
            wakers: OnceLock::new(),
            sends: Outstanding::new(capacity.send_requests),
            receives: Outstanding::new(capacity.receive_requests),
        }
    }

    pub(super) fn state(&self) -> QueuePairState {
        match self.state.load(SeqCst) {
            RESET => QueuePairState::Reset,
            INIT => QueuePairState::Init,
            RTR => QueuePairState::Rtr,
            RTS => QueuePairState::Rts,
            _ => QueuePairState::Error,
        }
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Notes that the device has gone from `from` to `to`. Fails if it was taken to Error meanwhile, and then takes it
    /// there again: the two may have overtaken one another.
    pub(super) fn advance(
        &self,
        call: &'static str,
        from: QueuePairState,
        to: QueuePairState,
    ) -> Result<(), VerbsError> {
        match self.state.compare_exchange(code(from), code(to), SeqCst, SeqCst) {
            Ok(_) => Ok(()),
            Err(_) => {
                self.flush();
                Err(match self.failure() {
                    Some(reason) => VerbsError::Unreachable(reason.to_owned()),
                    None => VerbsError::State { call, state: self.state() },
                })
            }
        }
    }

    /// Whether one of its queues completes there.
    pub(super) fn completes_on(&self, queue: *mut sys::ibv_cq) -> bool {
        // SAFETY: the queue pair is alive, see the type's documentation, and its queues never change.
        let (send_queue, receive_queue) =
            unsafe { ((*self.pair.as_ptr()).send_cq, (*self.pair.as_ptr()).recv_cq) };
        queue == send_queue || queue == receive_queue
    }

    /// Takes the queue pair to Error, for `reason` if it is not there yet.
    pub(super) fn fail(&self, reason: impl FnOnce() -> String) {
        if self.state.load(SeqCst) == ERROR {
            return;
        }
        self.failure.get_or_init(reason);
        self.close();
    }

    /// Takes the queue pair to Error because its user wants it there.
    pub(super) fn close(&self) {
        if self.state.swap(ERROR, SeqCst) != ERROR {
            self.flush();
            if self.flushes_here {
                self.flushed.store(true, SeqCst);
                self.wake();
            }
        }
    }

    /// Whether what is still outstanding when the completion queue is empty will never be completed by the device.
    pub(super) fn is_flushed(&self) -> bool {
        self.flushed.load(SeqCst)
    }

    /// Wakes up whoever sleeps for completions that do not come from the device.
    pub(super) fn wake(&self) {
        for waker in self.wakers.get().into_iter().flatten().flatten() {
            waker.wake();
        }
    }

    /// The peer's hello has come: it listens.
    pub(super) fn hear(&self) {
        self.heard.store(true, SeqCst);
        self.open_gate();
    }

    pub(super) fn is_heard(&self) -> bool {
        self.heard.load(SeqCst)
    }

    /// Sends what the peer's device takes notice of, and nobody else.
    pub(super) fn nudge(&self) {
        if let Err(error) = lock(&self.poster).nudge(self) {
            tracing::debug!(queue_pair = self.number, %error, "nudging the peer");
        }
    }

    /// The peer listens: says hello, and posts all that was held back.
    pub(super) fn open_gate(&self) {
        if let Err(error) = lock(&self.poster).open(self) {
            self.fail(|| format!("the device refused the first requests: {error}"));
        }
    }

    /// Has the device go through its queues in Error. Necessary even if it is there: Soft-RoCE does not look at a
    /// receive that is posted later on its own.
    pub(super) fn flush(&self) {
        let mut attributes =
            sys::ibv_qp_attr { qp_state: sys::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        // SAFETY: the queue pair is alive, see the type's documentation.
        let result = unsafe {
            let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
            (self.library.modify_qp)(self.pair.as_ptr(), &raw mut attributes, mask)
        };
        if let Err(error) = check("taking the queue pair to Error", result) {
            tracing::debug!(queue_pair = self.number, %error);
        }
    }
}

fn code(state: QueuePairState) -> u8 {
    match state {
        QueuePairState::Reset => RESET,
        QueuePairState::Init => INIT,
        QueuePairState::Rtr => RTR,
        QueuePairState::Rts => RTS,
        QueuePairState::Error => ERROR,
    }
}

/// The requests that are outstanding on one queue, in the order of posting: their identifiers, and so their count.
///
/// Devices round up the depth of a queue, and only know when a place of theirs is free again; so places are counted
/// here, and the queue is full at exactly what it was created for. One thread posts at a time, and one polls.
#[derive(Debug)]
pub(super) struct Outstanding {
    /// By position, modulo the length, which is a power of two.
    ids: Box<[AtomicU64]>,
    capacity: u32,
    /// Position of the next request.
    posted: AtomicU32,
    /// Position after the last one that is known to have completed.
    completed: AtomicU32,
}

impl Outstanding {
    fn new(capacity: u32) -> Self {
        let length = capacity.max(1).next_power_of_two() as usize;
        Self {
            ids: (0..length).map(|_| AtomicU64::new(0)).collect(),
            capacity,
            posted: AtomicU32::new(0),
            completed: AtomicU32::new(0),
        }
    }

    /// Position of the next request; for whoever posts.
    pub(super) fn position(&self) -> u32 {
        self.posted.load(Relaxed)
    }

    /// How many more can be posted; for whoever posts.
    pub(super) fn room(&self) -> u32 {
        self.capacity.saturating_sub(self.position().wrapping_sub(self.completed.load(Acquire)))
    }

    /// Notes a request's identifier at `position`, where there is room.
    pub(super) fn put(&self, position: u32, wr_id: u64) {
        self.at(position).store(wr_id, Relaxed);
    }

    /// Has everything before `position` count as posted. Before the device learns of it: the completion may be polled
    /// at once.
    pub(super) fn post(&self, position: u32) {
        // SYNC: with `complete`, so that identifiers are seen there.
        self.posted.store(position, Release);
    }

    /// The identifier of the request at `position`, which completed, and with it all before it. `None` if no such
    /// request is outstanding.
    pub(super) fn complete(&self, position: u32) -> Option<u64> {
        let posted = self.posted.load(Acquire);
        let completed = self.completed.load(Relaxed);
        if position.wrapping_sub(completed) >= posted.wrapping_sub(completed) {
            return None;
        }
        let wr_id = self.at(position).load(Relaxed);
        // SYNC: with `room`, so that the identifier was read before its place is used again.
        self.completed.store(position.wrapping_add(1), Release);
        Some(wr_id)
    }

    /// The identifier of the oldest request, for a device that is gone and completes nothing any more.
    pub(super) fn complete_oldest(&self) -> Option<u64> {
        self.complete(self.oldest())
    }

    /// Position of the oldest request, if there is one.
    pub(super) fn oldest(&self) -> u32 {
        self.completed.load(Relaxed)
    }

    fn at(&self, position: u32) -> &AtomicU64 {
        &self.ids[position as usize & (self.ids.len() - 1)]
    }
}

/// What the device is given as a request's identifier, and brings back with its completion: which queue pair, which
/// kind of request, and its position. (Some devices report neither kind nor queue with a failure.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) kind: RequestKind,
    /// Where the queue pair is in the completion queue's table.
    pub(super) slot: Slot,
    pub(super) position: u32,
}

/// A place in a completion queue's table of queue pairs. Its generation tells one user from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) index: u16,
    /// 13 bits.
    pub(super) generation: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    Send,
    Write,
    Read,
    Receive,
    /// The first message on iWARP, in either direction.
    Hello,
    /// A receive of a shared receive queue; see [`Ticket::shared`].
    SharedReceive,
}

impl Ticket {
    pub(super) fn to_bits(self) -> u64 {
        let kind = match self.kind {
            RequestKind::Send => 0,
            RequestKind::Write => 1,
            RequestKind::Read => 2,
            RequestKind::Receive => 3,
            RequestKind::Hello => 4,
            RequestKind::SharedReceive => 5u64,
        };
        kind << 61
            | u64::from(self.slot.generation & Slot::GENERATIONS) << 48
            | u64::from(self.slot.index) << 32
            | u64::from(self.position)
    }

    pub(super) fn from_bits(bits: u64) -> Self {
        let kind = match bits >> 61 {
            0 => RequestKind::Send,
            1 => RequestKind::Write,
            2 => RequestKind::Read,
            4 => RequestKind::Hello,
            5 => RequestKind::SharedReceive,
            _ => RequestKind::Receive,
        };
        let slot = Slot { index: (bits >> 32) as u16, generation: (bits >> 48) as u16 & Slot::GENERATIONS };
        Self { kind, slot, position: bits as u32 }
    }
}

/// Receives of shared receive queues: which queue pair took one is said by its completion, so the ticket says which
/// queue it was posted to.
impl Ticket {
    /// Mask of a queue's key.
    pub(super) const SHARED_KEYS: u32 = (1 << 29) - 1;

    /// That of a receive at `position` of the queue of that key.
    pub(super) fn shared(key: u32, position: u32) -> Self {
        let slot = Slot { index: key as u16, generation: (key >> 16) as u16 & Slot::GENERATIONS };
        Self { kind: RequestKind::SharedReceive, slot, position }
    }

    /// The key of the queue.
    pub(super) fn shared_key(self) -> u32 {
        u32::from(self.slot.generation) << 16 | u32::from(self.slot.index)
    }
}

impl Slot {
    /// Mask of a generation.
    pub(super) const GENERATIONS: u16 = (1 << 13) - 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_comes_back_as_it_went() {
        use RequestKind::{Hello, Read, Receive, Send, SharedReceive, Write};
        for kind in [Send, Write, Read, Receive, Hello, SharedReceive] {
            for (index, generation, position) in
                [(0, 0, 0), (7, 3, 9), (u16::MAX, Slot::GENERATIONS, u32::MAX)]
            {
                let ticket = Ticket { kind, slot: Slot { index, generation }, position };
                assert_eq!(Ticket::from_bits(ticket.to_bits()), ticket);
            }
        }
    }

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
