//! The calls of one connection: handles for tasks on one side, the endpoint's messages on the other.
//!
//! A [`Session`] has one [`Stream`] for each call. Methods of a stream queue what is to be sent. [`Session::drive`] then sends what
//! is queued; a caller that queues several things calls it once, so that they share one message:
//!
//! ```text
//!  client                                         server
//!  open(head)                                     accept(stream, head)          on the thread that polled
//!  send_data(request, true), drive ──────────▶    poll_part … None
//!  poll_head, poll_part …          ◀──────────    send_head, send_data, send_trailers    (the session drives)
//! ```
//!
//! All methods of a stream take `&self`, so that a stream can be shared: one task may send while another reads. A stream has three
//! wakers: one for [`poll_head`](Stream::poll_head) and [`poll_part`](Stream::poll_part), one for
//! [`poll_send_ready`](Stream::poll_send_ready), and one for [`poll_reset`](Stream::poll_reset). Each keeps the waker of the latest
//! task that asked.

#![allow(dead_code, unused_imports, clippy::unimplemented, reason = "the bodies follow")]

mod fault;

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http::uri::{Authority, PathAndQuery};

use super::calls::CallConfig;
use crate::endpoint::{ConnectionFault, MessageEndpoint, RdmaConnectInfo};

pub use self::fault::{CallFault, ResetCode};

/// The head of a request. The method is always POST and the scheme `http`, because gRPC knows no others here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestHead {
    /// The path: `/package.Service/Method`.
    pub(crate) path: PathAndQuery,
    pub(crate) authority: Option<Authority>,
    /// The metadata, with gRPC's own fields such as `te`, `content-type` and `grpc-timeout`.
    pub(crate) headers: HeaderMap,
}

/// A part of the body that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Bytes of the body, in order. Messages may begin and end anywhere in them.
    Data(Bytes),
    /// One whole gRPC message with its prefix of five bytes, in one piece of registered memory. The place that the sender named
    /// ([`Stream::send_message`]) is at a multiple of 64 bytes. Only after [`Stream::deliver_landed`].
    Message(Bytes),
    /// The trailers. Nothing follows.
    Trailers(HeaderMap),
}

/// The reason why [`Session::open`] opens no stream. The call has not reached the peer, so that it may be sent on another connection.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// The connection has ended.
    #[error(transparent)]
    Ended(CallFault),
    /// The peer takes no new calls on this connection, or its numbers of streams are used up.
    #[error("this connection takes no new calls: {0}")]
    GoingAway(Arc<str>),
}

/// Takes the calls that arrive at a server.
pub(crate) trait Accept: std::fmt::Debug + Send + Sync + 'static {
    /// Takes a call. The thread that polled the completion queue calls this, outside of a runtime's context if it is a thread of the
    /// device's, and without any lock. After some calls of `accept` the session drives once, so that replies which are queued here
    /// share messages.
    fn accept(&self, stream: Stream, head: RequestHead);
}

/// The calls of one connection.
#[derive(Debug)]
pub(crate) struct Session {}

impl Session {
    /// Begins the calls of a client.
    pub(crate) fn client(endpoint: MessageEndpoint, config: &CallConfig) -> Arc<Self> {
        unimplemented!("{endpoint:?} {config:?}")
    }

    /// Begins the calls of a server. `acceptor` gets each call.
    pub(crate) fn server(
        endpoint: MessageEndpoint,
        config: &CallConfig,
        acceptor: Arc<dyn Accept>,
    ) -> Arc<Self> {
        drop(acceptor);
        unimplemented!("{endpoint:?} {config:?}")
    }

    /// Opens a stream for a call of this client. The head is queued; nothing is sent until [`drive`](Self::drive). If the server has as
    /// many streams as it takes, the call waits in the queue until another has ended, so callers need not ask before.
    ///
    /// # Errors
    /// The connection has ended, or takes no new calls.
    pub(crate) fn open(self: &Arc<Self>, head: RequestHead) -> Result<Stream, OpenError> {
        unimplemented!("{head:?}")
    }

    /// Sends what the streams have queued, as far as there is room. The rest goes when there is room.
    pub(crate) fn drive(&self) {
        unimplemented!()
    }

    /// Looks at the completion queue once, and delivers what has arrived. Returns whether anything had arrived.
    pub(crate) fn poll(&self) -> bool {
        unimplemented!()
    }

    /// Returns the endpoint, for its information and the budget of callers that spin.
    pub(crate) fn endpoint(&self) -> &MessageEndpoint {
        unimplemented!()
    }

    /// Returns the information about the connection.
    pub(crate) fn info(&self) -> &RdmaConnectInfo {
        unimplemented!()
    }

