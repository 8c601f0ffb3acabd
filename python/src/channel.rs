//! Channels, their methods, and calls with one request and one response that a thread waits for.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::header::{CONTENT_TYPE, TE};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri, Version};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};
use tonic_rdma::{EndpointState, RdmaChannel, RdmaConnectInfo, RdmaError};
use tower_service::Service;

use crate::call::{self, Call, Outcome, Source};
use crate::completions::{Callback, Completions, Value};
use crate::connection::Connection;
use crate::framing::{Encoding, Messages};
use crate::metadata;
use crate::outcome::End;
use crate::runtime::{after, duration, runtime, sleep_until, wait};

/// How often a wait for a state looks at it.
const STATES: Duration = Duration::from_millis(5);

/// The shortest time between two dials that calls have asked for.
const DIALS: Duration = Duration::from_millis(100);
/// The time between two dials of a call that waits for a server.
const WAITING_DIALS: Duration = Duration::from_secs(1);

/// The states of a channel, by gRPC's numbers.
const IDLE: i32 = 0;
const CONNECTING: i32 = 1;
const READY: i32 = 2;
const TRANSIENT_FAILURE: i32 = 3;
const SHUTDOWN: i32 = 4;

/// A channel of the library, which stays connected, and dials again by a back-off of up to 10 s.
#[derive(Debug)]
struct Connecting {
    channel: RdmaChannel,
    since: Instant,
}

/// What the calls of a channel share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Or why the target can't be one. Calls fail then, as those to a name that is not known.
    endpoints: Result<Vec<Endpoint>, String>,
    /// A call, or the application, has asked for a connection.
    asked: AtomicBool,
    /// Made when the first call needs it, because it connects.
    connecting: Mutex<Option<Connecting>>,
    pub(crate) closed: CancellationToken,
    tls: bool,
    max_send: usize,
    max_receive: usize,
}

impl Shared {
    fn connecting(&self) -> MutexGuard<'_, Option<Connecting>> {
        self.connecting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the channel, which connects now if it is new. Call this within the runtime.
    fn channel(&self) -> Result<RdmaChannel, Status> {
        self.asked.store(true, Ordering::Relaxed);
        let endpoints = self.endpoints.as_ref().map_err(|why| Status::unavailable(why.as_str()))?;
        let mut connecting = self.connecting();
        if self.closed.is_cancelled() {
            return Err(Status::cancelled("Channel closed!"));
        }
        let made = connecting.get_or_insert_with(|| Connecting {
            channel: RdmaChannel::balance(endpoints.iter().cloned()).connect_lazy(),
            since: Instant::now(),
        });
        Ok(made.channel.clone())
    }

    /// Has the next call dial at once, if all endpoints are down and the channel has dialled for longer than
    /// `least` before `now`: what a call found may be the failure of a dial that is seconds old. Returns whether
    /// it will.
    fn dials_again(&self, now: Instant, least: Duration) -> bool {
        let is_down = self.state() == TRANSIENT_FAILURE;
        let old =
            self.connecting().take_if(|made| is_down && now.saturating_duration_since(made.since) > least);
        old.is_some()
    }

    fn state(&self) -> i32 {
        if self.closed.is_cancelled() {
            return SHUTDOWN;
        }
        if self.endpoints.is_err() && self.asked.load(Ordering::Relaxed) {
            return TRANSIENT_FAILURE;
        }
        let Some(channel) = self.connecting().as_ref().map(|made| made.channel.clone()) else { return IDLE };
        let states = channel.endpoints().into_iter().map(|endpoint| match endpoint.state {
            EndpointState::Up(_) => READY,
            EndpointState::Connecting => CONNECTING,
            _ => TRANSIENT_FAILURE,
        });
        // The best of all endpoints counts: READY, then CONNECTING.
        states
            .min_by_key(|state| {
                [READY, CONNECTING, TRANSIENT_FAILURE].iter().position(|known| known == state)
            })
            .unwrap_or(IDLE)
    }

    async fn state_other_than(&self, last: i32) -> i32 {
        loop {
            let state = self.state();
            if state != last {
                return state;
            }
            tokio::select! {
                () = self.closed.cancelled() => {}
                () = tokio::time::sleep(STATES) => {}
            }
        }
    }

