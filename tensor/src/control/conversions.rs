//! Conversions between the messages of the service and the types of links.

use std::sync::Arc;

use crate::control::proto::{AttachReply, Place, QueuePair};
use crate::link::prepare::{PeerEnd, Prepared};
use tonic_rdma_verbs::internal::RemotePlace;
use tonic_rdma_verbs::{QueuePairAddress, RemoteSegment, Rkey};

/// The version of the service that this end speaks. Since version 2, ranks of a group name the group in their calls.
pub(crate) const VERSION: u32 = 2;

/// A message of the peer describes no possible end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadReply {
    #[error("it named no words")]
    NoWords,
    #[error("it named no memory")]
    NoMemory,
    #[error("an address of {0} bytes")]
    AddressLength(usize),
    #[error("{0} receives on a queue pair")]
    Receives(u32),
}

/// Returns the queue pairs of this end, as messages describe them.
pub(crate) fn queue_pairs(prepared: &Prepared) -> Vec<QueuePair> {
    let queue_pairs = prepared.queue_pairs().into_iter();
    queue_pairs.map(|(address, receives)| QueuePair { address: address.into(), receives }).collect()
}

/// Returns the place of this end's words, as messages describe it.
pub(crate) fn words(prepared: &Prepared) -> Place {
    place(&prepared.words())
}

/// Returns a range of memory, as messages describe it.
pub(crate) fn place(place: &RemotePlace) -> Place {
    Place { address: place.start.address, rkey: place.start.rkey.0, length: place.length }
}

/// Returns the end of the peer that a message describes.
pub(crate) fn peer_end(
    name: Arc<str>,
    queue_pairs: &[QueuePair],
    words: Option<Place>,
    places_in_order: bool,
    immediate: bool,
) -> Result<PeerEnd, BadReply> {
    let words = words.ok_or(BadReply::NoWords)?;
    let start = RemoteSegment { address: words.address, rkey: Rkey(words.rkey) };
    let queue_pair = |it: &QueuePair| {
        let address = QueuePairAddress::new(it.address.to_vec());
        let address = address.ok_or(BadReply::AddressLength(it.address.len()))?;
        if !(16..=1 << 20).contains(&it.receives) {
            return Err(BadReply::Receives(it.receives));
        }
        Ok((address, it.receives))
    };
    Ok(PeerEnd {
        name,
        queue_pairs: queue_pairs.iter().map(queue_pair).collect::<Result<_, BadReply>>()?,
        words: RemotePlace { start, length: words.length },
        places_in_order,
        immediate,
    })
}

/// Returns the memory that the peer gave this end a right to.
pub(crate) fn place_of(reply: &AttachReply) -> Result<RemotePlace, BadReply> {
    let place = reply.place.ok_or(BadReply::NoMemory)?;
    let start = RemoteSegment { address: place.address, rkey: Rkey(place.rkey) };
    Ok(RemotePlace { start, length: place.length })
}
