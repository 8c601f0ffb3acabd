//! Connections that carry messages instead of a byte stream, for native calls.
//!
//! This module has the interface between such a connection and the session above it. A [`MessageEndpoint`]
//! sends and receives messages; each one is an eager message of the [protocol](crate::protocol), so it is at
//! most as long as a receive buffer of the peer. Long content goes by *fetches*: a message says where the
//! content lies, and the peer's handler asks its connection to read it ([`Wire::read`]). Fetches land in
//! any order, and messages do not wait for them.
//!
//! ```text
//!  session ── update ──▶ handler ── transmit: send, fetch ──▶ link       (under the connection's lock)
//!  poller ── completions ──▶ connection ── receive, landed ──▶ handler
//!                                                     └─ wakers, runs ──▶ Deferred, carried out without the lock
//! ```
//!
//! The handler is a part of the connection's state, so one lock guards both. A session usually holds its
//! endpoint, so its last user must call [`MessageEndpoint::close`] or [`MessageEndpoint::abort`]; both let the
//! connection end.

#[cfg(test)]
mod tests;
pub(in crate::endpoint) mod traffic;

use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::endpoint::config::Config;
use crate::endpoint::connection::{Connection, Member};
use crate::endpoint::deferred::Run;
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::held::{HeldBudget, HeldShare};
use crate::endpoint::histogram::Histograms;
use crate::endpoint::info::{Counters, RdmaConnectInfo};
use crate::endpoint::meeting::Meeting;
use crate::endpoint::meters::OpenHandle;
use crate::endpoint::polling::{CallInFlight, Queue, Reactor};
use crate::endpoint::stream::EndpointStream;
use crate::protocol::AbortCode;

use self::traffic::Lending;
pub(crate) use self::traffic::{
    Kept, LandedContent, MessageHandler, MessageSettings, ReadRefused, ReadSegment, Sender, Wire,
};
pub(in crate::endpoint) use self::traffic::{MessageMemory, Messages};

/// A connection after a negotiation in which one side asked for native calls.
#[derive(Debug)]
pub(crate) enum Negotiated {
    /// A byte stream, over RDMA or TCP, for HTTP/2. Its [`RdmaConnectInfo::reason`] says why there are no
    /// native calls.
    Stream(EndpointStream),
    /// A connection over RDMA that carries messages.
    Messages(MessageEndpoint),
}

impl Negotiated {
    /// Returns the result of the negotiation, and its reason.
    pub(crate) fn info(&self) -> &RdmaConnectInfo {
        match self {
            Self::Stream(stream) => stream.info(),
            Self::Messages(endpoint) => endpoint.info(),
        }
    }
}

/// A connection over RDMA that carries messages. Dropping this closes the connection, as
/// [`close`](Self::close) does.
#[derive(Debug)]
pub(crate) struct MessageEndpoint {
    connection: Arc<Connection<Messages>>,
    queue: Arc<Queue>,
    reactor: Arc<Reactor>,
    lending: Arc<Lending>,
    info: RdmaConnectInfo,
    meeting: Meeting,
    /// The limit of what the connection holds, if the calls' settings have none.
    limit: u64,
    held: Arc<HeldBudget>,
    /// Calls are timed.
    has_histograms: bool,
    /// Behind the connection, whose memory is free before this is dropped.
    opened: OpenHandle,
}

impl MessageEndpoint {
    pub(in crate::endpoint) fn new(
        connection: Arc<Connection<Messages>>,
        member: &Member,
        info: RdmaConnectInfo,
        meeting: Meeting,
        config: &Config,
        opened: OpenHandle,
    ) -> Self {
        let lending = connection.update(|messages| (Arc::clone(messages.lending()), false));
        let (queue, reactor) = (Arc::clone(&member.queue), Arc::clone(&member.reactor));
        let (limit, held) = (config.connection_limit, HeldBudget::of_process(config));
        let has_histograms = config.histograms;
        Self { connection, queue, reactor, lending, info, meeting, limit, held, has_histograms, opened }
    }

    /// Returns the connection's histograms, if calls are timed.
    pub(crate) fn histograms(&self) -> Option<Arc<Histograms>> {
        self.has_histograms.then(|| Arc::clone(&self.connection.counters.histograms))
    }

    /// Notes, for the metrics, that calls stay in this process.
    pub(crate) fn stays_in_process(&self) {
        self.opened.stays_in_process();
    }

