//! Collectives for C: the library behind `include/tonic_rdma_collective.h`.
//!
//! ```text
//!   C ── a call ──▶ boundary    the functions of the header, and C's memory: the one file with unsafe code
//!                      │        a panic or an error becomes a status, and the text of this thread's last error
//!                   handles     numbers for communicators and operations
//!                      │
//!                 tonic-rdma-collective: `Verb` and `Arrays`, which the package for Python uses too
//! ```
#![deny(unsafe_code)]

pub mod boundary;
mod failure;
mod handles;
