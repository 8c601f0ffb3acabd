//! One call at a server, from its arrival to its end.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};
use tokio::sync::{SetOnce, TryAcquireError, mpsc};
use tokio::time::Sleep;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::body::Body;
use tonic::{Code, Status};
use tonic_rdma::unstable::grpc_timeout;
use tonic_rdma::{RdmaConnectInfo, RdmaRequestExt as _};

use crate::call::frames;
use crate::completions::{Callback, Completions, Value};
use crate::connection::{self, Connection};
use crate::framing::{Encoding, Frames, Message, Messages, WholeBody};
use crate::metadata;
use crate::room::Room;
use crate::runtime::{unless_forked, wait};
use crate::server::{InFlight, Shared, Slot, shut_down};

/// What a handler has its call do.
#[derive(Debug)]
enum Step {
    Initial(HeaderMap),
    Message(Frames),
    Finish(Frames, HeaderMap),
}

/// What the handle of a call and its response share.
#[derive(Debug)]
struct State {
    head: http::request::Parts,
    requests: tokio::sync::Mutex<Messages>,
    steps: Mutex<Option<mpsc::UnboundedSender<Step>>>,
    /// Room for messages of the response.
    room: Room,
    encoding: Mutex<(Option<Encoding>, bool)>,
    limit: usize,
    deadline: Option<Instant>,
    cancelled: CancellationToken,
    /// Until the handler has finished, also if the client has given the call up.
    slot: Mutex<Option<Slot>>,
    /// The headers of the response are queued, so its compression is settled.
    answered: AtomicBool,
    /// Whether the call ended before it was finished.
    done: SetOnce<bool>,
    callbacks: Mutex<Vec<AtEnd>>,
}

/// What is to be run at the end of a call.
#[derive(Debug)]
struct AtEnd {
    callback: Callback,
    /// Only if the call was cancelled.
    if_cancelled: bool,
}

