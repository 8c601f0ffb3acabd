//! The command `tonic-rdma-graph`.
#![forbid(unsafe_code)]

fn main() {}
