//! Calls whose client and server are in one process.
//!
//! The connection stays as it was negotiated: it says why, and it ends as ever. Its calls don't use it. Each
//! has an [`Exchange`], which both ends have: what one end sends is queued there, and the other takes it.
//!
//! ```text
//!  client: Stream ── LocalEnd ──▶ Exchange ◀── LocalEnd ── Stream of the server's call, in a task of its own
//!                                     ▲
//!  server's Session ── LocalCalls ────┘  so many at a time, in order
//! ```

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use slab::Slab;

use super::{OpenError, Part, RequestHeaders, ResetCode, Session, Stream};
use crate::grpc::calls::CallConfig;
use crate::grpc::core::{Parts, Role};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::headers::fields_length;
use crate::grpc::landed::{Landing, PREFIX};
use tonic_rdma_verbs::unstable::{lock, wake_all};

/// What both ends of a call share.
#[derive(Debug)]
pub(super) struct Exchange {
    state: Mutex<ExchangeState>,
    /// The handler has the call.
    has_begun: AtomicBool,
}

#[derive(Debug)]
struct ExchangeState {
    request: Half,
    response: Half,
    /// The headers of the response.
    head: Option<HeaderMap>,
    trailers: Option<HeaderMap>,
    /// The reason why the call ended early, for the client and for the server.
    faults: Option<[CallFault; 2]>,
    /// The task of the handler.
    handler: Option<Waker>,
    /// The most bytes of headers and trailers that the client takes.
    header_limit: usize,
}

/// The parts in one direction.
#[derive(Debug)]
struct Half {
    queued: Parts<Queued>,
    /// What the queued parts cost. The sender waits while that is not below the window.
    cost: usize,
    window: usize,
    ended: bool,
    /// The longest message that the reader takes in one segment, if it does.
    landing: Option<usize>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Debug)]
enum Queued {
    Data(Bytes),
    /// A whole message, and the byte that is to be aligned.
    Message(Vec<Bytes>, usize),
}

impl Queued {
    /// Returns the length, without what the part costs beside it.
    fn bytes(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Message(parts, _) => parts.iter().map(Bytes::len).sum(),
        }
    }
}

impl Half {
    /// What a part counts beside its length.
    const PART: usize = 64;

    /// Makes one whose reader has these limits.
    fn new(limits: &CallConfig) -> Self {
        let share = usize::try_from(limits.landing_budget / 16).unwrap_or(usize::MAX);
        let window = limits.stream_window.min(share);
        let (reader, writer, landing) = (None, None, None);
        Self { queued: Parts::default(), cost: 0, window, ended: false, landing, reader, writer }
    }

    fn push(&mut self, part: Queued) {
        self.cost += part.bytes() + Self::PART;
        self.queued.push(part);
    }

    /// Takes the next part. A message for a reader that takes none in one segment becomes several parts.
    fn pop(&mut self, after: &mut Vec<Waker>) -> Option<Queued> {
        let mut part = self.queued.pop()?;
        if self.landing.is_none()
            && let Queued::Message(parts, _) = &mut part
        {
            let parts = mem::take(parts).into_iter().rev().map(Queued::Data);
            for part in parts {
                self.cost += Self::PART;
                self.queued.unpop(part);
            }
            self.cost -= Self::PART;
            part = self.queued.pop()?;
        }
        self.cost -= part.bytes() + Self::PART;
        if self.cost < self.window {
            after.extend(self.writer.take());
        }
        Some(part)
    }
}

impl ExchangeState {
    /// Returns what `role` sends.
    fn sent_by(&mut self, role: Role) -> &mut Half {
        match role {
            Role::Client => &mut self.request,
            Role::Server => &mut self.response,
        }
    }

    fn fault(&self, role: Role) -> Option<CallFault> {
        let [client, server] = self.faults.as_ref()?;
        Some(if role == Role::Client { client } else { server }.clone())
    }

    /// Returns whether nothing more can be sent.
    fn is_over(&self) -> bool {
        self.faults.is_some() || self.response.ended
    }

