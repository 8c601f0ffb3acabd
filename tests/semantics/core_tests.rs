//! gRPC core's own end-to-end tests (`test/core/end2end/tests` of grpc/grpc), and the behaviours that ask for
//! the same.

/// Where a test of gRPC core has its counterpart.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Counterpart {
    /// In behaviours, by name.
    In(&'static [&'static str]),
    /// Nowhere, for a reason in one sentence.
    Absent(&'static str),
}

use Counterpart::{Absent, In};

const FILTERS: &str = "tonic has no filters; layers take their place (see the group of layers).";
const RETRIES: &str = "tonic does not repeat calls by a service config; its users do it with a tower layer.";
const NO_C_API: &str = "It tests a part of gRPC core's C interface that tonic does not have.";

/// The tests, in the order of their names.
pub(crate) static TESTS: &[(&str, Counterpart)] = &[
    ("authority_not_supported", In(&["extensions::another_origin"])),
    ("bad_hostname", In(&["extensions::another_origin", "connections::to_no_server"])),
    (
        "bad_ping",
        Absent(
            "It counts HTTP/2's pings; native calls have none, and `Config::ping_interval` sets the transport's.",
        ),
    ),
    ("binary_metadata", In(&["metadata::that_is_binary"])),
    ("call_creds", In(&["layers::an_interceptor_of_the_client", "layers::an_interceptor_of_the_server"])),
    ("call_host_override", In(&["extensions::another_origin"])),
    ("cancel_after_accept", In(&["cancels::after_the_start"])),
    ("cancel_after_client_done", In(&["cancels::after_the_clients_last_message"])),
    ("cancel_after_invoke", In(&["cancels::by_a_handle"])),
    ("cancel_after_round_trip", In(&["cancels::after_the_first_reply"])),
    ("cancel_before_invoke", In(&["cancels::before_the_start"])),
    ("cancel_in_a_vacuum", In(&["cancels::before_the_start"])),
    ("cancel_with_status", In(&["cancels::by_the_server"])),
    ("channelz", Absent("tonic has no channelz; `RdmaChannel::last_connection` describes a connection.")),
    ("client_streaming", In(&["streams::of_requests"])),
    (
        "compressed_payload",
        In(&[
            "payloads::compressed_both_ways",
            "payloads::compressed_streams",
            "payloads::compressed_for_a_server_that_takes_none",
        ]),
    ),
    ("connection_scaling", In(&["limits::on_calls_of_a_connection"])),
    ("connectivity", In(&["connections::made_by_the_first_call", "connections::made_again_after_a_restart"])),
    ("default_host", In(&["extensions::request_line_and_authority"])),
    ("disappearing_server", In(&["connections::of_a_server_that_shuts_down"])),
    ("empty_batch", Absent(NO_C_API)),
    ("filter_call_init_fails", Absent(FILTERS)),
    ("filter_causes_close", Absent(FILTERS)),
    ("filter_context", Absent(FILTERS)),
    ("filter_init_fails", Absent(FILTERS)),
    ("filter_latency", Absent(FILTERS)),
    ("filter_status_code", Absent(FILTERS)),
    ("filtered_metadata", In(&["metadata::reserved_names"])),
    ("graceful_server_shutdown", In(&["connections::of_a_server_that_shuts_down"])),
    ("grpc_authz", Absent("tonic has no authorization engine; an interceptor takes its place.")),
    ("high_initial_seqno", Absent("The first sequence number of a native connection is fixed.")),
    ("hpack_size", In(&["metadata::that_never_repeats"])),
    ("http2_stats", Absent("Native calls have no HTTP/2 to count.")),
    ("invoke_large_request", In(&["payloads::of_1_mib", "payloads::of_64_mib"])),
    (
        "keepalive_timeout",
        In(&[
            "ends_of_processes::of_a_server_that_is_stopped",
            "ends_of_processes::of_a_client_that_is_stopped",
        ]),
    ),
    (
        "large_metadata",
        In(&[
            "metadata::of_6_kib",
            "limits::on_the_metadata_that_a_server_takes",
            "limits::on_the_metadata_that_a_client_takes",
        ]),
    ),
    ("load_reporting_hook", Absent("tonic has no load reports.")),
    ("many_calls", In(&["payloads::a_thousand_calls_at_once"])),
    (
        "max_concurrent_streams",
        In(&["limits::on_calls_of_a_connection", "limits::on_calls_that_wait_and_give_up"]),
    ),
    ("max_connection_age", In(&["connections::of_a_certain_age", "connections::of_a_certain_age_and_grace"])),
    ("max_connection_idle", In(&["connections::without_calls"])),
    (
        "max_message_length",
        In(&[
            "limits::of_the_servers_decoder",
            "limits::of_the_clients_decoder",
            "limits::of_the_servers_encoder",
            "limits::of_the_clients_encoder",
        ]),
    ),
    ("negative_deadline", In(&["deadlines::negative", "deadlines::already_passed", "deadlines::of_zero"])),
    ("no_error_on_hotpath", Absent("It searches gRPC core's own log for error objects.")),
    (
        "no_logging",
        Absent("It searches gRPC core's own log; `tests/transport/endpoint/logs.rs` checks ours."),
    ),
    ("no_op", Absent(NO_C_API)),
    ("payload", In(&["payloads::of_1_mib", "payloads::of_lengths_around_powers_of_two"])),
    ("ping", Absent("tonic has no call that sends a ping.")),
    ("ping_pong_streaming", In(&["payloads::ten_thousand_ping_pongs"])),
    ("proxy_auth", Absent("tonic's channel has no proxy support.")),
    ("registered_call", In(&["calls::one_after_the_other"])),
    ("request_with_flags", Absent(NO_C_API)),
    ("request_with_payload", In(&["payloads::of_4_kib"])),
    ("resource_quota_server", In(&["streams::beside_one_that_is_not_read"])),
    ("retry", Absent(RETRIES)),
    ("retry_…", Absent(RETRIES)),
    ("sdk_authz", Absent("tonic has no authorization engine; an interceptor takes its place.")),
    (
        "server_finishes_request",
        In(&["streams::answered_before_the_requests_end", "streams::refused_before_the_requests_end"]),
    ),
    ("server_streaming", In(&["streams::of_replies"])),
    ("shutdown_finishes_calls", In(&["connections::of_a_server_that_shuts_down"])),
    ("shutdown_finishes_tags", Absent(NO_C_API)),
    (
        "simple_delayed_request",
        In(&["connections::to_a_server_that_starts_late", "calls::that_take_a_while"]),
    ),
    ("simple_metadata", In(&["metadata::of_text", "metadata::with_several_values"])),
    ("simple_request", In(&["calls::one_after_the_other"])),
    ("streaming_error_response", In(&["endings::an_error_after_messages"])),
    ("timeout_before_request_call", In(&["deadlines::of_a_call"])),
    ("trailing_metadata", In(&["metadata::trailers_after_messages", "endings::trailers_only"])),
    ("write_buffering", In(&["streams::whose_requests_move_by_themselves"])),
    ("write_buffering_at_end", In(&["streams::closed_by_the_client_first"])),
];
