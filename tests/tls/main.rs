//! TLS over the RDMA stream, who the peer is, and tensors beside it. Certificates are made as the tests run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod balance;
mod certificates;
mod failures;
mod greeting;
mod identity;
mod links;
#[allow(dead_code, reason = "each test crate uses its part")]
#[path = "../tensor/raw_peer.rs"]
mod raw_peer;
mod tensors;
mod transport;
