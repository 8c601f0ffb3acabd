//! The endpoint's sender, as the state machine sees it.

use std::io::IoSlice;

use crate::endpoint::{ConnectionFault, FetchError, Piece, Sender};
use crate::grpc::core::{FetchRefused, Wire};
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::memory::{Block, Lease};

/// Memory that the peer may read.
#[derive(Debug)]
#[expect(dead_code, reason = "keeps the memory in place")]
pub(in crate::grpc) enum Kept {
    Copied(Block),
    Exposed(Lease),
}

// Inherent functions of `Sender` go before those of the trait.
impl Wire for Sender<'_> {
    type Kept = Kept;
    type Fault = ConnectionFault;

    fn room(&self) -> usize {
        self.room()
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), ConnectionFault> {
        self.send(slices)
    }

    fn expose(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let exposed = self.expose(bytes)?;
        Some((exposed.remote, Kept::Exposed(exposed.lease)))
    }

    fn copy(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let mut block = self.lease(bytes.len()).ok()?;
        block.copy_in(0, bytes).ok()?;
        Some((block.remote(0), Kept::Copied(block)))
    }

    fn fetch(&mut self, id: u64, pieces: &[Piece<'_>], aligned_at: usize) -> Result<(), FetchRefused> {
        self.fetch(id, pieces, aligned_at).map_err(|error| match error {
            FetchError::NoMemory(_) => FetchRefused::Later,
            error @ FetchError::TooLong { .. } => FetchRefused::Never(error.to_string().into()),
        })
    }

    fn cancel_fetch(&mut self, id: u64) {
        self.cancel_fetch(id);
    }
}
