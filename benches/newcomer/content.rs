//! Content of the messages: a number at the start and at the end, which differs between messages.

use std::ops::Range;

use tonic_rdma_tensor::{Dtype, Shape, SharedRegion, TensorSpec};

/// Returns the spec of a tensor of `bytes` bytes.
pub(crate) fn spec(bytes: usize) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[bytes as u64]).unwrap()).unwrap()
}

/// Writes `step` to both ends.
pub(crate) fn stamp(bytes: &mut [u8], step: u64) {
    let end = bytes.len() - 8;
    bytes[..8].copy_from_slice(&step.to_le_bytes());
    bytes[end..].copy_from_slice(&step.to_le_bytes());
}

/// Returns whether both ends are `step`.
pub(crate) fn is(bytes: &[u8], step: u64) -> bool {
    bytes.starts_with(&step.to_le_bytes()) && bytes.ends_with(&step.to_le_bytes())
}

/// Checks that both ends are `step`.
pub(crate) fn check(bytes: &[u8], step: u64) {
    assert!(is(bytes, step), "not the message of step {step}");
}

/// Checks both ends of a range of memory that the peer may write.
pub(crate) fn check_shared(memory: &SharedRegion, range: Range<usize>, step: u64) {
    let mut ends = [0; 16];
    let (first, last) = ends.split_at_mut(8);
    memory.copy_out(range.start, first).unwrap();
    memory.copy_out(range.end - 8, last).unwrap();
    check(&ends, step);
}

/// Returns a text with `step` at both ends, for gRPC's greeter.
pub(crate) fn text(bytes: usize, step: u64) -> String {
    let number = format!("{step:08}");
    let mut text = "x".repeat(bytes);
    text.replace_range(..8, &number);
    text.replace_range(bytes - 8.., &number);
    text
}
