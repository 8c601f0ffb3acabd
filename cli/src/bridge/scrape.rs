//! Metrics and health over HTTP.

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use super::serve::Phase;

/// Requests served at one time. Further clients wait for the accept.
const CONNECTIONS: usize = 16;
/// Time for one connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// Answers requests until the task ends.
pub(crate) async fn serve(listener: TcpListener, handle: PrometheusHandle, phase: watch::Receiver<Phase>) {
    /// The pause after an error such as too many open files.
    const PAUSE: Duration = Duration::from_millis(200);
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "metrics can't be served"),
    };
    let room = Arc::new(Semaphore::new(CONNECTIONS));
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
        let (handle, phase) = (handle.clone(), phase.clone());
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let answer = answer(&request, &handle, *phase.borrow());
                async move { Ok::<_, Infallible>(answer) }
            });
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(PATIENCE).keep_alive(false);
            let served = timeout(PATIENCE, http.serve_connection(TokioIo::new(stream), service)).await;
            tracing::trace!(?served, "a request for metrics");
            drop(permit);
        });
    }
}

/// Runs the upkeep of histograms regularly. Without a scraper they would grow for ever.
pub(crate) async fn upkeep(handle: PrometheusHandle) {
    const EVERY: Duration = Duration::from_secs(5);
    loop {
        sleep(EVERY).await;
        handle.run_upkeep();
    }
}

fn answer(request: &Request<Incoming>, handle: &PrometheusHandle, phase: Phase) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        refused.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    match request.uri().path() {
        "/metrics" => text(StatusCode::OK, handle.render()),
        "/healthz" => text(StatusCode::OK, "alive\n"),
        "/ready" if phase == Phase::Running => text(StatusCode::OK, "ready\n"),
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
