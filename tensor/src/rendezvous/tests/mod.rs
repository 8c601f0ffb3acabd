//! The rendezvous by itself: rule by rule, and whatever order things happen in.

mod hostile;
mod provider;
mod requester;
mod simulation;
mod world;

use std::time::{Duration, Instant};

use super::*;
use crate::wire::tensor_metadata::{Dims, Layout, Metadata};

fn metadata(lengths: &[u64]) -> Metadata {
    let bytes = 4 * lengths.iter().product::<u64>();
    Metadata { dtype: 11, layout: Layout::Dense, shape: Dims::new(lengths).unwrap(), bytes }
}

fn sink(metadata: Metadata) -> Sink {
    Sink { metadata, address: 4096, rkey: 7, length: metadata.bytes }
}
