//! Lanes: messages from one rank to another, in order.
//!
//! A message is *inline* (its elements travel with it) or a *reference* (the elements stay in registered memory of the sender,
//! and the receiver pulls them from there). A reference needs that memory unchanged until the receiver has taken the message.

pub(crate) mod remote;

/// All lanes of one rank. The engine runs over this trait: over RDMA, and over a simulation in its tests.
pub(crate) trait Lanes {
    /// Memory of this rank that peers may pull from.
    type Memory: std::ops::DerefMut<Target = [u8]>;

    /// Returns the largest length of an inline message, in bytes.
    fn inline(&self) -> usize;

    /// Returns whether peers can pull from `memory` over these lanes.
    fn offers(&self, memory: &Self::Memory) -> bool;

    /// Sends `payload` to rank `to`, inline. Returns false if there is no room now. The payload is free when this returns.
    ///
    /// # Errors
    /// The lane to this rank has failed.
    fn send(&mut self, to: usize, tag: Tag, payload: &[u8]) -> Result<bool, LaneError>;

    /// Sends a reference to `length` bytes at `offset` of `memory` to rank `to`. Returns the message's number, or `None` if there
    /// is no room now.
    ///
    /// # Errors
    /// The lane to this rank has failed.
    fn send_reference(
        &mut self,
        to: usize,
        tag: Tag,
        memory: &Self::Memory,
        offset: usize,
        length: usize,
    ) -> Result<Option<u64>, LaneError>;

    /// Returns how many messages rank `to` has taken: all messages with smaller numbers are done, and what they refer to is
    /// free again.
    ///
    /// # Errors
    /// The lane to this rank has failed.
    fn taken(&mut self, to: usize) -> Result<u64, LaneError>;

    /// Returns the tag and length in bytes of the next message of rank `from`, if it has arrived.
    ///
    /// # Errors
    /// The lane from this rank has failed.
    fn peek(&mut self, from: usize) -> Result<Option<(Tag, usize)>, LaneError>;

    /// Gives what is there of the message that [`peek`](Self::peek) showed to `then`, in order, piece by piece: the offset in
    /// the message, and the bytes, a multiple of 64 bytes but for the last piece. Returns true when the last byte was given;
    /// the message is then taken. A pull may take several calls.
    ///
    /// # Errors
    /// The lane from this rank has failed.
    fn receive(&mut self, from: usize, then: &mut dyn FnMut(usize, &[u8])) -> Result<bool, LaneError>;

    /// Copies what is there of the message that [`peek`](Self::peek) showed into `into`, which has the message's length. Returns
    /// true when the last byte is there; the message is then taken. A pull may take several calls, all with the same memory.
    ///
    /// # Errors
    /// The lane from this rank has failed.
    fn receive_into(&mut self, from: usize, into: &mut [u8]) -> Result<bool, LaneError>;

    /// Returns whether a receive has given bytes since the last call, also of a message that is not whole yet.
    fn has_given(&mut self) -> bool;

    /// Carries out work of the lanes that is due, such as completions. Called once for each round of looks.
    ///
    /// # Errors
    /// A lane has failed.
    fn progress(&mut self) -> Result<(), LaneError>;
}

/// What a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    /// The number of the operation, counted from 0 by each rank.
    pub(crate) operation: u64,
    /// The index of the sender's step.
    pub(crate) step: u32,
    /// The call, packed: operation, type, reduction, algorithm, and a hash of the lengths. Equal on all ranks of a call.
    pub(crate) call: u64,
}

/// A lane has failed.
#[derive(Clone, Debug)]
pub(crate) struct LaneError {
    pub(crate) rank: usize,
    pub(crate) cause: LaneFault,
}

/// Makes the fault of a peer that breaks a rule.
#[cold]
fn violation(what: impl Into<std::sync::Arc<str>>) -> LaneFault {
    LaneFault::Violation(what.into())
}

impl From<tonic_rdma_tensor::TensorError> for LaneFault {
    fn from(error: tonic_rdma_tensor::TensorError) -> Self {
        Self::Lost(error.to_string().into())
    }
}

#[derive(Clone, Debug)]
pub(crate) enum LaneFault {
    /// The peer is gone.
    Lost(std::sync::Arc<str>),
    /// The peer broke the protocol.
    Violation(std::sync::Arc<str>),
}
