//! Completion queues with their completion channels, the queue pairs that complete on them, and the
//! translation of the device's completions for these.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use ibverbs_sys as sys;

use super::device::Device;
use super::library::{Owned, check, last_error, set_nonblocking};
use super::posting::core::Core;
use super::posting::windows::Kept;
use super::sleeper::{Sleeper, Waker};
use super::ticket::{RequestKind, Slot, Ticket};
use crate::panics::lock;
use crate::{
    CompletionOpcode, CompletionQueue, CompletionStatus, Context as _, QueuePairNumber, VerbsError,
    WorkCompletion,
};

/// Completions taken from the device at a time.
const BATCH: usize = 32;
/// Slots for hellos in a completion queue on iWARP.
const HELLOS: u32 = 512;

/// A completion queue. It has its own channel, so each event of the channel belongs to this queue.
#[derive(Debug)]
pub(crate) struct Queue {
    queue: Owned<sys::ibv_cq>,
    /// On iWARP: sleepers wait for more than the channel. Dropped before the channel, whose descriptor it
    /// has.
    sleeper: Option<Sleeper>,
    channel: Channel,
    device: Arc<Device>,
    state: Mutex<QueueState>,
}

#[derive(Debug)]
struct QueueState {
    completions: Box<[sys::ibv_wc; BATCH]>,
    members: Members,
    /// Completions that found no room in an earlier poll, in their order.
    ready: VecDeque<WorkCompletion>,
    /// What closed windows have kept. Dropped without the lock, because this runs code of others.
    over: Vec<Kept>,
}

impl Queue {
    pub(crate) fn create(device: Arc<Device>, capacity: u32) -> Result<Arc<Self>, VerbsError> {
        let entries = entries(&device, capacity)?;
        let channel = Channel::create(Arc::clone(&device))?;
        let sleeper = match &device.manager {
            Some(_) => Some(Sleeper::new(&[channel.fd()])?),
            None => None,
        };
        let library = device.library();
        // SAFETY:
        // - the context is open, and the channel one of its own, and both are dropped after the queue; and
        // - queue pairs hold a reference to their completion queues, so none is left when the queue is
        //   dropped. Destroying waits for events that were taken and not acknowledged. There are none.
        let queue = unsafe {
            let (nothing, channel) = (std::ptr::null_mut(), channel.channel.as_ptr());
            let queue = (library.create_cq)(device.context(), entries, nothing, channel, 0);
            Owned::new(queue, library.destroy_cq, "destroying a completion queue")
        };
        let queue =
            queue.ok_or_else(|| last_error(format!("creating a completion queue of {capacity} entries")))?;
        let completions = Box::new([sys::ibv_wc::default(); BATCH]);
        let (members, ready, over) = (Members::default(), VecDeque::new(), Vec::new());
        let state = Mutex::new(QueueState { completions, members, ready, over });
        Ok(Arc::new(Self { queue, sleeper, channel, device, state }))
    }

    /// Returns the queue behind the trait object, if it is one of `device`.
    pub(crate) fn of(
        queue: &Arc<dyn CompletionQueue>,
        device: &Arc<Device>,
    ) -> Result<Arc<Self>, VerbsError> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(queue) as _;
        let own = any.downcast().ok().filter(|queue: &Arc<Self>| Arc::ptr_eq(&queue.device, device));
        own.ok_or_else(|| VerbsError::foreign("completion queue"))
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ibv_cq {
        self.queue.as_ptr()
    }

    /// Returns the waker for its sleepers, if they may sleep for more than an event of the device.
    pub(crate) fn waker(&self) -> Option<Arc<Waker>> {
        self.sleeper.as_ref().map(|sleeper| Arc::clone(&sleeper.waker))
    }

    /// Reserves a slot for a queue pair.
    pub(crate) fn enter(&self, core: &Arc<Core>, role: Role) -> Result<Slot, VerbsError> {
        lock(&self.state).members.enter(core, role)
    }

