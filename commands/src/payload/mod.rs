//! The payloads of the command `tonic-rdma`: content that can be checked, the reduction that receivers
//! compute over it, and pseudo-random numbers, which are equal in every run.
//!
//! Every byte of a measurement goes through this code, so `cargo test` compiles this package with optimisation.

pub mod content;
pub mod reduce;
pub mod seeded;
