//! The state of one stream.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use bytes::Bytes;
use foldhash::fast::RandomState;
use http::HeaderMap;

use crate::endpoint::{Deferred, SentHeaders};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::RequestHeaders;

/// The key of a stream's slot. The slot is used again after the stream's handle is gone and the call has
/// ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::grpc) struct StreamKey(pub(super) u32);

impl StreamKey {
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A map with numbers as keys. A peer chooses some of them, so the hash function has a secret.
pub(super) type NumberMap<K, V> = HashMap<K, V, RandomState>;

/// Landed bytes that were taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::grpc) struct LandedBytes {
    /// Of messages in one segment.
    pub(in crate::grpc) in_place: u64,
    /// Of others, which tonic copies.
    pub(in crate::grpc) copied: u64,
    /// Of both, those that were copied into ordinary memory before.
    pub(in crate::grpc) moved: u64,
}

/// A part of the body that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Bytes of the body, in order. Messages may begin and end anywhere in them.
    Data(Bytes),
    /// One whole gRPC message with its prefix of five bytes, in one segment of registered memory. The byte
    /// that the sender chose ([`send_message`](super::Core::send_message)) is at a multiple of 64 bytes. Only
    /// after [`deliver_landed`](super::Core::deliver_landed).
    Message(Bytes),
    /// The trailers. Nothing follows.
    Trailers(HeaderMap),
}

/// Headers to send.
#[derive(Debug)]
pub(super) enum OutHeaders {
    /// Shared, because the caller may send it again.
    Request(Arc<RequestHeaders>),
    Response(HeaderMap),
}

impl From<OutHeaders> for SentHeaders {
    fn from(head: OutHeaders) -> Self {
        match head {
            OutHeaders::Request(head) => Self::Shared(head),
            OutHeaders::Response(fields) => Self::Fields(fields),
        }
    }
}

/// A part of the body to send.
#[derive(Debug)]
pub(in crate::grpc) enum OutPart {
    Data(Bytes),
    /// One whole message, in parts.
    Message {
        parts: Vec<Bytes>,
        aligned_at: usize,
    },
}

impl OutPart {
    pub(in crate::grpc) fn length(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Message { parts, .. } => parts.iter().map(Bytes::len).sum(),
        }
    }

    /// Moves the memory of the part to `unneeded`.
    pub(in crate::grpc) fn discard(self, unneeded: &mut Vec<Bytes>) {
        match self {
            Self::Data(data) => unneeded.push(data),
            Self::Message { parts, .. } => unneeded.extend(parts),
        }
    }
}

/// A part of the body that arrived.
#[derive(Debug)]
pub(super) enum InPart {
    Data(Bytes),
    /// The index of an offer.
    Offer(usize),
    /// A part that ends the reading with an error.
    Fault(CallFault),
}

/// A queue whose first element needs no memory of its own, because most calls have one part.
#[derive(Debug)]
pub(in crate::grpc) struct Parts<T> {
    first: Option<T>,
    rest: VecDeque<T>,
}

impl<T> Default for Parts<T> {
    fn default() -> Self {
        Self { first: None, rest: VecDeque::new() }
    }
}

impl<T> Parts<T> {
    pub(in crate::grpc) fn push(&mut self, part: T) {
        if self.first.is_none() {
            self.first = Some(part);
        } else {
            self.rest.push_back(part);
        }
    }

    /// Returns the first element, if there is no other.
    pub(in crate::grpc) fn only(&self) -> Option<&T> {
        self.first.as_ref().filter(|_| self.rest.is_empty())
    }

    pub(super) fn front(&self) -> Option<&T> {
        self.first.as_ref()
    }

    pub(super) fn front_mut(&mut self) -> Option<&mut T> {
        self.first.as_mut()
    }

    pub(in crate::grpc) fn pop(&mut self) -> Option<T> {
        let next = self.rest.pop_front();
        std::mem::replace(&mut self.first, next)
    }

    /// Puts a part before all others.
    pub(in crate::grpc) fn unpop(&mut self, part: T) {
        if let Some(second) = self.first.replace(part) {
            self.rest.push_front(second);
        }
    }

    pub(in crate::grpc) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub(super) fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.rest.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.rest)
    }
}

impl Parts<InPart> {
    /// Returns whether there is one part, with at most `most` bytes of data.
    pub(super) fn is_only_data(&self, most: usize) -> bool {
        matches!(self.only(), Some(InPart::Data(data)) if data.len() <= most)
    }
}

/// A queue of streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    /// Streams with a message's worth to send.
    Ready,
    /// Streams with more to send.
    Bulk,
    /// Calls that wait for another to end.
    Unopened,
    /// Streams with offers to read.
    Reads,
    /// Streams that wait for the connection's credit for parts, and for headers.
    PausedParts,
    PausedHeaders,
}

