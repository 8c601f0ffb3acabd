//! Calls at the client that go on by themselves: of futures, streams and event loops.

use std::error::Error;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body::Frame;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};
use tokio::runtime::Runtime;
use tokio::sync::{SetOnce, TryAcquireError, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::{Code, Status};

use crate::channel::{Shared, Start, causes};
use crate::completions::{Callback, Completions, Value};
use crate::connection;
use crate::framing::{Encoding, Frames, Message, WholeBody};
use crate::metadata;
use crate::outcome::End;
use crate::room::Room;
use crate::runtime::{after, duration, sleep_until, unless_forked, wait};

/// How a call ended.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct Outcome {
    end: Arc<End>,
    #[pyo3(get)]
    response: Option<Py<PyBytes>>,
}

impl Outcome {
    pub(crate) fn new(py: Python<'_>, end: Arc<End>) -> PyResult<Py<Self>> {
        let response = end.response.as_ref().map(|response| response.to_python(py)).transpose()?;
        Py::new(py, Self { end, response: response.map(Bound::unbind) })
    }
}

impl Value for Arc<End> {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(Outcome::new(py, *self)?.into_any())
    }
}

#[pymethods]
impl Outcome {
    #[getter]
    fn code(&self) -> i32 {
        self.end.code
    }

    #[getter]
    fn details(&self) -> &str {
        &self.end.details
    }

    #[getter]
    fn initial_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        metadata::to_python(py, &self.end.initial)
    }

    #[getter]
    fn trailing_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        metadata::to_python(py, &self.end.trailing)
    }

    fn __repr__(&self) -> String {
        format!("<Outcome {:?}: {}>", Code::from_i32(self.end.code), self.end.details)
    }
}

/// The end of a call whose channel was closed.
pub(crate) fn closed() -> End {
    End::of_status(&Status::cancelled("Channel closed!"), HeaderMap::new())
}

/// The end of a call that is late.
pub(crate) fn late() -> End {
    End::of_status(&Status::deadline_exceeded("Deadline Exceeded"), HeaderMap::new())
}

/// The end of a call that failed before its trailers.
fn failed(status: &Status, initial: HeaderMap) -> End {
    match (status.code(), status.source()) {
        (Code::DeadlineExceeded, _) => End { initial, ..late() },
        // tonic has UNKNOWN, or hyper's CANCELLED, for a connection that has ended. gRPC's clients have UNAVAILABLE.
        (Code::Unknown, Some(source)) => End::of_status(&Status::unavailable(causes(source)), initial),
        (Code::Cancelled, Some(source)) if is_of_hyper(source) => {
            End::of_status(&Status::unavailable(causes(source)), initial)
        }
        _ => End::of_status(status, initial),
    }
}

/// Returns whether hyper has dropped the call with its connection.
fn is_of_hyper(source: &(dyn Error + 'static)) -> bool {
    let of_hyper =
        source.downcast_ref::<hyper::Error>().is_some_and(|error| error.is_canceled() || error.is_closed());
    of_hyper || source.source().is_some_and(is_of_hyper)
}

/// Makes a call with one response.
pub(crate) async fn unary(
    shared: &Shared,
    request: Request<Source>,
    wait_for_ready: bool,
    begun: impl FnOnce(&HeaderMap),
) -> End {
    let (head, mut messages) = match shared.begin(request, wait_for_ready).await {
        Ok(begun) => begun,
        Err(status) => return failed(&status, HeaderMap::new()),
    };
    let mut initial = head.headers;
    begun(&initial);
    let received = async {
        let first = messages.next().await?;
        let second = if first.is_some() { messages.next().await? } else { None };
        Ok((first, second.is_some()))
    };
    match received.await {
        Err(status) => failed(&status, initial),
        Ok((first, more)) => {
            let trailing = messages.trailers.take().unwrap_or_else(|| trailers_only(&mut initial));
            let end = End::of_trailers(head.status, initial, trailing);
            match first {
                _ if end.code != Code::Ok as i32 => end,
                Some(_) if more => end.wrong_count("Too many responses for a call with one response."),
                None => end.wrong_count("Missing a response of a call with one response."),
                response => End { response, ..end },
            }
        }
    }
}

/// Returns the headers of a response that has no trailers: they are its trailers (gRPC over HTTP/2,
/// "Trailers-Only"), if they have the status.
fn trailers_only(headers: &mut HeaderMap) -> HeaderMap {
    if headers.contains_key("grpc-status") { std::mem::take(headers) } else { HeaderMap::new() }
}

/// Makes the frames of a message. Compresses it without the interpreter's lock.
pub(crate) fn frames(
    py: Python<'_>,
    message: PyBackedBytes,
    encoding: Option<Encoding>,
    limit: usize,
) -> Result<Frames, Status> {
    match encoding {
        Some(_) => py.detach(|| Frames::new(message, encoding, limit)),
        None => Frames::new(message, None, limit),
    }
}

/// Where the requests of a call come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Whole(Frames),
    Stream(Arc<Mutex<Stream>>),
}

