//! The modes without calls: each crossing tensor has a slot at its receiver.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};

use crate::dataflow::{Hosted, KernelError, Value};
use crate::error::GraphError;
use crate::placement::{Crossing, CrossingId, Part};
use crate::schedule::{CrossingCounts, Start, Transport, Unfinished};
use crate::sites::NodeSites;
use crate::transfer::TransferMode;
use crate::transfer::peers::{Agreement, SessionHandle};
use tonic_rdma::memory::Pool;
use tonic_rdma::unstable::waits;
use tonic_rdma_tensor::unstable::{OwnPolling, announced, hosting_pool, try_recv_into};
use tonic_rdma_tensor::{
    DynamicReceiver, DynamicSender, MemRegion, Metadata, MetadataLayout, RdmaDevice, SentCounts,
    StaticReceiver, StaticSender, Tensor, TensorError, TensorErrorKind, TensorMut,
};
use tonic_rdma_verbs::unstable::RegionPool;

/// How often a flush counts the pending sends of a crossing tensor.
const COUNT: Duration = Duration::from_millis(50);

/// The sending end of a crossing tensor's slot.
#[derive(Debug)]
pub(crate) enum SlotSender {
    Static(StaticSender),
    Dynamic(DynamicSender),
}

/// The receiving end of a crossing tensor's slot.
#[derive(Debug)]
pub(crate) enum SlotReceiver {
    Static(StaticReceiver),
    Dynamic(DynamicReceiver),
}

/// The slots of one part in one mode.
#[derive(Debug, Default)]
pub(crate) struct SlotEndpoints {
    pub(crate) senders: Vec<(Crossing, SlotSender)>,
    pub(crate) receivers: Vec<(Crossing, SlotReceiver)>,
}

/// The transfers of `rdma-cp`, `rdma-zerocp` and `rdma-in-place`.
pub(crate) struct SlotTransfers<V> {
    session: SessionHandle,
    device: RdmaDevice,
    /// `Some` while the executor's thread polls slots itself: then arrivals and completions wake no other
    /// thread. `None` while it sleeps.
    polling: Option<OwnPolling>,
    /// Registered memory for copies, if all tensors are copied (`rdma-cp`).
    copies: Option<Pool>,
    outgoing: HashMap<CrossingId, Outgoing>,
    incoming: HashMap<CrossingId, Incoming<V>>,
    agreement: Agreement,
}

struct Outgoing {
    crossing: Crossing,
    sender: Lendable<SlotSender>,
    counts: CrossingCounts,
    /// Tensors that were copied here and not by the sender.
    copied: u64,
    /// The sends that were not over at the last call of `is_flushed`.
    pending: u64,
}

struct Incoming<V> {
    crossing: Crossing,
    /// A task only waits for a tensor. The executor's thread takes it, so that what the engine allocates
    /// belongs to the receive.
    receiver: Lendable<SlotReceiver>,
    /// Tensors of the engine into which the content is being read: the address, and what makes the value.
    hosted: VecDeque<(usize, Finish<V>)>,
    counts: CrossingCounts,
}

/// Makes the value of a tensor of the engine, once the content is there.
type Finish<V> = Box<dyn FnOnce(MemRegion) -> Result<V, KernelError> + Send>;

/// What a sender waits for.
#[derive(Clone, Copy)]
enum Goal {
    /// A free buffer.
    Room,
    /// The end of all sends.
    NoneUnderWay,
}

/// The reason why a tensor did not go into a slot or come out of one.
enum SlotError {
    Channel(TensorError),
    Other(KernelError),
}

