//! The modes with calls: a unary call brings each crossing tensor.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::dataflow::{KernelError, Value};
use crate::error::GraphError;
use crate::placement::{Crossing, CrossingId};
use crate::schedule::{CrossingCounts, Start, Transport, Unfinished};
use crate::sites::NodeSites;
use crate::transfer::TransferMode;
use crate::transfer::peers::{SessionHandle, WakerCell};
use crate::transfer::proto::parts_client::PartsClient;
use crate::transfer::proto::{self, PutRequest};
use tonic_rdma::RdmaChannel;
use tonic_rdma_tensor::{Tensor, TensorSpec};
use tonic_rdma_verbs::unstable::lock;

/// The longest time that a call may wait for room at the receiver. The peer's death ends a call much sooner.
pub(crate) const LONGEST_CALL: Duration = Duration::from_secs(600);

/// The entry in the metadata of a status that marks a refusal by the service of a part.
const REFUSAL: &str = "tonic-rdma-graph-refusal";

/// A connection to the service of another part.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    Http2(PartsClient<Channel>),
    Native(PartsClient<RdmaChannel>),
}

/// What one part needs for one mode with calls.
#[derive(Debug)]
pub(crate) struct CallEndpoints {
    pub(crate) mode: TransferMode,
    /// The calls in flight of each crossing tensor.
    pub(crate) window: usize,
    /// The tensors to send: the connection to the receiver, and this part's key there.
    pub(crate) senders: Vec<(Crossing, Caller, Bytes)>,
    pub(crate) mailboxes: Vec<(Crossing, Arc<Mailbox>)>,
}

/// The transfers of `grpc-tcp`, `grpc-rdma` and `grpc-native`.
pub(crate) struct CallTransfers {
    session: SessionHandle,
    mode: TransferMode,
    window: u64,
    outgoing: HashMap<CrossingId, Outgoing>,
    incoming: HashMap<CrossingId, (Crossing, Arc<Mailbox>, CrossingCounts)>,
    /// Woken when no call is in flight any more.
    flushed: Arc<WakerCell>,
}

struct Outgoing {
    crossing: Crossing,
    caller: Caller,
    key: Bytes,
    sequence: u64,
    counts: CrossingCounts,
    calls: Arc<Calls>,
}

/// The calls of one crossing tensor.
#[derive(Debug)]
struct Calls {
    in_flight: AtomicU64,
    fault: Mutex<Option<(u64, Status)>>,
    /// Woken when a call has ended.
    ended: Arc<WakerCell>,
    flushed: Arc<WakerCell>,
}

impl CallTransfers {
    pub(crate) fn new(session: SessionHandle, ends: CallEndpoints) -> Self {
        let flushed = session.peers.cell();
        let outgoing = ends.senders.into_iter().map(|(crossing, caller, key)| {
            let calls = Arc::new(Calls {
                in_flight: AtomicU64::new(0),
                fault: Mutex::default(),
                ended: session.peers.cell(),
                flushed: Arc::clone(&flushed),
            });
            let counts = CrossingCounts::default();
            (crossing.id, Outgoing { crossing, caller, key, sequence: 0, counts, calls })
        });
        let counts = CrossingCounts::default();
        let incoming =
            ends.mailboxes.into_iter().map(|(crossing, mailbox)| (crossing.id, (crossing, mailbox, counts)));
        let (outgoing, incoming) = (outgoing.collect(), incoming.collect());
        Self { session, mode: ends.mode, window: ends.window.max(1) as u64, outgoing, incoming, flushed }
    }
}

impl<V: Value> Transport<V> for CallTransfers {
    fn start(&mut self, crossing: CrossingId, step: u64, tensor: &Tensor) -> Result<Start, GraphError> {
        let session = &self.session;
        let out = self.outgoing.get_mut(&crossing).ok_or_else(|| session.unknown(crossing, step))?;
        session.peers.check(out.crossing.to)?;
        if !out.check(session)? || out.in_flight() >= self.window {
            return Ok(Start::Busy);
        }
        let content = tensor.to_contiguous().and_then(|tensor| tensor.to_bytes());
        let content = content.map_err(|error| out.crossing.failed(out.crossing.to, step, error))?;
        out.counts.sent += 1;
        out.counts.bytes += content.len() as u64;
        // tonic's codec copies each message into a buffer of its own.
        out.counts.copied += 1;
        let request = PutRequest {
            key: out.key.clone(),
            part: out.crossing.from.0 as u32,
            mode: self.mode.number(),
            crossing: crossing.0 as u64,
            sequence: out.sequence,
            step,
            dtype: tensor.dtype().to_string(),
            dims: tensor.shape().dims().to_vec(),
            content,
        };
        out.sequence += 1;
        out.calls.in_flight.fetch_add(1, Ordering::AcqRel);
        let (caller, calls) = (out.caller.clone(), Arc::clone(&out.calls));
        session.runtime.spawn(async move {
            let _call = InFlight(&calls);
            if let Err(status) = caller.put(request).await {
                lock(&calls.fault).get_or_insert((step, status));
            }
        });
        Ok(Start::Begun)
    }

