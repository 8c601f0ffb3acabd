//! Bad neighbours: processes that write garbage into what they share, stop, die, fork, flood, or send
//! descriptors of the wrong kind. They may end their own connection, and nothing else.
//!
//! Each test starts a process with a scenario. That process is connected to an honest neighbour and to a bad
//! one, over one completion queue. The calls to the honest neighbour must go on: with their content, with
//! wake-ups, and without an error. The tests know nothing of the layout of shared memory.
//!
//! | variable | meaning |
//! |---|---|
//! | `TONIC_RDMA_NEIGHBOURS_LONGER` | a factor by which the scenarios last longer |
//! | `TONIC_RDMA_NEIGHBOURS_STOPS` | the number of stops in mid-transfer; 100 without it |
//! | `TONIC_RDMA_NEIGHBOURS_LIMIT` | the seconds after which a scenario has failed; 600 without it |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "tests")]
#![allow(unreachable_pub, reason = "a test crate exports nothing")]

mod end;
#[allow(dead_code, reason = "the bench uses the rest")]
mod hostile;
mod meter;
mod neighbour;
mod process;
mod scenarios;
#[allow(dead_code, reason = "the bench uses the rest")]
mod system;
mod victim;

use std::sync::{Mutex, PoisonError};

/// The scenarios run one after another, because each uses all cores.
static TURN: Mutex<()> = Mutex::new(());

macro_rules! tests {
    ($level:ident: $($test:ident: $name:literal;)*) => {
        $(#[test] fn $test() {
            let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            process::run_scenario($name, process::Level::$level);
        })*
    };
}

/// Makes two tests of each scenario: with neighbours of this user, and with neighbours of another user, who
/// get in by `RDMA_SOFT_PEERS=any`.
macro_rules! scenarios {
    (both { $($both:tt)* } user { $($user:tt)* } strangers { $($strangers:tt)* }) => {
        tests! { User: $($user)* $($both)* }

        mod strangers {
            use super::*;

            tests! { Stranger: $($strangers)* $($both)* }
        }
    };
}

scenarios! {
    both {
        calls_beside_an_idle_neighbour: "idle";
        calls_beside_a_busy_neighbour: "transfer";
        a_scribbler_of_zeros_harms_only_itself: "scribble zeros";
        a_scribbler_of_ones_harms_only_itself: "scribble ones";
        a_scribbler_of_counters_harms_only_itself: "scribble counters";
        a_scribbler_of_random_bytes_harms_only_itself: "scribble random";
        a_peer_that_stops_in_mid_transfer_delays_no_drop_and_changes_no_byte: "stop";
        calls_do_not_wait_for_a_peer_that_stopped: "stopped calls";
        calls_do_not_wait_for_a_service_thread_that_does_not_answer: "deaf calls";
        a_flood_of_messages_stays_within_bounds: "flood of messages";
        a_flood_of_segments_stays_within_bounds: "flood of segments";
        a_flood_of_sockets_stays_within_bounds: "flood of sockets";
        a_flood_of_sockets_that_linger_stays_within_bounds: "flood of lingering sockets";
        a_fork_that_runs_destructors_ends_nothing: "fork";
        a_fork_that_outlives_its_parent_delays_nobody: "fork that outlives its parent";
        peers_that_die_leave_nothing: "die";
        a_peer_that_makes_descriptors_blocking_harms_only_itself: "block";
        a_full_pipe_in_place_of_a_wake_up_harms_only_its_sender: "swap full-pipe wake-ups";
        a_pipe_without_a_reader_harms_only_its_sender: "swap pipe-without-reader wake-ups";
        truncated_shared_structures_harm_only_their_sender: "swap truncated small";
        truncated_memory_harm_only_their_sender: "swap truncated large";
        huge_pages_in_place_of_shared_structures_harm_only_their_sender: "swap huge-pages small";
        huge_pages_in_place_of_memory_harm_only_their_sender: "swap huge-pages large";
        a_device_in_place_of_shared_structures_harms_only_its_sender: "swap device small";
        a_device_in_place_of_memory_harms_only_its_sender: "swap device large";
    }
    user {
        calls_without_a_neighbour: "alone";
    }
    strangers {
        a_peer_sees_no_memory_that_was_not_offered: "peek";
    }
}

/// Runs the role of a process that the tests start. Without a role this test does nothing.
#[test]
fn process_with_a_role() {
    let Ok(role) = std::env::var(process::ROLE) else { return };
    match role.split_once(':') {
        Some((_, scenario)) => {
            system::die_with_parent();
            tracing::subscriber::set_global_default(meter::Warnings).unwrap();
            scenarios::run(scenario);
        }
        None => {
            if role == "stranger" {
                system::become_user(system::OTHER_USER);
            }
            neighbour::run();
        }
    }
}
