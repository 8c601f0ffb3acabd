//! The handle of a call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::HeaderMap;

use super::local::LocalEnd;
use super::{Part, ResetCode, Session, SessionState};
use crate::endpoint::{CallInFlight, Kept, LandedContent};
use crate::grpc::core::{Core, LandedBytes, OutPart, StreamKey};
use crate::grpc::fault::CallFault;
use crate::grpc::landed::{AlignedField, Landing, LandingTarget};
use crate::grpc::times::CallTimer;

/// One call. Dropping the stream before both directions have ended resets the call with
/// [`ResetCode::Cancel`], at once. A server's direction has ended once its end or its trailers are queued.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(in crate::grpc) session: Arc<Session>,
    carrier: Carrier,
    /// The last part was taken.
    ended: AtomicBool,
    /// Messages of this side are aligned at their last large field.
    aligns_last: AtomicBool,
    /// The time when the call came to this server, if it is timed.
    came: Option<Instant>,
}

/// What carries a call.
#[derive(Debug)]
enum Carrier {
    /// The connection.
    Connection(StreamKey),
    /// Memory of this process.
    Local(LocalEnd),
}

impl Stream {
    pub(super) fn new(session: Arc<Session>, key: StreamKey) -> Self {
        Self::carried(session, Carrier::Connection(key))
    }

    pub(super) fn local(session: Arc<Session>, end: LocalEnd) -> Self {
        Self::carried(session, Carrier::Local(end))
    }

    fn carried(session: Arc<Session>, carrier: Carrier) -> Self {
        let [ended, aligns_last] = [const { AtomicBool::new(false) }; 2];
        Self { session, carrier, ended, aligns_last, came: None }
    }

    /// Notes when the call came to this server.
    pub(super) fn that_came(mut self, came: Option<Instant>) -> Self {
        self.came = came;
        self
    }

    /// Begins the time of a call that came to this server, if it is to be known.
    pub(crate) fn timer(&self) -> Option<CallTimer> {
        Some(self.session.times.as_ref()?.time(self.came?, self.is_local()))
    }

