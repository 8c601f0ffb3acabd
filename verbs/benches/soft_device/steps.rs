//! The processor's time of each step of a message, with both ends in one thread, so that no cache line moves between cores.
//!
//! ```text
//!  steps OPCODE LENGTH ROUNDS      ns of a message that is alone: the post, the poll that takes it, the post of its receive;
//!                                  of each post and of each take (with the post of the receive) of many at once;
//!                                  and of a poll that finds nothing
//! ```

use std::time::{Duration, Instant};

use tonic_rdma_commands::clap::{self, Args};

use super::side::{Opcode, Side, pin};

/// Messages of one round.
const MESSAGES: u32 = 16;

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Steps {
    opcode: Opcode,
    length: usize,
    rounds: u32,
}

/// Prints the steps.
#[allow(clippy::print_stdout, reason = "a command's result")]
pub(crate) fn run(Steps { opcode, length, rounds }: Steps) {
    pin(0);
    let (mut one, mut other) = (Side::new(length), Side::new(length));
    let names = (one.name(), other.name());
    one.connect(&names.1);
    other.connect(&names.0);
    let [mut post, mut take, mut idle] = [Duration::ZERO; 3];
    for round in 0..2 * rounds {
        if round == rounds {
            [post, take, idle] = [Duration::ZERO; 3];
        }
        let start = Instant::now();
        (0..MESSAGES).for_each(|_| one.post(opcode, false));
        let posted = Instant::now();
        other.poll();
        let taken = Instant::now();
        one.poll();
        one.poll();
        other.poll();
        let settled = Instant::now();
        (0..MESSAGES).for_each(|_| _ = other.poll());
        let end = Instant::now();
        post += posted - start;
        take += taken - posted;
        idle += end - settled;
    }
    let each = |all: Duration| all.as_secs_f64() * 1e9 / f64::from(rounds * MESSAGES);
    let start = Instant::now();
    for _ in 0..rounds * MESSAGES {
        one.post(opcode, false);
        other.poll();
        other.post(opcode, false);
        one.poll();
    }
    let alone = start.elapsed() / 2;
    println!(
        "alone {:.1}; post {:.1}, take {:.1}, idle poll {:.1}",
        each(alone),
        each(post),
        each(take),
        each(idle)
    );
}
