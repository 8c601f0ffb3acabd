//! States of a queue pair.

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePairState {
    /// Created.
    Reset,
    /// Takes receives.
    Init,
    /// Connected; receives.
    Rtr,
    /// Receives and sends.
    Rts,
    /// Flushes everything.
    Error,
}