    /// Returns whether the call stays in this process.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.carrier, Carrier::Local(_))
    }

    /// Returns whether the call can't be sent again, because it stays in this process and its handler has it.
    pub(crate) fn is_with_handler(&self) -> bool {
        matches!(&self.carrier, Carrier::Local(end) if end.has_begun)
    }

    /// Sends what is queued.
    pub(crate) fn drive(&self) {
        if !self.is_local() {
            self.session.drive();
        }
    }

    /// Notes that this client's call has begun, as [`MessageEndpoint::begin_call`] does.
    ///
    /// [`MessageEndpoint::begin_call`]: crate::endpoint::MessageEndpoint::begin_call
    pub(crate) fn begin_call(&self) -> Option<CallInFlight> {
        (!self.is_local()).then(|| self.session.endpoint.begin_call())
    }

    /// Waits for `is_done` on this thread for a short time, as [`MessageEndpoint::spin`] does. A call in this
    /// process has nothing to poll: its handler may need this very thread.
    ///
    /// [`MessageEndpoint::spin`]: crate::endpoint::MessageEndpoint::spin
    pub(crate) fn spin(&self, begun: Option<Instant>, mut is_done: impl FnMut() -> bool) -> bool {
        if self.is_local() { is_done() } else { self.session.endpoint.spin(begun, is_done) }
    }

    /// Returns ready when more of the body may be queued. A stream queues at most about 1 MiB.
    ///
    /// # Errors
    /// The call can't be sent any further: it was reset, it has ended, or the connection has.
    pub(crate) fn poll_send_ready(&self, context: &mut Context<'_>) -> Poll<Result<(), CallFault>> {
        match &self.carrier {
            Carrier::Connection(key) => self.with(|core| core.poll_send_ready(*key, context.waker())),
            Carrier::Local(end) => end.poll_send_ready(context.waker()),
        }
    }

    /// Queues the headers of the response (servers).
    pub(crate) fn send_headers(&self, headers: HeaderMap) {
        self.send_response(headers, None, None, false);
    }

    /// Queues the headers of the response, bytes of its body, and its trailers, which end the call (servers).
    /// `drives`: sends them, too.
    pub(crate) fn send_response(
        &self,
        head: HeaderMap,
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
        drives: bool,
    ) {
        let key = match &self.carrier {
            Carrier::Connection(key) => *key,
            Carrier::Local(end) => {
                let is_end = trailers.is_some();
                return end.send(Some(head), data.map(OutPart::Data), trailers, is_end);
            }
        };
        self.session.endpoint.update(|SessionState { core, .. }| {
            core.send_headers(key, head);
            if let Some(data) = data {
                core.send_data(key, data, false);
            }
            if let Some(trailers) = trailers {
                core.send_trailers(key, trailers);
            }
            ((), drives)
        });
    }

    /// Sets the field at which messages of this side are aligned.
    pub(super) fn align(&self, landing: Landing) {
        // Relaxed: the flag guards no other memory.
        self.aligns_last.store(landing.aligned == AlignedField::Last, Ordering::Relaxed);
    }

    /// Queues the trailers. They end the call (servers).
    pub(crate) fn send_trailers(&self, trailers: HeaderMap) {
        match &self.carrier {
            Carrier::Connection(key) => self.with(|core| core.send_trailers(*key, trailers)),
            Carrier::Local(end) => end.send(None, None, Some(trailers), true),
        }
    }

    /// Queues the end of the body. A server ends the call with it: a response without trailers is its
    /// headers, which have the status, and this.
    pub(crate) fn end(&self) {
        self.send_data(Bytes::new(), true);
    }

    /// Ends the call in both directions, and tells the peer so. What is queued or has arrived is dropped.
    /// This drives.
    pub(crate) fn reset(&self, code: ResetCode) {
        match &self.carrier {
            Carrier::Connection(key) => self.and_drive(|core| core.reset(*key, code)),
            Carrier::Local(end) => end.reset(code),
        }
    }

    /// Calls `change`, and drives if that is urgent then.
    fn and_drive(&self, change: impl FnOnce(&mut Core<Kept>)) {
        self.session.endpoint.update(|SessionState { core, .. }| (change(core), core.take_urgent()));
    }

    /// Calls `take`, and drives if the peer is to get credit for the connection.
    fn and_credit<T>(&self, take: impl FnOnce(&mut Core<Kept>) -> T) -> T {
        self.session.endpoint.update(|SessionState { core, .. }| (take(core), core.owes_credit()))
    }

    /// Waits for the headers of the response (clients). Of a response without a body this is all: it has the
    /// status, and [`poll_part`](Self::poll_part) returns `None`.
    ///
    /// # Errors
    /// The call was reset, or the connection has ended.
    pub(crate) fn poll_headers(&self, context: &mut Context<'_>) -> Poll<Result<HeaderMap, CallFault>> {
        match &self.carrier {
            Carrier::Connection(key) => {
                self.and_credit(|core| core.poll_headers(*key, Some(context.waker())))
            }
            Carrier::Local(end) => end.poll_headers(Some(context.waker())),
        }
    }

    /// Takes the headers of the response if they have arrived (clients), and registers no task, for callers
    /// that poll the completion queue themselves. If the rest of the response is there, one part and
    /// trailers, both are taken, too.
    ///
    /// # Errors
    /// As [`poll_headers`](Self::poll_headers).
    pub(crate) fn take_answer(
        &self,
        first: &mut Option<Part>,
        trailers: &mut Option<HeaderMap>,
    ) -> Poll<Result<HeaderMap, CallFault>> {
        let came = |head: &Poll<Result<HeaderMap, CallFault>>| matches!(head, Poll::Ready(Ok(_)));
        let (head, rest) = match &self.carrier {
            Carrier::Connection(key) => self.and_credit(|core| {
                let head = core.poll_headers(*key, None);
                let rest = came(&head).then(|| core.take_rest(*key));
                (head, rest)
            }),
            Carrier::Local(end) => {
                let head = end.poll_headers(None);
                let rest = came(&head).then(|| end.take_rest());
                (head, rest)
            }
        };
        if let Some((data, rest)) = rest.flatten() {
            (*first, *trailers) = (Some(Part::Data(data)), Some(rest));
            self.ended.store(true, Ordering::Relaxed);
        }
        head
    }

    /// Registers the task of `waker` for the headers of the response and what follows. Returns false if
    /// something has come already.
    pub(crate) fn wait(&self, waker: &Waker) -> bool {
        match &self.carrier {
            Carrier::Connection(key) => self.with(|core| core.wait(*key, waker)),
            Carrier::Local(end) => end.wait(waker),
        }
    }

    /// Waits for the next part of the body. Returns `None` at its end: after the trailers, or where the
    /// peer's half ended without. Drives if the peer waits for room.
    ///
    /// # Errors
    /// The call was reset, or the connection has ended.
    pub(crate) fn poll_part(&self, context: &mut Context<'_>) -> Poll<Option<Result<Part, CallFault>>> {
        if self.ended.load(Ordering::Relaxed) {
            return Poll::Ready(None);
        }
        let key = match &self.carrier {
            Carrier::Connection(key) => *key,
            Carrier::Local(end) => {
                let (part, is_end) = end.poll_part(context.waker());
                // Relaxed: only the reader uses the flag.
                self.ended.store(is_end, Ordering::Relaxed);
                return part;
            }
        };
        match self.check_part(key, context) {
            // Where the CPU reads from the peer's memory, a message of moderate length has landed now.
            (Poll::Pending, true) => self.check_part(key, context).0,
            (part, _) => part,
        }
    }

    /// Returns the next part of the body, if it is there, and whether the session was driven because the peer
    /// waits. What the peer is to be told about the memory of a whole message is kept back if this thread
    /// drives once more when the reader has the message. The peer waits for the memory of a message that
    /// comes in parts.
    fn check_part(
        &self,
        key: StreamKey,
        context: &mut Context<'_>,
    ) -> (Poll<Option<Result<Part, CallFault>>>, bool) {
        let will_drive = self.session.will_drive();
        let endpoint = &self.session.endpoint;
        let (mut part, is_urgent, keeps, moves) = endpoint.update(|SessionState { core, .. }| {
            let part = core.poll_part(key, Some(context.waker()));
            let is_urgent = core.take_urgent();
            // Relaxed: only the reader uses the flag.
            if part.is_ready() && core.is_end(key) {
                self.ended.store(true, Ordering::Relaxed);
            }
            let LandedBytes { in_place, copied, moved } = core.take_landed_bytes();
            let all = in_place + copied;
            let moves = all > moved && !endpoint.may_keep_landed();
            if all > 0 {
                let counters = endpoint.counters();
                let moved = if moves { all } else { moved };
                counters.decoded_in_place_bytes.add(in_place.saturating_sub(moved));
                counters.landed_copied_bytes.add(copied);
                counters.landed_moved_bytes.add(moved);
            }
            let keeps = is_urgent && will_drive && core.delivers_landed(key);
            if keeps {
                core.keep_taken(true);
            }
            ((part, is_urgent, keeps, moves), is_urgent)
        });
        if moves && let Poll::Ready(Some(Ok(Part::Message(landed) | Part::Data(landed)))) = &mut part {
            *landed = LandedContent::copy_of(landed).bytes;
        }
        if keeps {
            self.with(|core| core.keep_taken(false));
        }
        (part, is_urgent)
    }

    /// Returns whether [`poll_headers`](Self::poll_headers) or [`poll_part`](Self::poll_part) would return
    /// something now, for callers that poll the completion queue themselves.
    pub(crate) fn has_arrived(&self) -> bool {
        match &self.carrier {
            Carrier::Connection(key) => self.with(|core| core.has_arrived(*key)),
            // It is not polled for.
            Carrier::Local(_) => true,
        }
    }

    /// Polls the completion queue once, if the next part is being read from the peer's memory. Returns the
    /// time of the poll if the part has landed by then, as it has where a READ is a copy, or if the call has
    /// failed meanwhile. The caller must drive afterwards: the next message, usually the reply, tells the
    /// peer that its memory is free.
    pub(crate) fn poll_for_landing(&self) -> Option<Duration> {
        let Carrier::Connection(key) = self.carrier else { return None };
        let is_landing = self.with(|core| {
            let is_landing = core.is_landing(key);
            if is_landing {
                core.keep_taken(true);
            }
            is_landing
        });
        if !is_landing {
            return None;
        }
        let keeps = KeepsTaken(self);
        let began = Instant::now();
        self.session.endpoint.poll_queue();
        drop(keeps);
        (!self.with(|core| core.is_landing(key))).then(|| began.elapsed())
    }

    /// Returns whether [`poll_part`](Self::poll_part) has returned the last part, or will return `None` at
    /// once.
    pub(crate) fn is_end(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
            || match &self.carrier {
                Carrier::Connection(key) => self.with(|core| core.is_end(*key)),
                Carrier::Local(end) => end.is_end(),
            }
    }

    /// Waits until the call ends early: the peer reset it, or the connection ended. A server drops the
    /// handler then. Not to be asked once the whole response is queued: a request that it cuts short has a
    /// fault, too.
    pub(crate) fn poll_reset(&self, context: &mut Context<'_>) -> Poll<CallFault> {
        match &self.carrier {
            Carrier::Connection(key) => self.with(|core| core.poll_reset(*key, context.waker())),
            Carrier::Local(end) => end.poll_reset(context.waker()),
        }
    }

    /// Delivers messages that the peer offers as wholes from now on in one segment ([`Part::Message`]), if
    /// they have at most `limit` bytes without their prefix. A longer one is [`CallFault::MessageTooLarge`]
    /// in its place, and does not land. Call this before the first [`poll_part`](Self::poll_part), because
    /// messages land from then on.
    pub(crate) fn deliver_landed(&self, limit: usize) {
        match &self.carrier {
            Carrier::Connection(key) => self.with(|core| core.deliver_landed(*key, limit)),
            Carrier::Local(end) => end.deliver_landed(limit),
        }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Core<Kept>) -> T) -> T {
        self.session.with(|state| act(&mut state.core))
    }
}