impl AtEnd {
    fn run(self, cancelled: bool) {
        if cancelled || !self.if_cancelled {
            self.callback.complete(cancelled);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Reads the first message as soon as it arrives, also while the call waits for a thread: over HTTP/2 its
    /// bytes would take the window of all calls of the connection.
    fn read_ahead(&self, context: &mut Context<'_>) {
        // What holds the lock reads itself.
        if let Ok(mut requests) = self.requests.try_lock() {
            requests.read_ahead(context);
        }
    }

    fn is_active(&self) -> bool {
        self.done.get().is_none() && lock(&self.steps).is_some()
    }

    fn step(&self, step: Step) -> bool {
        self.answered.store(true, Ordering::Relaxed);
        lock(&self.steps).as_ref().is_some_and(|steps| steps.send(step).is_ok())
    }

    /// Queues the last step. Returns whether the call was under way.
    fn finish(&self, frames: Frames, trailers: HeaderMap) -> bool {
        // Before the client knows, because it may call again at once.
        lock(&self.slot).take();
        let steps = lock(&self.steps).take();
        // What waits for a cancellation waits no more.
        let unneeded: Vec<_> =
            lock(&self.callbacks).extract_if(.., |callback| callback.if_cancelled).collect();
        drop(unneeded);
        steps.is_some_and(|steps| steps.send(Step::Finish(frames, trailers)).is_ok())
    }

    fn at_end(&self, callback: AtEnd) {
        let mut callbacks = lock(&self.callbacks);
        match self.done.get() {
            Some(&cancelled) => {
                drop(callbacks);
                callback.run(cancelled);
            }
            None => callbacks.push(callback),
        }
    }

    fn end(&self, cancelled: bool) {
        if self.done.set(cancelled).is_err() {
            return;
        }
        lock(&self.steps).take();
        self.room.close();
        if let Ok(mut requests) = self.requests.try_lock() {
            requests.clear();
        }
        let callbacks = std::mem::take(&mut *lock(&self.callbacks));
        callbacks.into_iter().for_each(|callback| callback.run(cancelled));
    }

    async fn send(&self, frames: Frames) -> bool {
        let room = self.room.take(frames.length()).await;
        room.is_some_and(|room| self.step(Step::Message(frames.within(room))))
    }

    async fn receive(&self) -> Option<Message> {
        let receive = async { self.requests.lock().await.next().await };
        tokio::select! {
            biased;
            _ = self.done.wait() => None,
            received = receive => match received {
                Ok(message) => message,
                Err(status) => {
                    // The peer sees why: it may be alive, and have sent what can't be read.
                    self.finish(Frames::default(), trailers_of(&status));
                    None
                }
            },
        }
    }

    fn frames(&self, py: Python<'_>, message: PyBackedBytes) -> Result<Frames, Status> {
        let encoding = {
            let mut encoding = lock(&self.encoding);
            if std::mem::take(&mut encoding.1) { None } else { encoding.0 }
        };
        frames(py, message, encoding, self.limit)
    }

    /// The headers of the response.
    fn headers(&self, initial: HeaderMap) -> HeaderMap {
        let mut headers = initial;
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        if let (Some(encoding), _) = *lock(&self.encoding) {
            headers.insert("grpc-encoding", encoding.name());
        }
        headers
    }
}

fn trailers_of(status: &Status) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if status.add_header(&mut headers).is_err() {
        headers.insert("grpc-status", HeaderValue::from_static("13"));
    }
    headers
}

/// The response of a call.
#[derive(Debug)]
pub(crate) struct Responding {
    /// Of a call that was not taken.
    refused: Option<Status>,
    reply: Option<Reply>,
}

impl Responding {
    pub(crate) fn new(shared: &Arc<Shared>, request: Request<Body>) -> Self {
        let (head, body) = request.into_parts();
        let messages = Messages::new(&head.headers, body, shared.max_receive, true);
        let entered = shared.enter().and_then(|slot| Ok((slot, messages?)));
        let ((in_flight, slot), messages) = match entered {
            Ok(entered) => entered,
            Err(status) => return Self { refused: Some(status), reply: None },
        };
        let (sender, steps) = mpsc::unbounded_channel();
        let timeout = grpc_timeout(&head.headers);
        let state = Arc::new(State {
            head,
            requests: tokio::sync::Mutex::new(messages),
            steps: Mutex::new(Some(sender)),
            room: Room::new(),
            encoding: Mutex::default(),
            limit: shared.max_send,
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            cancelled: CancellationToken::new(),
            slot: Mutex::new(Some(slot)),
            answered: AtomicBool::new(false),
            done: SetOnce::new(),
            callbacks: Mutex::default(),
        });
        let handle = ServerCall { state: Some(Arc::clone(&state)) };
        let reply = Reply {
            state,
            steps,
            in_flight: Some(in_flight),
            watch: None,
            frames: Frames::default(),
            trailers: None,
        };
        shared.arrive(handle);
        Self { refused: None, reply: Some(reply) }
    }
}

impl Future for Responding {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(status) = self.refused.take() {
            return Poll::Ready(Ok(status.into_http()));
        }
        let Some(reply) = &mut self.reply else { return Poll::Pending };
        let step = ready!(reply.poll_step(context));
        let Some(mut reply) = self.reply.take() else { return Poll::Pending };
        let (headers, body) = match step {
            Step::Initial(headers) => (reply.state.headers(headers), Body::new(reply)),
            Step::Message(frames) => {
                reply.frames = frames;
                (reply.state.headers(HeaderMap::new()), Body::new(reply))
            }
            Step::Finish(frames, trailers) if frames.is_empty() => {
                reply.state.end(false);
                (reply.state.headers(trailers), Body::empty())
            }
            Step::Finish(frames, trailers) => {
                reply.state.end(false);
                (
                    reply.state.headers(HeaderMap::new()),
                    Body::new(WholeBody { frames, trailers: Some(trailers), begun: None }),
                )
            }
        };
        let mut response = Response::new(body);
        *response.headers_mut() = headers;
        Poll::Ready(Ok(response))
    }
}

/// What ends a call from outside its handler.
struct Watch {
    stopped: Pin<Box<WaitForCancellationFutureOwned>>,
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// The steps of a handler, as the body of the response. Dropping it before its end means that the client, or
/// the connection, has ended the call.
#[derive(Debug)]
struct Reply {
    state: Arc<State>,
    steps: mpsc::UnboundedReceiver<Step>,
    in_flight: Option<InFlight>,
    /// Made when the call waits.
    watch: Option<Watch>,
    frames: Frames,
    trailers: Option<HeaderMap>,
}

impl Reply {
    fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Step> {
        self.state.read_ahead(context);
        if self.state.cancelled.is_cancelled() {
            self.state.end(true);
            return Poll::Ready(Step::Finish(Frames::default(), trailers_of(&cancelled())));
        }
        if let Poll::Ready(step) = self.steps.poll_recv(context) {
            return Poll::Ready(step.unwrap_or_else(|| {
                Step::Finish(
                    Frames::default(),
                    trailers_of(&Status::unknown("the handler ended without a status")),
                )
            }));
        }
        let status = ready!(self.poll_watch(context));
        self.state.end(true);
        Poll::Ready(Step::Finish(Frames::default(), trailers_of(&status)))
    }