/// What a stream sends.
#[derive(Debug, Default)]
pub(super) struct Sending {
    pub(super) headers: Option<OutHeaders>,
    pub(super) parts: Parts<OutPart>,
    /// Bytes in `parts`.
    pub(super) bytes: usize,
    pub(super) trailers: Option<HeaderMap>,
    /// The application has ended this half.
    pub(super) end: bool,
    /// The end was sent, or nothing is sent any more.
    pub(super) done: bool,
    /// The cost that the peer takes now.
    pub(super) credit: i64,
    /// Bytes that were copied for the peer, and that the peer has not read yet.
    pub(super) copied: usize,
    /// Offers that the peer has not given back, and their bytes.
    pub(super) offers: u32,
    pub(super) offered: usize,
    /// The first message is being copied, a chunk at a time.
    pub(super) is_preparing: bool,
    pub(super) queued: Option<Queue>,
    pub(super) waker: Option<Waker>,
}

impl Sending {
    /// Returns whether the frame that is sent next is the last of the stream.
    pub(super) fn is_end_next(&self) -> bool {
        self.end && self.parts.is_empty() && self.trailers.is_none()
    }

    /// Returns whether the peer may be sent parts of the body now.
    pub(super) fn may_send_parts(&self) -> bool {
        self.credit > 0 && self.offered < Stream::MOST_OFFERED
    }
}

/// What a stream receives.
#[derive(Debug, Default)]
pub(super) struct Receiving {
    pub(super) headers: Option<HeaderMap>,
    pub(super) headers_seen: bool,
    pub(super) parts: Parts<InPart>,
    pub(super) trailers: Option<HeaderMap>,
    /// What the headers and the trailers cost the connection, as long as they have memory.
    pub(super) headers_cost: i64,
    /// The peer has ended its half.
    pub(super) ended: bool,
    /// The cost that the peer may still send.
    pub(super) allowance: i64,
    /// The cost of the parts that arrived and were not taken.
    pub(super) unread: i64,
    /// Credit is given until `allowance` and `unread` together reach this.
    pub(super) target: i64,
    /// The application has asked for a part.
    pub(super) wanted: bool,
    /// The limit of messages that are delivered in one segment.
    pub(super) landed_limit: Option<usize>,
    /// Bytes of fetches that were started and not taken.
    pub(super) landing: u64,
    /// The stream is in the queue of those whose offers are to be fetched.
    pub(super) queued: bool,
    pub(super) waker: Option<Waker>,
}

/// One stream.
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// The number on the wire; 0 before the headers are sent.
    pub(super) id: u32,
    /// The application has dropped the handle.
    pub(super) released: bool,
    /// Both halves are closed.
    pub(super) closed: bool,
    pub(super) fault: Option<CallFault>,
    pub(super) sending: Sending,
    pub(super) receiving: Receiving,
    pub(super) reset_waker: Option<Waker>,
    /// Since when the call waits to be sent, or to be taken, by its owner's clock; `None` if it is not timed.
    pub(super) waits_since: Option<Instant>,
}

/// The cost of a part of a body beside its length.
pub(in crate::grpc) const OVERHEAD: i64 = 256;

impl Stream {
    /// The most copied bytes of a stream that wait for the peer to read them.
    pub(super) const MOST_COPIED: usize = 256 << 10;
    /// A stream offers no more while so many offered bytes wait for the peer to read them. Credit does not
    /// bound them, because the peer grants as much as it likes.
    const MOST_OFFERED: usize = 64 << 20;

    /// Returns whether there is something to send that needs no credit, or that there is credit for.
    pub(super) fn can_send(&self) -> bool {
        let sending = &self.sending;
        if sending.done {
            return false;
        }
        match sending.parts.front() {
            _ if sending.headers.is_some() => true,
            Some(_) => sending.may_send_parts() && sending.copied < Self::MOST_COPIED,
            None => sending.end || sending.trailers.is_some(),
        }
    }

    /// Moves what is queued to be sent to `after`.
    pub(super) fn stop_sending(&mut self, after: &mut Deferred) {
        let sending = &mut self.sending;
        after.headers.extend(sending.headers.take().map(SentHeaders::from));
        after.headers.extend(sending.trailers.take().map(SentHeaders::Fields));
        while let Some(part) = sending.parts.pop() {
            part.discard(&mut after.unneeded);
        }
        sending.bytes = 0;
        sending.done = true;
    }

    /// Moves the wakers of all tasks that wait to `wakers`.
    pub(super) fn take_wakers(&mut self, wakers: &mut Vec<Waker>) {
        let all = [&mut self.receiving.waker, &mut self.sending.waker, &mut self.reset_waker];
        wakers.extend(all.into_iter().filter_map(Option::take));
    }
}