/// What the messages of a body go to: a stream.
pub(crate) trait Sink {
    /// Queues bytes of the body. With `end` the body ends here, as [`end`](Stream::end) says.
    fn send_data(&self, data: Bytes, end: bool);

    /// Queues one whole gRPC message with its prefix, in parts. Parts in registered memory go from where they
    /// lie; small ones are copied. A peer that [takes landed messages](Stream::deliver_landed) gets it in one
    /// segment of memory, in which the byte `aligned_at` of the message is at a multiple of 64 bytes.
    fn send_message(&self, parts: Vec<Bytes>, aligned_at: usize, end: bool);

    /// Returns the field at which messages of this side are to be aligned.
    fn aligned_field(&self) -> AlignedField;
}

impl Sink for Stream {
    fn send_data(&self, data: Bytes, end: bool) {
        match &self.carrier {
            Carrier::Connection(key) => self.with(|core| core.send_data(*key, data, end)),
            Carrier::Local(local) => local.send_data(data, end),
        }
    }

    fn send_message(&self, parts: Vec<Bytes>, aligned_at: usize, end: bool) {
        match &self.carrier {
            Carrier::Connection(key) => self.with(|core| core.send_message(*key, parts, aligned_at, end)),
            Carrier::Local(local) => {
                local.send(None, Some(OutPart::Message { parts, aligned_at }), None, end);
            }
        }
    }