    /// Returns the configuration's limit of what a connection holds for its peer, in bytes.
    pub(crate) fn connection_limit(&self) -> u64 {
        self.limit
    }

    /// Makes the connection's share of what the process may hold.
    pub(crate) fn share(&self) -> HeldShare {
        self.held.share()
    }

    /// Returns the result of the negotiation, and its reason.
    pub(crate) fn info(&self) -> &RdmaConnectInfo {
        &self.info
    }

    /// Returns what this end knows of a peer in this process.
    pub(crate) fn meeting(&self) -> &Meeting {
        &self.meeting
    }

    /// Returns the live counters.
    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.connection.counters
    }

    /// Returns whether the application may keep landed memory. If not, it is to get a copy, and the memory goes
    /// back at once.
    pub(crate) fn may_keep_landed(&self) -> bool {
        self.lending.may_be_kept()
    }

    /// Returns the length of the longest message to the peer, in bytes. It is at least 256.
    #[cfg(test)]
    pub(crate) fn max_message(&self) -> usize {
        self.connection.update(|messages| (messages.max_message(), false))
    }

    /// Takes the handler, delivers the messages that have arrived already, and sends what the handler has.
    /// Until then messages stay in their receive buffers. Later calls only send.
    pub(crate) fn start(&self, handler: impl MessageHandler, settings: &MessageSettings) {
        self.connection.settled(|messages| messages.start(handler, settings));
    }

    /// Calls `act` with the handler that has [started](Self::start), whose type must be `H`, and then sends
    /// what it has if `act` says so. Both happen under the connection's lock, so `act` must not use the
    /// endpoint. Afterwards, without the lock, this carries out what the handler left to be done.
    pub(crate) fn update<H: MessageHandler, R>(&self, act: impl FnOnce(&mut H) -> (R, bool)) -> R {
        self.connection.update(|messages| act(messages.handler()))
    }

    /// Sends what the handler has.
    pub(crate) fn drive(&self) {
        self.connection.settled(|_| ());
    }

    /// Waits for `is_done` on this thread for a short time, if that pays and other tasks have another thread,
    /// and polls the completion queue meanwhile. Returns whether `is_done` returned true; after that
    /// `is_done` is not called again. Returns false early if a poll woke another task.
    ///
    /// A future calls this in each poll but its first. If the result is false, the future registers its
    /// waker, checks once more, and returns `Pending`.
    ///
    /// A current-thread runtime has no other thread for other tasks, so this polls the queue once. If the
    /// runtime polls when it is idle, this polls for some microseconds when only one call is in flight and
    /// that call has just `begun`. In that case `is_done` may take only what has arrived already, and must
    /// not wait.
    pub(crate) fn spin(&self, begun: Option<Instant>, is_done: impl FnMut() -> bool) -> bool {
        self.reactor.wait_as_caller(&self.queue, begun, is_done)
    }

    /// Polls the completion queue once.
    pub(crate) fn poll_queue(&self) {
        self.queue.poll();
    }

    /// Notes that a call has begun, until the returned value is dropped. While other calls are in flight, a
    /// caller whose answer has come leaves the queue to the poll task.
    pub(crate) fn begin_call(&self) -> CallInFlight {
        CallInFlight::begin(&self.reactor)
    }

    /// Leaves work of the connection to a thread that [accepts](crate::endpoint::Accepting) calls.
    pub(crate) fn leave(&self, run: Weak<dyn Run>) {
        self.reactor.leave(run);
    }

    /// Closes the connection in good order. Messages that the handler still gives in `transmit` are sent;
    /// once it gives none though there is room, the peer sees the end of the messages. The connection ends
    /// when the peer has closed too, at the latest after [`Config::linger`](crate::Config::linger). The
    /// handler receives messages until then.
    pub(crate) fn close(&self) {
        self.connection.detach();
    }

    /// Ends the connection at once. The peer sees an abort with `code`, this side's handler `ended`.
    pub(crate) fn abort(&self, code: AbortCode) {
        self.connection.abort(code, ConnectionFault::Closed);
    }

    /// Returns the reason why the connection ended early, if it did.
    #[cfg(test)]
    pub(crate) fn fault(&self) -> Option<ConnectionFault> {
        self.connection.fault()
    }
}

impl Drop for MessageEndpoint {
    fn drop(&mut self) {
        self.close();
    }
}
