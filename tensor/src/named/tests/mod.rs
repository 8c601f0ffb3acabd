//! Tests of named tensors without a driver: single rules, and random orders of events.

mod hostile;
mod provider;
mod requester;
mod simulation;
mod world;

use std::time::{Duration, Instant};

use super::*;
use crate::wire::tensor_metadata::{WireLayout, WireMetadata, WireShape};
use tonic_rdma_verbs::unstable::RemoteRange;
use tonic_rdma_verbs::{RemoteSegment, Rkey};

fn metadata(lengths: &[u64]) -> WireMetadata {
    let bytes = 4 * lengths.iter().product::<u64>();
    WireMetadata { dtype: 11, layout: WireLayout::Dense, shape: WireShape::new(lengths).unwrap(), bytes }
}

fn sink(metadata: WireMetadata) -> TensorMemory {
    TensorMemory { metadata, place: place(metadata.bytes) }
}

fn place(length: u64) -> RemoteRange {
    RemoteRange { start: RemoteSegment { address: 4096, rkey: Rkey(7) }, length }
}