    /// Ends the call early, unless it has ended.
    fn fail(&mut self, client: CallFault, server: CallFault, after: &mut Vec<Waker>) {
        if !self.response.ended && self.faults.is_none() {
            self.faults = Some([client, server]);
        }
        let Self { request, response, .. } = self;
        let halves = [request, response].map(|half| [half.reader.take(), half.writer.take()]);
        after.extend(halves.into_iter().flatten().chain([self.handler.take()]).flatten());
    }

    /// Ends the call if headers or trailers are too long for the client. Returns whether they are.
    fn refuses(&mut self, fields: &HeaderMap, after: &mut Vec<Waker>) -> bool {
        let (length, limit) = (fields_length(fields), self.header_limit);
        if length > limit {
            let reset = CallFault::Reset(ResetCode::ResourceExhausted);
            self.fail(reset, CallFault::HeadersTooLarge { length, limit }, after);
        }
        length > limit
    }
}

impl Exchange {
    /// Calls `act`, and wakes the tasks that it adds to the list when the lock is free.
    fn with<T>(&self, act: impl FnOnce(&mut ExchangeState, &mut Vec<Waker>) -> T) -> T {
        let mut after = Vec::new();
        let result = act(&mut lock(&self.state), &mut after);
        wake_all(after);
        result
    }

    fn fail(&self, fault: &CallFault) {
        self.with(|state, after| state.fail(fault.clone(), fault.clone(), after));
    }

    /// Ends the call if its handler has not. A task may still read what the client has sent.
    fn leave(&self) {
        self.with(|state, after| state.fail(CallFault::PeerClosed, CallFault::Ended, after));
    }

    /// Returns whether the call has ended before its handler began.
    fn is_over(&self) -> bool {
        lock(&self.state).faults.is_some()
    }
}

/// One end of a call. Dropping the client's ends the call.
#[derive(Debug)]
pub(super) struct LocalEnd {
    exchange: Arc<Exchange>,
    role: Role,
}

impl LocalEnd {
    pub(super) fn poll_send_ready(&self, waker: &Waker) -> Poll<Result<(), CallFault>> {
        self.exchange.with(|state, _| {
            if let Some(fault) = state.fault(self.role) {
                return Poll::Ready(Err(fault));
            }
            let is_over = state.response.ended;
            let half = state.sent_by(self.role);
            if half.ended || is_over {
                return Poll::Ready(Err(CallFault::Ended));
            }
            if half.cost < half.window {
                return Poll::Ready(Ok(()));
            }
            keep(&mut half.writer, waker);
            Poll::Pending
        })
    }

    pub(super) fn send_response(&self, head: HeaderMap, data: Option<Bytes>, trailers: Option<HeaderMap>) {
        // What is refused is dropped without the lock, because its memory may have an owner that uses it.
        let refused = self.exchange.with(|state, after| {
            if state.is_over()
                || state.refuses(&head, after)
                || trailers.as_ref().is_some_and(|it| state.refuses(it, after))
            {
                return Some((head, data, trailers));
            }
            state.head = Some(head);
            if let Some(data) = data {
                state.response.push(Queued::Data(data));
            }
            Self::trail(state, trailers, after);
            None
        });
        drop(refused);
    }

    /// Queues the trailers.
    pub(super) fn send_trailers(&self, trailers: HeaderMap) {
        self.exchange.with(|state, after| {
            if !state.is_over() && !state.refuses(&trailers, after) {
                Self::trail(state, Some(trailers), after);
            }
        });
    }

    fn trail(state: &mut ExchangeState, trailers: Option<HeaderMap>, after: &mut Vec<Waker>) {
        state.response.ended |= trailers.is_some();
        state.trailers = trailers;
        // A client that sends still need not go on.
        if state.response.ended {
            after.extend(state.request.writer.take());
        }
        after.extend(state.response.reader.take());
    }

    pub(super) fn send_data(&self, data: Bytes, end: bool) {
        self.send((!data.is_empty()).then_some(Queued::Data(data)), end);
    }

