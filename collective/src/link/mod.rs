//! Links: messages from one rank to another, in order.
//!
//! A message is *inline* (its elements travel with it) or an *element reference* (the elements stay in
//! registered memory of the sender, and the receiver reads them from there). A reference needs that memory
//! unchanged until the receiver has taken the message.

pub(crate) mod remote;

/// All links of one rank. The engine runs over this trait: over RDMA, and over a simulation in its tests.
pub(crate) trait RankLinks {
    /// Memory of this rank that peers may read from.
    type Memory: std::ops::DerefMut<Target = [u8]>;

    /// Returns the largest length of an inline message, in bytes.
    fn inline(&self) -> usize;

    /// Returns whether peers can read from `memory` over these links.
    fn offers(&self, memory: &Self::Memory) -> bool;

    /// Sends `payload` to rank `to`, inline. Returns false if there is no room now. The payload is free when
    /// this returns.
    ///
    /// # Errors
    /// The link to this rank has failed.
    fn send(&mut self, to: usize, tag: Tag, payload: &[u8]) -> Result<bool, LinkError>;

    /// Sends a reference to `length` bytes at `offset` of `memory` to rank `to`. Returns the message's
    /// number, or `None` if there is no room now.
    ///
    /// # Errors
    /// The link to this rank has failed.
    fn send_reference(
        &mut self,
        to: usize,
        tag: Tag,
        memory: &Self::Memory,
        offset: usize,
        length: usize,
    ) -> Result<Option<u64>, LinkError>;

    /// Returns how many messages rank `to` has taken: all messages with smaller numbers are done, and what
    /// they refer to is free again.
    ///
    /// # Errors
    /// The link to this rank has failed.
    fn taken(&mut self, to: usize) -> Result<u64, LinkError>;

    /// Returns the tag and length in bytes of the next message of rank `from`, if it has arrived.
    ///
    /// # Errors
    /// The link from this rank has failed.
    fn peek(&mut self, from: usize) -> Result<Option<(Tag, usize)>, LinkError>;

    /// Passes to `then` what is there of the message that [`peek`](Self::peek) returned, in order and chunk
    /// by chunk: the offset in the message, and the bytes, a multiple of 64 bytes but for the last chunk.
    /// Returns true when the last byte was delivered; the message is then taken. The elements of a reference
    /// may take several calls.
    ///
    /// # Errors
    /// The link from this rank has failed.
    fn receive(&mut self, from: usize, then: &mut dyn FnMut(usize, &[u8])) -> Result<bool, LinkError>;

    /// Copies into `into` what is there of the message that [`peek`](Self::peek) returned. `into` has the
    /// message's length. Returns true when the last byte is there; the message is then taken. The elements of
    /// a reference may take several calls, all with the same memory.
    ///
    /// # Errors
    /// The link from this rank has failed.
    fn receive_into(&mut self, from: usize, into: &mut [u8]) -> Result<bool, LinkError>;

    /// Returns whether a receive has delivered bytes since the last call, also of a message that is not whole
    /// yet.
    fn has_delivered(&mut self) -> bool;

    /// Carries out work of the links that is due, such as completions. Called once for each round of polls.
    ///
    /// # Errors
    /// A link has failed.
    fn progress(&mut self) -> Result<(), LinkError>;
}

/// Which step of which operation a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    /// The number of the operation, counted from 0 by each rank.
    pub(crate) operation: u64,
    /// The index of the sender's step.
    pub(crate) step: u32,
    /// The call, packed: operation, type, reduction, algorithm, root and number of elements. Equal on all
    /// ranks of a call.
    pub(crate) call: u64,
}

/// A link has failed.
#[derive(Clone, Debug)]
pub(crate) struct LinkError {
    pub(crate) rank: usize,
    pub(crate) cause: LinkFault,
}

/// Makes the fault of a peer that breaks a rule.
#[cold]
fn violation(what: impl Into<std::sync::Arc<str>>) -> LinkFault {
    LinkFault::Violation(what.into())
}

impl From<tonic_rdma_tensor::TensorError> for LinkFault {
    fn from(error: tonic_rdma_tensor::TensorError) -> Self {
        Self::Lost(error.to_string().into())
    }
}

#[derive(Clone, Debug)]
pub(crate) enum LinkFault {
    /// The peer is gone.
    Lost(std::sync::Arc<str>),
    /// The peer broke the protocol.
    Violation(std::sync::Arc<str>),
}
