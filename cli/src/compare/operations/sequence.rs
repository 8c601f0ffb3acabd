//! The sequence in which callers take the operations of a cell, and the record of each operation that is done.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// Index of the next operation. All callers of a mode share it during all turns in a cell, so all modes send equal
/// sequences.
pub(crate) type Position = Arc<AtomicUsize>;

/// Latency, bytes and messages of an operation that is done.
pub(crate) type Done = (Duration, u64, u64);
