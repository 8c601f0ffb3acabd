//! Calls whose client and server are in one process.
//!
//! The connection stays as it was negotiated: it says why, and it ends as ever. Its calls don't use it. Each
//! has an [`Exchange`]: what one end sends stays there until the other end takes it.
//!
//! ```text
//!  client: Stream ── LocalEnd ──▶ Exchange ◀── LocalEnd ── Stream of the server's call, in a task of its own
//!                                     ▲
//!  server's Session ── LocalCalls ────┘  so many at a time
//! ```

use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::HeaderMap;
use slab::Slab;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

use super::{OpenError, Part, RequestHeaders, ResetCode, Session, Stream};
use crate::endpoint::{Deferred, LandedContent, SentHeaders};
use crate::grpc::calls::CallConfig;
use crate::grpc::core::{OVERHEAD, OutPart, Parts, Role, cost_of, keep};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::headers::fields_length;
use crate::grpc::landed::{Landing, PREFIX};
use tonic_rdma_verbs::unstable::{lock, wake_all};

/// What both ends of a call share.
#[derive(Debug)]
pub(super) struct Exchange {
    /// The client's end and the server's.
    ends: Mutex<[End; 2]>,
    /// The most bytes of headers, or trailers, of the response that the client takes.
    header_limit: usize,
}

/// One end of a call: what it sends, until the other end takes it, and the tasks that wait here.
#[derive(Debug, Default)]
struct End {
    head: Option<HeaderMap>,
    parts: Parts<OutPart>,
    trailers: Option<HeaderMap>,
    /// This end sends nothing more.
    ended: bool,
    /// The cost of parts that the other end takes now. A part costs what it costs on a connection, so of small
    /// parts both take equally many. Here a part takes less memory than that.
    credit: i64,
    /// Why nothing more can be sent, and nothing more comes than the parts that are there. Both ends have a
    /// reason, or none.
    fault: Option<CallFault>,
    /// The longest message that this end takes in one segment, if it does.
    landed_limit: Option<usize>,
    reader: Option<Waker>,
    writer: Option<Waker>,
    /// The task of the handler.
    handler: Option<Waker>,
}

impl End {
    /// Makes the end that sends to a reader with these limits.
    fn sending_to(reader: &CallConfig) -> Self {
        let share = reader.connection_limit.and_then(|limit| usize::try_from(limit / 16).ok());
        let credit = i64::try_from(reader.stream_window.min(share.unwrap_or(usize::MAX))).unwrap_or(i64::MAX);
        Self { credit, ..Self::default() }
    }

    fn push(&mut self, part: OutPart) {
        self.credit -= cost_of(part.length());
        self.parts.push(part);
    }

    /// Takes the next part that this end has sent, for a reader that takes messages in one segment or not.
    fn pop(&mut self, whole: bool, after: &mut Deferred) -> Option<OutPart> {
        let before = self.credit;
        let mut part = self.parts.pop()?;
        if let OutPart::Message { parts, .. } = &mut part
            && !whole
        {
            self.credit += OVERHEAD;
            for part in std::mem::take(parts).into_iter().rev() {
                self.credit -= OVERHEAD;
                self.parts.unpop(OutPart::Data(part));
            }
            part = self.parts.pop()?;
        }
        self.credit += cost_of(part.length());
        if before <= 0 && self.credit > 0 {
            after.wakers.extend(self.writer.take());
        }
        Some(part)
    }

    /// Returns whether all was taken that this end sends.
    fn is_taken(&self) -> bool {
        self.ended && self.parts.is_empty() && self.trailers.is_none()
    }

    /// Moves what was not taken to `after`.
    fn discard(&mut self, after: &mut Deferred) {
        let headers = [self.head.take(), self.trailers.take()];
        after.headers.extend(headers.into_iter().flatten().map(SentHeaders::Fields));
        while let Some(part) = self.parts.pop() {
            part.discard(&mut after.unneeded);
        }
    }
}

