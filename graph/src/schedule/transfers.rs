//! The interface between an executor and what moves its crossing tensors ([`Transport`]).

use std::fmt;
use std::ops::Range;
use std::task::Waker;
use std::time::Duration;

use tonic_rdma::unstable::waits;
use tonic_rdma_tensor::Tensor;

use crate::error::GraphError;
use crate::placement::{CrossingId, Part};
use crate::sites::NodeSites;

/// What became of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// The send has begun. The transfers hold what they need of the tensor until the send is over.
    Begun,
    /// All buffers of this crossing tensor are in use. The executor tries again later, and runs other nodes
    /// meanwhile.
    Busy,
}

/// Sends that have begun and are not over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unfinished {
    /// One of their crossing tensors.
    pub(crate) crossing: CrossingId,
    /// The number of these sends, of all crossing tensors.
    pub(crate) sends: u64,
}

impl Unfinished {
    /// Adds up the sends of crossing tensors. The first one by number that has sends is named.
    pub(crate) fn of(sends: impl Iterator<Item = (CrossingId, u64)>) -> Option<Self> {
        let some = sends.filter(|(_, sends)| *sends > 0);
        some.map(|(crossing, sends)| Self { crossing, sends }).reduce(|one, other| Self {
            crossing: one.crossing.min(other.crossing),
            sends: one.sends + other.sends,
        })
    }
}

/// How often, and how, a crossing tensor was sent or received by this part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CrossingCounts {
    /// Tensors whose send has begun.
    pub sent: u64,
    /// Bytes of these tensors.
    pub bytes: u64,
    /// Tensors that this part copied before it sent them, or while it sent them.
    pub copied: u64,
    /// Tensors so small that they went inline, in the request itself.
    pub inline: u64,
    /// Tensors that this part has received.
    pub received: u64,
    /// Tensors that this part copied after they had arrived, into the memory of its engine.
    pub received_copied: u64,
}

/// What sends and receives the crossing tensors of one part.
/// [`Session::transfers`](crate::session::Session::transfers) and [`in_memory`](Self::in_memory) make it, and
/// one [`Executor`](crate::schedule::Executor) uses it.
pub struct Transfers<V>(pub(crate) Box<dyn Transport<V>>);

impl<V> fmt::Debug for Transfers<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Transfers").finish_non_exhaustive()
    }
}

/// Sends and receives the crossing tensors of one part. One executor uses it, from one thread.
///
/// The executor keeps to these rules:
///
/// - For each crossing tensor, sends come in ascending order of the steps. After [`Start::Busy`] the same
///   send comes again.
/// - For each crossing tensor, it asks for one step at a time, in ascending order, and for each step that the
///   other part sends.
/// - A step that has been taken is never asked for again.
///
/// No method waits. A transfer may have threads or a runtime of its own behind this trait.
pub(crate) trait Transport<V>: Send {
    /// Begins a run of these steps. All parts run the same steps. Transfers whose tensors don't carry the
    /// number of their step compare the steps of the parts.
    fn begin(&mut self, _steps: &Range<u64>) {}

    /// Returns whether all parts that send to this one are known to run the same steps. Otherwise wakes `waker`
    /// when that may have changed. The executor calls it at the end of a run, so that no run ends well that
    /// took tensors of other steps.
    ///
    /// # Errors
    /// A part runs other steps, or is gone.
    fn is_agreed(&mut self, _waker: &Waker) -> Result<bool, GraphError> {
        Ok(true)
    }

    /// Returns a part of which [`is_agreed`](Self::is_agreed) still waits to hear.
    fn unheard(&self) -> Option<Part> {
        None
    }

    /// Gives the memory of tensors back whose sends need it no more. The executor calls it before a step
    /// begins, because the nodes of the step allocate.
    fn recycle(&mut self) {}

    /// Begins to send a tensor of this part to the part [`Crossing::to`](crate::placement::Crossing::to).
    ///
    /// # Errors
    /// The peer is gone, or the tensor can't be sent. The error names the crossing tensor and the peer.
    fn start(&mut self, crossing: CrossingId, step: u64, tensor: &Tensor) -> Result<Start, GraphError>;

    /// Takes a tensor if it has arrived, makes its value by [`NodeSites::filled`], and frees its buffer for
    /// the sender. Otherwise wakes `waker`, if there is one, when the tensor has arrived, or when it never
    /// will. Only the last waker counts, for each crossing tensor, and a call without one may forget it.
    ///
    /// # Errors
    /// The peer is gone, it sent something else, or the engine can't make the value. The error names the
    /// crossing tensor and the peer.
    fn take(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
        waker: Option<&Waker>,
    ) -> Result<Option<V>, GraphError>;

    /// Returns whether a send of this crossing tensor can begin. Otherwise wakes `waker` when it can, or never
    /// will.
    ///
    /// # Errors
    /// The peer is gone.
    fn can_start(&mut self, crossing: CrossingId, waker: &Waker) -> Result<bool, GraphError>;

    /// Returns whether all sends that have begun are over: this part is not needed for them any more. A
    /// tensor is then in memory of the peer, which may not have taken it yet, or the peer has left. So the
    /// run of a peer may end later than that of this part. Otherwise wakes `waker` when the sends may be over,
    /// or when a peer is gone. The executor calls it at the end of a run.
    ///
    /// # Errors
    /// A peer is gone.
    fn is_flushed(&mut self, waker: &Waker) -> Result<bool, GraphError>;

    /// Returns the sends that are not over, as the last call of [`is_flushed`](Self::is_flushed) found
    /// them, or later. `None` if there are none. The executor sees by a falling number that a peer goes on,
    /// and names the crossing tensor if it does not.
    fn unfinished(&self) -> Option<Unfinished>;

    /// Returns how often and how a crossing tensor was sent or received.
    fn counts(&self, crossing: CrossingId) -> CrossingCounts;

    /// Returns how long an executor that has nothing to do should poll for arrivals, at most, before its thread
    /// sleeps. Transfers that other threads carry on need these threads' cores, so the default is short.
    fn spin(&self) -> Duration {
        waits::GRAPH_CALLS
    }

    /// Tells the peers that this part has failed, and why, so that they end too: their next call of a method
    /// here returns [`Problem::PeerFailed`](crate::error::Problem::PeerFailed). Does not wait for their
    /// answers.
    fn abort(&mut self, reason: &str);
}
