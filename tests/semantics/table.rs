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
        one_after_the_other => "?",
        that_take_a_while => "?",
        whose_handlers_compute => "?",
        made_by_a_handler => "?",
        made_by_a_handler_to_itself => "?",
        in_a_future_that_is_polled_by_hand => "?",
        over_clones_of_a_client => "?",
    }
    "Cancelled calls" cancels {
        before_the_start => "?",
        after_the_start => "?",
        by_a_handle => "?",
        after_the_clients_last_message => "?",
        after_the_first_reply => "?",
        while_requests_stream => "?",
        while_both_directions_stream => "?",
        while_the_server_waits_for_room => "?",
        of_the_connection => "?",
        of_a_thousand_calls => "?",
        by_the_server => "?",
    }
    "Deadlines" deadlines {
        of_a_call => "?",
        of_a_channel => "?",
        of_a_server => "?",
        the_shorter_of_two => "?",
        of_zero => "?",
        already_passed => "?",
        negative => "?",
        not_understood => "?",
        the_longest => "?",
        seen_by_the_handler => "?",
        in_the_middle_of_a_stream => "?",
        while_requests_stream => "?",
        of_one_call_of_many => "?",
    }
    "Messages" payloads {
        of_0_bytes => "?",
        of_1_byte => "?",
        of_4_kib => "?",
        of_1_mib => "?",
        of_64_mib => "?",
        of_lengths_around_powers_of_two => "?",
        of_mixed_lengths_in_a_stream => "?",
        empty_ones_in_a_stream => "?",
        ten_thousand_ping_pongs => "?",
        a_thousand_calls_at_once => "?",
        a_hundred_streams_at_once => "?",
        compressed_both_ways => "?",
        compressed_streams => "?",
        compressed_for_a_server_that_takes_none => "?",
    }
    "Streams" streams {
        of_requests => "?",
        of_replies => "?",
        without_messages => "?",
        closed_by_the_client_first => "?",
        closed_by_the_server_first => "?",
        answered_before_the_requests_end => "?",
        refused_before_the_requests_end => "?",
        beside_one_that_is_not_read => "?",
        read_late_in_both_directions => "?",
        with_a_head_before_messages => "?",
        whose_requests_move_by_themselves => "?",
    }
    "Ends of calls" endings {
        every_code => "?",
        ok_as_an_error => "?",
        messages_that_need_escapes => "?",
        a_long_message => "?",
        trailers_only => "?",
        trailers_only_of_a_stream => "?",
        an_error_after_messages => "?",
        an_error_before_messages_of_a_stream => "?",
        a_method_that_does_not_exist => "?",
        a_service_that_does_not_exist => "?",
        a_panic_of_a_handler => "?",
        a_panic_of_a_reply_stream => "?",
    }
    "Metadata" metadata {
        of_text => "?",
        with_several_values => "?",
        that_is_binary => "?",
        of_6_kib => "?",
        of_a_hundred_names => "?",
        that_never_repeats => "?",
        of_sensitive_values => "?",
        of_grpc_itself => "?",
        user_agent => "?",
        tracing_context => "?",
        reserved_names => "?",
        trailers_after_messages => "?",
    }
    "Limits" limits {
        of_the_servers_decoder => "?",
        of_the_clients_decoder => "?",
        of_the_servers_encoder => "?",
        of_the_clients_encoder => "?",
        that_are_small => "?",
        on_the_metadata_that_a_server_takes => "?",
        on_the_metadata_that_a_client_takes => "?",
        on_calls_of_a_connection => "?",
        on_calls_of_a_channel => "?",
        on_calls_that_wait_and_give_up => "?",
    }
    "Connections" connections {
        shared_by_all_calls => "?",
        made_by_the_first_call => "?",
        made_by_many_first_calls => "?",
        to_no_server => "?",
        to_a_server_that_starts_late => "?",
        made_again_after_a_restart => "?",
        of_a_certain_age => "?",
        of_a_certain_age_and_grace => "?",
        without_calls => "?",
        of_a_server_that_shuts_down => "?",
        of_a_server_without_calls_that_shuts_down => "?",
        of_a_channel_that_was_dropped => "?",
    }
    "Ends of processes" ends_of_processes {
        of_a_server_that_is_killed => "?",
        of_a_server_that_is_stopped => "?",
        of_a_client_that_is_killed => "?",
        of_a_client_that_is_stopped => "?",
    }
    "Layers and interceptors" layers {
        an_interceptor_of_the_client => "?",
        an_interceptor_of_the_server => "?",
        a_layer_of_the_server => "?",
        layers_of_the_client => "?",
        a_timeout_layer_of_the_client => "?",
        a_limit_of_the_server => "?",
    }
    "What a handler learns, and standard services" extensions {
        addresses_by_tonics_request => "?",
        connect_info => "?",
        request_line_and_authority => "?",
        another_origin => "?",
        of_a_layer => "?",
        health => "?",
        reflection => "?",
    }
}
