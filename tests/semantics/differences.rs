//! The only place where a column's outcome may differ from that over stock TCP. Each entry says why in one
//! sentence. An undeclared difference fails the behaviour's test, and so does a declared one that no longer
//! differs.

use crate::column::Column;

/// What is declared about a behaviour over a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Declared {
    /// The outcome is another one.
    Outcome(&'static str),
    /// The behaviour can't be asked for over this column.
    NotRun,
}

/// A declared difference.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Difference {
    pub(crate) behaviour: &'static str,
    pub(crate) column: Column,
    pub(crate) outcome: Declared,
    /// The reason, in one sentence.
    pub(crate) because: &'static str,
}

const DEADLINES: &str = "A native call that is too late ends with DEADLINE_EXCEEDED, as gRPC demands; tonic's own ends with CANCELLED.";
const PANIC: &str = "A native server says that the handler panicked (UNKNOWN); tonic's resets the stream, which the client sees as CANCELLED.";
const HEADS: &str = "A head that is too long for the peer ends a native call with RESOURCE_EXHAUSTED before or after it is sent, \
                     as gRPC core does; HTTP/2's answer has no gRPC status.";
const ENDED: &str = "A native call whose connection ends has the status UNAVAILABLE, as gRPC demands; tonic makes UNKNOWN of some of \
                     HTTP/2's errors.";
const ONE_PROCESS: &str = "Client and server end together, because they are one process.";