    /// Sends a request. If all endpoints are down, dials first. With `wait_for_ready`, goes on until an endpoint
    /// has begun with the call. Returns the response's headers and messages.
    pub(crate) async fn begin(
        &self,
        request: Request<Source>,
        wait_for_ready: bool,
    ) -> Result<(http::response::Parts, Messages), Status> {
        let now = Instant::now();
        loop {
            let mut channel = self.channel();
            while wait_for_ready && self.state() != READY && !self.closed.is_cancelled() {
                tokio::time::sleep(STATES).await;
                if self.dials_again(Instant::now(), WAITING_DIALS) {
                    channel = self.channel();
                }
            }
            let begun = Arc::<AtomicBool>::default();
            let body = request.body().body(&begun);
            let body = body.ok_or_else(|| Status::unavailable("the server has not begun with the call"))?;
            match channel?.call(request.clone().map(|_| body)).await {
                Ok(response) => {
                    request.body().has_begun();
                    let (head, body) = response.into_parts();
                    let messages = Messages::new(&head.headers, body, self.max_receive, false)?;
                    return Ok((head, messages));
                }
                Err(status) if begun.load(Ordering::Acquire) && !has_not_begun(&status) => {
                    return Err(status);
                }
                Err(_) if wait_for_ready => tokio::time::sleep(STATES).await,
                // At most once: a channel that this call has made is not older than the call.
                Err(_) if self.dials_again(now, DIALS) => {}
                Err(status) => return Err(status),
            }
        }
    }

    /// Makes a call with one request and one response.
    async fn unary(&self, start: Start) -> End {
        tokio::select! {
            biased;
            end = call::unary(self, start.request, start.wait_for_ready, |_| {}) => end,
            // The library ends a call that is late; it does not see a call that waits to be READY.
            () = sleep_until(start.deadline.filter(|_| start.wait_for_ready)) => call::late(),
            () = self.closed.cancelled() => call::closed(),
        }
    }
}

/// PEM of the roots, of the key, and of the certificates.
type Tls = (Option<PyBackedBytes>, Option<PyBackedBytes>, Option<PyBackedBytes>);

/// What the endpoints of a channel have in common.
struct Settings<'a> {
    tls: Option<&'a Tls>,
    authority: Option<&'a str>,
    agent: &'a str,
    keepalive: Option<(f64, f64)>,
}

impl Settings<'_> {
    /// Returns the endpoint of `address`, or why there can't be one.
    ///
    /// # Errors
    /// A setting can't be used.
    fn endpoint(&self, address: &str) -> PyResult<Result<Endpoint, String>> {
        let wrong = |error: &dyn std::fmt::Display| {
            PyValueError::new_err(format!("the channel to {address:?}: {error}"))
        };
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let mut endpoint = match Endpoint::from_shared(format!("{scheme}://{address}")) {
            Ok(endpoint) => endpoint,
            Err(error) => {
                return Ok(Err(format!("the name {address:?} can't be resolved: {}", causes(&error))));
            }
        };
        endpoint = endpoint.user_agent(self.agent).map_err(|error| wrong(&error))?;
        if let Some(authority) = self.authority {
            let origin = format!("{scheme}://{authority}").parse::<Uri>().map_err(|error| wrong(&error))?;
            endpoint = endpoint.origin(origin);
        }
        if let Some((interval, timeout)) = self.keepalive
            && let (Some(interval), Some(timeout)) =
                (duration("keepalive", Some(interval))?, duration("keepalive", Some(timeout))?)
        {
            endpoint = endpoint.http2_keep_alive_interval(interval).keep_alive_timeout(timeout);
        }
        if let Some((roots, key, chain)) = self.tls {
            let roots = roots.as_ref().ok_or_else(|| wrong(&"TLS needs the root certificates"))?;
            let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(roots));
            if let (Some(key), Some(chain)) = (key, chain) {
                config = config.identity(Identity::from_pem(chain, key));
            }
            if let Some(authority) = self.authority {
                let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
                config = config.domain_name(host);
            }
            endpoint = endpoint.tls_config(config).map_err(|error| wrong(&causes(&error)))?;
        }
        Ok(Ok(endpoint))
    }
}

/// A channel. It connects when the first call, or `state(True)`, needs it.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct Channel {
    shared: Arc<Shared>,
}

