//! The metrics of this package: their names and meanings, and the gauges of the process. Counters of
//! connections are in `info`, times of native calls in the layer above.
//!
//! Gauges of open connections change with each connection. The others are read by [`refresh`], at most once a
//! second: when a connection begins, ends, pings, or publishes its counters.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Once, OnceLock, Weak};
use std::time::{Duration, Instant};

use metrics::{Gauge, KeyName, Unit, describe_counter, describe_gauge};
use tokio::sync::watch;
use tonic_rdma_verbs::unstable::{SOFT_VERSIONS, Versions, lock};

use super::held::held;
use super::info::{COUNTERS, Role, Verdict};
use super::provider;
use super::reason::ReasonCode;
use crate::wire::hello::VERSIONS;

/// What describes a metric to the recorder.
type Describe = fn(KeyName, Unit, &'static str);

const COUNTER: Describe = |name, unit, text| describe_counter!(name, unit, text);
const GAUGE: Describe = |name, unit, text| describe_gauge!(name, unit, text);

/// The metrics of all packages, without the counters of connections.
const METRICS: &[(Describe, &str, &str)] = &[
    (GAUGE, BUILD_INFO, "1, with the versions of this program in the labels"),
    (GAUGE, CONNECTIONS, "Open connections, by what carries them and what they carry"),
    (COUNTER, NEGOTIATIONS, "Connections made and accepted, by transport and by the reason for TCP"),
    (COUNTER, FAILED, "Connections that were refused, by reason"),
    (COUNTER, LOST, "RDMA connections whose peer left without closing, or did not answer a ping"),
    (GAUGE, REGISTERED, "Registered memory of the process"),
    (GAUGE, REGISTERED_LIMIT, "Limit of registered memory (RDMA_PINNED_LIMIT)"),
    (GAUGE, LANDING, "Content of native calls that lands, or was not taken yet"),
    (GAUGE, HELD, "Memory that native calls hold for their peers, with landing content"),
    (GAUGE, HELD_LIMIT, "Limit of the memory that native calls hold (RDMA_HELD_LIMIT)"),
    (GAUGE, DESCRIPTORS, "Open file descriptors of the process"),
    (GAUGE, DESCRIPTORS_LIMIT, "Limit of file descriptors (ulimit -n)"),
    (GAUGE, "tonic_rdma_shared_receive_buffers", "Receive buffers that connections share"),
    (GAUGE, "tonic_rdma_rendezvous_threshold_bytes", "Length from which writes go by rendezvous, by device"),
    (COUNTER, "tonic_rdma_tensor_naps_total", "Waits for a tensor that a timer ended; each is a fault"),
];

/// The [histograms](super::Histograms).
const HISTOGRAMS: [(&str, &str); 3] = [
    ("tonic_rdma_call_seconds", "Native calls, from begin to end, by status; off unless RDMA_HISTOGRAMS=yes"),
    (
        "tonic_rdma_queue_seconds",
        "Time that native calls wait before they are sent, or before their handler runs",
    ),
    ("tonic_rdma_message_bytes", "Lengths of the messages that this side of native calls has sent"),
];

const BUILD_INFO: &str = "tonic_rdma_build_info";
const CONNECTIONS: &str = "tonic_rdma_connections";
const NEGOTIATIONS: &str = "tonic_rdma_negotiations_total";
const FAILED: &str = "tonic_rdma_negotiations_failed_total";
const LOST: &str = "tonic_rdma_peers_lost_total";
const REGISTERED: &str = "tonic_rdma_registered_bytes";
const REGISTERED_LIMIT: &str = "tonic_rdma_registered_limit_bytes";
const LANDING: &str = "tonic_rdma_landing_bytes";
const HELD: &str = "tonic_rdma_held_bytes";
const HELD_LIMIT: &str = "tonic_rdma_held_limit_bytes";
const DESCRIPTORS: &str = "tonic_rdma_descriptors";
const DESCRIPTORS_LIMIT: &str = "tonic_rdma_descriptors_limit";

/// Describes the metrics of tonic-rdma to the recorder of the `metrics` facade, so that an exporter shows what
/// each means, and sets the gauges. The first connector or listener of a process does this, too. So a program
/// that installs its exporter later than that calls this afterwards.
///
/// ```
/// let recorder = metrics_util::debugging::DebuggingRecorder::new(); // your exporter
/// metrics::set_global_recorder(recorder)?;
/// tonic_rdma::describe_metrics();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn describe_metrics() {
    let counters = COUNTERS.iter().map(|(name, text)| (COUNTER, *name, text.trim().trim_end_matches('.')));
    for (describe, name, text) in METRICS.iter().copied().chain(counters) {
        let unit = match name {
            name if name.contains("_bytes") => Unit::Bytes,
            name if name.ends_with("_seconds") => Unit::Seconds,
            _ => Unit::Count,
        };
        describe(KeyName::from_const_str(name), unit, text);
    }
    for (name, text) in HISTOGRAMS {
        let unit = if name.ends_with("_bytes") { Unit::Bytes } else { Unit::Seconds };
        let parts = [(COUNTER, "bucket", Unit::Count), (COUNTER, "count", Unit::Count), (GAUGE, "sum", unit)];
        for (describe, part, unit) in parts {
            describe(format!("{name}_{part}").into(), unit, text);
        }
    }
    // A series without its first value would hide the first increment from `increase`.
    for role in [Role::Client, Role::Server] {
        negotiated(role, Verdict::Rdma, None, 0);
        for reason in ReasonCode::ALL.iter().copied() {
            negotiated(role, Verdict::Tcp, Some(reason), 0);
        }
    }
    for is_silent in [false, true] {
        peer_lost(is_silent, 0);
    }
    publish();
}

