//! Servers: their ports, and the calls that wait for a thread of Python.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::SetOnce;
use tokio::sync::oneshot;
use tokio_util::either::Either;
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tonic::body::Body;
use tonic::codegen::BoxFuture;
use tonic::server::NamedService as _;
use tonic::transport::{Certificate, Identity, Server as Http2, ServerTlsConfig};
use tonic::{Code, Status};
use tonic_rdma::{CallConfig, RdmaIncoming, RdmaRoutes, RdmaServer};
use tonic_rdma_tensor::buffer::BufferService;
use tower::ServiceExt as _;
use tower::layer::layer_fn;
use tower_service::Service;

use crate::channel::{Waiting, causes, limit};
use crate::completions::{Callback, Completions, Results};
use crate::runtime::{after, duration, runtime, sleep_until, unless_forked, wait};
use crate::server_call::{self, ServerCall};

/// Calls that wait for threads.
#[derive(Debug, Default)]
struct Arrivals {
    calls: VecDeque<ServerCall>,
    /// Threads that wait. The latest one gets the next call, because its memory is still in the cache.
    waiting: Vec<oneshot::Sender<ServerCall>>,
    /// An event loop gets all calls.
    receiver: Option<(Arc<Results>, Arc<Py<PyAny>>)>,
    stopped: bool,
}

/// What the calls of a server share.
#[derive(Debug)]
pub(crate) struct Shared {
    arrivals: Mutex<Arrivals>,
    /// Calls whose response has not ended.
    in_flight: AtomicUsize,
    /// Calls whose handler has not finished.
    held: AtomicUsize,
    max_concurrent: usize,
    pub(crate) max_send: usize,
    pub(crate) max_receive: usize,
    /// No further calls are taken.
    stopping: CancellationToken,
    /// The calls in flight end.
    pub(crate) cancelled: CancellationToken,
    stopped: SetOnce<()>,
    /// Why it could not go on.
    failed: OnceLock<String>,
    /// Has the calls for buffers.
    buffers: OnceLock<BufferService>,
}

impl Shared {
    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the service of the pool, if it has the method at `path`.
    fn buffers(&self, path: &str) -> Option<BufferService> {
        let buffers = self.buffers.get()?;
        let method = path.strip_prefix('/')?.strip_prefix(BufferService::NAME)?;
        method.starts_with('/').then(|| buffers.clone())
    }

    /// Takes a call in, unless there are too many.
    pub(crate) fn enter(self: &Arc<Self>) -> Result<(InFlight, Slot), Status> {
        if self.stopping.is_cancelled() {
            return Err(Status::unavailable("the server is shutting down"));
        }
        let slot = Slot(Arc::clone(self));
        if self.held.fetch_add(1, Ordering::Relaxed) >= self.max_concurrent {
            return Err(Status::resource_exhausted("Concurrent RPC limit exceeded!"));
        }
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        Ok((InFlight(Arc::clone(self)), slot))
    }

    /// Gives `call` to who waits for one.
    pub(crate) fn arrive(&self, mut call: ServerCall) {
        let mut arrivals = self.arrivals();
        if let Some((results, callback)) = arrivals.receiver.clone() {
            drop(arrivals);
            results.push(callback, Box::new(call));
            return;
        }
        if arrivals.stopped {
            drop(arrivals);
            return;
        }
        while let Some(thread) = arrivals.waiting.pop() {
            match thread.send(call) {
                Ok(()) => return,
                // The thread has stopped waiting.
                Err(back) => call = back,
            }
        }
        arrivals.calls.push_back(call);
    }

    /// Returns the next call; `None` at `deadline`, and once the server has stopped.
    async fn next(&self, deadline: Option<Instant>) -> Option<ServerCall> {
        let mut call = {
            let mut arrivals = self.arrivals();
            if let Some(call) = arrivals.calls.pop_front() {
                return Some(call);
            }
            if arrivals.stopped {
                return None;
            }
            let (sender, call) = oneshot::channel();
            arrivals.waiting.push(sender);
            call
        };
        tokio::select! {
            biased;
            call = &mut call => call.ok(),
            () = sleep_until(deadline) => {
                // A call that came at the same moment is this thread's.
                call.close();
                let call = call.try_recv().ok();
                self.arrivals().waiting.retain(|thread| !thread.is_closed());
                call
            }
        }
    }
}

