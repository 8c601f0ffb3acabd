//! What the messages hold: numbers at their beginning and end that tell one message from the next.

use tonic_rdma::tensor::{Dtype, Shape, TensorSpec};

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

/// Demands that both ends are `step`.
pub(crate) fn check(first: &[u8], last: &[u8], step: u64) {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!((word(first), word(&last[last.len() - 8..])), (step, step), "another message than was due");
}

/// The same as text, for gRPC's greeter.
pub(crate) fn text(bytes: usize, step: u64) -> String {
    let number = format!("{step:08}");
    let mut text = "x".repeat(bytes);
    text.replace_range(..8, &number);
    text.replace_range(bytes - 8.., &number);
    text
}