/// Describes the metrics, once in a process.
pub(super) fn describe_once() {
    static DESCRIBED: Once = Once::new();
    DESCRIBED.call_once(describe_metrics);
}

/// Counts connections that were made or accepted. `reason`: that of TCP.
pub(super) fn negotiated(role: Role, verdict: Verdict, reason: Option<ReasonCode>, count: u64) {
    let reason = reason.map_or("none", ReasonCode::label);
    metrics::counter!(NEGOTIATIONS, "side" => role.name(), "verdict" => verdict.name(), "reason" => reason)
        .increment(count);
}

/// Counts a connection that was refused.
pub(super) fn refused(role: Role, reason: ReasonCode) {
    metrics::counter!(FAILED, "side" => role.name(), "reason" => reason.label()).increment(1);
}

/// Counts connections whose peer was lost.
pub(super) fn peer_lost(is_silent: bool, count: u64) {
    metrics::counter!(LOST, "reason" => if is_silent { "silent" } else { "left" }).increment(count);
}

/// The number of open connections.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// Something that is published at most once a second, and when it was last.
struct Refreshed {
    last: Mutex<Option<Instant>>,
    publish: fn(),
}

static MEMORY: Refreshed = Refreshed { last: Mutex::new(None), publish: publish_memory };
static FILES: Refreshed = Refreshed { last: Mutex::new(None), publish: publish_descriptors };

impl Refreshed {
    const PERIOD: Duration = Duration::from_secs(1);

    fn refresh(&self, now: Instant) {
        let mut last = lock(&self.last);
        if last.is_none_or(|last| now.saturating_duration_since(last) >= Self::PERIOD) {
            *last = Some(now);
            drop(last);
            (self.publish)();
        }
    }
}

/// Publishes the gauges of the process, at most once a second. Makes system calls, so a thread that carries
/// messages calls [`refresh_memory`] instead.
pub(super) fn refresh() {
    let now = Instant::now();
    MEMORY.refresh(now);
    FILES.refresh(now);
}

/// Publishes the gauges of memory, at most once a second.
pub(super) fn refresh_memory(now: Instant) {
    MEMORY.refresh(now);
}

/// Publishes the gauges of the process now.
fn publish() {
    publish_memory();
    publish_descriptors();
}

fn publish_memory() {
    static LABELS: LazyLock<[String; 2]> = LazyLock::new(|| [VERSIONS, SOFT_VERSIONS].map(span));
    let [hello, soft] = &*LABELS;
    let ibverbs = if cfg!(feature = "ibverbs") { "yes" } else { "no" };
    metrics::gauge!(
        BUILD_INFO,
        "version" => env!("CARGO_PKG_VERSION"),
        "hello" => hello.as_str(),
        "soft" => soft.as_str(),
        "ibverbs" => ibverbs
    )
    .set(1.0);
    if let Some((used, limit)) = provider::budget_in_use() {
        metrics::gauge!(REGISTERED).set(used as f64);
        metrics::gauge!(REGISTERED_LIMIT).set(limit as f64);
    }
    if let Some([used, limit, landing]) = held() {
        metrics::gauge!(HELD).set(used as f64);
        metrics::gauge!(HELD_LIMIT).set(limit as f64);
        metrics::gauge!(LANDING).set(landing as f64);
    }
}

