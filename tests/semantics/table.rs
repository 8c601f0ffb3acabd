//! The behaviours and their outcomes over stock TCP, and a test of each.

use crate::run::{Behaviour, Group, check};

/// Makes the list of groups, and a test of each behaviour, whose name is the behaviour's.
macro_rules! behaviours {
    ($($title:literal $module:ident { $($name:ident => $outcome:expr,)* })*) => {
        /// All groups, in the order of the page.
        pub(crate) static GROUPS: &[Group] = &[$(Group {
            title: $title,
            behaviours: &[$(Behaviour {
                name: concat!(stringify!($module), "::", stringify!($name)),
                outcome: $outcome,
                body: |column| Box::pin(crate::$module::$name(column)),
            }),*],
        }),*];

        $(mod $module {
            $(#[test]
            fn $name() {
                super::run(concat!(stringify!($module), "::", stringify!($name)));
            })*
        })*
    };
}

/// Returns the behaviour of this name.
pub(crate) fn find(name: &str) -> Option<&'static Behaviour> {
    GROUPS.iter().flat_map(|group| group.behaviours).find(|behaviour| behaviour.name == name)
}

fn run(name: &str) {
    check(find(name).expect("a behaviour of the table"));
}

behaviours! {
    "Calls" calls {
        one_after_the_other => "300 answers",
        that_take_a_while => "OK",
        whose_handlers_compute => "40 answers",
        made_by_a_handler => "50 answers from behind",
        made_by_a_handler_to_itself => "20 calls inside of one another",
        in_a_future_that_is_polled_by_hand => "20 answers",
        over_clones_of_a_client => "21 answers",
    }
    "Cancelled calls" cancels {
        before_the_start => "CANCELLED, 0 handlers began, the connection goes on",
        after_the_start => "the handler ends, the connection goes on",
        by_a_handle => "CANCELLED, the handler ends, the connection goes on",
        after_the_clients_last_message => "the handler ends, the connection goes on",
        after_the_first_reply => "CANCELLED, the handler and the requests end, the connection goes on",
        while_requests_stream => "the handler and the requests end, the connection goes on",
        while_both_directions_stream => "the handler and the requests end, the connection goes on",
        of_the_replies_alone => "the handler goes on, the connection goes on",
        while_the_server_waits_for_room => "1 handler waits, it ends, the connection goes on",
        of_the_connection => "20 handlers end",
        of_a_thousand_calls => "1000 handlers end, the connection goes on",
        by_the_server => "CANCELLED, the requests end",
    }
    "Deadlines" deadlines {
        of_a_call => "CANCELLED, the handler ends, the connection goes on",
        of_a_channel => "CANCELLED, the handler ends",
        of_a_server => "CANCELLED, the handler ends",
        the_shorter_of_two => "CANCELLED, CANCELLED",
        of_zero => "CANCELLED",
        already_passed => "CANCELLED",
        negative => "-1S: OK",
        not_understood => "soon: OK, 1: OK, 123456789S: OK",
        the_longest => "99999999H: OK, 99999999S: OK",
        seen_by_the_handler => "Some(\"60000000u\")",
        in_the_middle_of_a_stream => "the first reply: OK, one after the deadline: OK",
        while_requests_stream => "CANCELLED, the handler ends",
        of_one_call_of_many => "CANCELLED, the others: OK",
    }
    "Messages" payloads {
        of_0_bytes => "the same bytes come back",
        of_1_byte => "the same bytes come back",
        of_4_kib => "the same bytes come back",
        of_1_mib => "the same bytes come back",
        of_64_mib => "the same bytes come back",
        of_lengths_around_powers_of_two => "the same bytes come back",
        of_mixed_lengths_in_a_stream => "the same bytes come back, in order",
        empty_ones_in_a_stream => "100 messages come back",
        ten_thousand_ping_pongs => "10000 messages come back, in order",
        a_thousand_calls_at_once => "1000 calls get their own bytes back",
        a_hundred_streams_at_once => "100 streams get their own bytes back, in order",
        compressed_both_ways => "there Some(\"gzip\"), back gzip",
        compressed_streams => "the same bytes come back, in order",
        compressed_for_a_server_that_takes_none => "UNIMPLEMENTED, plain: OK",
    }
    "Streams" streams {
        of_requests => "100 requests, one reply",
        of_replies => "one request, 100 replies",
        without_messages => "exchange: None, produce: None, collect: 0 bytes",
        closed_by_the_client_first => "50 replies after the end of the requests, then None",
        closed_by_the_server_first => "the client reads None, the requests end",
        answered_before_the_requests_end => "OK, the requests end",
        refused_before_the_requests_end => "RESOURCE_EXHAUSTED, the requests end",
        beside_one_that_is_not_read => "200 calls beside it: OK, then its own replies and None",
        read_late_in_both_directions => "100 messages come back, then None",
        with_a_head_before_messages => "head, message, None",
        whose_requests_move_by_themselves => "20 requests arrive",
    }
    "Ends of calls" endings {
        every_code => "CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED",
        ok_as_an_error => "INTERNAL",
        messages_that_need_escapes => "UNKNOWN with the same message",
        a_long_message => "ABORTED with 6000 bytes",
        trailers_only => "FAILED_PRECONDITION with details and metadata",
        trailers_only_of_a_stream => "FAILED_PRECONDITION with details and metadata",
        an_error_after_messages => "3 messages, then FAILED_PRECONDITION with details and metadata",
        an_error_before_messages_of_a_stream => "FAILED_PRECONDITION with details and metadata",
        a_method_that_does_not_exist => "UNIMPLEMENTED, the connection goes on",
        a_service_that_does_not_exist => "UNIMPLEMENTED, the connection goes on",
        a_panic_of_a_handler => "CANCELLED, later calls: OK",
        a_panic_of_a_reply_stream => "CANCELLED, later calls: OK",
    }
    "Metadata" metadata {
        of_text => "comes back in the head and in trailers",
        with_several_values => "comes back in the head and in trailers",
        that_is_binary => "comes back in the head and in trailers",
        of_6_kib => "comes back in the head and in trailers",
        of_a_hundred_names => "comes back in the head and in trailers",
        that_never_repeats => "2000 calls get their own back",
        of_sensitive_values => "comes back",
        of_grpc_itself => "content-type: application/grpc, te: trailers, grpc-encoding: none",
        user_agent => "user-agent: tonic/0.00.0, user-agent: probe/0 tonic/0.00.0",
        tracing_context => "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01, tracestate: congo=t61rcWkgMzE, baggage: userId=alice",
        reserved_names => "te: trailers, content-type: application/grpc, grpc-status: none, grpc-message: none",
        trailers_after_messages => "one, two",
    }
    "Limits" limits {
        of_the_servers_decoder => "OK, OUT_OF_RANGE, OK, OK",
        of_the_clients_decoder => "OK, OUT_OF_RANGE, OK, OK",
        of_the_servers_encoder => "OK, OUT_OF_RANGE, OK",
        of_the_clients_encoder => "OK, INTERNAL, OK",
        that_are_small => "OK, OK, OUT_OF_RANGE, OUT_OF_RANGE, OK",
        on_the_metadata_that_a_server_takes => "OK, UNKNOWN, the connection goes on",
        on_the_metadata_that_a_client_takes => "OK, INTERNAL, the connection goes on",
        on_calls_of_a_connection => "all are answered, 3 at a time",
        on_calls_of_a_channel => "all are answered, 2 at a time",
        on_calls_that_wait_and_give_up => "OK, the next call gets the place",
    }
    "Connections" connections {
        shared_by_all_calls => "100 calls over 1 connection",
        made_by_the_first_call => "OK",
        made_by_many_first_calls => "OK",
        to_no_server => "an eager one fails: true, calls of a lazy one: UNAVAILABLE, UNAVAILABLE",
        to_a_server_that_starts_late => "UNAVAILABLE, then OK",
        made_again_after_a_restart => "OK after each of 3 restarts",
        of_a_certain_age => "ends; the next call: a new connection",
        of_a_certain_age_with_a_call_under_way => "the call: OK, others before its end: a new connection, after it: a new connection",
        of_a_certain_age_and_grace => "a call longer than both: UNKNOWN, its handler ends",
        without_calls => "ends; the next call: a new connection",
        of_a_server_that_shuts_down => "a call under way: OK, a stream: OK, new calls: UNAVAILABLE, then the server ends",
        of_a_server_without_calls_that_shuts_down => "UNAVAILABLE, UNAVAILABLE, UNAVAILABLE",
        of_a_channel_that_was_dropped => "the stream goes on without the channel; then the server ends",
    }
    "Ends of processes" ends_of_processes {
        of_a_server_that_is_killed => "a call: UNKNOWN, a stream: UNKNOWN",
        of_a_server_that_is_stopped => "a call: UNAVAILABLE, a stream: UNKNOWN",
        of_a_client_that_is_killed => "the handler ends; others are served",
        of_a_client_that_is_stopped => "the handler ends; others are served",
    }
    "Layers and interceptors" layers {
        an_interceptor_of_the_client => "adds: added, refuses: FAILED_PRECONDITION \"not sent\"",
        an_interceptor_of_the_server => "refuses: UNAUTHENTICATED \"no token\", adds: seen",
        a_layer_of_the_server => "1 POST /semantics.Probe/Unary, 2 POST /semantics.Probe/Unary",
        layers_of_the_client => "mapped, mapped",
        a_timeout_layer_of_the_client => "timed out: true, the handler ends",
        a_limit_of_the_server => "OK, 2 at once",
    }
    "What a handler learns, and standard services" extensions {
        addresses_by_tonics_request => "remote known, local known",
        connect_info => "rdma",
        request_line_and_authority => "POST, scheme http, host 127.0.0.1, path /semantics.Probe/Unary",
        another_origin => "POST, scheme http, host elsewhere.example, path /semantics.Probe/Unary",
        of_a_layer => "from a layer",
        health => "check Serving and NOT_FOUND, watch [Serving, NotServing]",
        reflection => "the service is listed: true, its file is found: true",
    }
}