impl<V: Value> SlotTransfers<V> {
    /// Makes the transfers of slots that are attached. Tensors are copied to `copies` if it is there.
    pub(crate) fn new(
        session: SessionHandle,
        device: RdmaDevice,
        mode: TransferMode,
        copies: Option<Pool>,
        ends: SlotEndpoints,
    ) -> Self {
        let senders = ends.receivers.iter().map(|(crossing, _)| crossing.from);
        let agreement = Agreement::new(&session, mode, senders);
        let outgoing = ends.senders.into_iter().map(|(crossing, sender)| {
            let counts = CrossingCounts::default();
            (crossing.id, Outgoing { crossing, sender: Lendable::new(sender), counts, copied: 0, pending: 0 })
        });
        let incoming = ends.receivers.into_iter().map(|(crossing, receiver)| {
            let (hosted, counts) = (VecDeque::new(), CrossingCounts::default());
            (crossing.id, Incoming { crossing, receiver: Lendable::new(receiver), hosted, counts })
        });
        let (outgoing, incoming) = (outgoing.collect(), incoming.collect());
        Self { session, device, polling: None, copies, outgoing, incoming, agreement }
    }

    /// Gives the memory of earlier tensors back. A part that receives tensors begins to poll when it first
    /// looks for one.
    fn poll(&mut self) {
        if self.polling.is_some() || self.incoming.is_empty() {
            self.polls().poll();
        }
    }

    /// Notes that the executor polls slots itself from now on.
    fn polls(&mut self) -> &OwnPolling {
        self.polling.get_or_insert_with(|| OwnPolling::new(&self.device))
    }
}

impl<V: Value> Transport<V> for SlotTransfers<V> {
    fn begin(&mut self, steps: &Range<u64>) {
        self.agreement.begin(&self.session, steps);
    }

    fn is_agreed(&mut self, waker: &Waker) -> Result<bool, GraphError> {
        self.agreement.is_reached(&self.session, waker)
    }

    fn unheard(&self) -> Option<Part> {
        self.agreement.unheard(&self.session)
    }

    fn recycle(&mut self) {
        self.poll();
        // What receivers have read comes back. The next send reports a failure.
        for out in self.outgoing.values_mut() {
            if let Lendable::Here(SlotSender::Dynamic(sender)) = &mut out.sender {
                _ = sender.pending();
            }
        }
    }

    fn start(&mut self, crossing: CrossingId, step: u64, tensor: &Tensor) -> Result<Start, GraphError> {
        self.poll();
        let session = &self.session;
        let out = self.outgoing.get_mut(&crossing).ok_or_else(|| session.unknown(crossing, step))?;
        let peer = out.crossing.to;
        session.peers.check(peer)?;
        match out.start(tensor, self.copies.as_ref()) {
            Ok(true) => Ok(Start::Begun),
            Ok(false) => Ok(Start::Busy),
            Err(error) => session.slot_error(&out.crossing, peer, step, error).map(|()| Start::Busy),
        }
    }

    fn take(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
        waker: Option<&Waker>,
    ) -> Result<Option<V>, GraphError> {
        match waker {
            None => _ = self.polls(),
            Some(_) => self.polling = None,
        }
        let session = &self.session;
        let pool = hosting_pool(&self.device);
        let Incoming { crossing, receiver, hosted, counts } =
            self.incoming.get_mut(&crossing).ok_or_else(|| session.unknown(crossing, step))?;
        let peer = crossing.from;
        loop {
            // Subscribed before the check, so that any later change ends the task below.
            let changes = waker.map(|_| session.peers.changes());
            // Checked before the take: when the end of a part is known, all that it had sent is here.
            let health = session.peers.check(peer);
            let here = receiver.here(waker).map_err(|error| crossing.failed(peer, step, error))?;
            let Some(slot) = here else { return Ok(None) };
            let connected = match slot.try_take(crossing, sites, hosted, pool) {
                Ok(Some((value, is_copy))) => {
                    counts.received += 1;
                    counts.received_copied += u64::from(is_copy);
                    return Ok(Some(value));
                }
                Ok(None) => health.map(|()| true)?,
                Err(error) => session.slot_error(crossing, peer, step, error).map(|()| false)?,
            };
            let Some(mut changes) = changes else { return Ok(None) };
            receiver.lend(&session.runtime, |mut receiver| async move {
                wait(connected, receiver.stirs(), &mut changes).await;
                receiver
            });
        }
    }