    fn aligned_field(&self) -> AlignedField {
        if self.aligns_last.load(Ordering::Relaxed) { AlignedField::Last } else { AlignedField::Longest }
    }
}

/// While this exists, TAKEN waits for the next message. A task that a poll wakes may panic, so dropping this
/// ends the wait.
struct KeepsTaken<'a>(&'a Stream);

impl Drop for KeepsTaken<'_> {
    fn drop(&mut self) {
        self.0.with(|core| core.keep_taken(false));
    }
}

impl LandingTarget for Stream {
    fn land(&self, landing: Landing) {
        self.align(landing);
        self.deliver_landed(landing.limit);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        match &self.carrier {
            Carrier::Connection(key) => self.and_drive(|core| core.release(*key)),
            Carrier::Local(end) if !self.ended.load(Ordering::Relaxed) => end.release(),
            Carrier::Local(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic, reason = "tests")]

    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    impl Stream {
        /// Panics while TAKEN waits. Returns whether it still waits.
        pub(in crate::grpc::session) fn keeps_taken_after_a_panic(&self) -> bool {
            let look = || {
                self.with(|core| core.keep_taken(true));
                let _keeps = KeepsTaken(self);
                panic!("a task that a look woke");
            };
            assert!(catch_unwind(AssertUnwindSafe(look)).is_err());
            self.with(|core| core.keeps_taken())
        }
    }
}
