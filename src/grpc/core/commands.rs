//! What the application does with its streams.

use std::sync::Arc;
use std::task::{Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;

use super::ledger::cost_of;
use super::stream::{InPart, OutHeaders, OutPart, Part, Stream, StreamKey};
use super::{Core, Role};
use crate::endpoint::SentHeaders;
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{Kind, RequestHeaders, ResetCode};

/// The reason why [`open`](Core::open) opens no stream. The call has not reached the peer, so that it may be
/// sent on another connection.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// The connection has ended.
    #[error(transparent)]
    Ended(CallFault),
    /// The peer accepts no new calls on this connection, or its numbers of streams are used up.
    #[error("this connection takes no new calls: {0}")]
    GoingAway(Arc<str>),
}

impl<K> Core<K> {
    /// The most bytes of a body that a stream queues before its sender is to wait.
    pub(super) const QUEUED: usize = 1 << 20;
    /// The most bytes that are taken with the headers.
    const LITTLE: usize = 4096;

    /// Opens a stream for a call of this client.
    pub(in crate::grpc) fn open(
        &mut self,
        head: impl Into<Arc<RequestHeaders>>,
    ) -> Result<StreamKey, OpenError> {
        if let Some(fault) = &self.ended {
            return Err(OpenError::Ended(fault.clone()));
        }
        if let Some(reason) = self.going_away() {
            return Err(OpenError::GoingAway(reason));
        }
        let mut stream = Stream::default();
        stream.sending.headers = Some(OutHeaders::Request(head.into()));
        Ok(self.streams.insert_unopened(stream))
    }

    /// Queues the headers of a response.
    pub(in crate::grpc) fn send_headers(&mut self, key: StreamKey, headers: HeaderMap) {
        let sending = &mut self.streams[key].sending;
        if sending.done {
            self.after.headers.push(SentHeaders::Fields(headers));
            return;
        }
        self.after
            .headers
            .extend(sending.headers.replace(OutHeaders::Response(headers)).map(SentHeaders::from));
        self.streams.schedule(key);
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
        let stream = &mut self.streams[key];
        if stream.sending.done || stream.sending.end {
            if let Some(part) = part {
                part.discard(&mut self.after.unneeded);
            }
            return;
        }
        if let Some(part) = part {
            let before = self.ledger.sent_by(stream);
            stream.sending.bytes += part.length();
            stream.sending.parts.push(part);
            self.ledger.resend(before, self.ledger.sent_by(stream));
        }
        stream.sending.end |= end;
        self.streams.schedule(key);
    }

    /// Queues the trailers of a response, which end the call.
    pub(in crate::grpc) fn send_trailers(&mut self, key: StreamKey, trailers: HeaderMap) {
        let sending = &mut self.streams[key].sending;
        if sending.done || sending.end {
            self.after.headers.push(SentHeaders::Fields(trailers));
            return;
        }
        sending.trailers = Some(trailers);
        sending.end = true;
        self.streams.schedule(key);
    }

    /// Waits until less than `QUEUED` bytes wait on the stream, and the connection has not too much to send.
    pub(in crate::grpc) fn poll_send_ready(
        &mut self,
        key: StreamKey,
        waker: &Waker,
    ) -> Poll<Result<(), CallFault>> {
        let stream = &mut self.streams[key];
        if let Some(fault) = &stream.fault {
            return Poll::Ready(Err(fault.clone()));
        }
        if stream.sending.done || stream.sending.end {
            return Poll::Ready(Err(CallFault::Ended));
        }
        if stream.sending.bytes < Self::QUEUED && !self.ledger.stops_sender(stream) {
            return Poll::Ready(Ok(()));
        }
        keep(&mut stream.sending.waker, waker);
        Poll::Pending
    }

    /// Takes the headers of the response. Without a waker no task is registered.
    pub(in crate::grpc) fn poll_headers(
        &mut self,
        key: StreamKey,
        waker: Option<&Waker>,
    ) -> Poll<Result<HeaderMap, CallFault>> {
        let stream = &mut self.streams[key];
        if let Some(head) = stream.receiving.headers.take() {
            self.took_headers(key);
            return Poll::Ready(Ok(head));
        }
        if let Some(fault) = &stream.fault {
            return Poll::Ready(Err(fault.clone()));
        }
        if stream.receiving.headers_seen {
            return Poll::Ready(Err(CallFault::Ended));
        }
        if let Some(waker) = waker {
            keep(&mut stream.receiving.waker, waker);
        }
        Poll::Pending
    }

