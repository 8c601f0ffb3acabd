//! A port: one queue pair of a link, with its transfers in flight and its frames.

use std::collections::VecDeque;
use std::fmt;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::{Context, Poll, Waker};

use crate::error::{TensorError, TensorErrorKind};
use crate::link::Link;
use crate::link::words::WordPair;
use crate::wire::tensor_frame::{Announcement, Frame, MAX_FRAME};
use tonic_rdma::unstable::{Deferred, Participant, WorkId, WorkKind};
use tonic_rdma_verbs::memory::{Block, Lease, Pool, Quota};
use tonic_rdma_verbs::unstable::{
    FinishedTransfer, Grant, InFlight, LocalMemory, Notice, RemoteRange, Transfer, TransferKind, lock,
    wake_all,
};
use tonic_rdma_verbs::{
    CompletionOpcode, CompletionStatus, Operation, Payload, Probe, QueuePair, QueuePairNumber,
    ReceiveRequest, RemoteSegment, Rkey, VerbsError, WorkCompletion,
};

/// One queue pair of a link, with its transfers in flight and its frames.
pub(crate) struct Port {
    number: QueuePairNumber,
    /// The number of the port in its link.
    index: u32,
    /// The number of the port in its queue. Work requests carry it, so that their completions find the port.
    key: u32,
    /// The number of bytes that a request may carry inline.
    pub(crate) inline: usize,
    pool: Pool,
    state: Mutex<PortState>,
    /// The link that the port belongs to.
    owner: OnceLock<Weak<Link>>,
    written: AtomicU64,
    read: AtomicU64,
    /// The error of a full send queue, made once because callers of `write_now` may try again and again.
    busy: TensorError,
    /// Whether completions must be taken before more is posted. A sender that only polls memory polls no
    /// queue.
    completions_due: AtomicBool,
}

struct PortState {
    /// `None` once the link has ended. Declared before `receives`, because the queue pair has to go before
    /// the memory that it receives in.
    flights: Option<InFlight<Token>>,
    receives: Block,
    credits: Credits,
    /// Frames that wait until the peer has a receive for them. Their count of receives is set when they go.
    backlog: VecDeque<Box<[u8]>>,
}

/// What a completed receive brings: a frame of so many bytes, or immediate data.
#[derive(Clone, Copy, Debug)]
enum Arrival {
    Frame(usize),
    Immediate(u32),
}

impl Port {
    /// The number of receives that are posted: frames and notices that the peer may send before this side
    /// takes one.
    pub(crate) const RECEIVES: u32 = 256;
    /// The number of frames that may wait.
    const BACKLOG: usize = 1 << 16;
    /// The number of transfers that may wait on a port. Few in the unit tests, which fill a port.
    pub(crate) const WAITING: usize = if cfg!(test) { 16 } else { 1 << 16 };

    /// Takes over a queue pair in Init or later, and posts its receives.
    pub(crate) fn new(
        flights: InFlight<Token>,
        index: u32,
        key: u32,
        pool: Pool,
    ) -> Result<Self, TensorError> {
        let length = Self::RECEIVES as usize * MAX_FRAME;
        let receives = pool.lease(length, Quota::Receive).map_err(TensorError::memory)?;
        let (number, capacity) = (flights.queue_pair().number(), flights.queue_pair().capacity());
        let (inline, busy) = (capacity.inline as usize, TensorError::busy(capacity.send_requests as usize));
        let state = PortState {
            flights: Some(flights),
            receives,
            credits: Credits::new(Self::RECEIVES),
            backlog: VecDeque::new(),
        };
        for slot in 0..Self::RECEIVES {
            state.post_receive(slot, key)?;
        }
        Ok(Self {
            number,
            index,
            key,
            inline,
            pool,
            state: Mutex::new(state),
            owner: OnceLock::new(),
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
            busy,
            completions_due: AtomicBool::new(false),
        })
    }

    /// Sets the link that the port belongs to, and the number of receives that the peer has posted.
    pub(crate) fn set_owner(&self, owner: Weak<Link>, peer_receives: u32) {
        lock(&self.state).credits.set_peer_receives(peer_receives);
        let _ = self.owner.set(owner);
    }