    fn can_start(&mut self, crossing: CrossingId, waker: &Waker) -> Result<bool, GraphError> {
        self.polling = None;
        let session = &self.session;
        let out = self.outgoing.get_mut(&crossing).ok_or_else(|| session.unknown(crossing, 0))?;
        session.peers.check(out.crossing.to)?;
        out.has_reached(Goal::Room, session, waker)
    }

    fn is_flushed(&mut self, waker: &Waker) -> Result<bool, GraphError> {
        self.polling = None;
        self.session.peers.check_all()?;
        let mut flushed = true;
        for out in self.outgoing.values_mut() {
            // All are polled, so that `unfinished` sees each send that has ended.
            flushed &= out.has_reached(Goal::NoneUnderWay, &self.session, waker)?;
        }
        Ok(flushed)
    }

    fn unfinished(&self) -> Option<Unfinished> {
        Unfinished::of(self.outgoing.iter().map(|(crossing, out)| (*crossing, out.pending)))
    }

    fn counts(&self, crossing: CrossingId) -> CrossingCounts {
        let sent = self.outgoing.get(&crossing).map(|out| out.counts);
        sent.or_else(|| Some(self.incoming.get(&crossing)?.counts)).unwrap_or_default()
    }

    fn spin(&self) -> Duration {
        waits::GRAPH_SLOTS
    }

    fn abort(&mut self, reason: &str) {
        self.polling = None;
        self.session.state.bootstrap.fail(reason);
    }
}

impl Outgoing {
    /// Returns whether the sends are as far as `goal` says, and notes how many are not over. Otherwise wakes
    /// `waker` when they may be.
    fn has_reached(
        &mut self,
        goal: Goal,
        session: &SessionHandle,
        waker: &Waker,
    ) -> Result<bool, GraphError> {
        let peer = self.crossing.to;
        loop {
            let mut changes = session.peers.changes();
            session.peers.check_all()?;
            let here = self.sender.here(Some(waker)).map_err(|error| self.crossing.failed(peer, 0, error))?;
            let Some(sender) = here else { return Ok(false) };
            let reached = match goal {
                Goal::Room => sender.is_ready(),
                Goal::NoneUnderWay => sender.pending().map(|pending| {
                    self.pending = pending;
                    pending == 0
                }),
            };
            if matches!(goal, Goal::NoneUnderWay) && session.peers.left(peer) {
                // A part that has left in good order needs nothing any more.
                self.pending = 0;
                return Ok(true);
            }
            let connected = match reached {
                Ok(true) => return Ok(true),
                Ok(false) => true,
                Err(error) => session.slot_error(&self.crossing, peer, 0, error.into()).map(|()| false)?,
            };
            self.sender.lend(&session.runtime, |mut sender| async move {
                match goal {
                    Goal::Room => wait(connected, sender.ready(), &mut changes).await,
                    // After `COUNT`, the pending sends are counted again.
                    Goal::NoneUnderWay => {
                        wait(connected, tokio::time::timeout(COUNT, sender.flush()), &mut changes).await;
                    }
                }
                sender
            });
        }
    }