/// Ends the call for both ends, unless it has ended.
fn end_both(ends: [&mut End; 2], faults: [CallFault; 2], after: &mut Deferred) {
    for (end, fault) in ends.into_iter().zip(faults) {
        if end.fault.is_none() {
            end.fault = Some(fault);
            let wakers = [&mut end.reader, &mut end.writer, &mut end.handler];
            after.wakers.extend(wakers.into_iter().filter_map(Option::take));
        }
    }
}

impl Exchange {
    /// Ends the call, unless it has ended. The faults are the client's and the server's.
    fn end(&self, faults: [CallFault; 2]) {
        let mut after = Deferred::default();
        end_both(lock(&self.ends).each_mut(), faults, &mut after);
        after.carry_out();
    }
}

/// One end of a call.
#[derive(Debug)]
pub(super) struct LocalEnd {
    exchange: Arc<Exchange>,
    role: Role,
    /// The handler had the call at once, so that it can't be sent again.
    pub(super) has_begun: bool,
}

impl LocalEnd {
    /// Calls `act` with this end and the other one.
    fn look<T>(&self, act: impl FnOnce(&mut End, &mut End) -> T) -> T {
        let [client, server] = &mut *lock(&self.exchange.ends);
        if self.role == Role::Client { act(client, server) } else { act(server, client) }
    }

    /// Calls `act` with this end and the other one. Then, without the lock, wakes tasks and drops memory.
    fn with<T>(&self, act: impl FnOnce(&mut End, &mut End, &mut Deferred) -> T) -> T {
        let mut after = Deferred::reused();
        let result = self.look(|own, other| act(own, other, &mut after));
        after.carry_out();
        after.reuse();
        result
    }

    pub(super) fn poll_send_ready(&self, waker: &Waker) -> Poll<Result<(), CallFault>> {
        self.look(|own, _| match &own.fault {
            Some(fault) => Poll::Ready(Err(fault.clone())),
            None if own.ended => Poll::Ready(Err(CallFault::Ended)),
            None if own.credit > 0 => Poll::Ready(Ok(())),
            None => {
                keep(&mut own.writer, waker);
                Poll::Pending
            }
        })
    }

    pub(super) fn send_data(&self, data: Bytes, end: bool) {
        self.send(None, (!data.is_empty()).then_some(OutPart::Data(data)), None, end);
    }

    /// Queues what this end sends, unless the call has ended. A body that lacks a part does not end in order,
    /// so the end is refused with the part.
    pub(super) fn send(
        &self,
        head: Option<HeaderMap>,
        part: Option<OutPart>,
        trailers: Option<HeaderMap>,
        is_end: bool,
    ) {
        let limit = self.exchange.header_limit;
        let length = [&head, &trailers].into_iter().flatten().map(fields_length).max().unwrap_or_default();
        self.with(|own, other, after| {
            if length > limit {
                let faults = [
                    CallFault::HeadersTooLarge { length, limit },
                    CallFault::Reset(ResetCode::ResourceExhausted),
                ];
                end_both([&mut *own, &mut *other], faults, after);
            }
            if own.ended || own.fault.is_some() {
                // It is dropped without the lock, because its memory may have an owner that uses the call.
                let mut refused = End { head, trailers, ..End::default() };
                part.into_iter().for_each(|part| refused.push(part));
                return refused.discard(after);
            }
            own.head = head.or_else(|| own.head.take());
            part.into_iter().for_each(|part| own.push(part));
            own.ended = is_end;
            own.trailers = trailers;
            if is_end && self.role == Role::Server {
                // The rest of the request is not needed.
                end_both([own, other], [const { CallFault::Ended }; 2], after);
            } else {
                after.wakers.extend(other.reader.take());
            }
        });
    }

    pub(super) fn reset(&self, code: ResetCode) {
        let faults = [CallFault::ResetHere(code), CallFault::Reset(code)];
        self.with(|own, other, after| end_both([own, other], faults, after));
    }