    /// Lends the queue pair to `then`. Returns `None` if the link has ended.
    pub(crate) fn with_queue_pair<T>(
        &self,
        then: impl FnOnce(&dyn tonic_rdma_verbs::QueuePair) -> T,
    ) -> Option<T> {
        lock(&self.state).flights.as_ref().map(|flights| then(flights.queue_pair()))
    }

    /// Returns the evidence that both sides see one another's memory.
    pub(crate) fn probe(&self) -> Probe {
        let probe = |queue_pair: &dyn QueuePair| queue_pair.local().map(|local| local.probe());
        self.with_queue_pair(probe).flatten().unwrap_or_default()
    }

    /// Returns the bytes that transfers have written and read.
    pub(crate) fn moved(&self) -> (u64, u64) {
        (self.written.load(Ordering::Relaxed), self.read.load(Ordering::Relaxed))
    }

    /// Starts a transfer.
    ///
    /// # Errors
    /// The transfer can't start. The token gets the memory, and a copy of the error.
    pub(crate) fn submit(&self, transfer: Transfer<Token>) -> Result<(), TensorError> {
        self.submit_announced(transfer, None).map(drop)
    }

    /// Starts a transfer, which announces itself by `announcement` if the peer has a receive for that. Returns
    /// whether it does.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit).
    pub(crate) fn submit_announced(
        &self,
        mut transfer: Transfer<Token>,
        announcement: Option<Announcement>,
    ) -> Result<bool, TensorError> {
        let (kind, bytes) = transfer.moves();
        let counter = if kind == TransferKind::Read { &self.read } else { &self.written };
        counter.fetch_add(bytes, Ordering::Relaxed);
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let Some(flights) = &mut state.flights else {
            drop(guard);
            return Err(refuse(transfer, self.fault()));
        };
        if flights.unfinished() >= Self::WAITING {
            drop(guard);
            return Err(refuse(transfer, TensorError::busy(Self::WAITING)));
        }
        let announcement = announcement.filter(|_| state.credits.may_send());
        if let Some(announcement) = announcement {
            transfer = transfer.notify(Notice::Immediate(announcement.encode()));
        }
        if transfer.sends_immediate() {
            state.credits.sent();
        }
        let result = flights.submit(transfer, |number| self.id(number));
        drop(guard);
        result.map_err(|error| self.fail(TensorError::local(error)))?;
        Ok(announcement.is_some())
    }

    /// Returns whether the slab of `lease` is registered, or can be.
    pub(crate) fn registers(&self, lease: &Lease) -> bool {
        lock(&self.state).flights.as_mut().is_none_or(|flights| flights.registers(lease))
    }

    /// Returns whether the queue pair may have windows to memory for the peer.
    pub(crate) fn has_windows(&self) -> bool {
        self.with_queue_pair(|queue_pair| queue_pair.has_windows()).unwrap_or(false)
    }

    /// Opens a window to memory for the peer by `open`, which must not take long, because the poller of the
    /// queue waits meanwhile.
    pub(crate) fn open_window(
        &self,
        open: impl FnOnce(&mut InFlight<Token>) -> Result<Option<Grant>, VerbsError>,
    ) -> Result<Option<Grant>, TensorError> {
        let mut state = lock(&self.state);
        let opened = state.flights.as_mut().map(open);
        drop(state);
        opened.map_or_else(|| Err(self.fault()), |opened| opened.map_err(TensorError::memory))
    }

