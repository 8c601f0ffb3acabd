//! What the state machine needs from the connection below it while it transmits.

use std::io::IoSlice;
use std::sync::Arc;

use crate::endpoint::Piece;
use tonic_rdma_verbs::RemoteSegment;

/// The sending side of a connection.
pub(in crate::grpc) trait Wire {
    /// What keeps memory in place that the peer may read.
    type Kept;
    /// The reason why nothing can be sent any more.
    type Fault;

    /// Returns how many bytes one message may have now; 0 means to wait for the next `transmit`.
    fn room(&self) -> usize;

    /// Sends one message, the concatenation of `slices`.
    fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), Self::Fault>;

    /// Lets the peer read `bytes` from where they lie. Returns `None` if they have to be copied.
    fn expose(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Self::Kept)>;

    /// Copies `bytes` into memory that the peer may read. Returns `None` if there is no memory now.
    fn copy(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Self::Kept)>;

    /// Starts to read the pieces into one piece of memory whose byte `aligned_at` lies at a multiple of 64.
    fn fetch(&mut self, id: u64, pieces: &[Piece<'_>], aligned_at: usize) -> Result<(), FetchRefused>;

    /// Ends a fetch. It is reported as landed without memory.
    fn cancel_fetch(&mut self, id: u64);
}

/// The reason why a fetch was not started.
#[derive(Clone, Debug)]
pub(in crate::grpc) enum FetchRefused {
    /// There is no memory now; `transmit` is called again later.
    Later,
    /// The fetch can never be started.
    Never(Arc<str>),
}
