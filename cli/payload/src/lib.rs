//! The payloads of the command `tonic-rdma`: content that can be checked, the reduction that receivers
//! compute over it, and pseudo-random numbers, which are equal in every run.
//!
//! A package of its own, because every byte of a measurement goes through this code: `cargo test` compiles
//! this package alone of the command with optimisation.
#![forbid(unsafe_code)]

pub mod content;
pub mod reduce;
pub mod seeded;