    /// Drops what this end has not taken. A client's call ends with it.
    pub(super) fn release(&self) {
        if self.role == Role::Client {
            self.reset(ResetCode::Cancel);
        }
        self.with(|_, other, after| other.discard(after));
    }

    pub(super) fn deliver_landed(&self, limit: usize) {
        self.look(|own, _| own.landed_limit = Some(limit));
    }

    /// Takes the headers of the response. Without a waker no task is registered.
    pub(super) fn poll_headers(&self, waker: Option<&Waker>) -> Poll<Result<HeaderMap, CallFault>> {
        self.look(|own, other| match (other.head.take(), &own.fault) {
            (Some(head), _) => Poll::Ready(Ok(head)),
            (None, Some(fault)) => Poll::Ready(Err(fault.clone())),
            (None, None) => {
                waker.into_iter().for_each(|waker| keep(&mut own.reader, waker));
                Poll::Pending
            }
        })
    }

    /// Takes the rest of a response, if it is all there: one part, and trailers.
    pub(super) fn take_rest(&self) -> Option<(Bytes, HeaderMap)> {
        self.look(|_, other| {
            if !matches!(other.parts.only(), Some(OutPart::Data(_))) || other.trailers.is_none() {
                return None;
            }
            let Some(OutPart::Data(data)) = other.parts.pop() else { return None };
            Some((data, other.trailers.take()?))
        })
    }

    /// Registers the task of `waker`. Returns false if something has come already.
    pub(super) fn wait(&self, waker: &Waker) -> bool {
        self.look(|own, other| {
            keep(&mut own.reader, waker);
            other.head.is_none() && own.fault.is_none()
        })
    }

    /// Waits for the next part. Returns also whether nothing is left to take.
    pub(super) fn poll_part(&self, waker: &Waker) -> (Poll<Option<Result<Part, CallFault>>>, bool) {
        let (part, limit, is_end) = self.with(|own, other, after| {
            let limit = own.landed_limit;
            let part = match other.pop(limit.is_some(), after) {
                Some(part) => Ok(part),
                None if other.ended => {
                    Err(Poll::Ready(other.trailers.take().map(|it| Ok(Part::Trailers(it)))))
                }
                None => Err(match &own.fault {
                    Some(fault) => Poll::Ready(Some(Err(fault.clone()))),
                    None => {
                        keep(&mut own.reader, waker);
                        Poll::Pending
                    }
                }),
            };
            (part, limit.unwrap_or_default(), other.is_taken())
        });
        let part = match part {
            Ok(OutPart::Data(data)) => Poll::Ready(Some(Ok(Part::Data(data)))),
            // The copy is made without the lock.
            Ok(OutPart::Message { parts, aligned_at }) => {
                let length = parts.iter().map(Bytes::len).sum::<usize>().saturating_sub(PREFIX);
                Poll::Ready(Some(if length > limit {
                    Err(CallFault::MessageTooLarge { length: length as u64, limit })
                } else {
                    Ok(Part::Message(joined(&parts, aligned_at)))
                }))
            }
            Err(polled) => polled,
        };
        (part, is_end)
    }

    /// Returns whether nothing is left to take.
    pub(super) fn is_end(&self) -> bool {
        self.look(|_, other| other.is_taken())
    }

    pub(super) fn poll_reset(&self, waker: &Waker) -> Poll<CallFault> {
        self.look(|own, _| match &own.fault {
            Some(fault) => Poll::Ready(fault.clone()),
            None => {
                keep(&mut own.handler, waker);
                Poll::Pending
            }
        })
    }
}

/// Returns the parts of a message in one segment, in which the byte `aligned_at` is at a multiple of
/// [`LandedContent::ALIGNMENT`]. Copies them, unless they are one already.
fn joined(parts: &[Bytes], aligned_at: usize) -> Bytes {
    match parts {
        [only] if only.as_ptr().addr().wrapping_add(aligned_at) % LandedContent::ALIGNMENT == 0 => {
            only.clone()
        }
        parts => LandedContent::joined(parts, aligned_at.wrapping_neg()),
    }
}

