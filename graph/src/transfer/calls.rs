//! The modes with calls: a unary call brings each crossing tensor.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_rdma::RdmaChannel;
use tonic_rdma_tensor::Tensor;

use crate::dataflow::{KernelError, Value};
use crate::error::GraphError;
use crate::placement::{Crossing, CrossingId};
use crate::schedule::{CrossingCounts, Start, Transfers, Unfinished};
use crate::sites::NodeSites;
use crate::transfer::base::Base;
use crate::transfer::mailbox::{Mailbox, Parcel};
use crate::transfer::peers::WakerCell;
use crate::transfer::proto::PutRequest;
use crate::transfer::proto::parts_client::PartsClient;
use crate::transfer::{Mode, proto};
use tonic_rdma_verbs::internal::lock;

/// The longest time that a call may wait for a place at the receiver. The peer's death ends a call much sooner.
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
pub(crate) struct CallEnds {
    pub(crate) mode: Mode,
    /// The calls in flight of each crossing tensor.
    pub(crate) window: usize,
    /// The tensors to send: the connection to the receiver, and this part's key there.
    pub(crate) senders: Vec<(Crossing, Caller, Bytes)>,
    pub(crate) mailboxes: Vec<(Crossing, Arc<Mailbox>)>,
}

/// The transfers of `grpc-tcp`, `grpc-rdma` and `grpc-native`.
pub(crate) struct CallTransfers {
    base: Base,
    mode: Mode,
    window: usize,
    outgoing: HashMap<CrossingId, Outgoing>,
    incoming: HashMap<CrossingId, (Crossing, Arc<Mailbox>)>,
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
    in_flight: AtomicUsize,
    fault: Mutex<Option<(u64, Status)>>,
    /// Woken when a call has ended.
    ended: Arc<WakerCell>,
    flushed: Arc<WakerCell>,
}

impl CallTransfers {
    pub(crate) fn new(base: Base, ends: CallEnds) -> Self {
        let flushed = base.peers.cell();
        let outgoing = ends.senders.into_iter().map(|(crossing, caller, key)| {
            let calls = Arc::new(Calls {
                in_flight: AtomicUsize::new(0),
                fault: Mutex::default(),
                ended: base.peers.cell(),
                flushed: Arc::clone(&flushed),
            });
            let counts = CrossingCounts::default();
            (crossing.id, Outgoing { crossing, caller, key, sequence: 0, counts, calls })
        });
        let outgoing = outgoing.collect();
        let incoming =
            ends.mailboxes.into_iter().map(|(crossing, mailbox)| (crossing.id, (crossing, mailbox)));
        let incoming = incoming.collect();
        Self { base, mode: ends.mode, window: ends.window.max(1), outgoing, incoming, flushed }
    }
}

impl<V: Value> Transfers<V> for CallTransfers {
    fn start(&mut self, crossing: CrossingId, step: u64, tensor: &Tensor) -> Result<Start, GraphError> {
        let base = &self.base;
        let out = self.outgoing.get_mut(&crossing).ok_or_else(|| base.unknown(crossing, step))?;
        base.peers.check(out.crossing.to)?;
        if !out.check(base)? || out.calls.in_flight.load(Ordering::Acquire) >= self.window {
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
        base.runtime.spawn(async move {
            let _call = InFlight(&calls);
            if let Err(status) = caller.put(request).await {
                lock(&calls.fault).get_or_insert((step, status));
            }
        });
        Ok(Start::Begun)
    }

    fn try_take(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
    ) -> Result<Option<V>, GraphError> {
        let Some((crossing, mailbox)) = self.incoming.get(&crossing) else {
            return Err(self.base.unknown(crossing, step));
        };
        // Before the look: all that a part had sent when it ended is here.
        let peer = self.base.peers.check(crossing.from);
        let Some(parcel) = mailbox.take() else { return peer.map(|()| None) };
        let failed = |source: KernelError| crossing.failed(crossing.from, step, source);
        let Parcel { step: came, spec, content } = parcel;
        if came != step {
            return Err(failed(format!("step {came} came in its place").into()));
        }
        let value = sites.filled(crossing, &spec, &mut |memory| copy(&content, memory));
        value.map(Some).map_err(failed)
    }

    fn poll_take(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
        context: &mut Context<'_>,
    ) -> Poll<Result<V, GraphError>> {
        if let Some((_, mailbox)) = self.incoming.get(&crossing) {
            // Before the look, so that no arrival is missed.
            mailbox.arrived().set(context.waker());
        }
        self.try_take(crossing, step, sites).transpose().map_or(Poll::Pending, Poll::Ready)
    }

    fn poll_ready(
        &mut self,
        crossing: CrossingId,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), GraphError>> {
        let Some(out) = self.outgoing.get(&crossing) else {
            return Poll::Ready(Err(self.base.unknown(crossing, 0)));
        };
        out.calls.ended.set(context.waker());
        self.base.peers.check(out.crossing.to)?;
        match out.check(&self.base)? && out.calls.in_flight.load(Ordering::Acquire) < self.window {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        }
    }

    fn poll_flushed(&mut self, context: &mut Context<'_>) -> Poll<Result<(), GraphError>> {
        self.flushed.set(context.waker());
        self.base.peers.check_all()?;
        let mut flushed = true;
        for out in self.outgoing.values() {
            let left = self.base.peers.left(out.crossing.to);
            if out.calls.in_flight.load(Ordering::Acquire) > 0 {
                flushed &= left;
            } else if !left {
                // A part that has left in good order needs nothing any more.
                flushed &= out.check(&self.base)?;
            }
        }
        if flushed { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn unfinished(&self) -> Option<Unfinished> {
        let sends = |out: &Outgoing| match self.base.peers.left(out.crossing.to) {
            true => 0,
            false => out.calls.in_flight.load(Ordering::Acquire) as u64,
        };
        Unfinished::of(self.outgoing.iter().map(|(crossing, out)| (*crossing, sends(out))))
    }

    fn counts(&self, crossing: CrossingId) -> CrossingCounts {
        self.outgoing.get(&crossing).map(|out| out.counts).unwrap_or_default()
    }

    fn abort(&mut self, reason: &str) {
        self.base.runs.abort(reason);
    }
}

impl Outgoing {
    /// Returns the error of a call that failed, or whether calls can go on. They can't if the connection has ended, and the reason is not
    /// known yet.
    fn check(&self, base: &Base) -> Result<bool, GraphError> {
        let fault = lock(&self.calls.fault).clone();
        let Some((step, status)) = fault else { return Ok(true) };
        let peer = self.crossing.to;
        match is_of_call(&status) {
            true => Err(self.crossing.failed(peer, step, status)),
            false => base.connection_ended(peer, &KernelError::from(status)).map(|()| false),
        }
    }
}

/// Returns whether a status is about the call, and not about its connection. The service of a part marks its refusals. A message that is
/// too long or late is refused before it comes to the service, so these codes count too.
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
