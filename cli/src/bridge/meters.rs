//! Metrics, whose names begin with `tonic_rdma_bridge_`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{Counter, Unit, describe_counter, describe_gauge, describe_histogram};

const OPEN: &str = "tonic_rdma_bridge_connections";
const TOTAL: &str = "tonic_rdma_bridge_connections_total";
const FAILED: &str = "tonic_rdma_bridge_connections_failed_total";
const BYTES: &str = "tonic_rdma_bridge_bytes_total";
const DIALS_FAILED: &str = "tonic_rdma_bridge_dial_failures_total";
const RETRIES: &str = "tonic_rdma_bridge_dial_retries_total";
const DIALLING: &str = "tonic_rdma_bridge_dial_seconds";
const LIVED: &str = "tonic_rdma_bridge_connection_seconds";

/// Describes the metrics to the recorder.
pub(crate) fn describe() {
    describe_gauge!(OPEN, "Connections carried now, by route and by what carries either end");
    describe_counter!(TOTAL, "Connections carried so far");
    describe_counter!(FAILED, "Connections that ended with a reset, by reason: dial, reset, broken, cut-off");
    describe_counter!(BYTES, Unit::Bytes, "Bytes written, up (to the target) and down (to the client)");
    describe_counter!(DIALS_FAILED, "Attempts to connect to the target that failed");
    describe_counter!(RETRIES, "Attempts to connect to the target after a failed one");
    describe_histogram!(DIALLING, Unit::Seconds, "Time until the target was connected to");
    describe_histogram!(LIVED, Unit::Seconds, "How long connections were carried");
}

/// The counters of one route.
#[derive(Debug)]
pub(crate) struct Meters {
    route: Arc<str>,
    pub(crate) up: Counter,
    pub(crate) down: Counter,
}

/// The reason why a connection ended with a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The target could not be connected to.
    Dial,
    /// The client reset the connection, or the target reset it after the client's end of data. Clients that leave
    /// without reading to the end cause both kinds of reset.
    Reset,
    /// One end of the connection failed.
    Broken,
    /// The drain timeout or a second signal ended the connection.
    CutOff,
}

impl Meters {
    /// Creates the counters of `route`.
    pub(crate) fn new(route: &str) -> Self {
        let route: Arc<str> = route.into();
        let bytes = |direction: &'static str| metrics::counter!(BYTES, "route" => Arc::clone(&route), "direction" => direction);
        let (up, down) = (bytes("up"), bytes("down"));
        Self { route, up, down }
    }

    /// Counts a connection that ended with a reset.
    pub(crate) fn failed(&self, why: Failed) {
        let reason = match why {
            Failed::Dial => "dial",
            Failed::Reset => "reset",
            Failed::Broken => "broken",
            Failed::CutOff => "cut-off",
        };
        metrics::counter!(FAILED, "route" => Arc::clone(&self.route), "reason" => reason).increment(1);
    }

    /// Counts a failed attempt to connect to the target.
    pub(crate) fn dial_failed(&self) {
        metrics::counter!(DIALS_FAILED, "route" => Arc::clone(&self.route)).increment(1);
    }

    /// Counts an attempt after a failed one.
    pub(crate) fn dial_retried(&self) {
        metrics::counter!(RETRIES, "route" => Arc::clone(&self.route)).increment(1);
    }

    /// Records the time until the target was connected.
    pub(crate) fn dialled(&self, took: Duration) {
        metrics::histogram!(DIALLING, "route" => Arc::clone(&self.route)).record(took);
    }

    /// Counts a connection as open until the result is dropped.
    pub(crate) fn opened(&self, client: &'static str, target: &'static str) -> Open {
        let route = Arc::clone(&self.route);
        metrics::counter!(TOTAL, "route" => Arc::clone(&route), "client" => client, "target" => target)
            .increment(1);
        let open = Open { route, client, target, since: Instant::now() };
        open.gauge().increment(1.0);
        open
    }
}

/// An open connection, counted.
#[derive(Debug)]
pub(crate) struct Open {
    route: Arc<str>,
    client: &'static str,
    target: &'static str,
    since: Instant,
}

impl Open {
    fn gauge(&self) -> metrics::Gauge {
        metrics::gauge!(OPEN, "route" => Arc::clone(&self.route), "client" => self.client, "target" => self.target)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.gauge().decrement(1.0);
        metrics::histogram!(LIVED, "route" => Arc::clone(&self.route)).record(self.since.elapsed());
    }
}
