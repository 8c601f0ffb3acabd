//! Control: the gRPC service by which devices find one another and give one another rights to memory.

pub(crate) mod accept;
pub(crate) mod open;
pub(crate) mod proto;

use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tonic::Status;
use tonic::transport::Channel as Grpc;

use self::proto::tensor_device_client::TensorDeviceClient;
use self::proto::{AttachReply, AttachRequest, Kind, MemoryRange, Offered as OfferedReply, QueuePair};
use crate::error::TensorError;
use crate::link::words::WordPair;
use crate::link::{Link, PeerParameters, Prepared};
use tonic_rdma_verbs::unstable::{RemoteRange, with_causes};
use tonic_rdma_verbs::{Probe, QueuePairAddress, RemoteSegment, Rkey};

/// Returns the queue pairs of this side, as messages describe them.
pub(crate) fn queue_pairs(prepared: &Prepared) -> Vec<QueuePair> {
    let queue_pairs = prepared.queue_pairs().into_iter();
    queue_pairs.map(|(address, receives)| QueuePair { address: address.into(), receives }).collect()
}

/// Returns the memory of this side's words, as messages describe it.
pub(crate) fn words(prepared: &Prepared) -> MemoryRange {
    memory_range(&prepared.words.memory_range())
}

/// Returns a range of memory, as messages describe it.
pub(crate) fn memory_range(place: &RemoteRange) -> MemoryRange {
    MemoryRange { address: place.start.address, rkey: place.start.rkey.0, length: place.length }
}

/// Returns the peer's side that a message describes.
pub(crate) fn peer_parameters(
    name: Arc<str>,
    queue_pairs: &[QueuePair],
    words: Option<MemoryRange>,
    places_in_order: bool,
    immediate: bool,
    version: u32,
) -> Result<PeerParameters, String> {
    let words = words.ok_or("it named no words")?;
    let queue_pair = |it: &QueuePair| {
        let address = QueuePairAddress::new(it.address.to_vec());
        let address = address.ok_or_else(|| format!("an address of {} bytes", it.address.len()))?;
        if !(16..=1 << 20).contains(&it.receives) {
            return Err(format!("{} receives on a queue pair", it.receives));
        }
        Ok((address, it.receives))
    };
    Ok(PeerParameters {
        name,
        queue_pairs: queue_pairs.iter().map(queue_pair).collect::<Result<_, String>>()?,
        words: remote_range(words),
        places_in_order,
        immediate,
        version,
    })
}

/// Returns whether `read`, the nonces that the peer says it has read in the memory of this process, are those
/// of `probes`.
pub(crate) fn is_seen(probes: &[Probe], read: &[u64]) -> bool {
    let right = |(probe, read): (&Probe, &u64)| probe.ours.is_none_or(|ours| ours == *read);
    read.len() == probes.len() && probes.iter().zip(read).all(right)
}

/// Returns the memory that the peer gave this side a right to.
pub(crate) fn granted_memory(reply: &AttachReply) -> Result<RemoteRange, TensorError> {
    reply.memory.map(remote_range).ok_or_else(|| TensorError::other("it named no memory"))
}

fn remote_range(MemoryRange { address, rkey, length }: MemoryRange) -> RemoteRange {
    RemoteRange { start: RemoteSegment { address, rkey: Rkey(rkey) }, length }
}

/// A region or a slot, to which peers attach by its name.
pub(crate) trait Attachable: Send + Sync {
    /// Gives the peer of `link` its right.
    fn attach(self: Arc<Self>, link: &Arc<Link>, request: &AttachRequest) -> Result<AttachReply, Status>;

    /// Describes the region or slot, for the call `Describe`.
    fn describe(&self, name: &str) -> OfferedReply;
}

/// Returns an error if the request asks for another kind than `kind`.
pub(crate) fn expect_kind(request: &AttachRequest, kind: Kind) -> Result<(), Status> {
    let asked = request.kind();
    if asked == kind {
        return Ok(());
    }
    let (name, found, asked) = (&request.name, kind.as_str_name(), asked.as_str_name());
    Err(Status::invalid_argument(format!("{name:?} is {found}, not {asked}")))
}

/// Returns the status of a request for `name` that can't be understood.
pub(crate) fn invalid(name: &str, error: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("{name:?}: {error}"))
}

/// Returns the status of a failure at this side.
pub(crate) fn internal(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}

/// The gRPC connection that a link was made over.
#[derive(Clone)]
pub(crate) struct PeerService {
    pub(crate) endpoint: Arc<str>,
    pub(crate) client: TensorDeviceClient<Grpc>,
    pub(crate) answer_timeout: Duration,
}

impl PeerService {
    /// Attaches to the region or slot `name` of the peer. Takes a pair of words here, and learns the peer's
    /// pair from the answer. If the future is dropped or the time is over, the pair is given up when the
    /// answer has come.
    pub(crate) async fn attach(
        &self,
        link: &Arc<Link>,
        port: u32,
        name: &Arc<str>,
        kind: Kind,
        metadata: Vec<u8>,
    ) -> Result<(OwnPair, AttachReply), TensorError> {
        let ours = link.add_pair(WordPair::unanswered)?;
        let request = AttachRequest {
            link: link.id.to_vec().into(),
            name: name.to_string(),
            kind: kind.into(),
            metadata: metadata.into(),
            words: ours.number,
            queue_pair: port,
        };
        let mut ours = OwnPair { link: Arc::downgrade(link), pair: ours };
        let (mut client, ended) = (self.client.clone(), link.ended());
        let (answer, answered) = oneshot::channel();
        tokio::spawn(async move {
            let reply = tokio::select! {
                reply = client.attach(request) => reply,
                // The link ends only together with its call, so no answer is missed.
                () = ended => return,
            };
            // An answer that nobody waits for any more is dropped, and the pair with it.
            let _ = answer.send(reply.map(|reply| {
                let reply = reply.into_inner();
                ours.pair = Arc::new(ours.pair.towards(reply.slot));
                (ours, reply)
            }));
        });
        match tokio::time::timeout(self.answer_timeout, answered).await {
            Ok(Ok(reply)) => reply.map_err(|status| self.refused(link, &status)),
            Ok(Err(_)) => Err(link.fault().cloned().unwrap_or_else(|| TensorError::closed(&link.peer))),
            Err(_) => Err(TensorError::timeout("the peer's answer", self.answer_timeout)),
        }
    }

    /// Returns the error for a status of the peer.
    fn refused(&self, link: &Link, status: &tonic::Status) -> TensorError {
        if let Some(fault) = link.fault() {
            return fault.clone();
        }
        refused(&self.endpoint, status)
    }
}

/// A pair of words of this side, for a slot or region of the peer. Dropping it gives the pair up.
#[derive(Debug)]
pub(crate) struct OwnPair {
    link: Weak<Link>,
    pair: Arc<WordPair>,
}

impl Deref for OwnPair {
    type Target = Arc<WordPair>;

    fn deref(&self) -> &Arc<WordPair> {
        &self.pair
    }
}

impl Drop for OwnPair {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            link.remove_pair(&self.pair);
        }
    }
}

/// Returns the error for a status of the peer at `endpoint`.
pub(crate) fn refused(endpoint: &Arc<str>, status: &tonic::Status) -> TensorError {
    // If the connection could not be made or has ended, only the sources of the status say why.
    let message = with_causes(status.message(), status);
    TensorError::refused(endpoint, status.code(), &message)
}