    fn poll_watch(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        let (state, in_flight) = (&self.state, &self.in_flight);
        let watch = self.watch.get_or_insert_with(|| {
            let server =
                in_flight.as_ref().map_or_else(CancellationToken::new, |call| call.0.cancelled.clone());
            Watch {
                stopped: Box::pin(server.cancelled_owned()),
                cancelled: Box::pin(state.cancelled.clone().cancelled_owned()),
                deadline: state.deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline.into()))),
            }
        });
        if watch.stopped.as_mut().poll(context).is_ready() {
            return Poll::Ready(shut_down());
        }
        if watch.cancelled.as_mut().poll(context).is_ready() {
            return Poll::Ready(cancelled());
        }
        match &mut watch.deadline {
            Some(deadline) => {
                deadline.as_mut().poll(context).map(|()| Status::deadline_exceeded("Deadline Exceeded"))
            }
            None => Poll::Pending,
        }
    }
}

impl http_body::Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if let Some(data) = self.frames.next() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if let Some(trailers) = self.trailers.take() {
                self.state.end(false);
                return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
            }
            if self.state.done.get().is_some() {
                return Poll::Ready(None);
            }
            match ready!(self.poll_step(context)) {
                // The headers were sent.
                Step::Initial(_) => {}
                Step::Message(frames) => self.frames = frames,
                Step::Finish(frames, trailers) => (self.frames, self.trailers) = (frames, Some(trailers)),
            }
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.state.end(true);
        self.in_flight.take();
    }
}

fn cancelled() -> Status {
    Status::cancelled("the handler cancelled the call")
}

/// The handle of a call. Dropping it before `finish` ends the call with UNKNOWN.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct ServerCall {
    /// There until it is dropped.
    state: Option<Arc<State>>,
}

impl Value for ServerCall {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(Py::new(py, *self)?.into_any())
    }
}

impl ServerCall {
    fn state(&self) -> PyResult<&Arc<State>> {
        self.state.as_ref().ok_or_else(|| crate::channel::ended("the call was dropped"))
    }

    fn info(&self) -> Option<&RdmaConnectInfo> {
        self.state.as_ref()?.head.extensions.connection()
    }

    /// Makes the frames of a response. A message that is too large ends the call.
    fn frames(&self, py: Python<'_>, state: &State, message: PyBackedBytes) -> Option<Frames> {
        let made = state.frames(py, message);
        made.map_err(|status| state.finish(Frames::default(), trailers_of(&status))).ok()
    }
}

#[pymethods]
impl ServerCall {
    #[getter]
    fn method(&self) -> PyResult<&str> {
        Ok(self.state()?.head.uri.path())
    }