    fn take(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
        waker: Option<&Waker>,
    ) -> Result<Option<V>, GraphError> {
        let Some((crossing, mailbox, counts)) = self.incoming.get_mut(&crossing) else {
            return Err(self.session.unknown(crossing, step));
        };
        if let Some(waker) = waker {
            // Set before the take, so that no arrival is missed.
            mailbox.arrived.set(waker);
        }
        // Checked before the take: when the end of a part is known, all that it had sent is here.
        let health = self.session.peers.check(crossing.from);
        let Some(parcel) = mailbox.take() else { return health.map(|()| None) };
        let failed = |source: KernelError| crossing.failed(crossing.from, step, source);
        let Parcel { step: came, spec, content } = parcel;
        if came != step {
            return Err(failed(format!("step {came} came in its place").into()));
        }
        counts.received += 1;
        counts.received_copied += u64::from(!content.is_empty());
        let value = sites.filled(crossing, &spec, &mut |memory| copy(&content, memory));
        value.map(Some).map_err(failed)
    }

    fn can_start(&mut self, crossing: CrossingId, waker: &Waker) -> Result<bool, GraphError> {
        let out = self.outgoing.get(&crossing).ok_or_else(|| self.session.unknown(crossing, 0))?;
        out.calls.ended.set(waker);
        self.session.peers.check(out.crossing.to)?;
        Ok(out.check(&self.session)? && out.in_flight() < self.window)
    }

    fn is_flushed(&mut self, waker: &Waker) -> Result<bool, GraphError> {
        self.flushed.set(waker);
        self.session.peers.check_all()?;
        let mut flushed = true;
        for out in self.outgoing.values() {
            let left = self.session.peers.left(out.crossing.to);
            if out.in_flight() > 0 {
                flushed &= left;
            } else if !left {
                // A part that has left in good order needs nothing any more.
                flushed &= out.check(&self.session)?;
            }
        }
        Ok(flushed)
    }

    fn unfinished(&self) -> Option<Unfinished> {
        let sends = |out: &Outgoing| match self.session.peers.left(out.crossing.to) {
            true => 0,
            false => out.in_flight(),
        };
        Unfinished::of(self.outgoing.iter().map(|(crossing, out)| (*crossing, sends(out))))
    }

    fn counts(&self, crossing: CrossingId) -> CrossingCounts {
        let sent = self.outgoing.get(&crossing).map(|out| out.counts);
        sent.or_else(|| Some(self.incoming.get(&crossing)?.2)).unwrap_or_default()
    }

    fn abort(&mut self, reason: &str) {
        self.session.state.bootstrap.fail(reason);
    }
}

impl Outgoing {
    fn in_flight(&self) -> u64 {
        self.calls.in_flight.load(Ordering::Acquire)
    }

    /// Returns the error of a call that failed, or whether calls can go on. They can't if the connection has
    /// ended, and the reason is not known yet.
    fn check(&self, session: &SessionHandle) -> Result<bool, GraphError> {
        let fault = lock(&self.calls.fault).clone();
        let Some((step, status)) = fault else { return Ok(true) };
        let peer = self.crossing.to;
        match is_of_call(&status) {
            true => Err(self.crossing.failed(peer, step, status)),
            false => session.connection_ended(peer, &KernelError::from(status)).map(|()| false),
        }
    }
}

/// Returns whether a status is about the call, and not about its connection. The service of a part marks its
/// refusals. A message that is too long or late is refused before it comes to the service, so these codes
/// count too.
fn is_of_call(status: &Status) -> bool {
    let is_marked = status.metadata().contains_key(REFUSAL);
    is_marked || matches!(status.code(), Code::DeadlineExceeded | Code::OutOfRange | Code::ResourceExhausted)
}

/// Marks a status as a refusal by the service of a part.
pub(crate) fn refusal(mut status: Status) -> Status {
    status.metadata_mut().insert(REFUSAL, MetadataValue::from_static("1"));
    status
}

/// Counts a call as ended when it is dropped, whatever ended it.
struct InFlight<'a>(&'a Calls);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.0.ended.wake();
        self.0.flushed.wake();
    }
}

impl Caller {
    /// Brings a tensor to the other part.
    async fn put(&self, request: PutRequest) -> Result<(), Status> {
        let mut request = Request::new(request);
        request.set_timeout(LONGEST_CALL);
        let reply: Result<tonic::Response<proto::PutReply>, Status> = match self.clone() {
            Self::Http2(mut client) => client.put(request).await,
            Self::Native(mut client) => client.put(request).await,
        };
        reply.map(drop)
    }
}