    pub(super) fn send_message(&self, parts: Vec<Bytes>, aligned_at: usize, end: bool) {
        self.send(Some(Queued::Message(parts, aligned_at)), end);
    }

    /// Queues a part, unless the call has ended. A body that lacks a part does not end in order, so the end is
    /// refused with the part.
    fn send(&self, part: Option<Queued>, end: bool) {
        let refused = self.exchange.with(|state, after| {
            if state.is_over() {
                return part;
            }
            let half = state.sent_by(self.role);
            part.into_iter().for_each(|part| half.push(part));
            half.ended |= end;
            after.extend(half.reader.take());
            if state.response.ended {
                after.extend(state.request.writer.take());
            }
            None
        });
        drop(refused);
    }

    pub(super) fn reset(&self, code: ResetCode) {
        let (here, there) = (CallFault::ResetHere(code), CallFault::Reset(code));
        let (client, server) = if self.role == Role::Client { (here, there) } else { (there, here) };
        self.exchange.with(|state, after| state.fail(client, server, after));
    }

    pub(super) fn deliver_landed(&self, limit: usize) {
        self.exchange.with(|state, _| self.received(state).landing = Some(limit));
    }

    /// Returns what this end reads.
    fn received<'a>(&self, state: &'a mut ExchangeState) -> &'a mut Half {
        state.sent_by(if self.role == Role::Client { Role::Server } else { Role::Client })
    }

    /// Takes the headers of the response. Without a waker no task is registered.
    pub(super) fn poll_headers(&self, waker: Option<&Waker>) -> Poll<Result<HeaderMap, CallFault>> {
        self.exchange.with(|state, _| {
            if let Some(head) = state.head.take() {
                return Poll::Ready(Ok(head));
            }
            if let Some(fault) = state.fault(Role::Client) {
                return Poll::Ready(Err(fault));
            }
            if let Some(waker) = waker {
                keep(&mut state.response.reader, waker);
            }
            Poll::Pending
        })
    }

    /// Registers the task of `waker`. Returns false if something has come already.
    pub(super) fn wait(&self, waker: &Waker) -> bool {
        self.exchange.with(|state, _| {
            keep(&mut state.response.reader, waker);
            state.head.is_none() && state.faults.is_none()
        })
    }

    pub(super) fn poll_part(&self, context: &mut Context<'_>) -> Poll<Option<Result<Part, CallFault>>> {
        let message = self.exchange.with(|state, after| {
            let half = self.received(state);
            let end = match half.pop(after) {
                Some(Queued::Message(parts, at)) => return Ok((parts, at, half.landing.unwrap_or_default())),
                Some(Queued::Data(data)) => Some(Ok(Part::Data(data))),
                None if half.ended => match self.role {
                    Role::Client => state.trailers.take().map(|trailers| Ok(Part::Trailers(trailers))),
                    Role::Server => None,
                },
                None => match state.fault(self.role) {
                    Some(fault) => Some(Err(fault)),
                    // The handler has answered without the rest of the request.
                    None if state.response.ended => Some(Err(CallFault::Ended)),
                    None => {
                        keep(&mut self.received(state).reader, context.waker());
                        return Err(Poll::Pending);
                    }
                },
            };
            Err(Poll::Ready(end))
        });
        // The copy is made without the lock.
        message.map_or_else(
            |polled| polled,
            |(parts, aligned_at, limit)| {
                let length = parts.iter().map(Bytes::len).sum::<usize>().saturating_sub(PREFIX);
                let is_too_long = length > limit;
                let fault = CallFault::MessageTooLarge { length: length as u64, limit };
                let joined = || Part::Message(joined(&parts, aligned_at));
                Poll::Ready(Some(if is_too_long { Err(fault) } else { Ok(joined()) }))
            },
        )
    }

    /// Returns whether nothing is left to take.
    pub(super) fn is_end(&self) -> bool {
        let mut state = lock(&self.exchange.state);
        let has_trailers = self.role == Role::Client && state.trailers.is_some();
        let half = self.received(&mut state);
        half.ended && half.queued.is_empty() && !has_trailers
    }

    pub(super) fn poll_reset(&self, context: &mut Context<'_>) -> Poll<CallFault> {
        self.exchange.with(|state, _| match state.fault(self.role) {
            Some(fault) => Poll::Ready(fault),
            None => {
                keep(&mut state.handler, context.waker());
                Poll::Pending
            }
        })
    }

    /// Returns whether the call is with its handler, so that it can't be sent again.
    pub(super) fn has_begun(&self) -> bool {
        // Relaxed: it guards no other memory.
        self.exchange.has_begun.load(Ordering::Relaxed)
    }
}

