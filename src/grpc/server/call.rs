//! A call, from its arrival to its end, with the body of its request, and statuses as they stand in headers
//! and trailers.
//!
//! ```text
//!  Waiting ── the service is ready ──▶ Running ── response ──▶ Responding ── trailers ──▶ Done
//!     └──────── panic, deadline, reset by the client: the handler is dropped ───────────────▲
//! ```

use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use tokio::time::Sleep;
use tonic::body::Body;
use tonic::{Code, Status};
use tower_service::Service;

use super::BoxError;
use super::routes::{Boxed, GrpcService, boxed};
use crate::grpc::landed::Presenter;
use crate::grpc::outgoing::Outgoing;
use crate::grpc::session::{Part, ResetCode, Stream};
use crate::grpc::times::CallTimer;

/// Most frames of a response that one poll sends.
const FRAMES: usize = 64;

/// A call. It is polled in place first, and becomes a task if it waits.
pub(super) struct Call<S: Service<Request<Body>>> {
    stream: Arc<Stream>,
    state: CallState<S>,
    limit: Option<CallDeadline>,
    /// The headers of the response were sent, or wait in [`PendingResponse`].
    answered: bool,
    /// A whole response is to be sent as soon as it is queued. Then this becomes false.
    pub(super) drives: bool,
    /// The time of the call, if it is to be known.
    pub(super) timer: Option<CallTimer>,
}

enum CallState<S: Service<Request<Body>>> {
    Waiting(S, Request<Body>),
    Running(Boxed<Result<S::Response, S::Error>>),
    Responding(Body, Outgoing, Option<PendingResponse>),
    Done,
}

/// The start of a response: its headers, and small messages. It waits for the trailers, to be queued with
/// them, or until the body has nothing more for now.
struct PendingResponse {
    head: HeaderMap,
    data: Option<Bytes>,
}

/// The deadline of a call.
struct CallDeadline {
    timeout: Duration,
    at: Instant,
    /// Made when the call waits.
    sleep: Option<Pin<Box<Sleep>>>,
}

// Nothing in it is pinned in place: the service's future has a box of its own.
impl<S: Service<Request<Body>>> Unpin for Call<S> {}

impl<S: GrpcService> Call<S> {
    pub(super) fn new(
        stream: Arc<Stream>,
        service: S,
        request: Request<Body>,
        timeout: Option<Duration>,
    ) -> Self {
        let limit = timeout.and_then(|timeout| {
            // A time beyond the clock's range is no limit.
            Some(CallDeadline { timeout, at: Instant::now().checked_add(timeout)?, sleep: None })
        });
        let (state, timer) = (CallState::Waiting(service, request), stream.timer());
        Self { stream, state, limit, answered: false, drives: false, timer }
    }

    /// Polls the call where it was found. Returns whether the call waits, so that it has to go on as a task.
    /// What it has to send is queued. `now` is the time, if it is known. Also returns the time of a poll of the
    /// completion queue, which is not the handler's time.
    pub(super) fn poll_in_place(&mut self, now: Option<Instant>) -> (bool, Duration) {
        match (&mut self.timer, now) {
            (Some(timer), Some(now)) => timer.runs(|| now),
            (Some(timer), None) => timer.runs_where_received(),
            (None, _) => {}
        }
        let mut context = Context::from_waker(Waker::noop());
        if self.guarded(&mut context).is_ready() {
            return (false, Duration::ZERO);
        }
        // A request that the CPU reads from the client's memory is there already.
        let Some(poll_time) = self.stream.poll_for_landing() else { return (true, Duration::ZERO) };
        (self.guarded(&mut context).is_pending(), poll_time)
    }

    /// Notes the status of the call, if it is timed.
    fn ends_with(&mut self, trailers: &HeaderMap) {
        if let Some(timer) = &mut self.timer {
            timer.set_code_of(trailers);
        }
    }

    /// Carries the call on, and catches panics of the handler.
    fn guarded(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // After a panic, only the stream of the call is used, and the stream has locks of its own.
        // Both callers drive the session afterwards.
        let session = Arc::clone(&self.stream.session);
        let later = session.drives_later();
        let stepped = catch_unwind(AssertUnwindSafe(|| self.step(context)));
        drop(later);
        stepped.unwrap_or_else(|_| {
            tracing::debug!("a handler of a native call panicked");
            self.fail(&Status::unknown("the handler of the call panicked"));
            Poll::Ready(())
        })
    }

