//! What the application does with its streams.

use std::sync::Arc;
use std::task::{Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;

use super::state::{Core, Role};
use super::stream::{InPart, OVERHEAD, OutHead, OutPart, Part, Queued, Stream, StreamKey};
use crate::endpoint::SentHead;
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{RequestHead, ResetCode};

/// The reason why [`open`](Core::open) opens no stream. The call has not reached the peer, so that it may be sent on another connection.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// The connection has ended.
    #[error(transparent)]
    Ended(CallFault),
    /// The peer takes no new calls on this connection, or its numbers of streams are used up.
    #[error("this connection takes no new calls: {0}")]
    GoingAway(Arc<str>),
}

impl<K> Core<K> {
    /// The most bytes of a body that a stream queues before its sender is to wait.
    const QUEUED: usize = 1 << 20;
    /// The most bytes that are taken with the head.
    const LITTLE: usize = 4096;

    /// Opens a stream for a call of this client.
    pub(in crate::grpc) fn open(
        &mut self,
        head: impl Into<Arc<RequestHead>>,
    ) -> Result<StreamKey, OpenError> {
        if let Some(fault) = &self.ended {
            return Err(OpenError::Ended(fault.clone()));
        }
        if let Some(reason) = self.going_away() {
            return Err(OpenError::GoingAway(reason));
        }
        let mut stream = Stream::default();
        stream.sending.head = Some(OutHead::Request(head.into()));
        stream.sending.queued = Queued::Unopened;
        // A number of streams that does not fit would need more memory than there is.
        let key = StreamKey(self.streams.insert(stream) as u32);
        self.unopened.push_back(key);
        Ok(key)
    }

    /// Queues the head of a response.
    pub(in crate::grpc) fn send_head(&mut self, key: StreamKey, headers: HeaderMap) {
        let sending = &mut self.streams[key.index()].sending;
        if sending.done {
            self.spent.push(SentHead::Fields(headers));
            return;
        }
        self.spent.extend(sending.head.replace(OutHead::Response(headers)).map(SentHead::from));
        self.schedule(key);
    }

    /// Queues bytes of the body.
    pub(in crate::grpc) fn send_data(&mut self, key: StreamKey, data: Bytes, end: bool) {
        self.send_part(key, (!data.is_empty()).then_some(OutPart::Data(data)), end);
    }

    /// Queues one whole message in parts.
    pub(in crate::grpc) fn send_message(
        &mut self,
        key: StreamKey,
        mut parts: Vec<Bytes>,
        aligned_at: usize,
        end: bool,
    ) {
        parts.retain(|part| !part.is_empty());
        let part = OutPart::Message { parts, aligned_at };
        self.send_part(key, (part.length() > 0).then_some(part), end);
    }

    fn send_part(&mut self, key: StreamKey, part: Option<OutPart>, end: bool) {
        let sending = &mut self.streams[key.index()].sending;
        if sending.done || sending.end {
            if let Some(part) = part {
                part.discard(&mut self.unneeded);
            }
            return;
        }
        if let Some(part) = part {
            sending.bytes += part.length();
            sending.parts.push(part);
        }
        sending.end |= end;
        self.schedule(key);
    }

    /// Queues the trailers of a response, which end the call.
    pub(in crate::grpc) fn send_trailers(&mut self, key: StreamKey, trailers: HeaderMap) {
        let sending = &mut self.streams[key.index()].sending;
        if sending.done || sending.end {
            self.spent.push(SentHead::Fields(trailers));
            return;
        }
        sending.trailers = Some(trailers);
        sending.end = true;
        self.schedule(key);
    }

    /// Waits until the stream queues few enough bytes.
    pub(in crate::grpc) fn poll_send_ready(
        &mut self,
        key: StreamKey,
        waker: &Waker,
    ) -> Poll<Result<(), CallFault>> {
        let stream = &mut self.streams[key.index()];
        if let Some(fault) = &stream.fault {
            return Poll::Ready(Err(fault.clone()));
        }
        if stream.sending.done || stream.sending.end {
            return Poll::Ready(Err(CallFault::Ended));
        }
        if stream.sending.bytes < Self::QUEUED {
            return Poll::Ready(Ok(()));
        }
        keep(&mut stream.sending.waker, waker);
        Poll::Pending
    }