/// The calls that a server has from its own process, on one connection.
#[derive(Debug)]
pub(super) struct LocalCalls {
    calls: Mutex<Calls>,
    /// A permit for each call that may begin. A call waits for one from the first poll of its task on, so
    /// calls may begin in another order than they were sent in.
    permits: Semaphore,
    /// A call has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Calls {
    /// Each with whether it may begin.
    exchanges: Slab<(Arc<Exchange>, bool)>,
    /// Why there are no further calls.
    closed: Option<Arc<str>>,
}

impl Calls {
    /// Returns the client's reason for the end of a call that the handler has not ended.
    fn unanswered(&self, has_begun: bool) -> CallFault {
        if has_begun {
            return CallFault::PeerClosed;
        }
        CallFault::GoneAway(self.closed.clone().unwrap_or_default())
    }
}

impl LocalCalls {
    pub(super) fn new(limits: &CallConfig) -> Self {
        let permits = Semaphore::new(limits.max_concurrent_streams as usize);
        Self { calls: Mutex::default(), permits, ended: Notify::new() }
    }

    /// Returns the number of calls that have not ended.
    pub(super) fn active(&self) -> usize {
        lock(&self.calls).exchanges.len()
    }

    /// Returns whether this takes no further calls.
    pub(super) fn is_closed(&self) -> bool {
        self.permits.is_closed()
    }

    /// Takes no further calls. Those that wait can be sent over another connection.
    pub(super) fn close(&self, reason: &str) {
        lock(&self.calls).closed.get_or_insert_with(|| reason.into());
        self.permits.close();
    }

    /// Ends all calls. Those that wait can be sent over another connection.
    pub(super) fn abort(&self, reason: &str) {
        self.close(reason);
        let mut after = Deferred::default();
        // With the lock, so that no call begins meanwhile.
        let calls = lock(&self.calls);
        for (_, (exchange, has_begun)) in &calls.exchanges {
            let faults = [calls.unanswered(*has_begun), CallFault::PeerClosed];
            end_both(lock(&exchange.ends).each_mut(), faults, &mut after);
        }
        drop(calls);
        after.carry_out();
    }

    /// Wakes the tasks that wait for headers and parts of responses.
    pub(super) fn wake_clients(&self) {
        wake_all(self.exchanges().iter().filter_map(|exchange| lock(&exchange.ends)[0].reader.take()));
    }

    fn exchanges(&self) -> Vec<Arc<Exchange>> {
        lock(&self.calls).exchanges.iter().map(|(_, (exchange, _))| Arc::clone(exchange)).collect()
    }

    /// Waits until there is no call.
    pub(super) async fn ended(&self) {
        loop {
            let ended = self.ended.notified();
            if self.active() == 0 {
                return;
            }
            ended.await;
        }
    }
}

/// A call that a server has from its own process. Dropping this ends the call if the handler has not, and
/// lets the next one begin.
#[derive(Debug)]
pub(crate) struct LocalCall {
    session: Arc<Session>,
    slot: usize,
    has_permit: bool,
    /// It is known whether the call begins.
    is_settled: bool,
}

impl LocalCall {
    /// Waits until the server has room for the call, which is that of `stream`. Returns false if it has ended
    /// before.
    pub(crate) async fn begin(&mut self, stream: &Stream) -> bool {
        let LocalCalls { calls, permits, .. } = &self.session.local;
        if !self.has_permit {
            self.has_permit = tokio::select! {
                biased;
                _ = poll_fn(|context| stream.poll_reset(context)) => false,
                permit = permits.acquire() => permit.map(SemaphorePermit::forget).is_ok(),
            };
            // A call that has ended meanwhile is seen as such before its handler runs.
            if let Some((_, has_begun)) = lock(calls).exchanges.get_mut(self.slot) {
                *has_begun = self.has_permit;
            }
        }
        self.is_settled = true;
        self.has_permit
    }
}

