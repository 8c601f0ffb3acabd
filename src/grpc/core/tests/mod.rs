//! Tests of the state machine: two ends and a network that is simulated, and a peer that breaks the rules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod application;
mod hostile;
mod network;
mod schedules;
mod turns;