#[pymethods]
impl Channel {
    #[new]
    #[pyo3(signature = (
        addresses, *, tls = None, authority = None, user_agent = None, max_send = -1, max_receive = 4 << 20, keepalive = None, unusable = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments")]
    fn new(
        addresses: Vec<String>,
        tls: Option<Tls>,
        authority: Option<&str>,
        user_agent: Option<&str>,
        max_send: i64,
        max_receive: i64,
        keepalive: Option<(f64, f64)>,
        unusable: Option<String>,
    ) -> PyResult<Self> {
        if addresses.is_empty() && unusable.is_none() {
            return Err(PyValueError::new_err("a channel needs an address"));
        }
        let agent = match user_agent {
            Some(agent) => format!("{agent} {AGENT}"),
            None => AGENT.to_owned(),
        };
        let settings = Settings { tls: tls.as_ref(), authority, agent: &agent, keepalive };
        let endpoints = match unusable {
            Some(why) => Err(why),
            None => addresses
                .iter()
                .map(|address| settings.endpoint(address))
                .collect::<PyResult<Result<Vec<_>, _>>>()?,
        };
        let shared = Shared {
            endpoints,
            asked: AtomicBool::new(false),
            connecting: Mutex::default(),
            closed: CancellationToken::new(),
            tls: tls.is_some(),
            max_send: limit(max_send),
            max_receive: limit(max_receive),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    fn method(&self, path: &str) -> PyResult<Method> {
        let invalid = |error: &dyn std::fmt::Display| {
            PyValueError::new_err(format!("the method {path:?} can't be called: {error}"))
        };
        // A name without a slash is a method that no server has.
        let slash = if path.starts_with('/') { "" } else { "/" };
        let path: PathAndQuery = format!("{slash}{path}").parse().map_err(|error| invalid(&error))?;
        let mut parts = http::uri::Parts::default();
        parts.path_and_query = Some(path);
        let uri = Uri::from_parts(parts).map_err(|error| invalid(&error))?;
        Ok(Method { shared: Arc::clone(&self.shared), uri, last: Mutex::default() })
    }

    /// Returns the state. Begins to connect then, if asked to.
    fn state(&self, connect: bool) -> PyResult<i32> {
        let state = self.shared.state();
        if connect && state == IDLE {
            let _inside = runtime()?.enter();
            // A name that can't be resolved shows in the state.
            let _ = self.shared.channel();
        }
        Ok(state)
    }

    #[pyo3(signature = (last, timeout = None))]
    fn wait_for_state_change(&self, py: Python<'_>, last: i32, timeout: Option<f64>) -> PyResult<i32> {
        let deadline = after(duration("timeout", timeout)?);
        wait(py, async {
            tokio::select! {
                state = self.shared.state_other_than(last) => state,
                () = sleep_until(deadline) => last,
            }
        })
    }

    fn wait_for_state_change_then(
        &self,
        completions: &Completions,
        callback: Py<PyAny>,
        last: i32,
    ) -> PyResult<Waiting> {
        let shared = Arc::clone(&self.shared);
        let changed = async move { shared.state_other_than(last).await };
        Waiting::begin(Callback::new(completions, callback), changed)
    }

    fn connection(&self) -> Option<Connection> {
        Some(Connection::new(&self.shared.info()?, self.shared.tls))
    }

    /// Ends the calls in flight. Later calls fail.
    fn close(&self) {
        self.shared.closed.cancel();
        // The connections end with the last call.
        let channel = self.shared.connecting().take();
        drop(channel);
    }
}

/// A wait that goes on until it is cancelled.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct Waiting {
    token: CancellationToken,
}

impl Waiting {
    /// Completes `callback` with the result of `future`, unless the wait is cancelled before.
    pub(crate) fn begin(
        callback: Callback,
        future: impl Future<Output: Value + 'static> + Send + 'static,
    ) -> PyResult<Self> {
        let token = CancellationToken::new();
        let cancelled = token.clone();
        runtime()?.spawn(async move {
            tokio::select! {
                value = future => callback.complete(value),
                () = cancelled.cancelled() => {}
            }
        });
        Ok(Self { token })
    }
}

#[pymethods]
impl Waiting {
    fn cancel(&self) {
        self.token.cancel();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.token.cancel();
    }
}

/// Returns whether no server has begun with a call that failed with `status`.
fn has_not_begun(status: &Status) -> bool {
    let error = status.source().and_then(|source| source.downcast_ref::<RdmaError>());
    error.is_some_and(RdmaError::may_resend)
}

/// What clients call themselves.
const AGENT: &str = concat!("tonic-rdma-python/", env!("CARGO_PKG_VERSION"));

/// Returns a limit of bytes; a negative number is no limit.
pub(crate) fn limit(bytes: i64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Returns an error with its sources.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// One method of one channel.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct Method {
    shared: Arc<Shared>,
    uri: Uri,
    /// The time-out of the last call, as a header. Most calls of a method have the same.
    last: Mutex<Option<(Duration, HeaderValue)>>,
}

/// A call that can begin.
pub(crate) struct Start {
    pub(crate) request: Request<Source>,
    pub(crate) wait_for_ready: bool,
    pub(crate) deadline: Option<Instant>,
}

impl Method {
    fn start(
        &self,
        source: Source,
        timeout: Option<f64>,
        metadata: Option<&Bound<'_, PyAny>>,
        wait_for_ready: bool,
        encoding: Option<Encoding>,
    ) -> PyResult<Start> {
        if self.shared.closed.is_cancelled() {
            return Err(PyValueError::new_err("Cannot invoke RPC on closed channel!"));
        }
        let timeout = duration("timeout", timeout)?;
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(ACCEPT_ENCODING, Encoding::ACCEPTED);
        if let Some(encoding) = encoding {
            headers.insert(ENCODING, encoding.name());
        }
        if let Some(timeout) = timeout {
            headers.insert(TIMEOUT, self.timeout(timeout));
        }
        metadata::add(&mut headers, metadata)?;
        let mut request = Request::new(source);
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = headers;
        Ok(Start { request, wait_for_ready, deadline: after(timeout) })
    }