impl Drop for LocalEnd {
    /// Drops the parts that this end has not read.
    fn drop(&mut self) {
        if self.role == Role::Client {
            self.reset(ResetCode::Cancel);
        }
        let untaken = self.exchange.with(|state, _| mem::take(&mut self.received(state).queued));
        drop(untaken);
    }
}

fn keep(place: &mut Option<Waker>, waker: &Waker) {
    match place {
        Some(known) => known.clone_from(waker),
        None => *place = Some(waker.clone()),
    }
}

/// Returns the parts of a message in one segment, in which the byte `aligned_at` is at a multiple of 64
/// bytes. Copies them, unless they are one already.
fn joined(parts: &[Bytes], aligned_at: usize) -> Bytes {
    const ALIGNMENT: usize = 64;
    let missing = |start: *const u8| start.addr().wrapping_add(aligned_at).wrapping_neg() % ALIGNMENT;
    if let [only] = parts
        && missing(only.as_ptr()) == 0
    {
        return only.clone();
    }
    let mut message = BytesMut::with_capacity(ALIGNMENT + parts.iter().map(Bytes::len).sum::<usize>());
    let before = missing(message.as_ptr());
    message.resize(before, 0);
    parts.iter().for_each(|part| message.extend_from_slice(part));
    message.advance(before);
    message.freeze()
}

/// The calls that a server has from its own process, on one connection.
#[derive(Debug, Default)]
pub(super) struct LocalCalls(Mutex<Gate>);

#[derive(Debug, Default)]
struct Gate {
    running: Slab<Arc<Exchange>>,
    /// Calls beyond the limit.
    waiting: VecDeque<(Arc<Exchange>, Arc<RequestHeaders>)>,
    /// Why there are no further calls.
    closed: Option<Arc<str>>,
    /// A thread lets waiting calls begin.
    begins: bool,
    /// Tasks that wait for the end of all calls.
    ended: Vec<Waker>,
}

impl Gate {
    /// Takes the calls that gave up while they waited, each time that the number of those that wait has doubled.
    fn take_given_up(&mut self) -> Vec<(Arc<Exchange>, Arc<RequestHeaders>)> {
        const FEW: usize = 64;
        if self.waiting.len() < FEW || !self.waiting.len().is_power_of_two() {
            return Vec::new();
        }
        let (given_up, waiting): (Vec<_>, _) =
            mem::take(&mut self.waiting).into_iter().partition(|(it, _)| it.is_over());
        self.waiting = waiting.into();
        given_up
    }
}

impl LocalCalls {
    /// Returns the number of calls that have not ended.
    pub(super) fn active(&self) -> usize {
        let gate = lock(&self.0);
        gate.running.len() + gate.waiting.len()
    }

    /// Returns whether this takes no further calls.
    pub(super) fn is_closed(&self) -> bool {
        lock(&self.0).closed.is_some()
    }

    /// Takes no further calls. Those that wait can be sent over another connection.
    pub(super) fn close(&self, reason: &str) {
        let waiting = {
            let mut gate = lock(&self.0);
            gate.closed.get_or_insert_with(|| reason.into());
            mem::take(&mut gate.waiting)
        };
        let fault = CallFault::GoneAway(reason.into());
        waiting.iter().for_each(|(exchange, _)| exchange.fail(&fault));
    }