    /// Begins to send a tensor. Returns false if no buffer is free.
    fn start(&mut self, tensor: &Tensor, copies: Option<&Pool>) -> Result<bool, SlotError> {
        let Some(sender) = self.sender.here(None).map_err(other)? else { return Ok(false) };
        if !sender.is_ready()? {
            return Ok(false);
        }
        match (&mut *sender, copies) {
            (SlotSender::Static(sender), Some(_)) if tensor.spec() == sender.spec() => {
                let tensor = tensor.to_contiguous().map_err(other)?;
                sender.try_send_bytes(tensor.bytes().map_err(other)?)?;
            }
            // Refuses a tensor of another type or shape.
            (SlotSender::Static(sender), _) => sender.try_send(tensor)?,
            (SlotSender::Dynamic(sender), Some(pool)) if tensor.spec().bytes().is_some_and(|it| it > 0) => {
                let mut copy = TensorMut::in_pool(*tensor.spec(), pool).map_err(other)?;
                tensor.copy_to(copy.bytes_mut()).map_err(other)?;
                sender.try_send(&copy.freeze())?;
                // The sender does not know that this is a copy, and does not count it.
                self.copied += 1;
            }
            (SlotSender::Dynamic(sender), _) => sender.try_send(tensor)?,
        }
        let sent = sender.sent();
        self.counts.sent += 1;
        self.counts.bytes += tensor.spec().bytes().unwrap_or(0);
        self.counts.copied = self.copied + sent.copied.tensors;
        self.counts.inline = sent.inline.tensors;
        Ok(true)
    }
}

/// Waits for `event` while the slot is connected, or until the state of another part has changed. The next
/// poll finds a failure.
async fn wait<T>(connected: bool, event: impl Future<Output = T>, changes: &mut watch::Receiver<u64>) {
    tokio::select! {
        _ = event, if connected => {}
        _ = changes.changed() => {}
    }
}

/// Makes the same call of a static and of a dynamic slot.
macro_rules! of_either {
    ($slot:expr, $end:ident => $call:expr) => {
        match $slot {
            Self::Static($end) => $call,
            Self::Dynamic($end) => $call,
        }
    };
}

impl SlotSender {
    fn sent(&self) -> SentCounts {
        of_either!(self, sender => sender.sent())
    }

    fn is_ready(&mut self) -> Result<bool, TensorError> {
        of_either!(self, sender => sender.is_ready())
    }

    async fn ready(&mut self) -> Result<(), TensorError> {
        of_either!(self, sender => sender.ready().await)
    }

    fn pending(&mut self) -> Result<u64, TensorError> {
        of_either!(self, sender => sender.pending())
    }

    async fn flush(&mut self) -> Result<(), TensorError> {
        of_either!(self, sender => sender.flush().await)
    }
}

impl SlotReceiver {
    /// Takes the next tensor if it is here, and returns whether it was copied. A dynamic tensor is read
    /// into a tensor of the engine, which is among `hosted` meanwhile, if the engine has them. Any other
    /// tensor is copied into the memory of the engine. [`NodeSites::filled`] checks its type and shape.
    fn try_take<V: Value>(
        &mut self,
        crossing: &Crossing,
        sites: &NodeSites,
        hosted: &mut VecDeque<(usize, Finish<V>)>,
        pool: &RegionPool,
    ) -> Result<Option<(V, bool)>, SlotError> {
        let receiver = match self {
            Self::Static(receiver) => {
                let Some(arrived) = receiver.try_recv()? else { return Ok(None) };
                let fill = &mut |memory: &mut [u8]| arrived.copy_to(memory).map_err(KernelError::from);
                let value = sites.filled(crossing, arrived.spec(), fill).map_err(SlotError::Other)?;
                return Ok(Some((value, arrived.spec().bytes() != Some(0))));
            }
            Self::Dynamic(receiver) => receiver,
        };
        let memory = &mut |metadata: &Metadata| {
            let is_dense = matches!(metadata.layout, MetadataLayout::Dense);
            let Hosted { memory, finish } =
                is_dense.then(|| sites.hosted(crossing, &metadata.spec, pool)).flatten()?;
            hosted.push_back((memory.as_ptr().addr(), finish));
            Some(memory)
        };
        let (taken, reads) = try_recv_into(receiver, memory);
        let Ok(Some((metadata, region))) = taken else {
            // Without those whose read has not begun, after all.
            hosted.truncate(reads);
            return Ok(taken.map(|_| None)?);
        };
        // Reads that the receiver began itself have no tensor here. They are in order.
        if hosted.front().is_some_and(|(address, _)| *address == region.as_ptr().addr())
            && let Some((_, finish)) = hosted.pop_front()
        {
            hosted.truncate(reads);
            return finish(region).map(|value| Some((value, false))).map_err(SlotError::Other);
        }
        let length = metadata.bytes();
        let tensor = Tensor::deserialize(&metadata, Bytes::from_owner(region).slice(..length as usize))?;
        let fill = &mut |memory: &mut [u8]| tensor.copy_to(memory).map_err(KernelError::from);
        let value = sites.filled(crossing, tensor.spec(), fill).map_err(SlotError::Other)?;
        Ok(Some((value, length > 0)))
    }

