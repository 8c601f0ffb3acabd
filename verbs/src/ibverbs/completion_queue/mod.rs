//! Completion queues with their completion channels, and the queue pairs that complete on them.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use ibverbs_sys as sys;

use super::core::{Core, RequestKind, Slot, Ticket};
use super::device::{Device, set_nonblocking};
use super::library::{check, last_error};
use super::lock;
use super::wake::{Sleeper, Waker};
use crate::{
    CompletionOpcode, CompletionQueue, CompletionStatus, Context as _, QueuePairNumber, VerbsError,
    WorkCompletion,
};

/// Completions taken from the device at a time.
const BATCH: usize = 32;
/// Places for hellos in a completion queue on iWARP.
const HELLOS: u32 = 512;

/// A completion queue. Its channel is its own, so an event says which queue it is for.
#[derive(Debug)]
pub(super) struct Queue {
    device: Arc<Device>,
    /// On iWARP: sleepers wait for more than the channel.
    sleeper: Option<Sleeper>,
    channel: Channel,
    queue: NonNull<sys::ibv_cq>,
    state: Mutex<State>,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

#[derive(Debug)]
struct State {
    completions: Box<[sys::ibv_wc; BATCH]>,
    users: Users,
    /// What could not be reported before, in its order.
    ready: VecDeque<WorkCompletion>,
}

/// The queue pairs that complete here.
#[derive(Debug, Default)]
struct Users {
    slots: Vec<User>,
    free: Vec<u16>,
}

#[derive(Debug, Default)]
struct User {
    generation: u16,
    /// The queue pair, and which of its queues complete here.
    core: Option<(Arc<Core>, Role)>,
    /// Whether the device has flushed it, and all that came of that is in the queue or was polled.
    flushed: bool,
}

/// Which queues of a queue pair complete on a completion queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Role {
    pub(super) sends: bool,
    pub(super) receives: bool,
}

impl Queue {
    pub(super) fn create(device: Arc<Device>, capacity: u32) -> Result<Arc<Self>, VerbsError> {
        let limit = device.attributes().max_completions;
        if capacity > limit {
            return Err(VerbsError::Limit {
                what: "completion queue depth",
                asked: capacity.into(),
                limit: limit.into(),
            });
        }
        let channel = Channel::create(Arc::clone(&device))?;
        let sleeper = match &device.manager {
            Some(_) => Some(Sleeper::new(&[channel.fd()])?),
            None => None,
        };
        // Hellos need places, too: one for each queue pair.
        let hellos = if sleeper.is_some() { HELLOS } else { 0 };
        let entries = capacity.max(1).saturating_add(hellos).min(limit.max(1));
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: the context is open, and the channel one of its own.
        let queue = unsafe {
            (device.library().create_cq)(
                device.context(),
                entries,
                std::ptr::null_mut(),
                channel.channel.as_ptr(),
                0,
            )
        };
        let queue = NonNull::new(queue)
            .ok_or_else(|| last_error(format!("creating a completion queue of {capacity} entries")))?;
        let completions = Box::new([sys::ibv_wc::default(); BATCH]);
        let state = Mutex::new(State { completions, users: Users::default(), ready: VecDeque::new() });
        Ok(Arc::new(Self { device, sleeper, channel, queue, state }))
    }

    /// The queue behind the trait, if it is of `device`.
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

    pub(super) fn as_ptr(&self) -> *mut sys::ibv_cq {
        self.queue.as_ptr()
    }

    /// What wakes up its sleepers without an event of the device, if anything.
    pub(super) fn waker(&self) -> Option<Arc<Waker>> {
        self.sleeper.as_ref().map(|sleeper| Arc::clone(sleeper.waker()))
    }

    /// Reserves a place for a queue pair.
    pub(super) fn enter(&self, core: &Arc<Core>, role: Role) -> Result<Slot, VerbsError> {
        let users = &mut lock(&self.state).users;
        let core = Some((Arc::clone(core), role));
        if let Some(index) = users.free.pop() {
            let user = &mut users.slots[usize::from(index)];
            user.generation = user.generation.wrapping_add(1) & Slot::GENERATIONS;
            user.core = core;
            user.flushed = false;
            return Ok(Slot { index, generation: user.generation });
        }
        let index = u16::try_from(users.slots.len()).map_err(|_| VerbsError::Limit {
            what: "queue pairs of one completion queue",
            asked: users.slots.len() as u64 + 1,
            limit: 1 << 16,
        })?;
        users.slots.push(User { generation: 0, core, flushed: false });
        Ok(Slot { index, generation: 0 })
    }

