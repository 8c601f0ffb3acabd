//! A port: one queue pair of a link, with its transfers in flight and its frames.

use std::collections::VecDeque;
use std::fmt;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::Waker;

use super::super::ChannelError;
use super::super::lock;
use super::Link;
use super::lane::Lane;
use super::token::{Outcome, Token};
use crate::wire::tensor_frame::{Frame, MAX_FRAME};
use tonic_rdma::internal::{Participant, WorkId, WorkKind};
use tonic_rdma_verbs::internal::{
    CopyRange, CopyRanges, FinishedTransfer, InFlight, LocalMemory, Transfer, TransferKind,
};
use tonic_rdma_verbs::memory::{Block, Pool, Quota};
use tonic_rdma_verbs::{
    CompletionOpcode, CompletionStatus, Operation, Payload, Probe, QueuePairNumber, ReceiveRequest,
    RemoteSegment, Rkey, WorkCompletion,
};

/// See the module's documentation.
pub(crate) struct Port {
    number: QueuePairNumber,
    /// Its place among the link's ports.
    index: u32,
    /// What its requests carry, so that completions find it.
    key: u32,
    inline: usize,
    pool: Pool,
    state: Mutex<State>,
    link: OnceLock<Weak<Link>>,
    written: AtomicU64,
    read: AtomicU64,
    /// Whether completions should be taken before more is posted: an end that only looks at memory polls no queue.
    crowded: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// Nothing once the link has ended. Before `receives`: the queue pair goes before the memory that it receives in.
    flights: Option<InFlight<Token>>,
    receives: Block,
    lane: Lane,
    /// Frames that wait for the peer to have a receive for them.
    backlog: VecDeque<Box<[u8]>>,
}

/// What has come in.
#[derive(Clone, Copy, Debug)]
enum Arrival {
    Frame(usize),
    Immediate(u32),
}

impl Port {
    /// Receives posted: frames and notices that the peer may send before this end takes one.
    pub(super) const RECEIVES: u32 = 256;
    /// Frames that may wait.
    const BACKLOG: usize = 1 << 16;
    /// Transfers that may wait on a channel.
    pub(crate) const WAITING: usize = 1 << 16;