    /// Waits until the next tensor is here, or can be read, and does not take it.
    async fn stirs(&mut self) -> Result<(), TensorError> {
        match self {
            Self::Static(receiver) => receiver.arrived().await,
            Self::Dynamic(receiver) => announced(receiver).await,
        }
    }
}

impl From<TensorError> for SlotError {
    fn from(error: TensorError) -> Self {
        Self::Channel(error)
    }
}

impl SessionHandle {
    /// Returns the error of a slot. If only the link has ended, the reason may come later; until then there
    /// is no error.
    fn slot_error(
        &self,
        crossing: &Crossing,
        peer: Part,
        step: u64,
        error: SlotError,
    ) -> Result<(), GraphError> {
        match error {
            SlotError::Channel(error) => match error.kind() {
                TensorErrorKind::PeerLost | TensorErrorKind::Closed | TensorErrorKind::Device => {
                    self.connection_ended(peer, &KernelError::from(error))
                }
                _ => Err(crossing.failed(peer, step, error)),
            },
            SlotError::Other(source) => Err(crossing.failed(peer, step, source)),
        }
    }
}

fn other(error: impl Into<KernelError>) -> SlotError {
    SlotError::Other(error.into())
}

/// A slot's end that is here, or lent to a task that waits with it.
#[derive(Debug)]
enum Lendable<T> {
    Here(T),
    Away(oneshot::Receiver<T>),
    /// The task ended without giving it back, because its runtime ended or it panicked.
    Lost,
}

impl<T: Send + 'static> Lendable<T> {
    fn new(thing: T) -> Self {
        Self::Here(thing)
    }

    /// Returns the thing, or `None` if a task still has it. Then wakes `waker` when the task gives it back.
    ///
    /// # Errors
    /// The task ended without giving it back.
    fn here(&mut self, waker: Option<&Waker>) -> Result<Option<&mut T>, Lost> {
        if let Self::Away(back) = self {
            // A run may make many steps in one poll of its task, so they take nothing of the task's budget.
            let back = pin!(tokio::task::coop::unconstrained(back));
            let context = &mut Context::from_waker(waker.unwrap_or(Waker::noop()));
            *self = match back.poll(context) {
                Poll::Ready(Ok(thing)) => Self::Here(thing),
                Poll::Ready(Err(_)) => Self::Lost,
                Poll::Pending => return Ok(None),
            };
        }
        match self {
            Self::Here(thing) => Ok(Some(thing)),
            Self::Away(_) => Ok(None),
            Self::Lost => Err(Lost),
        }
    }

    /// Gives the thing to a task of `runtime`, which gives it back when `wait` is over. Does nothing if the
    /// thing is not here.
    fn lend<F>(&mut self, runtime: &Handle, wait: impl FnOnce(T) -> F)
    where
        F: Future<Output = T> + Send + 'static,
    {
        match std::mem::replace(self, Self::Lost) {
            Self::Here(thing) => {
                let (give, back) = oneshot::channel();
                let waiting = wait(thing);
                // A failed send means that the holder is gone, and with it the need for the thing.
                runtime.spawn(async move { _ = give.send(waiting.await) });
                *self = Self::Away(back);
            }
            other => *self = other,
        }
    }
}

/// The error of a thing that a task did not give back.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the threads of the session have ended")]
struct Lost;
