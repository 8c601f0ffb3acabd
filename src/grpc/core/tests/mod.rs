//! Tests of the state machine: two ends and a network that is simulated, and a peer that breaks the rules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use super::Core;
use crate::grpc::fault::CallFault;

/// The tests of what is held ask this allocator.
#[global_allocator]
static COUNTING: support::Counting = support::Counting;

mod application;
mod frames;
mod hostile;
mod network;
mod recorded;
mod schedules;
mod turns;

impl<K> Core<K> {
    /// Gives the next call of a client this number.
    pub(in crate::grpc) fn skip_numbers(&mut self, next: u32) {
        self.streams.set_last_number(next - 1);
    }

    /// Returns whether TAKEN waits for a message.
    pub(in crate::grpc) fn keeps_taken(&self) -> bool {
        self.control.keeps_taken()
    }
}

/// Faults are equal if all that they say is. The fault of a connection has no comparison of its own.
impl PartialEq for CallFault {
    fn eq(&self, other: &Self) -> bool {
        format!("{self:?}") == format!("{other:?}")
    }
}

impl Eq for CallFault {}