    fn timeout(&self, timeout: Duration) -> HeaderValue {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((known, header)) if *known == timeout => header.clone(),
            _ => {
                let header = timeout_header(timeout);
                *last = Some((timeout, header.clone()));
                header
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "those of the call")]
    fn wait_unary(
        &self,
        py: Python<'_>,
        request: PyBackedBytes,
        timeout: Option<f64>,
        metadata: Option<&Bound<'_, PyAny>>,
        wait_for_ready: bool,
        compression: i32,
    ) -> PyResult<End> {
        let encoding = Encoding::of_number(compression);
        let source = match call::frames(py, request, encoding, self.shared.max_send) {
            Ok(frames) => Source::Whole(frames),
            Err(status) => return Ok(End::of_status(&status, HeaderMap::new())),
        };
        let start = self.start(source, timeout, metadata, wait_for_ready, encoding)?;
        wait(py, self.shared.unary(start))
    }
}

const TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");

/// Returns a time as the header has it: at most eight digits and a unit (gRPC over HTTP/2, "Requests").
fn timeout_header(timeout: Duration) -> HeaderValue {
    const MOST: u128 = 99_999_999;
    let (nanoseconds, seconds) = (timeout.as_nanos(), u128::from(timeout.as_secs()));
    let units = [
        (nanoseconds, 'n'),
        (nanoseconds / 1_000, 'u'),
        (nanoseconds / 1_000_000, 'm'),
        (seconds, 'S'),
        (seconds / 60, 'M'),
    ];
    let fits = units.into_iter().find(|(value, _)| *value <= MOST);
    let (value, unit) = fits.unwrap_or(((seconds / 3600).min(MOST), 'H'));
    HeaderValue::try_from(format!("{value}{unit}")).unwrap_or_else(|_| HeaderValue::from_static("99999999H"))
}

#[pymethods]
impl Method {
    /// Makes a call with one request and one response, and waits for its end. Returns the response if the call
    /// succeeded.
    fn unary(
        &self,
        py: Python<'_>,
        request: PyBackedBytes,
        timeout: Option<f64>,
        metadata: Option<&Bound<'_, PyAny>>,
        wait_for_ready: bool,
        compression: i32,
    ) -> PyResult<Py<PyAny>> {
        let end = self.wait_unary(py, request, timeout, metadata, wait_for_ready, compression)?;
        match &end.response {
            Some(response) if end.code == Code::Ok as i32 => Ok(response.to_python(py)?.into_any().unbind()),
            _ => Ok(Outcome::new(py, Arc::new(end))?.into_any()),
        }
    }

    /// As `unary`. Returns the outcome, also of a call that succeeded.
    fn unary_with_call(
        &self,
        py: Python<'_>,
        request: PyBackedBytes,
        timeout: Option<f64>,
        metadata: Option<&Bound<'_, PyAny>>,
        wait_for_ready: bool,
        compression: i32,
    ) -> PyResult<Py<Outcome>> {
        let end = self.wait_unary(py, request, timeout, metadata, wait_for_ready, compression)?;
        Outcome::new(py, Arc::new(end))
    }

    /// Begins a call, which goes on by itself. Without `request`, the requests come by `Call.send`.
    #[pyo3(name = "start")]
    #[allow(clippy::too_many_arguments, reason = "those of the call")]
    fn begin(
        &self,
        py: Python<'_>,
        request: Option<PyBackedBytes>,
        unary_response: bool,
        timeout: Option<f64>,
        metadata: Option<&Bound<'_, PyAny>>,
        wait_for_ready: bool,
        compression: i32,
    ) -> PyResult<Call> {
        let encoding = Encoding::of_number(compression);
        let (source, requests) = match request {
            Some(request) => match call::frames(py, request, encoding, self.shared.max_send) {
                Ok(frames) => (Source::Whole(frames), None),
                Err(status) => return Ok(Call::failed(&status)),
            },
            None => {
                let (requests, source) = call::requests(encoding, self.shared.max_send, wait_for_ready);
                (source, Some(requests))
            }
        };
        let start = self.start(source, timeout, metadata, wait_for_ready, encoding)?;
        Call::spawn(py, runtime()?, Arc::clone(&self.shared), start, requests, unary_response)
    }
}

impl Shared {
    /// What carries the calls now.
    pub(crate) fn info(&self) -> Option<RdmaConnectInfo> {
        self.connecting().as_ref()?.channel.last_connection()
    }
}

/// The error of something that is used after its end.
pub(crate) fn ended(what: &str) -> PyErr {
    PyRuntimeError::new_err(what.to_owned())
}