    fn step(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            match &mut self.state {
                CallState::Waiting(service, _) => {
                    let result = ready!(service.poll_ready(context)).map_err(Into::into);
                    match (result, mem::replace(&mut self.state, CallState::Done)) {
                        (Ok(()), CallState::Waiting(mut service, request)) => {
                            self.state = CallState::Running(boxed(service.call(request)));
                        }
                        (Err(error), _) => return self.refuse(error),
                        (Ok(()), _) => return Poll::Ready(()),
                    }
                }
                CallState::Running(future) => match ready!(future.as_mut().poll(context)) {
                    Ok(response) => self.answer(response),
                    Err(error) => return self.refuse(error.into()),
                },
                CallState::Responding(..) => return self.respond(context),
                CallState::Done => return Poll::Ready(()),
            }
        }
    }

    /// Begins the response. Its headers are sent with what the body has at once.
    fn answer(&mut self, response: Response<S::ResponseBody>) {
        let (parts, body) = response.into_parts();
        let body = Body::new(body);
        if parts.status != StatusCode::OK && !parts.headers.contains_key(STATUS) {
            let mut trailers = parts.headers;
            trailers.extend(trailers_of(&status_of_http(parts.status)));
            self.finish(trailers);
        } else if body.is_end_stream() {
            self.finish(parts.headers);
        } else {
            let pending = PendingResponse { head: parts.headers, data: None };
            self.answered = true;
            let outgoing = Outgoing::recorded(self.stream.session.times.clone());
            self.state = CallState::Responding(body, outgoing, Some(pending));
        }
    }

    /// Sends the body of the response.
    fn respond(&mut self, context: &mut Context<'_>) -> Poll<()> {
        for _ in 0..FRAMES {
            let CallState::Responding(body, outgoing, pending) = &mut self.state else {
                return Poll::Ready(());
            };
            if pending.is_none() || self.stream.session.has_much_to_send() {
                match self.stream.poll_send_ready(context) {
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(_)) => {
                        // The client has reset the call, or the connection has ended.
                        self.state = CallState::Done;
                        return Poll::Ready(());
                    }
                    Poll::Pending => {
                        self.begin_response();
                        return Poll::Pending;
                    }
                }
            }
            let mut next = Pin::new(body).poll_frame(context);
            if let Some(start) = pending {
                match &mut next {
                    Poll::Ready(Some(Ok(frame))) => match frame.data_mut() {
                        Some(data) if start.data.is_none() && outgoing.is_small(data) => {
                            outgoing.record(data);
                            start.data = Some(std::mem::take(data));
                            continue;
                        }
                        Some(_) => self.begin_response(),
                        // The trailers go with the start.
                        None => {}
                    },
                    Poll::Ready(Some(Err(_)) | None) | Poll::Pending => self.begin_response(),
                }
            }
            let CallState::Responding(_, outgoing, _) = &mut self.state else { return Poll::Ready(()) };
            let Poll::Ready(next) = next else {
                outgoing.flush(&*self.stream, false);
                return Poll::Pending;
            };
            match next {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => outgoing.send(&*self.stream, data, false),
                    Err(frame) => {
                        outgoing.flush(&*self.stream, false);
                        self.finish(frame.into_trailers().unwrap_or_default());
                        return Poll::Ready(());
                    }
                },
                Some(Err(status)) => {
                    self.fail(&status);
                    return Poll::Ready(());
                }
                None => {
                    outgoing.flush(&*self.stream, false);
                    self.ends_with(&HeaderMap::new());
                    self.state = CallState::Done;
                    self.stream.end();
                    return Poll::Ready(());
                }
            }
        }
        // Other tasks run first.
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Queues the start of the response, if it waits.
    fn begin_response(&mut self) {
        if let CallState::Responding(_, _, pending) = &mut self.state
            && let Some(pending) = pending.take()
        {
            self.stream.send_response(pending.head, pending.data, None, false);
        }
    }

    /// Ends a call whose service returned an error instead of a response. Errors that hold a status become
    /// this status, as with tonic.
    fn refuse(&mut self, error: BoxError) -> Poll<()> {
        match Status::try_from_error(error) {
            Ok(status) => self.fail(&status),
            Err(error) => {
                tracing::debug!(error = %error, "the service of a native call failed");
                if let Some(timer) = &mut self.timer {
                    timer.set_code(Code::Internal);
                }
                self.state = CallState::Done;
                self.stream.reset(ResetCode::Internal);
            }
        }
        Poll::Ready(())
    }

    /// Ends the call with a status of this server's own.
    fn fail(&mut self, status: &Status) {
        let mut trailers = trailers_of(status);
        if !self.answered {
            let kind = http::HeaderValue::from_static("application/grpc");
            trailers.insert(http::header::CONTENT_TYPE, kind);
        }
        self.finish(trailers);
    }

    /// Sends the trailers, and drops the handler. Without a body the response is headers alone, which have
    /// the status.
    fn finish(&mut self, trailers: HeaderMap) {
        self.ends_with(&trailers);
        if let CallState::Responding(_, _, Some(pending)) = mem::replace(&mut self.state, CallState::Done) {
            let drives = mem::take(&mut self.drives);
            self.stream.send_response(pending.head, pending.data, Some(trailers), drives);
        } else if self.answered {
            self.stream.send_trailers(trailers);
        } else {
            self.stream.send_headers(trailers);
            self.stream.end();
        }
    }
}