    /// Takes the head of the response. Without a waker this only looks.
    pub(in crate::grpc) fn poll_head(
        &mut self,
        key: StreamKey,
        waker: Option<&Waker>,
    ) -> Poll<Result<HeaderMap, CallFault>> {
        let stream = &mut self.streams[key.index()];
        if let Some(head) = stream.receiving.head.take() {
            self.uncharge_heads(key);
            return Poll::Ready(Ok(head));
        }
        if let Some(fault) = &stream.fault {
            return Poll::Ready(Err(fault.clone()));
        }
        if stream.receiving.head_seen {
            return Poll::Ready(Err(CallFault::Ended));
        }
        if let Some(waker) = waker {
            keep(&mut stream.receiving.waker, waker);
        }
        Poll::Pending
    }

    /// Takes the rest of a response, if it is all there: one part with little data, and trailers. Longer data counts until somebody asks
    /// for it.
    pub(in crate::grpc) fn take_rest(&mut self, key: StreamKey) -> Option<(Bytes, HeaderMap)> {
        let receiving = &mut self.streams[key.index()].receiving;
        if !receiving.ended || receiving.trailers.is_none() || !receiving.parts.is_only_data(Self::LITTLE) {
            return None;
        }
        let Some(InPart::Data(data)) = receiving.parts.pop() else { return None };
        let trailers = receiving.trailers.take();
        let cost = data.len() as i64 + OVERHEAD;
        self.unread_data -= cost;
        self.took(key, cost);
        self.uncharge_heads(key);
        Some((data, trailers?))
    }

    /// Takes the next part of the body.
    pub(in crate::grpc) fn poll_part(
        &mut self,
        key: StreamKey,
        waker: Option<&Waker>,
    ) -> Poll<Option<Result<Part, CallFault>>> {
        if !std::mem::replace(&mut self.streams[key.index()].receiving.wanted, true) {
            self.queue_fetches(key);
        }
        let stream = &mut self.streams[key.index()];
        let receiving = &mut stream.receiving;
        match receiving.parts.front() {
            Some(InPart::Data(_)) => {
                let Some(InPart::Data(data)) = receiving.parts.pop() else { return Poll::Pending };
                let cost = data.len() as i64 + OVERHEAD;
                self.unread_data -= cost;
                self.took(key, cost);
                return Poll::Ready(Some(Ok(Part::Data(data))));
            }
            Some(InPart::Fault(fault)) => {
                let fault = fault.clone();
                receiving.parts.pop();
                return Poll::Ready(Some(Err(fault)));
            }
            Some(&InPart::Offer(offer)) => {
                let is_starved = receiving.starved.is_some();
                if let Some(delivered) = self.take_landed(key, offer) {
                    return Poll::Ready(Some(Ok(delivered)));
                }
                if is_starved {
                    self.queue_fetches(key);
                }
            }
            None => {
                if let Some(trailers) = receiving.trailers.take() {
                    self.uncharge_heads(key);
                    return Poll::Ready(Some(Ok(Part::Trailers(trailers))));
                }
                if receiving.ended {
                    return Poll::Ready(None);
                }
                if let Some(fault) = &stream.fault {
                    receiving.ended = true;
                    return Poll::Ready(Some(Err(fault.clone())));
                }
            }
        }
        if let Some(waker) = waker {
            keep(&mut self.streams[key.index()].receiving.waker, waker);
        }
        Poll::Pending
    }

    /// Takes the wakers of all tasks that wait in `poll_head` or `poll_part`.
    pub(in crate::grpc) fn wake_readers(&mut self) {
        self.wakers.extend(self.streams.iter_mut().filter_map(|(_, stream)| stream.receiving.waker.take()));
    }

    /// Returns whether `poll_head` or `poll_part` would return something now.
    pub(in crate::grpc) fn has_arrived(&self, key: StreamKey) -> bool {
        let stream = &self.streams[key.index()];
        let receiving = &stream.receiving;
        if receiving.head.is_some() || stream.fault.is_some() {
            return true;
        }
        match receiving.parts.front() {
            Some(&InPart::Offer(offer)) => self.inbound[offer].has_landed(),
            Some(_) => true,
            None => receiving.ended,
        }
    }

    /// Registers the task of `waker`, unless `poll_head` or `poll_part` would return something now. Returns whether it was registered.
    pub(in crate::grpc) fn wait(&mut self, key: StreamKey, waker: &Waker) -> bool {
        let waits = !self.has_arrived(key);
        if waits {
            keep(&mut self.streams[key.index()].receiving.waker, waker);
        }
        waits
    }

