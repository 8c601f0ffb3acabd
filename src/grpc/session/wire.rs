//! The endpoint's sender, as the state machine sees it.

use std::io::IoSlice;

use crate::endpoint::{ConnectionFault, FetchError, Piece, Sender};
use crate::grpc::core::{FetchRefused, Wire};
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::memory::{Block, Lease};

/// Memory that the peer may read.
#[derive(Debug)]
#[expect(dead_code, reason = "keeps the memory in place")]
pub(super) enum Kept {
    Copied(Block),
    Exposed(Lease),
}

/// The sending side of a connection.
#[derive(Debug)]
pub(super) struct SenderWire<'a, 'b>(pub(super) &'a mut Sender<'b>);

impl Wire for SenderWire<'_, '_> {
    type Kept = Kept;
    type Fault = ConnectionFault;

    fn room(&self) -> usize {
        self.0.room()
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), ConnectionFault> {
        self.0.send(slices)
    }

    fn expose(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let exposed = self.0.expose(bytes)?;
        Some((exposed.remote, Kept::Exposed(exposed.lease)))
    }

    fn copy(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let mut block = self.0.lease(bytes.len()).ok()?;
        block.copy_in(0, bytes).ok()?;
        Some((block.remote(0), Kept::Copied(block)))
    }

    fn fetch(&mut self, id: u64, pieces: &[Piece<'_>], aligned_at: usize) -> Result<(), FetchRefused> {
        self.0.fetch(id, pieces, aligned_at).map_err(|error| match error {
            FetchError::NoMemory(_) => FetchRefused::Later,
            error @ FetchError::TooLong { .. } => FetchRefused::Never(error.to_string().into()),
        })
    }

    fn cancel_fetch(&mut self, id: u64) {
        self.0.cancel_fetch(id);
    }
}
