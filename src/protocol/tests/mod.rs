//! Two connections joined by a model of queue pairs, in virtual time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod hostile;
mod pair;
mod schedules;
mod transcripts;
