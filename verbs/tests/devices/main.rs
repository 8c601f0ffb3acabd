//! Tests of devices. The conformance suite runs the cases that every provider of [`tonic_rdma_verbs`] must
//! pass, on each provider. `containers`, `counting`, `forking`, `isolation` and `ibverbs` test one provider each.
//!
//! To add a provider, implement [`fabric::Fabric`] and add one line of `suite!` below. Cases that need
//! another process start this binary again (`processes`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(unreachable_pub, reason = "a test crate exports nothing")]

mod containers;
mod counting;
mod device_memory;
mod errors;
mod fabric;
mod flow;
mod forking;
#[cfg(feature = "ibverbs")]
mod ibverbs;
mod in_order;
mod isolation;
mod lifecycle;
mod operations;
mod peer_work;
mod processes;
mod ranges;
mod shared_receive;
mod sinks;
mod windows;

use std::io::Write;
use std::sync::Arc;

use fabric::Fabric;
use tonic_rdma_verbs::{Context, VerbsError, soft};

/// The software device.
struct Soft;

impl Fabric for Soft {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn open(&self) -> Result<Arc<dyn Context>, VerbsError> {
        soft::open()
    }
}

/// Runs a case, unless the provider skips it.
fn run(fabric: &dyn Fabric, case: &str, test: impl FnOnce(&dyn Fabric)) {
    match fabric.skips(case) {
        Some(reason) => {
            let _ = writeln!(std::io::stderr(), "{} skips {case}: {reason}", fabric.name());
        }
        None => test(fabric),
    }
}

/// Makes a test of every case, in a module named after the provider.
macro_rules! suite {
    ($provider:ident, $fabric:expr) => {
        mod $provider {
            use super::*;
            suite!(@cases $fabric; operations:
                send_and_receive, send_with_immediate, write, write_with_immediate, read, private_memory, inline,
                inline_is_taken_over, scatter_and_gather, zero_length, exact_fit, maximum_length,
                selective_signalling, ordering, both_directions);
            suite!(@cases $fabric; errors:
                wrong_rkey, out_of_bounds, missing_region_right, missing_region_right_of_a_read, missing_queue_pair_right, foreign_domain,
                deregistered_key, message_too_long_for_the_receive, bad_local_key, local_range_out_of_bounds,
                read_into_read_only_memory, receive_into_deregistered_memory, flush_order, unsignalled_failure,
                peer_destroyed, peer_never_connects, peer_fails_while_a_send_waits);
            suite!(@cases $fabric; ranges:
                range_to_the_byte, beyond_a_range, local_segment_beyond_a_range, ranges_have_rights_of_their_own,
                ranges_not_to_be_read, ranges_go_one_by_one, invalid_ranges_are_refused, a_granted_payload_to_the_byte);
            suite!(@cases $fabric; sinks: a_sink_is_closed_after_its_read);
            suite!(@cases $fabric; windows:
                a_window_is_open_until_it_is_dropped, a_closed_window_is_not_read, beyond_a_window,
                a_window_for_one_right, a_window_is_for_one_queue_pair, windows_are_opened_again_and_again,
                windows_end_with_their_queue_pair, impossible_windows_are_refused,
                leases_are_granted_one_by_one);
            suite!(@cases $fabric; device_memory: other_descriptors_are_refused, device_memory);
            suite!(@cases $fabric; in_order:
                writes_placed_in_order, reads_placed_in_order, writes_placed_one_after_another);
            suite!(@cases $fabric; flow:
                receiver_not_ready_for_ever, receiver_not_ready_expires, receiver_not_ready_recovers,
                write_with_immediate_waits_for_a_receive, peer_not_connected_yet, send_queue_full,
                unsignalled_requests_hold_places, a_read_frees_the_places_before_it, receive_queue_full,
                too_many_segments_or_bytes,
                completion_queue_overrun, a_completion_queue_grows, arming_loses_no_wake_up, events_come_when_armed,
                an_armed_queue_stays_armed,
                many_queue_pairs_on_one_queue, separate_queues, no_queue_pair_starves);
            suite!(@cases $fabric; peer_work:
                writes_make_events, threads_that_look_need_no_events, a_long_write_leaves_an_event_for_the_rest,
                work_of_a_destroyed_queue_pair,
                work_of_an_ended_peer_and_a_destroyed_queue_pair);
            suite!(@cases $fabric; shared_receive:
                shared_receives, shared_receive_queue_full, shared_receive_comes_late,
                shared_receive_of_an_immediate, shared_receives_outlive_a_queue_pair, shared_receive_too_short,
                shared_receives_of_destroyed_queue_pairs_complete, shared_receive_of_another_domain, shared_receive_queue_of_another_device);
            suite!(@cases $fabric; lifecycle:
                state_machine, error_before_connecting, nonsense_addresses_are_refused, limits,
                deregistration_during_traffic, destruction_during_traffic, destroyed_with_completions_unpolled);
            suite!(@cases $fabric; processes:
                processes_exchange_messages, one_sided_between_processes, killed_while_idle, killed_while_it_sends,
                killed_while_it_writes, killed_while_it_reads, killed_while_we_send, killed_while_we_write,
                killed_while_we_read, killed_while_a_send_waits);
        }
    };
    (@cases $fabric:expr; $module:ident: $($case:ident),* $(,)?) => {
        $(#[test] fn $case() { run(&$fabric, stringify!($case), crate::$module::$case); })*
    };
}

suite!(soft_device, Soft);
suite!(counted_device, counting::Counted::default());
#[cfg(feature = "ibverbs")]
suite!(ibverbs_device, ibverbs::Device);

/// Runs the role of a child process (`processes`). Without a role this test does nothing.
#[test]
fn child_process() {
    let Ok(role) = std::env::var(processes::ROLE) else { return };
    let (provider, role) = role.split_once(':').unwrap();
    let fabrics: &[&dyn Fabric] = &[
        &Soft,
        #[cfg(feature = "ibverbs")]
        &ibverbs::Device,
    ];
    let fabric = fabrics.iter().copied().find(|fabric| fabric.name() == provider).unwrap();
    processes::run_role(fabric, role);
}