    #[getter]
    fn host(&self) -> PyResult<String> {
        let head = &self.state()?.head;
        let host = head.uri.authority().map(|authority| authority.as_str().to_owned());
        Ok(host.or_else(|| Some(head.headers.get("host")?.to_str().ok()?.to_owned())).unwrap_or_default())
    }

    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        metadata::to_python(py, &self.state()?.head.headers)
    }

    #[getter]
    fn peer(&self) -> String {
        self.info().map(|info| connection::peer(info.peer_addr())).unwrap_or_default()
    }

    #[getter]
    fn connection(&self) -> Option<Connection> {
        let info = self.info()?;
        Some(Connection::new(info, info.is_tls()))
    }

    /// The certificates of the client, in PEM, its own first.
    #[getter]
    fn identities<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let certificates = self.state()?.head.extensions.peer_certificates();
        let certificates = certificates.iter().flat_map(|all| all.iter());
        PyTuple::new(
            py,
            certificates.map(|certificate| PyBytes::new(py, &pem(certificate))).collect::<Vec<_>>(),
        )
    }

    fn time_remaining(&self) -> PyResult<Option<f64>> {
        let left = self.state()?.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        Ok(left.map(|left| left.as_secs_f64()))
    }

    fn is_active(&self) -> PyResult<bool> {
        Ok(self.state()?.is_active())
    }

    fn receive<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        wait(py, self.state()?.receive())?.map(|message| message.to_python(py)).transpose()
    }

    /// Returns the next message if it is there.
    fn receive_now<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let state = self.state()?;
        let runtime = crate::runtime::runtime()?;
        let polled = py.detach(|| {
            let _inside = runtime.enter();
            let mut context = Context::from_waker(std::task::Waker::noop());
            match state.requests.try_lock() {
                Ok(mut requests) if state.is_active() => requests.poll_next(&mut context),
                _ => Poll::Pending,
            }
        });
        match polled {
            Poll::Ready(Ok(message)) => message.map(|message| message.to_python(py)).transpose(),
            Poll::Ready(Err(status)) => {
                state.finish(Frames::default(), trailers_of(&status));
                Ok(None)
            }
            Poll::Pending => Ok(None),
        }
    }

    fn receive_then(&self, completions: &Completions, callback: Py<PyAny>) -> PyResult<()> {
        let state = Arc::clone(self.state()?);
        Callback::new(completions, callback).complete_with(async move { state.receive().await })
    }

    /// Compresses the messages of the response, if the client can read that. Has no effect after the first
    /// message.
    fn set_compression(&self, compression: i32) -> PyResult<()> {
        let state = self.state()?;
        let encoding = Encoding::of_number(compression).filter(|encoding| {
            let accepted =
                state.head.headers.get("grpc-accept-encoding").and_then(|value| value.to_str().ok());
            let name = encoding.name();
            accepted.is_some_and(|accepted| accepted.split(',').any(|accepted| accepted.trim() == name))
        });
        if !state.answered.load(Ordering::Relaxed) {
            lock(&state.encoding).0 = encoding;
        }
        Ok(())
    }

    fn disable_next_compression(&self) -> PyResult<()> {
        lock(&self.state()?.encoding).1 = true;
        Ok(())
    }

    #[pyo3(signature = (metadata = None))]
    fn send_initial_metadata(&self, metadata: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let mut headers = HeaderMap::new();
        metadata::add(&mut headers, metadata)?;
        Ok(self.state()?.step(Step::Initial(headers)))
    }

    fn send(&self, py: Python<'_>, message: PyBackedBytes) -> PyResult<bool> {
        let state = self.state()?;
        match self.frames(py, state, message) {
            Some(frames) => wait(py, state.send(frames)),
            None => Ok(false),
        }
    }

    fn send_then(
        &self,
        py: Python<'_>,
        completions: &Completions,
        callback: Py<PyAny>,
        message: PyBackedBytes,
    ) -> PyResult<()> {
        let state = Arc::clone(self.state()?);
        let callback = Callback::new(completions, callback);
        match self.frames(py, &state, message) {
            Some(frames) => callback.complete_with(async move { state.send(frames).await }),
            None => {
                callback.complete(false);
                Ok(())
            }
        }
    }

    /// Sends without a wait. Returns whether it was sent; `None` if there is no room.
    fn send_now(&self, py: Python<'_>, message: PyBackedBytes) -> PyResult<Option<bool>> {
        let state = self.state()?;
        let room = match state.room.take_now(message.len()) {
            Ok(room) => room,
            Err(TryAcquireError::NoPermits) => return Ok(None),
            Err(TryAcquireError::Closed) => return Ok(Some(false)),
        };
        let Some(frames) = self.frames(py, state, message) else { return Ok(Some(false)) };
        Ok(Some(state.step(Step::Message(frames.within(room)))))
    }

    /// Ends the call, after `message` if there is one. Returns whether the call was under way.
    #[pyo3(signature = (message, code, details, trailing = None))]
    fn finish(
        &self,
        py: Python<'_>,
        message: Option<PyBackedBytes>,
        code: i32,
        details: &str,
        trailing: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let state = self.state()?;
        let mut status = Status::new(Code::from_i32(code), details);
        let mut frames = Frames::default();
        if let Some(message) = message {
            match state.frames(py, message) {
                Ok(made) => frames = made,
                Err(wrong) => status = wrong,
            }
        }
        let mut trailers = trailers_of(&status);
        metadata::add(&mut trailers, trailing)?;
        Ok(state.finish(frames, trailers))
    }

    fn cancel(&self) -> PyResult<()> {
        let state = self.state()?;
        if state.is_active() {
            state.cancelled.cancel();
        }
        Ok(())
    }

    fn done_then(&self, completions: &Completions, callback: Py<PyAny>) -> PyResult<()> {
        let callback = Callback::new(completions, callback);
        self.state()?.at_end(AtEnd { callback, if_cancelled: false });
        Ok(())
    }

    /// Runs `callback` only if the call is cancelled before it is finished.
    fn cancelled_then(&self, completions: &Completions, callback: Py<PyAny>) -> PyResult<()> {
        let callback = Callback::new(completions, callback);
        self.state()?.at_end(AtEnd { callback, if_cancelled: true });
        Ok(())
    }
}

impl Drop for ServerCall {
    fn drop(&mut self) {
        if let Some(state) = self.state.take().and_then(unless_forked) {
            // The response ends with UNKNOWN if the call was not finished.
            lock(&state.slot).take();
            lock(&state.steps).take();
        }
    }
}

/// Returns a certificate in PEM (RFC 7468).
fn pem(certificate: &[u8]) -> Vec<u8> {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(certificate);
    let mut pem = b"-----BEGIN CERTIFICATE-----\n".to_vec();
    for line in text.as_bytes().chunks(64) {
        pem.extend_from_slice(line);
        pem.push(b'\n');
    }
    pem.extend_from_slice(b"-----END CERTIFICATE-----\n");
    pem
}
