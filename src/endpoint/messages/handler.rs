//! The interface that the owner of a message connection implements.

use std::fmt::Debug;

use bytes::Bytes;

use super::sender::Sender;
use crate::endpoint::aftermath::Aftermath;
use crate::endpoint::fault::ConnectionFault;

/// The owner of a message connection's messages. The connection calls all functions but the last under its lock, so they must not call the
/// [`MessageEndpoint`](super::MessageEndpoint). They may lock their own state. Work that needs no lock, and tasks to wake, go to
/// `after`.
///
/// A function that returns an error ends the connection with this error.
pub(crate) trait MessageHandler: Send + Sync + Debug + 'static {
    /// Takes a message. Messages arrive in the order in which the peer sent them. Returns whether [`transmit`](Self::transmit) would have
    /// something to do after that.
    ///
    /// # Errors
    /// The message breaks the rules of the call protocol.
    fn receive(&self, message: Bytes, after: &mut Aftermath) -> Result<bool, ConnectionFault>;

    /// Notes that a fetch is over: no READ of it is under way, so the peer may free its memory. `memory` is the content, or `None` for a
    /// fetch that was cancelled. The memory goes back to its pool when the last clone and slice of `memory` is dropped.
    ///
    /// # Errors
    /// The handler can't go on.
    fn landed(&self, fetch: u64, memory: Option<Bytes>, after: &mut Aftermath)
    -> Result<(), ConnectionFault>;

    /// Gives messages and fetches to `sender`, while it has room and the handler has some. The connection calls this function again
    /// after each [`drive`](super::MessageEndpoint::drive), after each group of completions (unless the group brought messages and
    /// [`receive`](Self::receive) says that there is nothing to do), and when there is memory or room again that `sender` had refused.
    ///
    /// # Errors
    /// The handler can't go on, or an error of `sender`.
    fn transmit(&self, sender: &mut Sender<'_>, after: &mut Aftermath) -> Result<(), ConnectionFault>;

    /// Notes that the peer sends no more messages. All messages of the peer have been received.
    fn peer_finished(&self, after: &mut Aftermath);

    /// Notes that the connection has ended early. This is the last call, and the only one without the connection's lock. There is no
    /// such call for a connection that both ends closed in good order: then [`peer_finished`](Self::peer_finished) was the last.
    fn ended(&self, fault: &ConnectionFault, after: &mut Aftermath);
}