    /// Writes `slices`, one after the other, to memory of the peer. For few bytes: the caller's memory is
    /// free when this returns, and no token reports the end of the write.
    pub(crate) fn write_small(
        &self,
        slices: &[IoSlice<'_>],
        remote: RemoteSegment,
        immediate: Option<u32>,
    ) -> Result<(), TensorError> {
        self.write(slices, remote, immediate, true).map(drop)
    }

    /// Writes `slices`, one after the other, to memory of the peer, if that needs no wait. The caller's
    /// memory is free when this returns, and no token reports the end of the write.
    ///
    /// # Errors
    /// [`Busy`](crate::TensorErrorKind::Busy) if the queue has no room, other operations wait for it, or the
    /// peer has no receive for the immediate data. Nothing was written.
    pub(crate) fn write_now(
        &self,
        slices: &[IoSlice<'_>],
        remote: RemoteSegment,
        immediate: Option<u32>,
    ) -> Result<(), TensorError> {
        if !self.write(slices, remote, immediate, false)? {
            return Err(self.busy.clone());
        }
        self.written.fetch_add(Payload::Inline(slices).length(), Ordering::Relaxed);
        Ok(())
    }

    /// Writes `slices` inline. Returns false if the write would have to wait, and may not.
    #[inline]
    fn write(
        &self,
        slices: &[IoSlice<'_>],
        remote: RemoteSegment,
        immediate: Option<u32>,
        may_wait: bool,
    ) -> Result<bool, TensorError> {
        let operation = Operation::Write { data: Payload::Inline(slices), remote, immediate };
        self.make_room();
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let Some(flights) = &mut state.flights else {
            drop(guard);
            return Err(self.fault());
        };
        if immediate.is_some() && !may_wait && !state.credits.may_send() {
            return Ok(false);
        }
        let mut posted = flights.post_now(|number| self.id(number), operation);
        if may_wait && matches!(posted, Ok(false)) {
            let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            let write = queued(bytes, TransferKind::Write, remote, immediate);
            posted = flights.submit(write, |number| self.id(number)).map(|()| true);
        }
        self.completions_due.store(flights.is_crowded(), Ordering::Relaxed);
        if immediate.is_some() && matches!(posted, Ok(true)) {
            state.credits.sent();
        }
        drop(guard);
        posted.map_err(|error| self.fail(TensorError::local(error)))
    }

    /// Sends a frame, or keeps the frame until the peer has a receive for it.
    pub(crate) fn send_frame(&self, frame: &Frame<'_>) -> Result<(), TensorError> {
        let mut buffer = [0; MAX_FRAME];
        self.make_room();
        let mut state = lock(&self.state);
        let length = frame.encode(0, &mut buffer).map_err(TensorError::local)?;
        let result = if state.backlog.is_empty() && state.credits.may_send() {
            state.post_frame(&mut buffer[..length], self)
        } else if state.backlog.len() < Self::BACKLOG {
            state.backlog.push_back(buffer[..length].into());
            Ok(())
        } else {
            Err(TensorError::other("the peer takes no frames"))
        };
        drop(state);
        result.map_err(|error| self.fail(error))
    }

    /// Ends the port: all transfers are over, and their memory is back with its owners.
    pub(crate) fn end(&self, fault: &TensorError) {
        let flights = lock(&self.state).flights.take();
        let Some(flights) = flights else { return };
        let mut wakers = Vec::new();
        let mut over = Vec::new();
        flights.abandon(CompletionStatus::WorkRequestFlushed, |finished| over.push(finished));
        for finished in over {
            deliver(finished, Some(fault), &mut wakers);
        }
        wake_all(wakers);
    }

    /// Takes completions if many are due.
    fn make_room(&self) {
        if self.completions_due.load(Ordering::Relaxed)
            && let Some(owner) = self.owner()
        {
            owner.poll(self.index);
        }
    }

    fn id(&self, number: u32) -> u64 {
        WorkId { kind: WorkKind::Send, connection: self.key, value: number }.to_bits()
    }

    fn owner(&self) -> Option<Arc<Link>> {
        self.owner.get().and_then(Weak::upgrade)
    }

    /// Returns why the link has ended.
    fn fault(&self) -> TensorError {
        let fault = self.owner().and_then(|link| link.fault().cloned());
        fault.unwrap_or_else(|| TensorError::other("the link has ended"))
    }

    /// Ends the link with `error`, unless it has ended. Returns why it ended.
    fn fail(&self, error: TensorError) -> TensorError {
        match self.owner() {
            Some(link) => link.fail(error),
            None => error,
        }
    }

    /// Takes one completion. Returns what has arrived, if the completion is a receive.
    fn take(
        &self,
        completion: &WorkCompletion,
        frame: &mut [u8; MAX_FRAME],
        finished: &mut Vec<FinishedTransfer<Token>>,
    ) -> Result<Option<Arrival>, TensorError> {
        let id = WorkId::from_bits(completion.wr_id);
        let mut state = lock(&self.state);
        let Some(flights) = &mut state.flights else { return Ok(None) };
        if id.kind != WorkKind::Receive {
            flights.completed(id.value, completion.status, |it| finished.push(it));
            if completion.status != CompletionStatus::Success {
                return Err(self.lost(completion.status));
            }
            flights.pump(|number| self.id(number)).map_err(TensorError::local)?;
            return Ok(None);
        }
        if completion.status != CompletionStatus::Success {
            return Err(self.lost(completion.status));
        }
        let arrival = match (completion.opcode, completion.immediate) {
            (CompletionOpcode::ReceiveWriteWithImmediate, Some(value)) => Arrival::Immediate(value),
            _ => {
                let length = (completion.byte_len as usize).min(MAX_FRAME);
                let at = id.value as usize * MAX_FRAME;
                state.receives.copy_out(at, &mut frame[..length]).map_err(TensorError::local)?;
                Arrival::Frame(length)
            }
        };
        state.post_receive(id.value, self.key)?;
        state.credits.reposted();
        if state.credits.owes_credit() {
            let mut buffer = [0; MAX_FRAME];
            let length = Frame::Credit.encode(0, &mut buffer).map_err(TensorError::local)?;
            state.post_frame(&mut buffer[..length], self)?;
        }
        Ok(Some(arrival))
    }

    fn lost(&self, status: CompletionStatus) -> TensorError {
        match status {
            CompletionStatus::WorkRequestFlushed | CompletionStatus::RetryExceeded => {
                let peer = self.owner().map_or_else(|| "".into(), |link| Arc::clone(&link.peer));
                let reason = match status {
                    CompletionStatus::RetryExceeded => "its device acknowledges nothing any more",
                    _ => "its end of the RDMA connection is closed",
                };
                TensorError::peer_lost(&peer, reason)
            }
            status => TensorError::device(status),
        }
    }

    /// Hands an arrival to the link.
    fn arrived(
        &self,
        arrival: Arrival,
        frame: &[u8; MAX_FRAME],
        wakers: &mut Vec<Waker>,
    ) -> Result<(), TensorError> {
        let Some(owner) = self.owner() else { return Ok(()) };
        match arrival {
            Arrival::Immediate(immediate) => match Announcement::decode(immediate) {
                Announcement::Placed(slot) => owner.placed(slot, None),
                Announcement::Written(number) => owner.named.handle_announced(&owner, number, wakers),
            },
            Arrival::Frame(length) => {
                let decoded = Frame::decode(&frame[..length]).map_err(|error| owner.violation(error))?;
                self.granted(decoded.granted)?;
                owner.handle(decoded.frame, wakers)
            }
        }
    }

    /// Notes that the peer has posted receives, and sends the frames that waited for them.
    fn granted(&self, granted: u32) -> Result<(), TensorError> {
        let mut state = lock(&self.state);
        state.credits.peer_granted(granted);
        while state.credits.may_send()
            && let Some(mut frame) = state.backlog.pop_front()
        {
            state.post_frame(&mut frame, self)?;
        }
        Ok(())
    }
}

impl PortState {
    fn post_receive(&self, slot: u32, key: u32) -> Result<(), TensorError> {
        let Some(flights) = &self.flights else { return Ok(()) };
        let start = slot as usize * MAX_FRAME;
        let into = self.receives.segment(start..start + MAX_FRAME).map_err(TensorError::local)?;
        let wr_id = WorkId { kind: WorkKind::Receive, connection: key, value: slot }.to_bits();
        let request = ReceiveRequest { wr_id, into: &[into] };
        flights.queue_pair().post_receive(&[request]).map_err(TensorError::local)
    }

    /// Posts a frame, which reports the receives of this side. While it waited it has reported none.
    /// Otherwise two sides whose frames wait for one another would owe no `Credit`.
    fn post_frame(&mut self, frame: &mut [u8], port: &Port) -> Result<(), TensorError> {
        self.credits.sent();
        Frame::set_granted(frame, self.credits.granted());
        let Some(flights) = &mut self.flights else { return Err(port.fault()) };
        let inline = frame.len() <= port.inline;
        if inline {
            let slices = [IoSlice::new(frame)];
            let operation = Operation::Send { data: Payload::Inline(&slices), immediate: None };
            let posted = flights.post_now(|number| port.id(number), operation);
            port.completions_due.store(flights.is_crowded(), Ordering::Relaxed);
            if posted.map_err(TensorError::local)? {
                return Ok(());
            }
        }
        let transfer = if inline {
            queued(frame.to_vec(), TransferKind::Send, NO_REMOTE, None)
        } else {
            let mut block = port.pool.lease(frame.len(), Quota::Send).map_err(TensorError::memory)?;
            block.copy_in(0, frame).map_err(TensorError::local)?;
            whole(frame.len(), LocalMemory::Block(block), TransferKind::Send, NO_REMOTE)
        };
        flights.submit(transfer, |number| port.id(number)).map_err(TensorError::local)
    }
}

/// The remote segment of a Send, which has none.
const NO_REMOTE: RemoteSegment = RemoteSegment { address: 0, rkey: Rkey(0) };

/// Makes a transfer of a few bytes that have to wait.
fn queued(
    bytes: Vec<u8>,
    kind: TransferKind,
    remote: RemoteSegment,
    immediate: Option<u32>,
) -> Transfer<Token> {
    let transfer = whole(bytes.len(), LocalMemory::Bytes(bytes), kind, remote);
    match immediate {
        Some(value) => transfer.notify(Notice::Immediate(value)),
        None => transfer,
    }
}

fn whole(length: usize, local: LocalMemory, kind: TransferKind, start: RemoteSegment) -> Transfer<Token> {
    let place = RemoteRange { start, length: length as u64 };
    Transfer::of_range(local, 0, length as u64, kind, place, Token::unobserved())
}

/// Reports to the owner of a transfer that the transfer did not begin.
fn refuse(transfer: Transfer<Token>, error: TensorError) -> TensorError {
    let FinishedTransfer { token, local, .. } = transfer.refuse();
    token.finish(Outcome { local, result: Err(error.clone()) });
    error
}

/// Reports to the owner of a transfer how the transfer ended.
fn deliver(finished: FinishedTransfer<Token>, fault: Option<&TensorError>, wakers: &mut Vec<Waker>) {
    let FinishedTransfer { token, local, status } = finished;
    let result = match (status, fault) {
        (CompletionStatus::Success, _) => Ok(()),
        (CompletionStatus::WorkRequestFlushed | CompletionStatus::RetryExceeded, Some(fault)) => {
            Err(fault.clone())
        }
        (status, _) => Err(TensorError::device(status)),
    };
    token.deliver(Outcome { local, result }, wakers);
}

impl Participant for Port {
    fn queue_pair_number(&self) -> QueuePairNumber {
        self.number
    }

    fn handle_completions(&self, completions: &[WorkCompletion], after: &mut Deferred) {
        let wakers = &mut after.wakers;
        let mut frame = [0; MAX_FRAME];
        let mut finished = Vec::new();
        for completion in completions {
            let result = self.take(completion, &mut frame, &mut finished).and_then(|arrival| match arrival {
                Some(arrival) => self.arrived(arrival, &frame, wakers),
                None => Ok(()),
            });
            let fault = result.err().map(|error| self.fail(error));
            for finished in finished.drain(..) {
                deliver(finished, fault.as_ref(), wakers);
            }
        }
    }

    fn fail_with_device(&self) {
        if let Some(reason) = self.with_queue_pair(|queue_pair| queue_pair.failure()).flatten() {
            let reason = format!("the device ended the link: {reason}");
            self.fail(TensorError::new(TensorErrorKind::Device, reason));
        }
    }

    fn fail_after_panic(&self) {
        self.fail(TensorError::other("code panicked that handles what has arrived"));
    }
}

impl fmt::Debug for Port {
    /// Shows the port's name only, because all its parts would fill pages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port")
            .field("queue_pair", &self.number)
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

/// The credits of one queue pair: how many messages each side may send. Both counts are absolute and wrap, so
/// a count that is repeated or late does no harm.
#[derive(Debug)]
struct Credits {
    /// The number of receives that were ever posted here.
    posted: u32,
    /// The number of them that the peer knows of.
    reported: u32,
    /// The number of receives that are posted here at any time.
    window: u32,
    /// The number of messages that were ever sent.
    sent: u32,
    /// The number of receives that the peer has ever reported.
    peer_posted: u32,
}

impl Credits {
    /// The number of the peer's receives that only frames of kind `Credit` may use. Without them two sides
    /// that have used up all receives could not report new ones.
    const RESERVE: u32 = 4;

    /// Makes the credits of a side that has posted `window` receives.
    fn new(window: u32) -> Self {
        Self { posted: window, reported: window, window, sent: 0, peer_posted: 0 }
    }

    /// Sets the number of receives that the peer begins with.
    fn set_peer_receives(&mut self, receives: u32) {
        self.peer_posted = receives;
    }

    /// Returns whether the peer has a receive for another message.
    fn may_send(&self) -> bool {
        let left = self.peer_posted.wrapping_sub(self.sent) as i32;
        left > Self::RESERVE as i32
    }

    /// Counts a message that was sent.
    fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Notes how many receives the peer has ever posted.
    fn peer_granted(&mut self, posted: u32) {
        if posted.wrapping_sub(self.peer_posted) as i32 > 0 {
            self.peer_posted = posted;
        }
    }

    /// Counts a receive that was taken and posted again.
    fn reposted(&mut self) {
        self.posted = self.posted.wrapping_add(1);
    }

    /// Returns whether the peer needs a report of the receives.
    fn owes_credit(&self) -> bool {
        self.posted.wrapping_sub(self.reported) >= self.window / 2
    }

    /// Returns the count for a frame that is posted now.
    fn granted(&mut self) -> u32 {
        self.reported = self.posted;
        self.posted
    }
}

/// The result of a transfer.
pub(crate) struct Outcome {
    /// The memory that had moved into the transfer.
    pub(crate) local: LocalMemory,
    pub(crate) result: Result<(), TensorError>,
}

/// The recipient of a transfer's outcome, and the bell to ring.
pub(crate) struct Token {
    /// Without a cell the outcome is dropped.
    cell: Option<Arc<OutcomeCell>>,
    bell: Option<DeferredBell>,
}

/// A bell to ring when a transfer has ended, because the peer may sleep until then.
struct DeferredBell {
    link: Weak<Link>,
    pair: Arc<WordPair>,
    epoch: u64,
    port: u32,
}

/// Where a future finds the outcome of its transfer.
#[derive(Default)]
pub(crate) struct OutcomeCell {
    state: Mutex<OutcomeState>,
}

#[derive(Default)]
struct OutcomeState {
    outcome: Option<Outcome>,
    waiter: Waiter,
}

/// The receiver of an outcome that is not there yet.
#[derive(Default)]
enum Waiter {
    #[default]
    None,
    Task(Waker),
    Function(Box<dyn FnOnce(Outcome) + Send>),
}

impl Token {
    /// Makes a token that drops the outcome.
    pub(crate) fn unobserved() -> Self {
        Self { cell: None, bell: None }
    }

    /// Makes a token that puts the outcome into `cell`.
    pub(crate) fn future(cell: &Arc<OutcomeCell>) -> Self {
        Self { cell: Some(Arc::clone(cell)), bell: None }
    }

    /// Makes a token that calls `function`, from the thread that polls the queue.
    pub(crate) fn call(function: impl FnOnce(Outcome) + Send + 'static) -> Self {
        let cell = Arc::new(OutcomeCell::default());
        cell.call(function);
        Self::future(&cell)
    }

    /// Adds a bell: if the peer sleeps until `epoch` when the transfer has ended, the peer is woken.
    pub(crate) fn with_bell(self, link: Weak<Link>, pair: &Arc<WordPair>, epoch: u64, port: u32) -> Self {
        Self { bell: Some(DeferredBell { link, pair: Arc::clone(pair), epoch, port }), ..self }
    }

    /// Ends a transfer that the device does not carry out.
    pub(crate) fn finish(self, outcome: Outcome) {
        let mut wakers = Vec::new();
        self.deliver(outcome, &mut wakers);
        wake_all(wakers);
    }

    /// Delivers the outcome. The task to wake is added to `wakers`.
    fn deliver(self, outcome: Outcome, wakers: &mut Vec<Waker>) {
        if let (Ok(()), Some(bell)) = (&outcome.result, self.bell)
            && let Some(link) = bell.link.upgrade()
        {
            // If the bell fails, the link fails too, and the owner learns that.
            let _ = link.ring_sleeper(&bell.pair, bell.epoch, bell.port);
        }
        let Some(cell) = self.cell else { return };
        let mut state = lock(&cell.state);
        match std::mem::take(&mut state.waiter) {
            Waiter::Function(function) => {
                drop(state);
                function(outcome);
            }
            waiter => {
                state.outcome = Some(outcome);
                if let Waiter::Task(waker) = waiter {
                    wakers.push(waker);
                }
            }
        }
    }
}

impl OutcomeCell {
    /// Is ready when the outcome is there. If it is not, the task is woken when it is.
    pub(crate) fn poll_over(&self, context: &Context<'_>) -> Poll<()> {
        let mut state = lock(&self.state);
        if state.outcome.is_some() {
            return Poll::Ready(());
        }
        state.waiter = Waiter::Task(context.waker().clone());
        Poll::Pending
    }

    /// Returns whether the outcome is there.
    pub(crate) fn is_over(&self) -> bool {
        lock(&self.state).outcome.is_some()
    }

    /// Calls `function` with the outcome: now if the outcome is there, otherwise from the thread that polls
    /// the queue.
    pub(crate) fn call(&self, function: impl FnOnce(Outcome) + Send + 'static) {
        let mut state = lock(&self.state);
        match state.outcome.take() {
            Some(outcome) => {
                drop(state);
                function(outcome);
            }
            None => state.waiter = Waiter::Function(Box::new(function)),
        }
    }

    /// Takes the outcome if it is there.
    pub(crate) fn take(&self) -> Option<Outcome> {
        lock(&self.state).outcome.take()
    }
}

impl fmt::Debug for OutcomeCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutcomeCell").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "port_tests.rs"]
mod tests;

#[cfg(test)]
mod credits_tests {
    use super::*;

    /// Two sides that answer one another, over a wire that keeps what was sent.
    #[test]
    fn no_end_sends_more_than_there_are_receives_and_no_end_waits_for_ever() {
        let (mut here, mut there) = (Credits::new(16), Credits::new(16));
        here.set_peer_receives(16);
        there.set_peer_receives(16);
        for _ in 0..100_000 {
            let mut burst = 0;
            while here.may_send() {
                here.sent();
                burst += 1;
            }
            assert!((8..=16).contains(&burst), "{burst}");
            for _ in 0..burst {
                there.reposted();
            }
            assert!(there.owes_credit());
            here.peer_granted(there.granted());
            assert!(!there.owes_credit());
            there.sent();
        }
    }

    #[test]
    fn counts_wrap() {
        let mut credits = Credits::new(8);
        (credits.sent, credits.posted, credits.reported) = (u32::MAX - 1, u32::MAX, u32::MAX);
        credits.set_peer_receives(u32::MAX - 1);
        assert!(!credits.may_send());
        credits.peer_granted(10);
        assert!(credits.may_send());
        credits.peer_granted(u32::MAX);
        assert!(credits.may_send(), "an old count changes nothing");
        credits.reposted();
        assert_eq!(credits.granted(), 0);
    }
}