    /// Takes over a queue pair in Init or later, and posts its receives.
    pub(super) fn new(
        flights: InFlight<Token>,
        index: u32,
        key: u32,
        pool: Pool,
    ) -> Result<Self, ChannelError> {
        let length = Self::RECEIVES as usize * MAX_FRAME;
        let receives = pool.lease(length, Quota::Receive).map_err(ChannelError::memory)?;
        let (number, inline) =
            (flights.queue_pair().number(), flights.queue_pair().capacity().inline as usize);
        let state = State {
            flights: Some(flights),
            receives,
            lane: Lane::new(Self::RECEIVES),
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
            link: OnceLock::new(),
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
            crowded: AtomicBool::new(false),
        })
    }

    /// The link that it belongs to, and the receives that the peer has posted.
    pub(super) fn belong(&self, link: &Arc<Link>, peer_receives: u32) {
        lock(&self.state).lane.set_peer_receives(peer_receives);
        let _ = self.link.set(Arc::downgrade(link));
    }

    /// Lets `then` use the queue pair; nothing if the link has ended.
    pub(super) fn with_queue_pair<T>(
        &self,
        then: impl FnOnce(&dyn tonic_rdma_verbs::QueuePair) -> T,
    ) -> Option<T> {
        lock(&self.state).flights.as_ref().map(|flights| then(flights.queue_pair()))
    }

    /// Evidence that both ends see one another's memory.
    pub(crate) fn probe(&self) -> Probe {
        self.with_queue_pair(|queue_pair| queue_pair.probe()).unwrap_or_default()
    }

    /// Bytes written and read by transfers.
    pub(crate) fn moved(&self) -> (u64, u64) {
        (self.written.load(Ordering::Relaxed), self.read.load(Ordering::Relaxed))
    }

    /// Bytes that a request may carry inline.
    pub(crate) fn inline(&self) -> usize {
        self.inline
    }

    /// Starts a transfer.
    ///
    /// # Errors
    /// Gives it back if it can't be started, with the reason.
    pub(crate) fn submit(
        &self,
        transfer: Transfer<Token>,
        bytes: u64,
        way: TransferKind,
    ) -> Result<(), ChannelError> {
        let counter = if way == TransferKind::Read { &self.read } else { &self.written };
        counter.fetch_add(bytes, Ordering::Relaxed);
        let mut state = lock(&self.state);
        let Some(flights) = &mut state.flights else {
            drop(state);
            return Err(refuse(transfer, self.fault()));
        };
        if flights.unfinished() >= Self::WAITING {
            drop(state);
            return Err(refuse(transfer, ChannelError::Busy(Self::WAITING)));
        }
        let result = flights.submit(transfer, |number| self.id(number));
        drop(state);
        result.map_err(|error| self.fail(ChannelError::local(error)))
    }

    /// Writes `slices`, few bytes and in a place of the peer's, one after the other; the caller's memory is free at once, and
    /// nobody is told when they are there.
    pub(crate) fn write_small(
        &self,
        slices: &[IoSlice<'_>],
        remote: RemoteSegment,
        immediate: Option<u32>,
    ) -> Result<(), ChannelError> {
        let operation = Operation::Write { data: Payload::Inline(slices), remote, immediate };
        self.make_room();
        let mut state = lock(&self.state);
        if immediate.is_some() {
            state.lane.sent();
        }
        let Some(flights) = &mut state.flights else {
            drop(state);
            return Err(self.fault());
        };
        let posted = flights.post_now(|number| self.id(number), operation);
        self.crowded.store(flights.is_crowded(), Ordering::Relaxed);
        match posted {
            Ok(true) => Ok(()),
            Ok(false) => {
                let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
                let result = flights
                    .submit(queued(bytes, TransferKind::Write, remote, immediate), |number| self.id(number));
                drop(state);
                result.map_err(|error| self.fail(ChannelError::local(error)))
            }
            Err(error) => {
                drop(state);
                Err(self.fail(ChannelError::local(error)))
            }
        }
    }

    /// Sends a frame, or keeps it until the peer has a receive for it.
    pub(crate) fn send_frame(&self, frame: &Frame<'_>) -> Result<(), ChannelError> {
        let mut buffer = [0; MAX_FRAME];
        self.make_room();
        let mut state = lock(&self.state);
        let length = frame.encode(state.lane.granted(), &mut buffer).map_err(ChannelError::local)?;
        let result = if state.backlog.is_empty() && state.lane.may_send() {
            state.post_frame(&buffer[..length], self)
        } else if state.backlog.len() < Self::BACKLOG {
            state.backlog.push_back(buffer[..length].into());
            Ok(())
        } else {
            Err(ChannelError::local("the peer takes no frames"))
        };
        drop(state);
        result.map_err(|error| self.fail(error))
    }

    /// Ends it: every transfer is over, with its memory.
    pub(super) fn end(&self, fault: &ChannelError) {
        let flights = lock(&self.state).flights.take();
        let Some(flights) = flights else { return };
        let mut wakers = Vec::new();
        let mut over = Vec::new();
        flights.abandon(CompletionStatus::WorkRequestFlushed, |finished| over.push(finished));
        for finished in over {
            deliver(finished, Some(fault), &mut wakers);
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Takes completions if many are due.
    fn make_room(&self) {
        if self.crowded.load(Ordering::Relaxed)
            && let Some(link) = self.link()
        {
            link.poll(self.index);
        }
    }

    fn id(&self, number: u32) -> u64 {
        WorkId { kind: WorkKind::Send, connection: self.key, value: number }.to_bits()
    }

    fn link(&self) -> Option<Arc<Link>> {
        self.link.get().and_then(Weak::upgrade)
    }

    /// Why it has ended.
    fn fault(&self) -> ChannelError {
        let fault = self.link().and_then(|link| link.fault().cloned());
        fault.unwrap_or_else(|| ChannelError::local("the link has ended"))
    }

    /// Ends the link with `error`, unless it has ended, and says why it did.
    fn fail(&self, error: ChannelError) -> ChannelError {
        match self.link() {
            Some(link) => link.fail(error),
            None => error,
        }
    }

    /// Takes one completion: what has come in, and what went wrong.
    fn take(
        &self,
        completion: &WorkCompletion,
        frame: &mut [u8; MAX_FRAME],
        finished: &mut Vec<FinishedTransfer<Token>>,
    ) -> Result<Option<Arrival>, ChannelError> {
        let id = WorkId::from_bits(completion.wr_id);
        let mut state = lock(&self.state);
        let Some(flights) = &mut state.flights else { return Ok(None) };
        if id.kind != WorkKind::Receive {
            flights.completed(id.value, completion.status, |it| finished.push(it));
            if completion.status != CompletionStatus::Success {
                return Err(self.lost(completion.status));
            }
            flights.pump(|number| self.id(number)).map_err(ChannelError::local)?;
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
                state.receives.copy_out(at, &mut frame[..length]).map_err(ChannelError::local)?;
                Arrival::Frame(length)
            }
        };
        state.post_receive(id.value, self.key)?;
        state.lane.reposted();
        if state.lane.owes_credit() {
            let mut buffer = [0; MAX_FRAME];
            let length =
                Frame::Credit.encode(state.lane.granted(), &mut buffer).map_err(ChannelError::local)?;
            state.post_frame(&buffer[..length], self)?;
        }
        Ok(Some(arrival))
    }

    fn lost(&self, status: CompletionStatus) -> ChannelError {
        match status {
            CompletionStatus::WorkRequestFlushed | CompletionStatus::RetryExceeded => {
                let peer = self.link().map_or_else(|| "".into(), |link| Arc::clone(link.peer()));
                let reason = match status {
                    CompletionStatus::RetryExceeded => "its device acknowledges nothing any more",
                    _ => "its end of the RDMA connection is closed",
                };
                ChannelError::PeerLost { peer, reason: reason.into() }
            }
            status => ChannelError::Device(status),
        }
    }

    /// Hands what has come in to the link.
    fn arrived(
        &self,
        arrival: Arrival,
        frame: &[u8; MAX_FRAME],
        wakers: &mut Vec<Waker>,
    ) -> Result<(), ChannelError> {
        let Some(link) = self.link() else { return Ok(()) };
        match arrival {
            Arrival::Immediate(slot) => link.placed(slot, None),
            Arrival::Frame(length) => {
                let decoded = Frame::decode(&frame[..length]).map_err(|error| link.violation(error))?;
                self.granted(decoded.granted)?;
                link.handle(decoded.frame, wakers)
            }
        }
    }

    /// The peer has posted receives; what waited for them goes.
    fn granted(&self, granted: u32) -> Result<(), ChannelError> {
        let mut state = lock(&self.state);
        state.lane.peer_granted(granted);
        while state.lane.may_send()
            && let Some(frame) = state.backlog.pop_front()
        {
            state.post_frame(&frame, self)?;
        }
        Ok(())
    }
}

impl State {
    fn post_receive(&self, slot: u32, key: u32) -> Result<(), ChannelError> {
        let Some(flights) = &self.flights else { return Ok(()) };
        let start = slot as usize * MAX_FRAME;
        let into = self.receives.segment(start..start + MAX_FRAME).map_err(ChannelError::local)?;
        let wr_id = WorkId { kind: WorkKind::Receive, connection: key, value: slot }.to_bits();
        let request = ReceiveRequest { wr_id, into: &[into] };
        flights.queue_pair().post_receive(&[request]).map_err(ChannelError::local)
    }

    fn post_frame(&mut self, frame: &[u8], port: &Port) -> Result<(), ChannelError> {
        self.lane.sent();
        let Some(flights) = &mut self.flights else { return Err(port.fault()) };
        let inline = frame.len() <= port.inline;
        if inline {
            let slices = [IoSlice::new(frame)];
            let operation = Operation::Send { data: Payload::Inline(&slices), immediate: None };
            let posted = flights.post_now(|number| port.id(number), operation);
            port.crowded.store(flights.is_crowded(), Ordering::Relaxed);
            if posted.map_err(ChannelError::local)? {
                return Ok(());
            }
        }
        let transfer = if inline {
            queued(frame.to_vec(), TransferKind::Send, NOWHERE, None)
        } else {
            let mut block = port.pool.lease(frame.len(), Quota::Send).map_err(ChannelError::memory)?;
            block.copy_in(0, frame).map_err(ChannelError::local)?;
            whole(LocalMemory::Block(block), frame.len(), TransferKind::Send, NOWHERE)
        };
        flights.submit(transfer, |number| port.id(number)).map_err(ChannelError::local)
    }
}

/// What a message has for a place.
const NOWHERE: RemoteSegment = RemoteSegment { address: 0, rkey: Rkey(0) };

/// A transfer of a few bytes that have to wait.
fn queued(
    bytes: Vec<u8>,
    way: TransferKind,
    remote: RemoteSegment,
    immediate: Option<u32>,
) -> Transfer<Token> {
    let length = bytes.len();
    let transfer = whole(LocalMemory::Bytes(bytes), length, way, remote);
    match immediate {
        Some(value) => transfer.notify(tonic_rdma_verbs::internal::Notice::Immediate(value)),
        None => transfer,
    }
}

fn whole(local: LocalMemory, length: usize, way: TransferKind, start: RemoteSegment) -> Transfer<Token> {
    let length = length as u64;
    let blocks = CopyRanges::One(CopyRange { local: 0, remote: 0, length });
    Transfer::new(
        local,
        way,
        blocks,
        tonic_rdma_verbs::internal::RemotePlace { start, length },
        Token::quiet(),
    )
}

/// Tells a transfer's owner that it did not begin.
fn refuse(transfer: Transfer<Token>, error: ChannelError) -> ChannelError {
    let FinishedTransfer { token, local, .. } = transfer.refuse();
    let mut wakers = Vec::new();
    token.deliver(Outcome { local, result: Err(error.clone()) }, &mut wakers);
    wakers.into_iter().for_each(Waker::wake);
    error
}

/// Tells a transfer's owner how it ended.
fn deliver(finished: FinishedTransfer<Token>, fault: Option<&ChannelError>, wakers: &mut Vec<Waker>) {
    let FinishedTransfer { token, local, status } = finished;
    let result = match (status, fault) {
        (CompletionStatus::Success, _) => Ok(()),
        (CompletionStatus::WorkRequestFlushed | CompletionStatus::RetryExceeded, Some(fault)) => {
            Err(fault.clone())
        }
        (status, _) => Err(ChannelError::Device(status)),
    };
    token.deliver(Outcome { local, result }, wakers);
}

impl Participant for Port {
    fn queue_pair_number(&self) -> QueuePairNumber {
        self.number
    }

    fn handle_completions(&self, completions: &[WorkCompletion], wakers: &mut Vec<Waker>) {
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
            self.fail(ChannelError::Local(format!("the device ended the link: {reason}").into()));
        }
    }
}

impl fmt::Debug for Port {
    /// Names the port; all that belongs to it would fill pages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port")
            .field("queue_pair", &self.number)
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}
