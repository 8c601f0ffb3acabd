//! The ways to learn of an arrival.

/// The way in which an end learns that the peer has written to its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification {
    /// The receiver looks at a word that is written last. Needs two devices that place in order.
    Word,
    /// A completion with immediate data. Needs two devices that have immediate data.
    Immediate,
    /// A message that follows the write.
    Message,
}