    /// Ends all calls.
    pub(super) fn abort(&self, reason: &str) {
        self.close(reason);
        self.exchanges().iter().for_each(|exchange| exchange.fail(&CallFault::PeerClosed));
    }

    /// Wakes the tasks that wait for headers and parts of responses.
    pub(super) fn wake_clients(&self) {
        let wake = |state: &mut ExchangeState, after: &mut Vec<Waker>| {
            after.extend(state.response.reader.take());
        };
        self.exchanges().iter().for_each(|exchange| exchange.with(wake));
    }

    fn exchanges(&self) -> Vec<Arc<Exchange>> {
        let gate = lock(&self.0);
        let running = gate.running.iter().map(|(_, exchange)| exchange);
        running.chain(gate.waiting.iter().map(|(exchange, _)| exchange)).cloned().collect()
    }

    /// Waits until there is no call.
    pub(super) fn poll_ended(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut gate = lock(&self.0);
        if gate.running.is_empty() {
            return Poll::Ready(());
        }
        if !gate.ended.iter().any(|known| known.will_wake(context.waker())) {
            gate.ended.push(context.waker().clone());
        }
        Poll::Pending
    }
}

/// A call that runs at the server. Dropping this ends the call if the handler has not, and lets the next one
/// begin.
#[derive(Debug)]
pub(crate) struct LocalCall {
    session: Arc<Session>,
    exchange: Arc<Exchange>,
    slot: usize,
}

impl Drop for LocalCall {
    fn drop(&mut self) {
        self.exchange.leave();
        let mut gate = lock(&self.session.local.0);
        gate.running.try_remove(self.slot);
        let ended = if gate.running.is_empty() { mem::take(&mut gate.ended) } else { Vec::new() };
        let are_waiting = !gate.waiting.is_empty();
        drop(gate);
        wake_all(ended);
        if are_waiting {
            self.session.begin_waiting();
        }
    }
}

impl Session {
    /// Ends the calls of this client's session within the process, if its connection has failed. Returns
    /// whether it has.
    pub(super) fn end_local(&self) -> bool {
        let Some(server) = self.server.get() else { return false };
        let has_failed = self.with(|state| state.fault.is_some());
        if has_failed && let Some(server) = server.upgrade() {
            server.local.abort("the connection has ended");
        }
        has_failed
    }

    /// Opens a stream to `server`, which is in this process, and sends `body` if that is the whole body.
    pub(super) fn open_local(
        self: &Arc<Self>,
        server: Option<Arc<Self>>,
        head: Arc<RequestHeaders>,
        body: Option<Bytes>,
        landing: Option<Landing>,
    ) -> Result<Stream, OpenError> {
        let gone = |reason: Arc<str>| {
            self.is_usable.store(false, Ordering::Relaxed);
            OpenError::GoingAway(reason)
        };
        let server = server.ok_or_else(|| gone("the server has ended".into()))?;
        let [request, mut response] = [&server, self].map(|reader| Half::new(&reader.limits));
        response.landing = landing.map(|landing| landing.limit);
        let mut state = ExchangeState {
            request,
            response,
            head: None,
            trailers: None,
            faults: None,
            handler: None,
            header_limit: self.limits.max_header_list_size,
        };
        if let Some(body) = body {
            state.request.push(Queued::Data(body));
            state.request.ended = true;
        }
        let (length, limit) = (head.counted_length(), server.limits.max_header_list_size);
        let fault = CallFault::HeadersTooLarge { length, limit };
        let is_refused = length > limit;
        state.faults = is_refused.then(|| [fault.clone(), fault]);
        let exchange = Arc::new(Exchange { state: Mutex::new(state), has_begun: AtomicBool::new(false) });
        if !is_refused {
            let mut gate = lock(&server.local.0);
            if let Some(reason) = &gate.closed {
                return Err(gone(Arc::clone(reason)));
            }
            if gate.waiting.is_empty() && gate.running.len() < server.limits.max_concurrent_streams as usize {
                let slot = gate.running.insert(Arc::clone(&exchange));
                drop(gate);
                server.begin(Arc::clone(&exchange), slot, head);
            } else {
                gate.waiting.push_back((Arc::clone(&exchange), head));
                let given_up = gate.take_given_up();
                drop(gate);
                drop(given_up);
                server.begin_waiting();
            }
        }
        Ok(Stream::local(Arc::clone(self), LocalEnd { exchange, role: Role::Client }))
    }