impl Drop for LocalCall {
    fn drop(&mut self) {
        let LocalCalls { calls, permits, ended } = &self.session.local;
        if !self.is_settled {
            // The server's runtime drops its tasks.
            self.session.local.close("the server has ended");
        }
        let mut calls = lock(calls);
        let removed = calls.exchanges.try_remove(self.slot);
        let fault = calls.unanswered(self.has_permit);
        drop(calls);
        if let Some((exchange, _)) = removed {
            // A task may still read what the client has sent.
            exchange.end([fault, CallFault::Ended]);
        }
        if self.has_permit {
            permits.add_permits(1);
        }
        // A task waits for the end only after it has closed the semaphore.
        if permits.is_closed() {
            ended.notify_waiters();
        }
    }
}

impl Session {
    /// Ends the calls of this client's session within the process, if its connection has failed. Returns
    /// whether it has.
    pub(super) fn end_local(&self) -> bool {
        let Some(server) = &self.server else { return false };
        let has_failed = self.with(|state| state.fault.is_some());
        if has_failed && let Some(server) = server.upgrade() {
            server.local.abort("the connection has ended");
        }
        has_failed
    }

    /// Opens a stream to `server`, which is in this process, and sends `body` if that is the whole body.
    pub(super) fn open_local(
        self: &Arc<Self>,
        server: &Weak<Self>,
        head: Arc<RequestHeaders>,
        body: Option<Bytes>,
        landing: Option<Landing>,
    ) -> Result<Stream, OpenError> {
        let gone = |reason: Arc<str>| {
            self.is_usable.store(false, Ordering::Relaxed);
            OpenError::GoingAway(reason)
        };
        let server = server.upgrade().ok_or_else(|| gone("the server has ended".into()))?;
        let mut ends = [&server, self].map(|reader| End::sending_to(&reader.limits));
        ends[0].landed_limit = landing.map(|landing| landing.limit);
        ends[0].ended = body.is_some();
        body.into_iter().for_each(|body| ends[0].push(OutPart::Data(body)));
        let exchange = Exchange { ends: Mutex::new(ends), header_limit: self.limits.max_header_list_size };
        let exchange = Arc::new(exchange);
        let (length, limit) = (head.counted_length(), server.limits.max_header_list_size);
        let has_begun = if length > limit {
            exchange.end([(); 2].map(|()| CallFault::HeadersTooLarge { length, limit }));
            false
        } else {
            server.take_local(&exchange, head).map_err(gone)?
        };
        if let Some(times) = &self.times {
            times.queued(Duration::ZERO);
        }
        Ok(Stream::local(Arc::clone(self), LocalEnd { exchange, role: Role::Client, has_begun }))
    }

