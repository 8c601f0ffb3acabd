//! Metrics, whose names begin with `tonic_rdma_bridge_`, and the server of metrics and health over HTTP.

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics::{Counter, Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

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
pub(crate) enum ResetReason {
    /// The target could not be connected to.
    Dial,
    /// The client reset the connection, or the target reset it after the client's end of data. Clients that
    /// leave without reading to the end cause both kinds of reset.
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
    pub(crate) fn failed(&self, why: ResetReason) {
        let reason = match why {
            ResetReason::Dial => "dial",
            ResetReason::Reset => "reset",
            ResetReason::Broken => "broken",
            ResetReason::CutOff => "cut-off",
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
    pub(crate) fn opened(&self, client: &'static str, target: &'static str) -> OpenConnection {
        let route = Arc::clone(&self.route);
        metrics::counter!(TOTAL, "route" => Arc::clone(&route), "client" => client, "target" => target)
            .increment(1);
        let open = OpenConnection { route, client, target, since: Instant::now() };
        open.gauge().increment(1.0);
        open
    }
}

/// An open connection, counted.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    route: Arc<str>,
    client: &'static str,
    target: &'static str,
    since: Instant,
}

impl OpenConnection {
    fn gauge(&self) -> metrics::Gauge {
        metrics::gauge!(OPEN, "route" => Arc::clone(&self.route), "client" => self.client, "target" => self.target)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.gauge().decrement(1.0);
        metrics::histogram!(LIVED, "route" => Arc::clone(&self.route)).record(self.since.elapsed());
    }
}

/// Requests served at one time. Further clients wait for the accept.
const REQUESTS: usize = 16;
/// Time for one connection.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Answers requests until the task ends.
pub(crate) async fn serve_metrics(
    listener: TcpListener,
    handle: PrometheusHandle,
    ready: impl Fn() -> bool + Clone + Send + Sync + 'static,
) {
    /// The pause after an error such as too many open files.
    const PAUSE: Duration = Duration::from_millis(200);
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "metrics can't be served"),
    };
    let room = Arc::new(Semaphore::new(REQUESTS));
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "accepting a request for metrics failed");
                sleep(PAUSE).await;
                continue;
            }
        };
        let (handle, ready) = (handle.clone(), ready.clone());
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let answer = answer(&request, &handle, ready());
                async move { Ok::<_, Infallible>(answer) }
            });
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(TIMEOUT).keep_alive(false);
            let served = timeout(TIMEOUT, http.serve_connection(TokioIo::new(stream), service)).await;
            tracing::trace!(?served, "a request for metrics");
            drop(permit);
        });
    }
}

/// Runs the upkeep of histograms regularly. Without a scraper they would grow forever.
pub(crate) async fn upkeep(handle: PrometheusHandle) {
    const EVERY: Duration = Duration::from_secs(5);
    loop {
        sleep(EVERY).await;
        handle.run_upkeep();
    }
}

fn answer(request: &Request<Incoming>, handle: &PrometheusHandle, ready: bool) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        refused.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    match request.uri().path() {
        "/metrics" => text(StatusCode::OK, handle.render()),
        "/healthz" => text(StatusCode::OK, "alive\n"),
        "/ready" if ready => text(StatusCode::OK, "ready\n"),
        "/ready" => text(StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
        _ => text(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /ready\n"),
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
