//! All cases over all pairings, servers that are wrong on purpose, and clients that are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