fn publish_descriptors() {
    if let Some(open) = descriptors() {
        metrics::gauge!(DESCRIPTORS).set(open as f64);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    metrics::gauge!(DESCRIPTORS_LIMIT).set(limit.map_or(f64::INFINITY, |limit| limit as f64));
}

/// Returns the number of open file descriptors. Linux 6.2 and later tell it as the length of the directory.
fn descriptors() -> Option<u64> {
    const FOLDER: &str = "/proc/self/fd";
    match std::fs::metadata(FOLDER).ok()?.len() {
        // The list has the descriptor by which it is read.
        0 => Some(std::fs::read_dir(FOLDER).ok()?.count().saturating_sub(1) as u64),
        open => Some(open),
    }
}

/// Returns versions as a label: `3-4`, or `5`.
fn span(versions: Versions) -> String {
    let Versions { oldest, newest } = versions;
    if oldest == newest { newest.to_string() } else { format!("{oldest}-{newest}") }
}

/// An open connection in its gauge, until this is dropped.
#[derive(Debug)]
pub(super) struct OpenConnection {
    role: Role,
    kind: &'static str,
    /// The gauge that counts the connection. Another recorder may have come meanwhile.
    gauge: Mutex<Gauge>,
    /// Who waits for the end of the connection sees this end.
    held: OnceLock<watch::Receiver<()>>,
}

impl OpenConnection {
    pub(super) fn new(role: Role, verdict: Verdict, is_native: bool) -> Arc<Self> {
        let kind = if is_native { "native" } else { "http2" };
        let gauge = Self::count(role, verdict.name(), kind);
        OPEN.fetch_add(1, Ordering::Relaxed);
        refresh();
        Arc::new(Self { role, kind, gauge: Mutex::new(gauge), held: OnceLock::new() })
    }

    /// Keeps `held` until the connection has ended.
    pub(super) fn hold(&self, held: watch::Receiver<()>) {
        let _ = self.held.set(held);
    }

    /// Counts a connection. Returns the gauge that counts it.
    fn count(role: Role, transport: &'static str, kind: &'static str) -> Gauge {
        let gauge =
            metrics::gauge!(CONNECTIONS, "side" => role.name(), "transport" => transport, "kind" => kind);
        gauge.increment(1.0);
        gauge
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        lock(&self.gauge).decrement(1.0);
        OPEN.fetch_sub(1, Ordering::Relaxed);
        publish_if_last();
    }
}

/// The open connection for its handle, which may outlive it.
#[derive(Debug)]
pub(super) struct OpenHandle(pub(super) Weak<OpenConnection>);

impl OpenHandle {
    /// Keeps `held` until the connection has ended.
    pub(super) fn hold(&self, held: watch::Receiver<()>) {
        if let Some(opened) = self.0.upgrade() {
            opened.hold(held);
        }
    }

    /// Notes that calls over the connection stay in this process.
    pub(super) fn stays_in_process(&self) {
        let Some(opened) = self.0.upgrade() else { return };
        let gauge = OpenConnection::count(opened.role, "in_process", opened.kind);
        let before = std::mem::replace(&mut *lock(&opened.gauge), gauge);
        before.decrement(1.0);
    }
}

/// The memory of a connection is free when its handle is gone, too. So handles have this behind the connection.
impl Drop for OpenHandle {
    fn drop(&mut self) {
        publish_if_last();
    }
}

/// Publishes the gauges of the process: now if no connection is left that would do so later.
fn publish_if_last() {
    if OPEN.load(Ordering::Relaxed) == 0 { publish() } else { refresh() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::Meters;

    /// An exporter that is installed later counts the connections that begin later.
    #[test]
    fn a_connection_from_before_the_exporter_does_not_count_at_its_end() {
        let open = || OpenConnection::new(Role::Client, Verdict::Rdma, true);
        let [before, moved] = [open(), open()];
        let meters = Meters::default();
        let count = |transport| meters.sum(CONNECTIONS, &[("transport", transport)]);
        meters.within(|| {
            let later = open();
            let stays = |opened| OpenHandle(Arc::downgrade(opened)).stays_in_process();
            stays(&moved);
            assert_eq!(["rdma", "in_process"].map(count), [1.0, 1.0]);
            drop(before);
            stays(&later);
            assert_eq!(["rdma", "in_process"].map(count), [0.0, 2.0]);
            drop([later, moved]);
            assert_eq!(["rdma", "in_process"].map(count), [0.0; 2]);
        });
    }
}
