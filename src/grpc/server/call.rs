//! A call, from its arrival to its end.
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
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Body as _;
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;
use tower_service::Service;

use super::error::BoxError;
use super::routes::{Boxed, GrpcService, boxed};
use super::status::{STATUS, of_http, trailers_of};
use crate::grpc::outgoing::Outgoing;
use crate::grpc::session::{ResetCode, Stream};

/// Most frames of a response that one poll sends.
const FRAMES: usize = 64;

/// A call. It is polled in place first, and becomes a task if it waits.
pub(super) struct Call<S: Service<Request<Body>>> {
    stream: Arc<Stream>,
    state: State<S>,
    limit: Option<Limit>,
    /// The head of the response was sent, or waits in [`Unsent`].
    answered: bool,
}

enum State<S: Service<Request<Body>>> {
    Waiting(S, Request<Body>),
    Running(Boxed<Result<S::Response, S::Error>>),
    Responding(Body, Outgoing, Option<Unsent>),
    Done,
}

/// The start of a response: its head, and small messages. It waits for the trailers, to be queued with them, or until the body has nothing
/// more for now.
struct Unsent {
    head: HeaderMap,
    data: Option<Bytes>,
}

impl Unsent {
    fn send(self, stream: &Stream, trailers: Option<HeaderMap>) {
        stream.send_response(self.head, self.data, trailers);
    }
}

/// The deadline of a call.
struct Limit {
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
            Some(Limit { timeout, at: Instant::now().checked_add(timeout)?, sleep: None })
        });
        Self { stream, state: State::Waiting(service, request), limit, answered: false }
    }

    /// Polls the call where it was found. Returns whether it waits: then it is to go on as a task. What it has to send is queued. Also
    /// returns the time of a look at the completion queue, which is not the handler's.
    pub(super) fn poll_in_place(&mut self) -> (bool, Duration) {
        let mut context = Context::from_waker(Waker::noop());
        if self.guarded(&mut context).is_ready() {
            return (false, Duration::ZERO);
        }
        // A request that the CPU reads from the client's memory is there already.
        let Some(looked) = self.stream.look_for_landing() else { return (true, Duration::ZERO) };
        (self.guarded(&mut context).is_pending(), looked)
    }

    /// Carries the call on, and catches panics of the handler.
    fn guarded(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // The call is not used after a panic, but for its stream, which has locks of its own.
        // Both callers drive the session afterwards.
        let session = Arc::clone(self.stream.session());
        let later = session.drives_later();
        let stepped = catch_unwind(AssertUnwindSafe(|| self.step(context)));
        drop(later);
        match stepped {
            Ok(polled) => polled,
            Err(_) => {
                tracing::debug!("a handler of a native call panicked");
                self.fail(&Status::unknown("the handler of the call panicked"));
                Poll::Ready(())
            }
        }
    }

    fn step(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            match &mut self.state {
                State::Waiting(service, _) => {
                    let result = ready!(service.poll_ready(context)).map_err(Into::into);
                    match (result, mem::replace(&mut self.state, State::Done)) {
                        (Ok(()), State::Waiting(mut service, request)) => {
                            self.state = State::Running(boxed(service.call(request)));
                        }
                        (Err(error), _) => return self.refuse(error),
                        (Ok(()), _) => return Poll::Ready(()),
                    }
                }
                State::Running(future) => match ready!(future.as_mut().poll(context)) {
                    Ok(response) => self.answer(response),
                    Err(error) => return self.refuse(error.into()),
                },
                State::Responding(..) => return self.respond(context),
                State::Done => return Poll::Ready(()),
            }
        }
    }

    /// Begins the response. Its head is sent with what the body has at once.
    fn answer(&mut self, response: Response<S::ResponseBody>) {
        let (parts, body) = response.into_parts();
        let body = Body::new(body);
        if parts.status != StatusCode::OK && !parts.headers.contains_key(STATUS) {
            let mut trailers = parts.headers;
            trailers.extend(trailers_of(&of_http(parts.status)));
            self.finish(trailers);
        } else if body.is_end_stream() {
            self.finish(parts.headers);
        } else {
            let unsent = Unsent { head: parts.headers, data: None };
            self.answered = true;
            self.state = State::Responding(body, Outgoing::default(), Some(unsent));
        }
    }

    /// Sends the body of the response.
    fn respond(&mut self, context: &mut Context<'_>) -> Poll<()> {
        for _ in 0..FRAMES {
            let State::Responding(body, outgoing, unsent) = &mut self.state else { return Poll::Ready(()) };
            if unsent.is_none() && ready!(self.stream.poll_send_ready(context)).is_err() {
                // The client has reset the call, or the connection has ended.
                self.state = State::Done;
                return Poll::Ready(());
            }
            let mut next = Pin::new(body).poll_frame(context);
            if let Some(start) = unsent {
                match &mut next {
                    Poll::Ready(Some(Ok(frame))) => match frame.data_mut() {
                        Some(data) if start.data.is_none() && outgoing.is_small(data) => {
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
            let State::Responding(_, outgoing, _) = &mut self.state else { return Poll::Ready(()) };
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
                    self.state = State::Done;
                    self.stream.end();
                    return Poll::Ready(());
                }
            }
        }
        // Others have their turn.
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Queues the start of the response, if it waits.
    fn begin_response(&mut self) {
        if let State::Responding(_, _, unsent) = &mut self.state
            && let Some(unsent) = unsent.take()
        {
            unsent.send(&self.stream, None);
        }
    }

    /// Ends a call whose service returned an error instead of a response. Errors that hold a status become this status, as with tonic.
    fn refuse(&mut self, error: BoxError) -> Poll<()> {
        match Status::try_from_error(error) {
            Ok(status) => self.fail(&status),
            Err(error) => {
                tracing::debug!(error = %error, "the service of a native call failed");
                self.state = State::Done;
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

    /// Sends the trailers, and drops the handler. Without a body the response is a head alone, which has the status.
    fn finish(&mut self, trailers: HeaderMap) {
        if let State::Responding(_, _, Some(unsent)) = mem::replace(&mut self.state, State::Done) {
            unsent.send(&self.stream, Some(trailers));
        } else if self.answered {
            self.stream.send_trailers(trailers);
        } else {
            self.stream.send_head(trailers);
            self.stream.end();
        }
    }
}

impl<S: GrpcService> Future for Call<S> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.stream.poll_reset(context).is_ready() {
            self.state = State::Done;
            return Poll::Ready(());
        }
        let mut polled = self.guarded(context);
        if polled.is_pending() && self.limit.as_mut().is_some_and(|limit| limit.poll(context).is_ready()) {
            let timeout = self.limit.take().map(|limit| limit.timeout).unwrap_or_default();
            self.fail(&Status::deadline_exceeded(format!("the call took longer than {timeout:?}")));
            polled = Poll::Ready(());
        }
        self.stream.session().drive();
        polled
    }
}

impl Limit {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let at = self.at;
        self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at.into()))).as_mut().poll(context)
    }
}