    /// Takes no new calls from now on, and tells the peer so, with the reason. Calls that run go on; when the last has ended, the connection is
    /// closed. This drives.
    pub(crate) fn go_away(&self, reason: &str) {
        unimplemented!("{reason}")
    }

    /// Ends the connection at once. Calls that run fail at both ends.
    pub(crate) fn abort(&self) {
        unimplemented!()
    }

    /// Returns whether calls can be opened.
    pub(crate) fn is_usable(&self) -> bool {
        unimplemented!()
    }

    /// Waits until the connection has ended: with a fault, or because an end went away and the last call has ended.
    pub(crate) async fn closed(&self) -> Result<(), ConnectionFault> {
        unimplemented!()
    }

    /// Returns the reason why the connection ended, if it did.
    pub(crate) fn fault(&self) -> Option<CallFault> {
        unimplemented!()
    }

    /// Returns the number of calls that have not ended.
    pub(crate) fn active_streams(&self) -> usize {
        unimplemented!()
    }
}

/// One call. Dropping the stream before both directions have ended resets the call with [`ResetCode::Cancel`], at once.
#[derive(Debug)]
pub(crate) struct Stream {}

impl Stream {
    /// Returns the session.
    pub(crate) fn session(&self) -> &Arc<Session> {
        unimplemented!()
    }

    /// Returns ready when more of the body may be queued. A stream queues at most about the length of its window.
    ///
    /// # Errors
    /// The call can't be sent any further: it was reset, it has ended, or the connection has.
    pub(crate) fn poll_send_ready(&self, context: &mut Context<'_>) -> Poll<Result<(), CallFault>> {
        unimplemented!("{context:?}")
    }

    /// Queues the head of the response (servers).
    pub(crate) fn send_head(&self, headers: HeaderMap) {
        unimplemented!("{headers:?}")
    }

    /// Queues bytes of the body. With `end` the body ends here, as [`end`](Self::end) says.
    pub(crate) fn send_data(&self, data: Bytes, end: bool) {
        unimplemented!("{data:?} {end}")
    }

    /// Queues one whole gRPC message with its prefix, in parts. Parts in registered memory go from where they lie; small ones are copied. A
    /// peer that [takes landed messages](Self::deliver_landed) gets it in one piece of memory, in which the byte `aligned_at` of the
    /// message is at a multiple of 64 bytes.
    pub(crate) fn send_message(&self, parts: Vec<Bytes>, aligned_at: usize, end: bool) {
        unimplemented!("{parts:?} {aligned_at} {end}")
    }

    /// Queues the trailers. They end the call (servers).
    pub(crate) fn send_trailers(&self, trailers: HeaderMap) {
        unimplemented!("{trailers:?}")
    }

    /// Queues the end of the body (clients). A server ends with trailers.
    pub(crate) fn end(&self) {
        unimplemented!()
    }

    /// Ends the call in both directions, and tells the peer so. What is queued or has arrived is dropped. This drives.
    pub(crate) fn reset(&self, code: ResetCode) {
        unimplemented!("{code:?}")
    }

    /// Waits for the head of the response (clients). A response without a body has trailers only: then the head is empty, and the
    /// trailers follow as the first part.
    ///
    /// # Errors
    /// The call was reset, or the connection has ended.
    pub(crate) fn poll_head(&self, context: &mut Context<'_>) -> Poll<Result<HeaderMap, CallFault>> {
        unimplemented!("{context:?}")
    }

    /// Waits for the next part of the body. Returns `None` at its end: after the trailers, or where the peer's half ended without.
    ///
    /// # Errors
    /// The call was reset, or the connection has ended.
    pub(crate) fn poll_part(&self, context: &mut Context<'_>) -> Poll<Option<Result<Part, CallFault>>> {
        unimplemented!("{context:?}")
    }

    /// Returns whether [`poll_part`](Self::poll_part) has returned the last part, or will return `None` at once.
    pub(crate) fn is_end(&self) -> bool {
        unimplemented!()
    }

    /// Waits until the call ends early: the peer reset it, or the connection ended. A server drops the handler then. Stays pending
    /// if the call ends in order.
    pub(crate) fn poll_reset(&self, context: &mut Context<'_>) -> Poll<CallFault> {
        unimplemented!("{context:?}")
    }

    /// Delivers messages that the peer offers as wholes from now on in one piece ([`Part::Message`]), if they have at most `limit`
    /// bytes without their prefix. A longer one ends the call with [`CallFault::MessageTooLarge`] before it lands.
    pub(crate) fn deliver_landed(&self, limit: usize) {
        unimplemented!("{limit}")
    }
}