    /// Takes a queue pair out, whose completions are then dropped. When this returns, nobody uses it any more here.
    pub(super) fn leave(&self, slot: Slot) {
        let users = &mut lock(&self.state).users;
        if let Some(user) = users.slots.get_mut(usize::from(slot.index))
            && user.generation == slot.generation
            && user.core.take().is_some()
        {
            users.free.push(slot.index);
        }
    }

    /// Does what the device's completions ask for, and keeps them for who polls.
    pub(super) fn fetch(&self) {
        let state = &mut *lock(&self.state);
        let count = self.take(&mut state.completions[..]);
        for completion in &state.completions[..count] {
            state.users.translate(&self.device, completion, |completion| state.ready.push_back(completion));
        }
    }

    /// Takes completions from the device; how many there were, and less than was asked for if there are no more.
    fn take(&self, completions: &mut [sys::ibv_wc]) -> usize {
        // SAFETY:
        // - the queue is alive, and with it its context, whose table never changes, and
        // - the array is writable for as many completions as the call says.
        let count = unsafe {
            let context = self.queue.as_ref().context;
            match (*context).ops.poll_cq {
                Some(poll) => poll(self.as_ptr(), completions.len() as i32, completions.as_mut_ptr()),
                None => 0,
            }
        };
        usize::try_from(count).map_or(0, |count| count.min(completions.len()))
    }
}