    /// Takes the queue pair with this number out, and drops its completions, except those of shared receives,
    /// which then name no queue pair. The queue does not use the queue pair any more when this returns.
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
        let mut state = lock(&self.state);
        // Bounds the loop, because the device may add completions meanwhile.
        for _ in 0..=self.entries(&state) / BATCH {
            if self.fetch_batch(&mut state) < BATCH {
                break;
            }
        }
        unlock(state);
    }

    /// Takes completions from the device, does what they ask for, and keeps them for the next poll.
    pub(crate) fn fetch(&self) {
        let mut state = lock(&self.state);
        self.fetch_batch(&mut state);
        unlock(state);
    }

    /// Takes completions from the device for later polls, a batch at most. Returns their number.
    fn fetch_batch(&self, state: &mut QueueState) -> usize {
        let count = self.take(&mut state.completions[..]);
        for completion in &state.completions[..count] {
            let keep = |completion| state.ready.push_back(completion);
            state.members.translate(&self.device, completion, &mut state.over, keep);
        }
        count
    }

    /// Returns the number of completions that the device's queue holds.
    fn entries(&self, _locked: &QueueState) -> usize {
        // SAFETY: the queue is alive, and only `resize` writes the number, which has the lock meanwhile.
        usize::try_from(unsafe { (*self.as_ptr()).cqe }).unwrap_or(0)
    }

    /// Takes completions from the device. Returns their number, which is less than the length of the array if
    /// the queue is empty.
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

/// Returns the number of completions that a queue of the device needs for `capacity` ones of its users.
fn entries(device: &Device, capacity: u32) -> Result<i32, VerbsError> {
    let limit = device.attributes().max_completions;
    VerbsError::check_limits([("completion queue depth", capacity, limit)])?;
    // On iWARP a hello of each queue pair needs a slot, too.
    let hellos = if device.manager.is_some() { HELLOS } else { 0 };
    Ok(i32::try_from(capacity.max(1).saturating_add(hellos).min(limit.max(1))).unwrap_or(i32::MAX))
}

/// Releases the lock, then drops what closed windows have kept.
fn unlock(mut state: MutexGuard<'_, QueueState>) {
    let over = std::mem::take(&mut state.over);
    drop(state);
    drop(over);
}

impl crate::sealed::Sealed for Queue {}