/// What a call takes of `max_concurrent`, until its handler has finished.
#[derive(Debug)]
pub(crate) struct Slot(Arc<Shared>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A call whose response has not ended. The end of the server waits for it.
#[derive(Debug)]
pub(crate) struct InFlight(pub(crate) Arc<Shared>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Release);
    }
}

/// The service of all methods.
#[derive(Clone, Debug)]
struct Dispatch(Arc<Shared>);

impl Service<Request<Body>> for Dispatch {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = Either<server_call::Responding, BoxFuture<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self.0.buffers(request.uri().path()) {
            Some(buffers) => {
                self.0.in_flight.fetch_add(1, Ordering::Relaxed);
                let in_flight = InFlight(Arc::clone(&self.0));
                Either::Right(Box::pin(async move {
                    let mut stopped = Box::pin(in_flight.0.cancelled.clone().cancelled_owned());
                    let response = tokio::select! {
                        response = buffers.oneshot(request) => response?,
                        () = &mut stopped => return Ok(shut_down().into_http()),
                    };
                    Ok(response.map(|body| {
                        let over = in_flight.0.cancelled.child_token();
                        let body = Arc::new(Mutex::new(Some((body, in_flight))));
                        let (held, ended) = (Arc::clone(&body), over.clone());
                        // A reader that takes nothing keeps no bytes when the server has ended.
                        tokio::spawn(async move {
                            ended.cancelled().await;
                            let held = held.lock().unwrap_or_else(PoisonError::into_inner).take();
                            drop(held);
                        });
                        Body::new(Fetched { body, stopped, _over: over.drop_guard() })
                    }))
                }))
            }
            None => Either::Left(server_call::Responding::new(&self.0, request)),
        }
    }
}

/// The response of a call for buffers, for which the end of the server waits as for other calls.
struct Fetched {
    /// `None` when the server has ended.
    body: Arc<Mutex<Option<(Body, InFlight)>>>,
    stopped: Pin<Box<WaitForCancellationFutureOwned>>,
    _over: DropGuard,
}