impl CompletionQueue for Queue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> usize {
        let state = &mut *lock(&self.state);
        // Asked before the device: what it flushed is in the queue by then.
        let removed = self.device.is_removed();
        if self.sleeper.is_some() {
            state.users.note_flushed();
        }
        let mut filled = 0;
        while filled < completions.len()
            && let Some(completion) = state.ready.pop_front()
        {
            completions[filled] = completion;
            filled += 1;
        }
        // What belongs to a queue pair that is gone is passed over, and must not look like an empty queue.
        while filled < completions.len() {
            let wanted = (completions.len() - filled).min(BATCH);
            let count = self.take(&mut state.completions[..wanted]);
            for completion in &state.completions[..count] {
                state.users.translate(&self.device, completion, |completion| {
                    match completions.get_mut(filled) {
                        Some(place) => {
                            *place = completion;
                            filled += 1;
                        }
                        // One that comes may bring others that waited for it.
                        None => state.ready.push_back(completion),
                    }
                });
            }
            if count < wanted {
                break;
            }
        }
        if removed || self.sleeper.is_some() {
            filled += state.users.flush(&mut completions[filled..], removed);
        }
        filled
    }

    fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue is alive, and with it its context, whose table never changes.
        let result = unsafe {
            let context = self.queue.as_ref().context;
            match (*context).ops.req_notify_cq {
                Some(arm) => arm(self.as_ptr(), 0),
                None => libc::EOPNOTSUPP,
            }
        };
        match check("arming a completion queue", result) {
            // A device that is gone flushes everything, see `poll`; nobody should sleep for it.
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

impl Drop for Queue {
    fn drop(&mut self) {
        // Destroying waits for events that were taken and not acknowledged: there are none.
        // SAFETY: queue pairs hold a reference to their completion queues, so none is left.
        let result = unsafe { (self.device.library().destroy_cq)(self.queue.as_ptr()) };
        if let Err(error) = check("destroying a completion queue", result) {
            tracing::warn!(%error, "an object of the device can't be given back");
        }
    }
}

impl Users {
    /// What a completion of the device says to the queue pair's user; moves the queue pair to Error if it failed.
    fn translate(&self, device: &Device, completion: &sys::ibv_wc, mut report: impl FnMut(WorkCompletion)) {
        let ticket = Ticket::from_bits(completion.wr_id());
        if ticket.kind == RequestKind::SharedReceive {
            if let Some(completed) = shared_receive(device, ticket, completion) {
                report(completed);
            }
            return;
        }
        let Some(user) = self.slots.get(usize::from(ticket.slot.index)) else { return };
        let user = user.core.as_ref().filter(|_| user.generation == ticket.slot.generation);
        let Some((core, _)) = user else { return };
        let queue = match ticket.kind {
            RequestKind::Hello => {
                match completion.error() {
                    None => core.hear(),
                    Some((status, vendor)) => {
                        core.fail(|| explain(core, self::status(status), ticket.kind, vendor))
                    }
                }
                return;
            }
            RequestKind::Receive => &core.receives,
            _ => &core.sends,
        };
        let status = match completion.error() {
            None => CompletionStatus::Success,
            Some((status, vendor_error)) => {
                let status = self::status(status);
                core.fail(|| explain(core, status, ticket.kind, vendor_error));
                status
            }
        };
        // Only a success says what it was.
        let with_immediate = status == CompletionStatus::Success
            && completion.opcode() == sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        let completed = WorkCompletion {
            wr_id: 0,
            status,
            opcode: match ticket.kind {
                RequestKind::Send | RequestKind::Hello => CompletionOpcode::Send,
                RequestKind::Write => CompletionOpcode::Write,
                RequestKind::Read => CompletionOpcode::Read,
                RequestKind::Receive if with_immediate => CompletionOpcode::ReceiveWriteWithImmediate,
                RequestKind::Receive | RequestKind::SharedReceive => CompletionOpcode::Receive,
            },
            byte_len: match (status, ticket.kind) {
                (CompletionStatus::Success, RequestKind::Receive) => completion.len() as u64,
                _ => 0,
            },
            immediate: completion.imm_data().map(u32::from_be),
            queue_pair: QueuePairNumber(core.number),
        };
        let mut report = |position, completed: WorkCompletion| {
            if let Some(wr_id) = queue.complete(position) {
                report(WorkCompletion { wr_id, ..completed });
            }
        };
        match &core.order {
            Some(order) if ticket.kind != RequestKind::Receive => {
                lock(order).arrive(ticket.position, completed, report);
            }
            _ => report(ticket.position, completed),
        }
    }

    /// Notes which queue pairs the device has flushed, for [`flush`](Self::flush) after the queue was polled empty.
    fn note_flushed(&mut self) {
        for user in &mut self.slots {
            user.flushed = user.core.as_ref().is_some_and(|(core, _)| core.is_flushed());
        }
    }

    /// The flush that the device does not report any more: because it was taken away, or because it does not look at
    /// requests that are posted in Error.
    fn flush(&self, completions: &mut [WorkCompletion], all: bool) -> usize {
        let mut filled = 0;
        let users = self.slots.iter().filter(|user| all || user.flushed);
        for (core, role) in users.filter_map(|user| user.core.as_ref()) {
            let queues = [
                (role.sends, &core.sends, CompletionOpcode::Send),
                (role.receives, &core.receives, CompletionOpcode::Receive),
            ];
            for (_, queue, opcode) in queues.into_iter().filter(|(here, ..)| *here) {
                while let Some(place) = completions.get_mut(filled) {
                    let flushed = WorkCompletion {
                        status: CompletionStatus::WorkRequestFlushed,
                        opcode,
                        queue_pair: QueuePairNumber(core.number),
                        ..WorkCompletion::EMPTY
                    };
                    let order = core.order.as_ref().filter(|_| opcode == CompletionOpcode::Send);
                    let known = order.and_then(|order| lock(order).take_early(queue.oldest()));
                    let Some(wr_id) = queue.complete_oldest() else { break };
                    *place = WorkCompletion { wr_id, ..known.unwrap_or(flushed) };
                    filled += 1;
                }
            }
        }
        filled
    }
}

/// What the completion of a receive of a shared receive queue says, whether the queue pair that took it is still there or
/// not: the buffer is its user's again.
fn shared_receive(device: &Device, ticket: Ticket, completion: &sys::ibv_wc) -> Option<WorkCompletion> {
    let wr_id = lock(&device.shared_receives).complete(ticket)?;
    let (status, byte_len, opcode) = match completion.error() {
        None => (CompletionStatus::Success, completion.len() as u64, completion.opcode()),
        Some((status, vendor_error)) => {
            let status = self::status(status);
            if let Some(core) = lock(&device.pairs).get(&completion.qp_num) {
                core.fail(|| explain(core, status, ticket.kind, vendor_error));
            }
            (status, 0, sys::ibv_wc_opcode::IBV_WC_RECV)
        }
    };
    Some(WorkCompletion {
        wr_id,
        status,
        opcode: match opcode {
            sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => CompletionOpcode::ReceiveWriteWithImmediate,
            _ => CompletionOpcode::Receive,
        },
        byte_len,
        immediate: completion.imm_data().map(u32::from_be),
        queue_pair: QueuePairNumber(completion.qp_num),
    })
}

fn explain(core: &Core, status: CompletionStatus, kind: RequestKind, vendor_error: u32) -> String {
    match status {
        // What came first is not ours to know: it happened on the peer's request, or in the device.
        CompletionStatus::WorkRequestFlushed => {
            "the device ended the connection: it refused a request of the peer's, or failed".into()
        }
        _ => {
            let kind = match kind {
                RequestKind::Send => "send",
                RequestKind::Write => "RDMA WRITE",
                RequestKind::Read => "RDMA READ",
                RequestKind::Receive | RequestKind::SharedReceive => "receive",
                RequestKind::Hello => "first message",
            };
            // soft-iWARP has one answer if a request is wrong, and if TCP no longer takes it.
            let or = match status {
                CompletionStatus::LocalOperation if core.flushes_here => ", or the connection has ended",
                _ => "",
            };
            format!("{kind}: {status}{or} (vendor error {vendor_error:#x})")
        }
    }
}

/// `enum ibv_wc_status` (man 3 ibv_poll_cq).
fn status(status: sys::ibv_wc_status::Type) -> CompletionStatus {
    use sys::ibv_wc_status as code;
    match status {
        code::IBV_WC_SUCCESS => CompletionStatus::Success,
        code::IBV_WC_LOC_LEN_ERR => CompletionStatus::LocalLength,
        code::IBV_WC_LOC_QP_OP_ERR => CompletionStatus::LocalOperation,
        code::IBV_WC_LOC_PROT_ERR | code::IBV_WC_LOC_ACCESS_ERR => CompletionStatus::LocalProtection,
        code::IBV_WC_WR_FLUSH_ERR => CompletionStatus::WorkRequestFlushed,
        code::IBV_WC_REM_INV_REQ_ERR => CompletionStatus::RemoteInvalidRequest,
        code::IBV_WC_REM_ACCESS_ERR => CompletionStatus::RemoteAccess,
        code::IBV_WC_REM_OP_ERR => CompletionStatus::RemoteOperation,
        code::IBV_WC_RETRY_EXC_ERR => CompletionStatus::RetryExceeded,
        code::IBV_WC_RNR_RETRY_EXC_ERR => CompletionStatus::RnrRetryExceeded,
        _ => CompletionStatus::Fatal,
    }
}

/// A completion channel, whose descriptor does not block.
#[derive(Debug)]
struct Channel {
    device: Arc<Device>,
    channel: NonNull<sys::ibv_comp_channel>,
}

impl Channel {
    fn create(device: Arc<Device>) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let channel = unsafe { (device.library().create_comp_channel)(device.context()) };
        let channel = NonNull::new(channel).ok_or_else(|| last_error("creating a completion channel"))?;
        let channel = Self { device, channel };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY:
        // - the channel is alive, and never changes its descriptor, and
        // - that is open as long as the channel, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Takes one event, if there is one.
    fn take_event(&self) -> bool {
        let mut queue = std::ptr::null_mut();
        let mut context = std::ptr::null_mut();
        // SAFETY: the channel is alive, and both results are writable.
        let result = unsafe {
            (self.device.library().get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut context)
        };
        result == 0
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the completion queue was destroyed before: it drops its fields after itself.
        let result = unsafe { (self.device.library().destroy_comp_channel)(self.channel.as_ptr()) };
        if let Err(error) = check("destroying a completion channel", result) {
            tracing::warn!(%error, "an object of the device can't be given back");
        }
    }
}