impl CompletionQueue for Queue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> usize {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        // Asked before the device is polled: the completions that a removed device flushed are in the queue
        // by then.
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
                state.members.translate(&self.device, completion, &mut state.over, |completion| {
                    match completions.get_mut(filled) {
                        Some(entry) => {
                            *entry = completion;
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
        unlock(guard);
        filled
    }

    fn resize(&self, capacity: u32) -> Result<(), VerbsError> {
        let entries = entries(&self.device, capacity)?;
        // Polls wait meanwhile.
        let state = lock(&self.state);
        if usize::try_from(entries).is_ok_and(|entries| entries <= self.entries(&state)) {
            return Ok(());
        }
        // SAFETY: the queue is alive.
        let result = unsafe { (self.device.library().resize_cq)(self.as_ptr(), entries) };
        match result.saturating_abs() {
            libc::EOPNOTSUPP | libc::ENOSYS => Err(VerbsError::unsupported("resizing of completion queues")),
            _ => check(format_args!("resizing a completion queue to {entries} entries"), result),
        }
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

/// A completion channel, whose descriptor does not block.
#[derive(Debug)]
struct Channel {
    channel: Owned<sys::ibv_comp_channel>,
    device: Arc<Device>,
}

impl Channel {
    fn create(device: Arc<Device>) -> Result<Self, VerbsError> {
        let library = device.library();
        // SAFETY:
        // - the context is open, and
        // - the completion queue of the channel is dropped before it, and the device after it.
        let channel = unsafe {
            let channel = (library.create_comp_channel)(device.context());
            Owned::new(channel, library.destroy_comp_channel, "destroying a completion channel")
        };
        let channel = channel.ok_or_else(|| last_error("creating a completion channel"))?;
        let channel = Self { device, channel };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY:
        // - the channel is alive, and never changes its descriptor, and
        // - that is open as long as the channel, which is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
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

/// The queue pairs that complete here.
#[derive(Debug, Default)]
struct Members {
    slots: Vec<Member>,
    free: Vec<u16>,
}

#[derive(Debug, Default)]
struct Member {
    generation: u16,
    /// The queue pair, and which of its queues complete here.
    core: Option<(Arc<Core>, Role)>,
    /// Whether the device has flushed the queue pair, and all flushed completions were polled or are in the
    /// queue.
    flushed: bool,
}

/// Which queues of a queue pair complete on a completion queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Role {
    pub(crate) sends: bool,
    pub(crate) receives: bool,
}

impl Members {
    /// Reserves a slot for a queue pair.
    fn enter(&mut self, core: &Arc<Core>, role: Role) -> Result<Slot, VerbsError> {
        let core = Some((Arc::clone(core), role));
        if let Some(index) = self.free.pop() {
            let member = &mut self.slots[usize::from(index)];
            member.generation = member.generation.wrapping_add(1) & Slot::GENERATIONS;
            member.core = core;
            member.flushed = false;
            return Ok(Slot { index, generation: member.generation });
        }
        let index = u16::try_from(self.slots.len()).map_err(|_| {
            VerbsError::limit("queue pairs of one completion queue", self.slots.len() as u64 + 1, 1 << 16)
        })?;
        self.slots.push(Member { generation: 0, core, flushed: false });
        Ok(Slot { index, generation: 0 })
    }

    /// Takes a queue pair out, and drops its completions.
    fn leave(&mut self, slot: Slot) {
        if let Some(member) = self.slots.get_mut(usize::from(slot.index))
            && member.generation == slot.generation
            && member.core.take().is_some()
        {
            self.free.push(slot.index);
        }
    }

    /// Translates a completion of the device to completions of the queue pair's user. Moves the queue pair to
    /// Error if the request failed. Adds to `over` what a closed window has kept.
    fn translate(
        &self,
        device: &Device,
        completion: &sys::ibv_wc,
        over: &mut Vec<Kept>,
        mut report: impl FnMut(WorkCompletion),
    ) {
        let ticket = Ticket::from_bits(completion.wr_id());
        if ticket.kind == RequestKind::SharedReceive {
            if let Some(completed) = shared_receive(device, ticket, completion) {
                report(completed);
            }
            return;
        }
        let Some(member) = self.slots.get(usize::from(ticket.slot.index)) else { return };
        let member = member.core.as_ref().filter(|_| member.generation == ticket.slot.generation);
        let Some((core, _)) = member else { return };
        let queue = match ticket.kind {
            RequestKind::Hello | RequestKind::Window => {
                match completion.error() {
                    None if ticket.kind == RequestKind::Hello => core.hello_arrived(),
                    None => core.windows.iter().for_each(|it| it.completed(ticket.position, over)),
                    Some((status, vendor)) => core
                        .fail(|| explain(core.flushes_here, translate_status(status), ticket.kind, vendor)),
                }
                return;
            }
            RequestKind::Receive => &core.receives,
            _ => &core.sends,
        };
        let completed = translate(completion, ticket.kind, core.number, |status, vendor_error| {
            core.fail(|| explain(core.flushes_here, status, ticket.kind, vendor_error));
        });
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

    /// Notes which queue pairs the device has flushed. [`flush`](Self::flush) uses this after the queue was
    /// polled empty.
    fn note_flushed(&mut self) {
        for member in &mut self.slots {
            member.flushed = member.core.as_ref().is_some_and(|(core, _)| core.is_flushed());
        }
    }

    /// Completes requests that the device no longer reports: because it was removed, or because it ignores
    /// requests that are posted in Error.
    fn flush(&self, completions: &mut [WorkCompletion], all: bool) -> usize {
        let mut filled = 0;
        let members = self.slots.iter().filter(|member| all || member.flushed);
        for (core, role) in members.filter_map(|member| member.core.as_ref()) {
            let queues = [
                (role.sends, &core.sends, CompletionOpcode::Send),
                (role.receives, &core.receives, CompletionOpcode::Receive),
            ];
            for (_, queue, opcode) in queues.into_iter().filter(|(here, ..)| *here) {
                while let Some(entry) = completions.get_mut(filled) {
                    let flushed = WorkCompletion {
                        status: CompletionStatus::WorkRequestFlushed,
                        opcode,
                        queue_pair: QueuePairNumber(core.number),
                        ..WorkCompletion::EMPTY
                    };
                    let order = core.order.as_ref().filter(|_| opcode == CompletionOpcode::Send);
                    let known = order.and_then(|order| lock(order).take_early(queue.oldest()));
                    let Some(wr_id) = queue.complete_oldest() else { break };
                    *entry = WorkCompletion { wr_id, ..known.unwrap_or(flushed) };
                    filled += 1;
                }
            }
        }
        filled
    }
}

/// Translates a completion of a request of queue pair `number`, with the identifier 0. Calls `fail` with the
/// status and the vendor's error if the request failed.
fn translate(
    completion: &sys::ibv_wc,
    kind: RequestKind,
    number: u32,
    fail: impl FnOnce(CompletionStatus, u32),
) -> WorkCompletion {
    let error = completion.error().map(|(status, vendor_error)| (translate_status(status), vendor_error));
    if let Some((status, vendor_error)) = error {
        fail(status, vendor_error);
    }
    // Only a successful completion states its kind and length.
    let with_immediate =
        error.is_none() && completion.opcode() == sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
    let is_receive = matches!(kind, RequestKind::Receive | RequestKind::SharedReceive);
    WorkCompletion {
        wr_id: 0,
        status: error.map_or(CompletionStatus::Success, |(status, _)| status),
        opcode: match kind {
            RequestKind::Send | RequestKind::Hello | RequestKind::Window => CompletionOpcode::Send,
            RequestKind::Write => CompletionOpcode::Write,
            RequestKind::Read => CompletionOpcode::Read,
            _ if with_immediate => CompletionOpcode::ReceiveWriteWithImmediate,
            RequestKind::Receive | RequestKind::SharedReceive => CompletionOpcode::Receive,
        },
        byte_len: if is_receive && error.is_none() { completion.len() as u64 } else { 0 },
        immediate: completion.imm_data().map(u32::from_be),
        queue_pair: QueuePairNumber(number),
    }
}

/// Returns the completion of a receive of a shared receive queue. The receive completes even if its queue
/// pair is gone, because its buffer belongs to its user again.
fn shared_receive(device: &Device, ticket: Ticket, completion: &sys::ibv_wc) -> Option<WorkCompletion> {
    let wr_id = lock(&device.shared_receives).complete(ticket)?;
    let fail = |status, vendor_error| {
        if let Some(pair) = lock(&device.pairs).get(&completion.qp_num) {
            pair.fail(|| explain(device.manager.is_some(), status, ticket.kind, vendor_error));
        }
    };
    let completed = translate(completion, ticket.kind, completion.qp_num, fail);
    let number = device.number_for_user(completion.qp_num);
    Some(WorkCompletion { wr_id, queue_pair: QueuePairNumber(number), ..completed })
}

/// Returns the explanation of a failed completion. `iwarp`: whether the device is an iWARP device.
fn explain(iwarp: bool, status: CompletionStatus, kind: RequestKind, vendor_error: u32) -> String {
    match status {
        // The cause is unknown here: it happened on the peer's request, or in the device.
        CompletionStatus::WorkRequestFlushed => {
            "the device ended the connection: the device refused a request of the peer, or failed".into()
        }
        _ => {
            let kind = match kind {
                RequestKind::Send => "send",
                RequestKind::Write => "RDMA WRITE",
                RequestKind::Read => "RDMA READ",
                RequestKind::Receive | RequestKind::SharedReceive => "receive",
                RequestKind::Hello => "first message",
                RequestKind::Window => "memory window",
            };
            // soft-iWARP reports one status for a wrong request and for a TCP connection that has ended.
            let or = match status {
                CompletionStatus::LocalOperation if iwarp => ", or the connection has ended",
                _ => "",
            };
            format!("{kind}: {status}{or} (vendor error {vendor_error:#x})")
        }
    }
}

/// Translates `enum ibv_wc_status` (man 3 ibv_poll_cq).
fn translate_status(status: sys::ibv_wc_status::Type) -> CompletionStatus {
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
