//! What the messages hold: numbers at their beginning and end that tell one message from the next.

use std::ops::Range;

use tonic_rdma_tensor::{Dtype, Shape, SharedRegion, TensorSpec};

/// A tensor of so many bytes.
pub(crate) fn spec(bytes: usize) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[bytes as u64]).unwrap()).unwrap()
}

/// Writes `step` to both ends.
pub(crate) fn stamp(bytes: &mut [u8], step: u64) {
    let end = bytes.len() - 8;
    bytes[..8].copy_from_slice(&step.to_le_bytes());
    bytes[end..].copy_from_slice(&step.to_le_bytes());
}

/// Whether both ends are `step`.
pub(crate) fn is(bytes: &[u8], step: u64) -> bool {
    bytes.starts_with(&step.to_le_bytes()) && bytes.ends_with(&step.to_le_bytes())
}

/// Demands that both ends are `step`.
pub(crate) fn check(bytes: &[u8], step: u64) {
    assert!(is(bytes, step), "another message than was due: {step}");
}

/// The same of memory that the peer may write to.
pub(crate) fn check_shared(memory: &SharedRegion, range: Range<usize>, step: u64) {
    let mut ends = [0; 16];
    let (first, last) = ends.split_at_mut(8);
    memory.copy_out(range.start, first).unwrap();
    memory.copy_out(range.end - 8, last).unwrap();
    check(&ends, step);
}

/// The same as text, for gRPC's greeter.
pub(crate) fn text(bytes: usize, step: u64) -> String {
    let number = format!("{step:08}");
    let mut text = "x".repeat(bytes);
    text.replace_range(..8, &number);
    text.replace_range(bytes - 8.., &number);
    text
}
