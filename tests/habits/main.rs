//! The rest of tonic's habits: what users of tonic do besides calling. Each scenario runs over stock tonic's TCP first, and
//! has to come out the same over RDMA, and over TCP where our two ends fell back to it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests"
)]

mod balance;
mod child;
mod compression;
mod harness;
mod health;
mod interceptors;
mod keepalive;
mod layers;
mod leaks;
mod limits;
mod membership;
mod metadata;
mod reconnect;
mod reflection;
mod service;
mod shutdown;
mod sizes;
mod timeouts;
mod web;

#[path = "../support/peer.rs"]
mod peer;
#[allow(dead_code, reason = "each test crate uses its part")]
#[path = "../support/support.rs"]
mod support;