impl Source {
    /// Makes the body of a request; `None` if a part of what a body before it has sent is not there any more.
    /// The body sets `begun` when it is polled, because only then its call is sent.
    pub(crate) fn body(&self, begun: &Arc<AtomicBool>) -> Option<Body> {
        let begun = Some(Arc::clone(begun));
        match self {
            Self::Whole(frames) => {
                Some(Body::new(WholeBody { frames: frames.clone(), trailers: None, begun }))
            }
            Self::Stream(shared) => {
                let mut stream = lock(shared);
                if matches!(stream.sent, Sent::Lost) {
                    return None;
                }
                stream.bodies += 1;
                let (stream, number) = (Arc::clone(shared), stream.bodies);
                Some(Body::new(StreamBody { stream, number, next: 0, frames: Frames::default(), begun }))
            }
        }
    }

    /// Notes that the server has begun with the call: no further body will be asked for.
    pub(crate) fn has_begun(&self) {
        if let Self::Stream(stream) = self {
            lock(stream).sent = Sent::Lost;
        }
    }
}

/// The sender of the requests of one call.
#[derive(Debug)]
pub(crate) struct Requests {
    sender: mpsc::UnboundedSender<Frames>,
    room: Room,
    /// Requests that wait for room.
    waiting: usize,
    /// The application has sent its last request. The stream ends when none waits.
    closing: bool,
    ended: Arc<AtomicBool>,
    encoding: Option<Encoding>,
    limit: usize,
}

/// Makes the source of requests that come one by one. `keep`: those that were sent are kept until the server
/// has begun with the call, so that they can be sent again.
pub(crate) fn requests(encoding: Option<Encoding>, limit: usize, keep: bool) -> (Requests, Source) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let ended = Arc::<AtomicBool>::default();
    let sent = if keep { Sent::Kept(Vec::new(), 0) } else { Sent::Nothing };
    let stream = Stream { receiver, ended: Arc::clone(&ended), sent, bodies: 0 };
    let requests = Requests { sender, room: Room::new(), waiting: 0, closing: false, ended, encoding, limit };
    (requests, Source::Stream(Arc::new(Mutex::new(stream))))
}

/// The requests that bodies have sent.
#[derive(Debug)]
enum Sent {
    /// None so far, and none will be kept.
    Nothing,
    /// All of them, with their bytes.
    Kept(Vec<Frames>, usize),
    Lost,
}

impl Sent {
    /// The most bytes that are kept.
    const MOST: usize = 256 << 10;

    fn note(&mut self, frames: &Frames) {
        match self {
            Self::Kept(kept, bytes) if *bytes + frames.length() <= Self::MOST => {
                *bytes += frames.length();
                kept.push(frames.clone());
            }
            _ => *self = Self::Lost,
        }
    }
}

/// Requests that come one by one.
#[derive(Debug)]
pub(crate) struct Stream {
    receiver: mpsc::UnboundedReceiver<Frames>,
    /// The application has ended the requests. Otherwise they are cut short by the end of the call.
    ended: Arc<AtomicBool>,
    sent: Sent,
    /// How many bodies were made. Only the last one may take requests.
    bodies: usize,
}

/// A body of requests that come one by one.
#[derive(Debug)]
struct StreamBody {
    stream: Arc<Mutex<Stream>>,
    number: usize,
    /// How many of the requests that were kept this body has taken.
    next: usize,
    frames: Frames,
    begun: Option<Arc<AtomicBool>>,
}

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { stream, number, next, frames, begun } = &mut *self;
        if let Some(begun) = begun.take() {
            begun.store(true, Ordering::Release);
        }
        loop {
            if let Some(data) = frames.next() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            let stream = &mut *lock(stream);
            if *number != stream.bodies {
                return Poll::Ready(Some(Err(Status::cancelled("the call was sent again"))));
            }
            if let Sent::Kept(kept, _) = &stream.sent
                && let Some(again) = kept.get(*next)
            {
                *frames = again.clone();
                *next += 1;
                continue;
            }
            match ready!(stream.receiver.poll_recv(context)) {
                Some(received) => {
                    stream.sent.note(&received);
                    *next += 1;
                    *frames = received;
                }
                None if stream.ended.load(Ordering::Acquire) => return Poll::Ready(None),
                // The server must not take what it has for all requests.
                None => return Poll::Ready(Some(Err(Status::cancelled("the call has ended")))),
            }
        }
    }
}