/// All differences.
pub(crate) static ALL: &[Difference] = &[
    Difference {
        behaviour: "cancels::of_the_replies_alone",
        column: Column::Native,
        outcome: Declared::Outcome("the handler and the requests end, the connection goes on"),
        because: "Dropping the replies cancels the call immediately; over HTTP/2 the open stream of requests keeps it.",
    },
    Difference {
        behaviour: "deadlines::of_a_call",
        column: Column::Native,
        outcome: Declared::Outcome("DEADLINE_EXCEEDED, the handler ends, the connection goes on"),
        because: DEADLINES,
    },
    Difference {
        behaviour: "deadlines::of_a_channel",
        column: Column::Native,
        outcome: Declared::Outcome("DEADLINE_EXCEEDED, the handler ends"),
        because: DEADLINES,
    },
    Difference {
        behaviour: "deadlines::of_a_server",
        column: Column::Native,
        outcome: Declared::Outcome("DEADLINE_EXCEEDED, the handler ends"),
        because: DEADLINES,
    },
    Difference {
        behaviour: "deadlines::the_shorter_of_two",
        column: Column::Native,
        outcome: Declared::Outcome("DEADLINE_EXCEEDED, DEADLINE_EXCEEDED"),
        because: DEADLINES,
    },
    Difference {
        behaviour: "deadlines::of_zero",
        column: Column::Native,
        outcome: Declared::Outcome("DEADLINE_EXCEEDED"),
        because: DEADLINES,
    },
    Difference {
        behaviour: "deadlines::already_passed",
        column: Column::Native,
        outcome: Declared::Outcome("DEADLINE_EXCEEDED"),
        because: DEADLINES,
    },
    Difference {
        behaviour: "deadlines::while_requests_stream",
        column: Column::Native,
        outcome: Declared::Outcome("DEADLINE_EXCEEDED, the handler ends"),
        because: DEADLINES,
    },
    Difference {
        behaviour: "deadlines::of_one_call_of_many",
        column: Column::Native,
        outcome: Declared::Outcome("DEADLINE_EXCEEDED, the others: OK"),
        because: DEADLINES,
    },
    Difference {
        behaviour: "deadlines::in_the_middle_of_a_stream",
        column: Column::Native,
        outcome: Declared::Outcome("the first reply: OK, one after the deadline: DEADLINE_EXCEEDED"),
        because: "The deadline of a native call holds until its last message, as gRPC demands; tonic's ends with the head of the response.",
    },
    Difference {
        behaviour: "endings::a_panic_of_a_handler",
        column: Column::Native,
        outcome: Declared::Outcome("UNKNOWN, later calls: OK"),
        because: PANIC,
    },
    Difference {
        behaviour: "endings::a_panic_of_a_reply_stream",
        column: Column::Native,
        outcome: Declared::Outcome("UNKNOWN, later calls: OK"),
        because: PANIC,
    },
    Difference {
        behaviour: "limits::of_the_clients_encoder",
        column: Column::Native,
        outcome: Declared::Outcome("OK, OUT_OF_RANGE, OK"),
        because: "A native call ends with the status that the encoder gave; over HTTP/2 the client sees its own reset of the stream.",
    },
    Difference {
        behaviour: "limits::on_the_metadata_that_a_server_takes",
        column: Column::Native,
        outcome: Declared::Outcome("OK, RESOURCE_EXHAUSTED, the connection goes on"),
        because: HEADS,
    },
    Difference {
        behaviour: "limits::on_the_metadata_that_a_client_takes",
        column: Column::Native,
        outcome: Declared::Outcome("OK, RESOURCE_EXHAUSTED, the connection goes on"),
        because: HEADS,
    },
    Difference {
        behaviour: "limits::on_calls_of_a_channel",
        column: Column::Native,
        outcome: Declared::NotRun,
        because: "tonic's `Endpoint` does not show its `concurrency_limit` to others; tower's `ConcurrencyLimit` around the channel does the same.",
    },
    Difference {
        behaviour: "connections::of_a_certain_age_and_grace",
        column: Column::Native,
        outcome: Declared::Outcome("a call longer than both: UNAVAILABLE, its handler ends"),
        because: ENDED,
    },
    Difference {
        behaviour: "connections::without_calls",
        column: Column::Tcp,
        outcome: Declared::NotRun,
        because: "tonic's server has no such setting.",
    },
    Difference {
        behaviour: "connections::without_calls",
        column: Column::DropIn,
        outcome: Declared::NotRun,
        because: "tonic's server has no such setting.",
    },
    Difference {
        behaviour: "ends_of_processes::of_a_server_that_is_killed",
        column: Column::Native,
        outcome: Declared::Outcome("a call: UNAVAILABLE, a stream: UNAVAILABLE"),
        because: ENDED,
    },
    Difference {
        behaviour: "ends_of_processes::of_a_server_that_is_stopped",
        column: Column::Native,
        outcome: Declared::Outcome("a call: UNAVAILABLE, a stream: UNAVAILABLE"),
        because: ENDED,
    },
    Difference {
        behaviour: "ends_of_processes::of_a_server_that_is_killed",
        column: Column::InProcess,
        outcome: Declared::NotRun,
        because: ONE_PROCESS,
    },
    Difference {
        behaviour: "ends_of_processes::of_a_server_that_is_stopped",
        column: Column::InProcess,
        outcome: Declared::NotRun,
        because: ONE_PROCESS,
    },
    Difference {
        behaviour: "ends_of_processes::of_a_client_that_is_killed",
        column: Column::InProcess,
        outcome: Declared::NotRun,
        because: ONE_PROCESS,
    },
    Difference {
        behaviour: "ends_of_processes::of_a_client_that_is_stopped",
        column: Column::InProcess,
        outcome: Declared::NotRun,
        because: ONE_PROCESS,
    },
    Difference {
        behaviour: "extensions::addresses_by_tonics_request",
        column: Column::DropIn,
        outcome: Declared::Outcome("remote unknown, local unknown"),
        because: "tonic finds these addresses only for its own listeners; `RemoteAddresses`, a layer, adds them, and `RdmaServer` has it built in.",
    },
    Difference {
        behaviour: "extensions::connect_info",
        column: Column::Tcp,
        outcome: Declared::Outcome("none"),
        because: "A stock listener does not know `RdmaConnectInfo`.",
    },
];

/// Returns what is declared about `behaviour` over `column`. What is declared about native calls holds in a
/// process, too, unless something else is declared there.
pub(crate) fn find(behaviour: &str, column: Column) -> Option<&'static Difference> {
    let of = |column| move |it: &&Difference| it.behaviour == behaviour && it.column == column;
    let own = ALL.iter().find(of(column));
    own.or_else(|| ALL.iter().find(of(Column::Native)).filter(|_| column == Column::InProcess))
}