    /// Returns whether messages of the stream are delivered in one piece.
    pub(in crate::grpc) fn delivers_landed(&self, key: StreamKey) -> bool {
        self.streams[key.index()].receiving.landed_limit.is_some()
    }

    /// Returns whether the next bytes are being fetched.
    pub(in crate::grpc) fn is_landing(&self, key: StreamKey) -> bool {
        match self.streams[key.index()].receiving.parts.front() {
            Some(&InPart::Offer(offer)) => {
                self.inbound[offer].under_way > 0 && !self.inbound[offer].has_landed()
            }
            _ => false,
        }
    }

    /// Returns whether nothing is left to take.
    pub(in crate::grpc) fn is_end(&self, key: StreamKey) -> bool {
        let receiving = &self.streams[key.index()].receiving;
        receiving.ended && receiving.parts.is_empty() && receiving.trailers.is_none()
    }

    /// Waits until the call has failed.
    pub(in crate::grpc) fn poll_reset(&mut self, key: StreamKey, waker: &Waker) -> Poll<CallFault> {
        let stream = &mut self.streams[key.index()];
        if let Some(fault) = &stream.fault {
            return Poll::Ready(fault.clone());
        }
        keep(&mut stream.reset_waker, waker);
        Poll::Pending
    }

    /// Delivers messages of at most `limit` bytes, without their prefix, in one piece.
    pub(in crate::grpc) fn deliver_landed(&mut self, key: StreamKey, limit: usize) {
        self.streams[key.index()].receiving.landed_limit = Some(limit);
    }

    /// Ends a call in both directions.
    pub(in crate::grpc) fn reset(&mut self, key: StreamKey, code: ResetCode) {
        let stream = &mut self.streams[key.index()];
        if !stream.closed {
            // A server has not heard of a call whose head waits.
            let is_known = stream.id != 0 && (self.role == Role::Server || stream.sending.head.is_none());
            if is_known && self.ended.is_none() {
                self.resets.push_back((stream.id, code));
                self.urgent = true;
            }
            self.fail(key, CallFault::ResetHere(code));
            self.sweep_unopened(32);
        }
        self.drop_arrived(key);
    }

    /// Notes that the handle of a stream is gone.
    pub(in crate::grpc) fn release(&mut self, key: StreamKey) {
        let stream = &mut self.streams[key.index()];
        // A server has ended the call when its end is queued. A client has not, as long as the response is missing.
        let is_ending = self.role == Role::Server && stream.sending.end;
        if stream.closed || is_ending {
            self.drop_arrived(key);
        } else {
            self.reset(key, ResetCode::Cancel);
        }
        let stream = &mut self.streams[key.index()];
        stream.held = false;
        (stream.receiving.waker, stream.sending.waker, stream.reset_waker) = (None, None, None);
        self.remove_if_over(key);
    }

    /// Drops what has arrived and was not taken.
    pub(super) fn drop_arrived(&mut self, key: StreamKey) {
        let receiving = &mut self.streams[key.index()].receiving;
        (receiving.head, receiving.trailers) = (None, None);
        self.uncharge_heads(key);
        let receiving = &mut self.streams[key.index()].receiving;
        let mut parts = std::mem::take(&mut receiving.parts);
        while let Some(part) = parts.pop() {
            self.unread_data -= part.data_cost();
            if let InPart::Offer(offer) = part {
                self.discard_offer(offer);
            }
        }
    }

    /// Removes calls that were dropped before they were opened, once they are at least `least`, and as many as the others.
    pub(super) fn sweep_unopened(&mut self, least: usize) {
        if self.unopened_dropped < least || self.unopened_dropped * 2 < self.unopened.len() {
            return;
        }
        let streams = &mut self.streams;
        let mut dropped = Vec::with_capacity(self.unopened_dropped);
        self.unopened.retain(|&key| {
            let stream = &mut streams[key.index()];
            if stream.closed {
                stream.sending.queued = Queued::No;
                dropped.push(key);
            }
            !stream.closed
        });
        self.unopened_dropped = 0;
        dropped.into_iter().for_each(|key| self.remove_if_over(key));
    }
}

/// Keeps the waker of the latest task that asked.
fn keep(place: &mut Option<Waker>, waker: &Waker) {
    match place {
        Some(kept) => kept.clone_from(waker),
        None => *place = Some(waker.clone()),
    }
}