/// What a call's task and its handles share.
#[derive(Debug)]
struct State {
    shared: Arc<Shared>,
    requests: Mutex<Option<Requests>>,
    responses: tokio::sync::Mutex<mpsc::Receiver<Message>>,
    initial: SetOnce<HeaderMap>,
    end: SetOnce<Arc<End>>,
    cancelled: CancellationToken,
    /// What is to be run at the end.
    callbacks: Mutex<Vec<Callback>>,
}

impl State {
    /// Carries the call out.
    async fn run(&self, start: Start, responses: mpsc::Sender<Message>, unary_response: bool) -> End {
        let Start { request, wait_for_ready, deadline } = start;
        let exchange = async {
            match unary_response {
                true => unary(&self.shared, request, wait_for_ready, |headers| self.begun(headers)).await,
                false => self.stream(request, wait_for_ready, responses).await,
            }
        };
        tokio::select! {
            biased;
            end = exchange => end,
            // `cancel` has noted the end.
            () = self.cancelled.cancelled() => closed(),
            // The library does not see a call that waits to be READY, or whose responses are not taken.
            () = sleep_until(deadline) => End { initial: self.initial.get().cloned().unwrap_or_default(), ..late() },
            () = self.shared.closed.cancelled() => self.ended_early(&Status::cancelled("Channel closed!")),
        }
    }

    fn ended_early(&self, status: &Status) -> End {
        End::of_status(status, self.initial.get().cloned().unwrap_or_default())
    }

    async fn stream(
        &self,
        request: Request<Source>,
        wait_for_ready: bool,
        responses: mpsc::Sender<Message>,
    ) -> End {
        let (head, mut messages) = match self.shared.begin(request, wait_for_ready).await {
            Ok(begun) => begun,
            Err(status) => return failed(&status, HeaderMap::new()),
        };
        let mut initial = head.headers;
        self.begun(&initial);
        loop {
            match messages.next().await {
                Ok(Some(message)) => {
                    // A handle that was dropped takes none, and has cancelled the call.
                    let _ = responses.send(message).await;
                }
                Ok(None) => {
                    let trailing = messages.trailers.take().unwrap_or_else(|| trailers_only(&mut initial));
                    return End::of_trailers(head.status, initial, trailing);
                }
                Err(status) => return failed(&status, initial),
            }
        }
    }

    async fn send(&self, frames: Frames) -> bool {
        let Some(sending) = Sending::begin(self) else { return false };
        let room = sending.room.take(frames.length()).await;
        room.is_some_and(|room| self.queue(frames.within(room)))
    }

    /// Ends the requests, after those that wait for room.
    fn close_send(&self) {
        let mut requests = lock(&self.requests);
        if let Some(open) = requests.as_mut() {
            open.closing = true;
            if open.waiting == 0 {
                open.ended.store(true, Ordering::Release);
                // Dropping the sender wakes the body.
                *requests = None;
            }
        }
    }

    /// Notes the headers of the response, unless they are all that it has.
    fn begun(&self, headers: &HeaderMap) {
        if !headers.contains_key("grpc-status") {
            let _ = self.initial.set(headers.clone());
        }
    }

    fn queue(&self, frames: Frames) -> bool {
        lock(&self.requests).as_ref().is_some_and(|requests| requests.sender.send(frames).is_ok())
    }

    async fn receive(&self) -> Option<Message> {
        tokio::select! {
            biased;
            () = self.cancelled.cancelled() => None,
            received = async { self.responses.lock().await.recv().await } => received,
        }
    }

    /// Waits for the headers of the response, or for the end of the call.
    async fn initial(&self) -> HeaderMap {
        tokio::select! {
            biased;
            initial = self.initial.wait() => initial.clone(),
            end = self.end.wait() => end.initial.clone(),
        }
    }