/// Copies the content of a message into the memory of the engine.
fn copy(content: &[u8], memory: &mut [u8]) -> Result<(), KernelError> {
    if content.len() != memory.len() {
        let (came, asked) = (content.len(), memory.len());
        return Err(format!("{came} bytes came, and the engine has room for {asked}").into());
    }
    memory.copy_from_slice(content);
    Ok(())
}

/// A tensor that came by a call. `content` has the length that `spec` says.
#[derive(Clone, Debug)]
pub(crate) struct Parcel {
    pub(crate) step: u64,
    pub(crate) spec: TensorSpec,
    pub(crate) content: Bytes,
}

/// The tensors of one crossing tensor in one mode. Calls that are in flight together may come in any order,
/// so each parcel has a number.
///
/// At most `window` parcels wait here. A call whose parcel comes too early waits until there is room, so that
/// a parcel that is needed sooner always finds room. At most one call waits for each number, so at most
/// `window` calls wait.
#[derive(Debug)]
pub(crate) struct Mailbox {
    name: String,
    window: u64,
    state: Mutex<MailboxState>,
    /// Notified when a parcel was taken.
    room: Notify,
    /// The waker of the executor.
    arrived: Arc<WakerCell>,
}

#[derive(Debug, Default)]
struct MailboxState {
    /// The number of the next parcel that the executor takes.
    next: u64,
    /// The step of the last parcel that was taken.
    last_step: Option<u64>,
    parcels: BTreeMap<u64, Parcel>,
    /// The numbers whose calls wait for room.
    waiting: BTreeSet<u64>,
}

impl Mailbox {
    /// Makes a mailbox with room for `window` parcels. `arrived` is woken when the next parcel is there.
    pub(crate) fn new(name: &str, window: usize, arrived: Arc<WakerCell>) -> Self {
        let window = window.max(1) as u64;
        Self { name: name.to_owned(), window, state: Mutex::default(), room: Notify::new(), arrived }
    }

    /// Puts a parcel in, once there is room.
    ///
    /// # Errors
    /// The parcel came already, waits already, or could not be sent yet by a sender that keeps to the window.
    pub(crate) async fn put(&self, sequence: u64, parcel: Parcel) -> Result<(), String> {
        let mut parcel = Some(parcel);
        let mut waiting = None;
        loop {
            let mut room = std::pin::pin!(self.room.notified());
            // From here on no removal is missed.
            room.as_mut().enable();
            if self.try_put(sequence, &mut parcel)? {
                return Ok(());
            }
            if waiting.is_none() {
                waiting = Some(self.wait(sequence)?);
            }
            room.await;
        }
    }

    /// Notes that a call waits, until the guard is dropped.
    fn wait(&self, sequence: u64) -> Result<Waiting<'_>, String> {
        if lock(&self.state).waiting.insert(sequence) {
            Ok(Waiting { mailbox: self, sequence })
        } else {
            Err(format!("tensor {sequence} of {:?} waits already, in another call", self.name))
        }
    }

    /// Puts the parcel in if there is room.
    fn try_put(&self, sequence: u64, parcel: &mut Option<Parcel>) -> Result<bool, String> {
        let mut state = lock(&self.state);
        let (name, window, next) = (&self.name, self.window, state.next);
        if sequence < next || state.parcels.contains_key(&sequence) {
            return Err(format!("tensor {sequence} of {name:?} came already"));
        }
        // The sender has at most `window` calls in flight, and each earlier call has found room.
        if sequence - next >= 2 * window {
            return Err(format!(
                "tensor {sequence} of {name:?} is too early: the receiver waits for tensor {next}, and the window is {window}"
            ));
        }
        let Some(step) = parcel.as_ref().map(|parcel| parcel.step) else { return Ok(true) };
        let earlier = state.parcels.range(..sequence).next_back().map(|(_, parcel)| parcel.step);
        let later = state.parcels.range(sequence..).next().map(|(_, parcel)| parcel.step);
        let ascends = earlier.or(state.last_step).is_none_or(|earlier| earlier < step)
            && later.is_none_or(|later| step < later);
        if !ascends {
            return Err(format!("step {step} of {name:?} came already, or a later step came before it"));
        }
        if sequence - next >= window {
            return Ok(false);
        }
        if let Some(parcel) = parcel.take() {
            state.parcels.insert(sequence, parcel);
        }
        drop(state);
        if sequence == next {
            self.arrived.wake();
        }
        Ok(true)
    }

    /// Takes the next parcel if it is there.
    pub(crate) fn take(&self) -> Option<Parcel> {
        let mut state = lock(&self.state);
        let next = state.next;
        let parcel = state.parcels.remove(&next)?;
        state.next += 1;
        state.last_step = Some(parcel.step);
        drop(state);
        self.room.notify_waiters();
        Some(parcel)
    }
}