    /// Hands a call to this server, unless it takes no further calls. Returns whether there is room for it now.
    fn take_local(
        self: &Arc<Self>,
        exchange: &Arc<Exchange>,
        head: Arc<RequestHeaders>,
    ) -> Result<bool, Arc<str>> {
        let (slot, has_permit) = {
            let mut calls = lock(&self.local.calls);
            if let Some(reason) = &calls.closed {
                return Err(Arc::clone(reason));
            }
            let has_permit = self.local.permits.try_acquire().map(SemaphorePermit::forget).is_ok();
            (calls.exchanges.insert((Arc::clone(exchange), has_permit)), has_permit)
        };
        let end = LocalEnd { exchange: Arc::clone(exchange), role: Role::Server, has_begun: has_permit };
        let call = LocalCall { session: Arc::clone(self), slot, has_permit, is_settled: false };
        if let Some(acceptor) = &self.acceptor {
            let came = self.times.as_ref().map(|_| Instant::now());
            let stream = Stream::local(Arc::clone(self), end).that_came(came);
            Arc::clone(acceptor).accept_local(stream, head, call);
        }
        Ok(has_permit)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::Sink as _;
    use super::super::tests::SessionPair;
    use super::*;

    /// Returns both ends of a call.
    fn ends() -> (LocalEnd, LocalEnd) {
        let ends = [(); 2].map(|()| End::sending_to(&CallConfig::default()));
        let exchange = Arc::new(Exchange { ends: Mutex::new(ends), header_limit: 1024 });
        let end = |role| LocalEnd { exchange: Arc::clone(&exchange), role, has_begun: true };
        (end(Role::Client), end(Role::Server))
    }

    fn answer(server: &LocalEnd, data: Option<Bytes>, trailers: Option<HeaderMap>) {
        let is_end = trailers.is_some();
        server.send(Some(HeaderMap::new()), data.map(OutPart::Data), trailers, is_end);
    }

    /// Returns what the handler reads next.
    fn read(server: &LocalEnd) -> Option<Result<Bytes, CallFault>> {
        match server.poll_part(Waker::noop()).0 {
            Poll::Ready(part) => part.map(|part| match part {
                Ok(Part::Data(bytes) | Part::Message(bytes)) => Ok(bytes),
                Ok(Part::Trailers(_)) => unreachable!("a request has none"),
                Err(fault) => Err(fault),
            }),
            Poll::Pending => unreachable!("nothing is there"),
        }
    }

    #[test]
    fn a_request_that_lost_a_part_does_not_end_in_order() {
        let (client, server) = ends();
        client.send_data(Bytes::from_static(b"first"), false);
        server.reset(ResetCode::Internal);
        client.send_data(Bytes::from_static(b"last"), true);
        assert_eq!(read(&server).unwrap().unwrap(), "first");
        assert!(read(&server).unwrap().is_err(), "the last part is missing");
    }

    #[test]
    fn a_task_that_reads_on_after_the_answer_reads_all_that_was_sent() {
        let (client, server) = ends();
        client.send_data(Bytes::from_static(b"first"), false);
        client.send_data(Bytes::from_static(b"last"), true);
        answer(&server, None, Some(HeaderMap::new()));
        assert_eq!(read(&server).unwrap().unwrap(), "first");
        assert_eq!(read(&server).unwrap().unwrap(), "last");
        assert!(read(&server).is_none());
    }

    #[test]
    fn a_request_that_was_cut_short_by_the_answer_has_no_end() {
        let (client, server) = ends();
        client.send_data(Bytes::from_static(b"first"), false);
        answer(&server, None, Some(HeaderMap::new()));
        assert_eq!(read(&server).unwrap().unwrap(), "first");
        assert!(matches!(read(&server), Some(Err(CallFault::Ended))));
    }

    #[tokio::test]
    async fn unread_parts_are_dropped_without_the_lock() {
        /// Memory whose owner uses the call when it is dropped.
        struct Owner(Arc<Exchange>);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                b"owned"
            }
        }
        impl Drop for Owner {
            fn drop(&mut self) {
                drop(self.0.ends.try_lock().unwrap());
            }
        }
        let pair = SessionPair::alike().await;
        let (client, server) = ends();
        let exchange = Arc::clone(&client.exchange);
        let client = Stream::local(Arc::clone(&pair.client), client);
        let server = Stream::local(Arc::clone(&pair.server), server);
        let owned = || Bytes::from_owner(Owner(Arc::clone(&exchange)));
        let answer = || server.send_response(HeaderMap::new(), Some(owned()), None, false);
        client.send_data(owned(), false);
        answer();
        client.reset(ResetCode::Cancel);
        client.send_data(owned(), true);
        answer();
        drop((client, server));
        assert_eq!(Arc::strong_count(&exchange), 1, "all parts were dropped");
    }

    #[test]
    fn a_sender_waits_for_its_reader_at_the_window() {
        let (client, server) = ends();
        let mut sent = 0;
        while client.poll_send_ready(Waker::noop()).is_ready() {
            client.send_data(vec![0; 1000].into(), false);
            sent += 1000;
        }
        let window = CallConfig::default().stream_window;
        assert!((window * 3 / 4..window + 1000).contains(&sent), "{sent} bytes");
        while client.poll_send_ready(Waker::noop()).is_pending() {
            read(&server).unwrap().unwrap();
        }
    }
}