    /// Notes the end. Returns whether there was none before.
    fn finish(&self, end: End) -> bool {
        let end = Arc::new(end);
        if self.end.set(Arc::clone(&end)).is_err() {
            return false;
        }
        if let Some(requests) = lock(&self.requests).take() {
            requests.room.close();
        }
        let callbacks = std::mem::take(&mut *lock(&self.callbacks));
        callbacks.into_iter().for_each(|callback| callback.complete(Arc::clone(&end)));
        true
    }

    /// Runs `callback` at the end.
    fn at_end(&self, callback: Callback) {
        let mut callbacks = lock(&self.callbacks);
        match self.end.get() {
            // Under the lock: `finish` sets the end first, and takes the callbacks then.
            Some(end) => {
                drop(callbacks);
                callback.complete(Arc::clone(end));
            }
            None => callbacks.push(callback),
        }
    }

    /// Ends the call. Returns whether it was under way.
    fn cancel(&self, status: &Status) -> bool {
        let was_under_way = self.finish(self.ended_early(status));
        if was_under_way {
            self.cancelled.cancel();
        }
        was_under_way
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends a call whose task is dropped, or panics.
struct Unfinished<'a>(&'a State);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if self.0.end.get().is_none() {
            self.0.finish(self.0.ended_early(&Status::internal("the task of the call has ended")));
        }
    }
}

/// A request that waits for room.
struct Sending<'a> {
    state: &'a State,
    room: Room,
}

impl<'a> Sending<'a> {
    /// Returns `None` if the call takes no further requests.
    fn begin(state: &'a State) -> Option<Self> {
        let mut requests = lock(&state.requests);
        let open = requests.as_mut().filter(|open| !open.closing)?;
        open.waiting += 1;
        Some(Self { state, room: open.room.clone() })
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        let closing = lock(&self.state.requests).as_mut().is_some_and(|open| {
            open.waiting -= 1;
            open.closing
        });
        if closing {
            self.state.close_send();
        }
    }
}

/// A call under way. Dropping it cancels the call.
#[pyclass(frozen, module = "tonic_rdma._native")]
#[derive(Debug)]
pub(crate) struct Call {
    state: Option<Arc<State>>,
    /// The end of a call that never began.
    failed: Option<Arc<End>>,
}

impl Call {
    /// A call that could not begin.
    pub(crate) fn failed(status: &Status) -> Self {
        Self { state: None, failed: Some(Arc::new(End::of_status(status, HeaderMap::new()))) }
    }

    /// Begins a call on the runtime.
    pub(crate) fn spawn(
        py: Python<'_>,
        runtime: &Runtime,
        shared: Arc<Shared>,
        start: Start,
        requests: Option<Requests>,
        unary_response: bool,
    ) -> PyResult<Self> {
        let (responses, receiver) = mpsc::channel(1);
        let state = Arc::new(State {
            shared,
            requests: Mutex::new(requests),
            responses: tokio::sync::Mutex::new(receiver),
            initial: SetOnce::new(),
            end: SetOnce::new(),
            cancelled: CancellationToken::new(),
            callbacks: Mutex::default(),
        });
        let task = Arc::clone(&state);
        let mut carried_out = Box::pin(async move {
            let unfinished = Unfinished(&task);
            let end = task.run(start, responses, unary_response).await;
            unfinished.0.finish(end);
        });
        // The request goes out here, without a wait for a thread of the runtime.
        let done = py.detach(|| {
            let _inside = runtime.enter();
            carried_out.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        });
        if !done {
            runtime.spawn(carried_out);
        }
        Ok(Self { state: Some(state), failed: None })
    }

    /// Makes the frames of a request. A message that is too large ends the call.
    fn frames(&self, py: Python<'_>, message: PyBackedBytes) -> Option<Frames> {
        let state = self.state.as_ref()?;
        let settings = lock(&state.requests).as_ref().map(|open| (open.encoding, open.limit));
        let (encoding, limit) = settings?;
        let made = frames(py, message, encoding, limit);
        made.map_err(|status| state.cancel(&status)).ok()
    }
}

#[pymethods]
impl Call {
    fn send(&self, py: Python<'_>, message: PyBackedBytes) -> PyResult<bool> {
        match (self.frames(py, message), &self.state) {
            (Some(frames), Some(state)) => wait(py, state.send(frames)),
            _ => Ok(false),
        }
    }