impl<S: GrpcService> Future for Call<S> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.stream.poll_reset(context).is_ready() {
            self.state = CallState::Done;
            return Poll::Ready(());
        }
        if let Some(timer) = &mut self.timer {
            timer.runs(Instant::now);
        }
        let mut polled = self.guarded(context);
        if polled.is_pending() && self.limit.as_mut().is_some_and(|limit| limit.poll(context).is_ready()) {
            let timeout = self.limit.take().map(|limit| limit.timeout).unwrap_or_default();
            self.fail(&Status::deadline_exceeded(format!("the call took longer than {timeout:?}")));
            polled = Poll::Ready(());
        }
        self.stream.drive();
        polled
    }
}

impl CallDeadline {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let at = self.at;
        self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at.into()))).as_mut().poll(context)
    }
}

/// What the client sends after the headers: messages with their prefixes, as the client sent them, or stubs
/// of landed messages.
#[derive(Debug)]
pub(super) struct RequestBody {
    stream: Arc<Stream>,
    presenter: Presenter,
    /// The status of a call that ended early, until the next poll.
    failed: Option<Status>,
}

impl RequestBody {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, presenter: Presenter::default(), failed: None }
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some(status) = this.failed.take() {
            return Poll::Ready(Some(Err(status)));
        }
        let part = match ready!(this.stream.poll_part(context)) {
            Some(Ok(part)) => part,
            Some(Err(fault)) => {
                // tonic takes CANCELLED of a request for its end, so a handler would take a request that was
                // cut short for complete. At the next poll of the call the handler is dropped. A task that
                // the handler started with the body gets the status then: CANCELLED if the client cancelled
                // the call, as over HTTP/2.
                this.failed = Some(fault.into());
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            None => return Poll::Ready(None),
        };
        Poll::Ready(Some(Ok(match part {
            Part::Data(bytes) => Frame::data(bytes),
            Part::Message(message) => Frame::data(this.presenter.present(message)),
            Part::Trailers(trailers) => Frame::trailers(trailers),
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.failed.is_none() && self.stream.is_end()
    }
}

/// The field that holds the code of a call's status.
pub(super) const STATUS: &str = "grpc-status";
/// Returns the trailers for a status.
pub(super) fn trailers_of(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(3);
    // tonic refuses no status of ours. If it did, the code alone says enough.
    if status.add_header(&mut trailers).is_err() {
        trailers.clear();
        trailers.insert(STATUS, HeaderValue::from(status.code() as i32));
    }
    trailers
}

/// Returns the status for a response with this status of HTTP and without a status of gRPC. A native response
/// has no status of HTTP, so the server does what a client does over HTTP/2
/// (grpc/doc/http-grpc-status-mapping.md).
pub fn status_of_http(status: StatusCode) -> Status {
    let code = match status {
        StatusCode::BAD_REQUEST => Code::Internal,
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::Unimplemented,
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Code::Unavailable,
        _ => Code::Unknown,
    };
    Status::new(code, format!("grpc-status header missing, mapped from HTTP status code {}", status.as_u16()))
}

#[cfg(test)]
mod status_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_status_of_http_becomes_one_of_grpc() {
        assert_eq!(status_of_http(StatusCode::NOT_FOUND).code(), Code::Unimplemented);
        assert_eq!(status_of_http(StatusCode::SERVICE_UNAVAILABLE).code(), Code::Unavailable);
        assert_eq!(status_of_http(StatusCode::IM_A_TEAPOT).code(), Code::Unknown);
        let trailers = trailers_of(&status_of_http(StatusCode::UNAUTHORIZED));
        assert_eq!(Status::from_header_map(&trailers).unwrap().code(), Code::Unauthenticated);
    }
}