impl Fetched {
    fn body(&self) -> MutexGuard<'_, Option<(Body, InFlight)>> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl http_body::Body for Fetched {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.stopped.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err(shut_down())));
        }
        match &mut *self.body() {
            Some((body, _)) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(Some(Err(shut_down()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body().as_ref().is_some_and(|(body, _)| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.body().as_ref().map_or_else(SizeHint::default, |(body, _)| body.size_hint())
    }
}

/// A port that the server listens on.
#[derive(Debug)]
struct Port {
    listener: TcpListener,
    tls: Option<ServerTlsConfig>,
}

/// A server of bytes. Handlers are Python's.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct Server {
    shared: Arc<Shared>,
    /// `None` once it has started or stopped.
    ports: Mutex<Option<Vec<Port>>>,
    /// Interval and time-out of HTTP/2's pings.
    keepalive: Option<(Duration, Duration)>,
    reuse_port: bool,
}

/// The longest time between the cancellation of calls and the end of the connections.
const LINGER: Duration = Duration::from_secs(1);

/// The longest time that clients have for what they have not read when the last call has ended.
const DELIVERY: Duration = Duration::from_secs(5);

/// Bytes of requests over HTTP/2 that a connection may have unread.
const CONNECTION_WINDOW: u32 = 16 << 20;

impl Server {
    fn ports(&self) -> MutexGuard<'_, Option<Vec<Port>>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn listen(&self, address: &str) -> std::io::Result<TcpListener> {
        let mut last = None;
        for address in tokio::net::lookup_host(address).await? {
            match self.listen_on(address) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| std::io::Error::other("the name has no address")))
    }

    fn listen_on(&self, address: SocketAddr) -> std::io::Result<TcpListener> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.set_reuseport(self.reuse_port)?;
        socket.bind(address)?;
        socket.listen(1024)
    }

    /// Returns the URI of the first port, with the host of `address` and its port unless that is 0.
    pub(crate) fn uri(&self, address: Option<&str>) -> PyResult<String> {
        let ports = self.ports();
        let none = |reason: &str| PyValueError::new_err(format!("server: {reason}"));
        let ports = ports.as_ref().ok_or_else(|| none("it has started: make its pool before"))?;
        let port = ports.first().ok_or_else(|| none("it has no port: call add_insecure_port before"))?;
        let local = port.listener.local_addr()?;
        let scheme = if port.tls.is_some() { "https" } else { "http" };
        Ok(match address {
            Some(address) => format!("{scheme}://{}", with_port(address, local.port())),
            None if local.ip().is_unspecified() => format!("{scheme}://127.0.0.1:{}", local.port()),
            None => format!("{scheme}://{local}"),
        })
    }

    /// Gives the calls for buffers to `service`.
    pub(crate) fn serve_buffers(&self, service: BufferService) -> PyResult<()> {
        let taken = |_| PyValueError::new_err("server: it has the service of another pool");
        self.shared.buffers.set(service).map_err(taken)
    }

    /// Serves the connections of one port, until the server stops.
    fn serve(&self, port: Port) -> Result<impl Future<Output = ()> + Send + 'static, String> {
        let incoming = RdmaIncoming::builder().listen(port.listener).map_err(|error| error.to_string())?;
        // Calls that wait for a thread don't read their requests. They may leave no room for those that do.
        let mut http2 = Http2::builder().initial_connection_window_size(CONNECTION_WINDOW);
        if let Some((interval, timeout)) = self.keepalive {
            http2 = http2.http2_keepalive_interval(Some(interval)).http2_keepalive_timeout(Some(timeout));
        }
        if let Some(tls) = port.tls {
            http2 = http2.tls_config(tls).map_err(|error| causes(&error))?;
        }
        let dispatch = Dispatch(Arc::clone(&self.shared));
        // The calls in flight have their own limit of time, which `stop` gets.
        let server = RdmaServer::new()
            .http2(http2)
            .calls(CallConfig::default().shutdown_grace(Duration::from_secs(24 * 3600)))
            .layer(layer_fn(move |_: RdmaRoutes| dispatch.clone()));
        let shared = Arc::clone(&self.shared);
        Ok(async move {
            let serving = server.serve_with_incoming_shutdown(incoming, shared.stopping.cancelled());
            let given_up = async {
                shared.cancelled.cancelled().await;
                tokio::time::sleep(LINGER).await;
            };
            tokio::select! {
                served = serving => if let Err(error) = served {
                    let _ = shared.failed.set(causes(&error));
                    shared.stopping.cancel();
                },
                () = given_up => {}
            }
        })
    }
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (*, max_send = -1, max_receive = 4 << 20, max_concurrent = None, keepalive = None, reuse_port = false))]
    fn new(
        max_send: i64,
        max_receive: i64,
        max_concurrent: Option<usize>,
        keepalive: Option<(f64, f64)>,
        reuse_port: bool,
    ) -> PyResult<Self> {
        let keepalive = match keepalive {
            Some((interval, timeout)) => {
                duration("keepalive", Some(interval))?.zip(duration("keepalive", Some(timeout))?)
            }
            None => None,
        };
        let shared = Shared {
            arrivals: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            max_concurrent: max_concurrent.unwrap_or(usize::MAX),
            max_send: limit(max_send),
            max_receive: limit(max_receive),
            stopping: CancellationToken::new(),
            cancelled: CancellationToken::new(),
            stopped: SetOnce::new(),
            failed: OnceLock::new(),
            buffers: OnceLock::new(),
        };
        Ok(Self { shared: Arc::new(shared), ports: Mutex::new(Some(Vec::new())), keepalive, reuse_port })
    }

    /// Listens on `address`. Returns the port. Connections wait until `start`.
    #[pyo3(signature = (address, tls = None))]
    fn bind(
        &self,
        py: Python<'_>,
        address: &str,
        tls: Option<(PyBackedBytes, PyBackedBytes, Option<PyBackedBytes>, bool)>,
    ) -> PyResult<u16> {
        let failed = |error: &dyn std::fmt::Display| {
            PyRuntimeError::new_err(format!("Failed to bind to address {address}: {error}"))
        };
        let tls = tls.map(|(key, chain, roots, required)| {
            let config = ServerTlsConfig::new().identity(Identity::from_pem(chain, key));
            match roots {
                Some(roots) => {
                    config.client_ca_root(Certificate::from_pem(roots)).client_auth_optional(!required)
                }
                None => config,
            }
        });
        if let Some(tls) = &tls {
            // What is wrong with the certificate shows here, not when the server starts.
            Http2::builder()
                .tls_config(tls.clone())
                .map_err(|error| PyValueError::new_err(causes(&error)))?;
        }
        let listener = wait(py, self.listen(address))?.map_err(|error| failed(&error))?;
        let port = listener.local_addr().map_err(|error| failed(&error))?.port();
        match self.ports().as_mut() {
            Some(ports) => ports.push(Port { listener, tls }),
            None => return Err(failed(&"the server has started")),
        }
        Ok(port)
    }

    /// Serves the ports.
    fn start(&self) -> PyResult<()> {
        let runtime = runtime()?;
        let _inside = runtime.enter();
        let ports = self.ports().take().unwrap_or_default();
        let serving: Result<Vec<_>, _> = ports.into_iter().map(|port| self.serve(port)).collect();
        // All ports, or none.
        let serving = serving.map_err(PyRuntimeError::new_err)?;
        let serving: Vec<_> = serving.into_iter().map(|serving| runtime.spawn(serving)).collect();
        let shared = Arc::clone(&self.shared);
        runtime.spawn(async move {
            shared.stopping.cancelled().await;
            for port in serving {
                let _ = port.await;
            }
            let calls = {
                let mut arrivals = shared.arrivals();
                arrivals.stopped = true;
                (
                    std::mem::take(&mut arrivals.waiting),
                    std::mem::take(&mut arrivals.calls),
                    arrivals.receiver.take(),
                )
            };
            drop(calls);
            let _ = shared.stopped.set(());
        });
        Ok(())
    }

    /// Returns the next call; `None` after `timeout`, and once the server has stopped.
    #[pyo3(signature = (timeout = None))]
    fn next_call(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<ServerCall>> {
        let deadline = after(duration("timeout", timeout)?);
        let call = wait(py, self.shared.next(deadline))?;
        match self.shared.failed.get() {
            Some(why) if call.is_none() => Err(PyRuntimeError::new_err(format!("the server failed: {why}"))),
            _ => Ok(call),
        }
    }

    /// Gives all calls to `callback`.
    fn calls_to(&self, completions: &Completions, callback: Py<PyAny>) {
        let receiver = (completions.results(), Arc::new(callback));
        let calls = {
            let mut arrivals = self.shared.arrivals();
            arrivals.receiver = Some(receiver.clone());
            std::mem::take(&mut arrivals.calls)
        };
        calls.into_iter().for_each(|call| receiver.0.push(Arc::clone(&receiver.1), Box::new(call)));
    }

    /// Takes no further calls. Cancels those in flight after `grace`.
    fn stop(&self, grace: Option<f64>) -> PyResult<()> {
        let deadline = match grace {
            Some(_) => after(duration("grace", grace)?),
            None => Some(Instant::now()),
        };
        let runtime = runtime()?;
        self.shared.stopping.cancel();
        let never_served = self.ports().take();
        drop(never_served);
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            self.shared.cancelled.cancel();
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        runtime.spawn(async move {
            let over = async {
                while shared.in_flight.load(Ordering::Acquire) > 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let _ = tokio::time::timeout(DELIVERY, shared.stopped.wait()).await;
            };
            tokio::select! {
                () = sleep_until(deadline) => {}
                () = over => {}
            }
            shared.cancelled.cancel();
        });
        Ok(())
    }

    #[pyo3(signature = (timeout = None))]
    fn wait_stopped(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = after(duration("timeout", timeout)?);
        wait(py, async {
            tokio::select! {
                biased;
                _ = self.shared.stopped.wait() => true,
                () = sleep_until(deadline) => false,
            }
        })
    }

    fn wait_stopped_then(&self, completions: &Completions, callback: Py<PyAny>) -> PyResult<Waiting> {
        let shared = Arc::clone(&self.shared);
        let stopped = async move {
            shared.stopped.wait().await;
            true
        };
        Waiting::begin(Callback::new(completions, callback), stopped)
    }
}

impl Drop for Server {
    /// A server that is dropped ends as by `stop(None)`.
    fn drop(&mut self) {
        let ports = self.ports().take();
        if unless_forked(ports).is_some() {
            self.shared.stopping.cancel();
            self.shared.cancelled.cancel();
        }
    }
}

/// Returns `address`, with `port` in place of port 0.
pub(crate) fn with_port(address: &str, port: u16) -> String {
    match address.rsplit_once(':') {
        Some((host, "0")) => format!("{host}:{port}"),
        _ => address.to_owned(),
    }
}

/// The status of a call that the server's end cancelled.
pub(crate) fn shut_down() -> Status {
    Status::new(Code::Unavailable, "the server was stopped")
}