    /// Takes the rest of a response, if it is all there: one part with little data, and trailers. Longer data
    /// stays, and counts against the window until the application takes it.
    pub(in crate::grpc) fn take_rest(&mut self, key: StreamKey) -> Option<(Bytes, HeaderMap)> {
        let receiving = &mut self.streams[key].receiving;
        if !receiving.ended || receiving.trailers.is_none() || !receiving.parts.is_only_data(Self::LITTLE) {
            return None;
        }
        let Some(InPart::Data(data)) = receiving.parts.pop() else { return None };
        let trailers = receiving.trailers.take();
        self.took_data(key, &data);
        self.took_headers(key);
        Some((data, trailers?))
    }

    /// Takes the next part of the body.
    pub(in crate::grpc) fn poll_part(
        &mut self,
        key: StreamKey,
        waker: Option<&Waker>,
    ) -> Poll<Option<Result<Part, CallFault>>> {
        if !std::mem::replace(&mut self.streams[key].receiving.wanted, true) {
            self.queue_reads(key);
        }
        let stream = &mut self.streams[key];
        let receiving = &mut stream.receiving;
        match receiving.parts.front() {
            Some(InPart::Data(_)) => {
                let Some(InPart::Data(data)) = receiving.parts.pop() else { return Poll::Pending };
                self.took_data(key, &data);
                return Poll::Ready(Some(Ok(Part::Data(data))));
            }
            Some(InPart::Fault(fault)) => {
                let fault = fault.clone();
                receiving.parts.pop();
                return Poll::Ready(Some(Err(fault)));
            }
            Some(&InPart::Offer(offer)) => {
                if let Some(delivered) = self.take_landed(key, offer) {
                    return Poll::Ready(Some(Ok(delivered)));
                }
                if !self.received_offers.is_landing(offer) {
                    self.queue_reads(key);
                    // The reserve is for content that a reader waits for, as this one does from now on.
                    self.control.set_urgent();
                }
            }
            None => {
                if let Some(trailers) = receiving.trailers.take() {
                    self.took_headers(key);
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
            keep(&mut self.streams[key].receiving.waker, waker);
        }
        Poll::Pending
    }

    /// Takes the wakers of all tasks that wait in `poll_headers` or `poll_part`.
    pub(in crate::grpc) fn wake_readers(&mut self) {
        self.after.wakers.extend(self.streams.iter_mut().filter_map(|stream| stream.receiving.waker.take()));
    }

    /// Returns whether `poll_headers` or `poll_part` would return something now.
    pub(in crate::grpc) fn has_arrived(&self, key: StreamKey) -> bool {
        let stream = &self.streams[key];
        let receiving = &stream.receiving;
        if receiving.headers.is_some() || stream.fault.is_some() {
            return true;
        }
        match receiving.parts.front() {
            Some(&InPart::Offer(offer)) => self.received_offers.has_landed(offer),
            Some(_) => true,
            None => receiving.ended,
        }
    }

    /// Registers the task of `waker`, unless `poll_headers` or `poll_part` would return something now.
    /// Returns whether it was registered.
    pub(in crate::grpc) fn wait(&mut self, key: StreamKey, waker: &Waker) -> bool {
        let waits = !self.has_arrived(key);
        if waits {
            keep(&mut self.streams[key].receiving.waker, waker);
        }
        waits
    }

    /// Returns whether messages of the stream are delivered in one segment.
    pub(in crate::grpc) fn delivers_landed(&self, key: StreamKey) -> bool {
        self.streams[key].receiving.landed_limit.is_some()
    }

    /// Returns whether the next bytes are being fetched.
    pub(in crate::grpc) fn is_landing(&self, key: StreamKey) -> bool {
        match self.streams[key].receiving.parts.front() {
            Some(&InPart::Offer(offer)) => self.received_offers.is_landing(offer),
            _ => false,
        }
    }

    /// Returns whether nothing is left to take.
    pub(in crate::grpc) fn is_end(&self, key: StreamKey) -> bool {
        let receiving = &self.streams[key].receiving;
        receiving.ended && receiving.parts.is_empty() && receiving.trailers.is_none()
    }

    /// Waits until the call has failed.
    pub(in crate::grpc) fn poll_reset(&mut self, key: StreamKey, waker: &Waker) -> Poll<CallFault> {
        let stream = &mut self.streams[key];
        if let Some(fault) = &stream.fault {
            return Poll::Ready(fault.clone());
        }
        keep(&mut stream.reset_waker, waker);
        Poll::Pending
    }

    /// Delivers messages of at most `limit` bytes, without their prefix, in one segment.
    pub(in crate::grpc) fn deliver_landed(&mut self, key: StreamKey, limit: usize) {
        self.streams[key].receiving.landed_limit = Some(limit);
    }

    /// Ends a call in both directions.
    pub(in crate::grpc) fn reset(&mut self, key: StreamKey, code: ResetCode) {
        let stream = &mut self.streams[key];
        if !stream.closed {
            // A server has not heard of a call whose headers wait.
            let is_known = stream.id != 0 && (self.role == Role::Server || stream.sending.headers.is_none());
            if is_known && self.ended.is_none() {
                self.control.reset(stream.id, code);
            }
            self.fail(key, CallFault::ResetHere(code));
            self.sweep();
        }
        self.drop_arrived(key);
    }

    /// Notes that the handle of a stream is gone.
    pub(in crate::grpc) fn release(&mut self, key: StreamKey) {
        let stream = &mut self.streams[key];
        // A server has ended the call when its end is queued. A client has not, as long as the response is
        // missing.
        let is_ending = self.role == Role::Server && stream.sending.end;
        if stream.closed || is_ending {
            self.drop_arrived(key);
        } else {
            self.reset(key, ResetCode::Cancel);
        }
        let stream = &mut self.streams[key];
        stream.released = true;
        (stream.receiving.waker, stream.sending.waker, stream.reset_waker) = (None, None, None);
        self.remove_if_over(key);
        // A peer that gives no credit may have ended the call in order.
        self.sweep();
    }

    /// Drops what has arrived and was not taken.
    pub(super) fn drop_arrived(&mut self, key: StreamKey) {
        let receiving = &mut self.streams[key].receiving;
        (receiving.headers, receiving.trailers) = (None, None);
        self.took_headers(key);
        let receiving = &mut self.streams[key].receiving;
        let mut parts = std::mem::take(&mut receiving.parts);
        while let Some(part) = parts.pop() {
            self.discard_part(part);
        }
    }

    /// Drops a part that has arrived and was not taken.
    pub(super) fn discard_part(&mut self, part: InPart) {
        match part {
            InPart::Data(data) => self.ledger.release(Kind::Data, cost_of(data.len())),
            InPart::Offer(offer) => {
                let wakers = &mut self.after.wakers;
                self.received_offers.discard(offer, &mut self.control, &mut self.ledger, wakers)
            }
            InPart::Fault(_) => {}
        }
    }

    /// Notes that the application took data of a stream.
    fn took_data(&mut self, key: StreamKey, data: &Bytes) {
        let cost = cost_of(data.len());
        self.ledger.release(Kind::Data, cost);
        self.took(key, cost);
    }

    /// Notes that the application took parts of a stream of this cost, and gives the peer credit for more.
    pub(super) fn took(&mut self, key: StreamKey, cost: i64) {
        let stream = &mut self.streams[key];
        if let Some(credit) = self.ledger.take(stream, cost) {
            self.control.credit(stream.id, credit);
        }
    }

    /// Takes the headers and trailers of a response off the ledger, if none of them waits to be taken. The
    /// headers of a request count until the handle of its stream is gone, because the handler has them.
    fn took_headers(&mut self, key: StreamKey) {
        let receiving = &mut self.streams[key].receiving;
        if self.role == Role::Client && receiving.headers.is_none() && receiving.trailers.is_none() {
            self.ledger.release_headers(receiving);
        }
    }

    /// Frees the slots of streams that wait for the peer although their calls have ended, if there are many.
    pub(super) fn sweep(&mut self) {
        self.streams.sweep().into_iter().for_each(|key| self.remove_if_over(key));
    }
}

/// Keeps the waker of the latest task that asked.
pub(in crate::grpc) fn keep(place: &mut Option<Waker>, waker: &Waker) {
    match place {
        Some(kept) => kept.clone_from(waker),
        None => *place = Some(waker.clone()),
    }
}