    /// Hands a call to the server.
    fn begin(self: &Arc<Self>, exchange: Arc<Exchange>, slot: usize, head: Arc<RequestHeaders>) {
        exchange.has_begun.store(true, Ordering::Relaxed);
        let end = LocalEnd { exchange: Arc::clone(&exchange), role: Role::Server };
        let call = LocalCall { session: Arc::clone(self), exchange, slot };
        if let Some(acceptor) = &self.acceptor {
            Arc::clone(acceptor).accept_local(Stream::local(Arc::clone(self), end), head, call);
        }
    }

    /// Lets waiting calls begin, as long as there is room.
    fn begin_waiting(self: &Arc<Self>) {
        // Dropped without the lock.
        let mut dead = Vec::new();
        let mut gate = lock(&self.local.0);
        // Where the runtime has ended, a call ends as it begins. The loop goes on then, not one within it.
        while !gate.begins && gate.running.len() < self.limits.max_concurrent_streams as usize {
            let Some((exchange, head)) = gate.waiting.pop_front() else { return };
            if exchange.is_over() {
                dead.push((exchange, head));
                continue;
            }
            let slot = gate.running.insert(Arc::clone(&exchange));
            gate.begins = true;
            drop(gate);
            self.begin(exchange, slot, head);
            gate = lock(&self.local.0);
            gate.begins = false;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// Returns both ends of a call.
    fn ends() -> (LocalEnd, LocalEnd) {
        let limits = CallConfig::default();
        let [request, response] = [(); 2].map(|()| Half::new(&limits));
        let state = ExchangeState {
            request,
            response,
            head: None,
            trailers: None,
            faults: None,
            handler: None,
            header_limit: 1024,
        };
        let exchange = Arc::new(Exchange { state: Mutex::new(state), has_begun: AtomicBool::new(true) });
        let end = |role| LocalEnd { exchange: Arc::clone(&exchange), role };
        (end(Role::Client), end(Role::Server))
    }

    /// Returns what the handler reads next.
    fn read(server: &LocalEnd) -> Option<Result<Bytes, CallFault>> {
        match server.poll_part(&mut Context::from_waker(Waker::noop())) {
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
        server.send_response(HeaderMap::new(), None, Some(HeaderMap::new()));
        server.exchange.leave();
        assert_eq!(read(&server).unwrap().unwrap(), "first");
        assert_eq!(read(&server).unwrap().unwrap(), "last");
        assert!(read(&server).is_none());
    }

    #[test]
    fn unread_parts_are_dropped_without_the_lock() {
        /// Memory whose owner uses the call when it is dropped.
        struct Owner(Arc<Exchange>);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                b"owned"
            }
        }
        impl Drop for Owner {
            fn drop(&mut self) {
                drop(self.0.state.try_lock().unwrap());
            }
        }
        let (client, server) = ends();
        let owned = || Bytes::from_owner(Owner(Arc::clone(&client.exchange)));
        client.send_data(owned(), false);
        server.send_response(HeaderMap::new(), Some(owned()), None);
        client.reset(ResetCode::Cancel);
        client.send_data(owned(), true);
        server.send_response(HeaderMap::new(), Some(owned()), None);
        drop(server);
        drop(client);
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
        assert!((window * 9 / 10..window + 1000).contains(&sent), "{sent} bytes");
        while client.poll_send_ready(Waker::noop()).is_pending() {
            read(&server).unwrap().unwrap();
        }
    }
}