/// A call that waits for room.
#[derive(Debug)]
struct Waiting<'a> {
    mailbox: &'a Mailbox,
    sequence: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.mailbox.state).waiting.remove(&self.sequence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_a_part_is_told_from_the_end_of_a_connection_whatever_its_code() {
        for code in [Code::InvalidArgument, Code::Unavailable, Code::Internal, Code::Aborted, Code::Unknown] {
            let status = Status::new(code, "why");
            assert!(!is_of_call(&status), "{status}");
            let marked = refusal(status);
            assert!(is_of_call(&marked), "{marked}");
            assert_eq!((marked.code(), marked.message()), (code, "why"));
        }
        assert!(is_of_call(&Status::out_of_range("a message that is too long")));
    }
}

#[cfg(test)]
mod mailbox_tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use tonic_rdma_tensor::{Dtype, Shape};

    use super::*;

    fn parcel(step: u64) -> Parcel {
        let spec = TensorSpec::new(Dtype::U8, Shape::new(&[1]).unwrap()).unwrap();
        Parcel { step, spec, content: Bytes::copy_from_slice(&[step as u8]) }
    }

    fn put(mailbox: &Mailbox, sequence: u64, step: u64) -> Option<Result<(), String>> {
        let mut context = Context::from_waker(Waker::noop());
        match pin!(mailbox.put(sequence, parcel(step))).poll(&mut context) {
            std::task::Poll::Ready(result) => Some(result),
            std::task::Poll::Pending => None,
        }
    }

    #[test]
    fn parcels_come_in_any_order_and_leave_in_the_right_one() {
        let mailbox = Mailbox::new("relu", 2, Arc::default());
        assert_eq!(put(&mailbox, 1, 20), Some(Ok(())));
        assert!(mailbox.take().is_none(), "the first one is not here");
        assert_eq!(put(&mailbox, 2, 30), None, "there is no room yet");
        assert_eq!(put(&mailbox, 0, 10), Some(Ok(())));
        assert_eq!(mailbox.take().unwrap().step, 10);
        assert_eq!(put(&mailbox, 2, 30), Some(Ok(())));
        assert_eq!([mailbox.take().unwrap().step, mailbox.take().unwrap().step], [20, 30]);
        assert!(mailbox.take().is_none());
    }

    #[test]
    fn a_parcel_waits_once() {
        let mailbox = Mailbox::new("relu", 1, Arc::default());
        let mut context = Context::from_waker(Waker::noop());
        let mut first = Box::pin(mailbox.put(1, parcel(20)));
        assert!(first.as_mut().poll(&mut context).is_pending(), "there is no room yet");
        let refusal = put(&mailbox, 1, 20).unwrap().unwrap_err().to_string();
        assert_eq!(refusal, "tensor 1 of \"relu\" waits already, in another call");
        // The caller gives up, and sends the tensor again.
        drop(first);
        let mut second = Box::pin(mailbox.put(1, parcel(20)));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert_eq!(put(&mailbox, 0, 10), Some(Ok(())));
        assert_eq!(mailbox.take().unwrap().step, 10);
        assert!(second.as_mut().poll(&mut context).is_ready());
        drop(second);
        assert_eq!(
            put(&mailbox, 1, 20).unwrap().unwrap_err().to_string(),
            "tensor 1 of \"relu\" came already"
        );
        assert_eq!(mailbox.take().unwrap().step, 20);
    }

    #[test]
    fn a_parcel_that_no_honest_sender_sends_is_refused_by_name() {
        let mailbox = Mailbox::new("relu", 1, Arc::default());
        let refusal = |sequence, step| put(&mailbox, sequence, step).unwrap().unwrap_err().to_string();
        assert_eq!(
            refusal(2, 1),
            "tensor 2 of \"relu\" is too early: the receiver waits for tensor 0, and the window is 1"
        );
        assert_eq!(put(&mailbox, 0, 7), Some(Ok(())));
        assert_eq!(refusal(0, 8), "tensor 0 of \"relu\" came already");
        assert_eq!(refusal(1, 7), "step 7 of \"relu\" came already, or a later step came before it");
        assert_eq!(mailbox.take().unwrap().step, 7);
        assert_eq!(refusal(0, 8), "tensor 0 of \"relu\" came already");
        assert_eq!(refusal(1, 7), "step 7 of \"relu\" came already, or a later step came before it");
        assert_eq!(
            refusal(u64::MAX, 9).split(':').next(),
            Some("tensor 18446744073709551615 of \"relu\" is too early")
        );
    }
}