    fn send_then(
        &self,
        py: Python<'_>,
        completions: &Completions,
        callback: Py<PyAny>,
        message: PyBackedBytes,
    ) -> PyResult<()> {
        let callback = Callback::new(completions, callback);
        match (self.frames(py, message), &self.state) {
            (Some(frames), Some(state)) => {
                let state = Arc::clone(state);
                callback.complete_with(async move { state.send(frames).await })
            }
            _ => {
                callback.complete(false);
                Ok(())
            }
        }
    }

    /// Sends without a wait. Returns whether it was sent; `None` if there is no room.
    fn send_now(&self, py: Python<'_>, message: PyBackedBytes) -> Option<bool> {
        let Some(state) = &self.state else { return Some(false) };
        let room = {
            let requests = lock(&state.requests);
            requests.as_ref().filter(|open| !open.closing).map(|open| open.room.take_now(message.len()))
        };
        match room {
            Some(Ok(room)) => {
                let frames = self.frames(py, message);
                Some(frames.is_some_and(|frames| state.queue(frames.within(room))))
            }
            Some(Err(TryAcquireError::NoPermits)) => None,
            Some(Err(TryAcquireError::Closed)) | None => Some(false),
        }
    }

    /// Returns the next message if it is there.
    fn receive_now<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let Some(state) = self.state.as_ref().filter(|state| !state.cancelled.is_cancelled()) else {
            return Ok(None);
        };
        let received = state.responses.try_lock().ok().and_then(|mut responses| responses.try_recv().ok());
        received.map(|message| message.to_python(py)).transpose()
    }

    /// Ends the requests.
    fn close_send(&self) {
        if let Some(state) = &self.state {
            state.close_send();
        }
    }

    fn receive<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let Some(state) = &self.state else { return Ok(None) };
        wait(py, state.receive())?.map(|message| message.to_python(py)).transpose()
    }

    fn receive_then(&self, completions: &Completions, callback: Py<PyAny>) -> PyResult<()> {
        let callback = Callback::new(completions, callback);
        match &self.state {
            Some(state) => {
                let state = Arc::clone(state);
                callback.complete_with(async move { state.receive().await })
            }
            None => {
                callback.complete(None::<Message>);
                Ok(())
            }
        }
    }

    fn initial_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        match &self.state {
            Some(state) => metadata::to_python(py, &wait(py, state.initial())?),
            None => Ok(PyTuple::empty(py)),
        }
    }

    fn initial_metadata_then(&self, completions: &Completions, callback: Py<PyAny>) -> PyResult<()> {
        let callback = Callback::new(completions, callback);
        match &self.state {
            Some(state) => {
                let state = Arc::clone(state);
                callback.complete_with(async move { state.initial().await })
            }
            None => {
                callback.complete(HeaderMap::new());
                Ok(())
            }
        }
    }

    #[pyo3(signature = (timeout = None))]
    fn outcome(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<Outcome>>> {
        let Some(state) = &self.state else { return self.outcome_now(py) };
        if state.end.get().is_none() {
            let deadline = after(duration("timeout", timeout)?);
            wait(py, async {
                tokio::select! {
                    biased;
                    _ = state.end.wait() => {}
                    () = sleep_until(deadline) => {}
                }
            })?;
        }
        self.outcome_now(py)
    }

    fn outcome_then(&self, completions: &Completions, callback: Py<PyAny>) {
        let callback = Callback::new(completions, callback);
        match (&self.state, &self.failed) {
            (Some(state), _) => state.at_end(callback),
            (None, Some(end)) => callback.complete(Arc::clone(end)),
            (None, None) => {}
        }
    }

    fn outcome_now(&self, py: Python<'_>) -> PyResult<Option<Py<Outcome>>> {
        let end = self.failed.as_ref().or_else(|| self.state.as_ref()?.end.get());
        end.map(|end| Outcome::new(py, Arc::clone(end))).transpose()
    }

    #[pyo3(signature = (code = 1, details = "Cancelled"))]
    fn cancel(&self, code: i32, details: &str) -> bool {
        self.state.as_ref().is_some_and(|state| state.cancel(&Status::new(Code::from_i32(code), details)))
    }

    fn peer(&self) -> Option<String> {
        let info = self.state.as_ref()?.shared.info()?;
        Some(connection::peer(info.peer_addr()))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(state) = self.state.take().and_then(unless_forked) {
            state.cancel(&Status::cancelled("the call was dropped"));
        }
    }
}
