//! One call: when it began, what its bodies have carried, and how it ended.
//!
//! ```text
//!  CallRecord::begin ─▶ RecordedFuture ── response ──▶ RecordedBody ── trailers ──▶ ended
//!                            │ error, status in the headers   │ error, end      ▲
//!                            └────────────────────────────────┴─────────────────┤
//!                                          dropped: CANCELLED, or late          ┘
//! ```

use std::any::Any;
use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;
use tonic::body::Body;
use tonic::{Code, Status};
use tonic_rdma::unstable::{gathered_bytes, grpc_timeout, landed_length, status_of_http};

use crate::instruments::{CallAttributes, Instruments};

pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// A call. Dropping it before its end records that it was cancelled, or that it was late.
#[derive(Debug)]
pub(crate) struct CallRecord {
    instruments: Arc<Instruments>,
    attributes: CallAttributes,
    begun: Instant,
    timeout: Option<Duration>,
    /// The bytes of the request, whose body may be with another task.
    request: Arc<AtomicU64>,
    response: u64,
    ended: bool,
}

impl CallRecord {
    pub(crate) fn begin(
        instruments: &Arc<Instruments>,
        attributes: CallAttributes,
        headers: &HeaderMap,
    ) -> Self {
        instruments.begin(&attributes);
        Self {
            instruments: Arc::clone(instruments),
            attributes,
            begun: Instant::now(),
            timeout: grpc_timeout(headers),
            request: Arc::default(),
            response: 0,
            ended: false,
        }
    }

    /// Records the end of the call. Later calls have no effect.
    fn end(&mut self, code: Code) {
        if !std::mem::replace(&mut self.ended, true) {
            let request = self.request.load(Ordering::Relaxed);
            self.instruments.end(&self.attributes, code, self.begun.elapsed(), request, self.response);
        }
    }
}

impl Drop for CallRecord {
    fn drop(&mut self) {
        /// Timers are as exact as this, so a late call may be dropped a little early.
        const TICK: Duration = Duration::from_millis(1);
        let late = self.timeout.is_some_and(|timeout| self.begun.elapsed() + TICK >= timeout);
        self.end(if late { Code::DeadlineExceeded } else { Code::Cancelled });
    }
}

/// Returns the code in the headers of a response, or in its trailers.
fn code_in(headers: &HeaderMap) -> Option<Code> {
    Status::from_header_map(headers).map(|status| status.code())
}

/// Returns the code of the error of a service.
fn code_of<E: 'static>(error: &E) -> Code {
    let error = error as &dyn Any;
    let boxed = || error.downcast_ref::<BoxError>()?.downcast_ref();
    error.downcast_ref::<Status>().or_else(boxed).map_or(Code::Unknown, Status::code)
}

pin_project! {
    /// The response of a call of a [`RecordedService`](crate::RecordedService).
    #[derive(Debug)]
    pub struct RecordedFuture<F> {
        #[pin]
        inner: F,
        call: Option<CallRecord>,
    }
}

impl<F> RecordedFuture<F> {
    pub(crate) fn new(inner: F, call: CallRecord) -> Self {
        Self { inner, call: Some(call) }
    }
}

impl<F, R, E> Future for RecordedFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    E: 'static,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = ready!(this.inner.poll(context));
        let mut call = this.call.take();
        let code = match &response {
            Err(error) => Some(code_of(error)),
            Ok(response) => code_in(response.headers()).or_else(|| {
                let has_body = response.status() == StatusCode::OK && !response.body().is_end_stream();
                (!has_body).then(|| status_of_http(response.status()).code())
            }),
        };
        if let Some((call, code)) = call.as_mut().zip(code) {
            call.end(code);
        }
        let side = Side::Response { call };
        Poll::Ready(response.map(|response| {
            response.map(|inner| Body::new(RecordedBody { inner, messages: Messages::default(), side }))
        }))
    }
}

pin_project! {
    /// A body of a call. It counts the bytes of its messages.
    #[derive(Debug)]
    pub(crate) struct RecordedBody<B> {
        #[pin]
        inner: B,
        messages: Messages,
        side: Side,
    }
}

#[derive(Debug)]
enum Side {
    Request {
        bytes: Arc<AtomicU64>,
    },
    /// `None` if the future was polled again after its end.
    Response {
        call: Option<CallRecord>,
    },
}

impl<B> RecordedBody<B> {
    /// Wraps the body of a request.
    pub(crate) fn request(inner: B, call: &CallRecord) -> Self {
        let side = Side::Request { bytes: Arc::clone(&call.request) };
        Self { inner, messages: Messages::default(), side }
    }
}

impl Side {
    fn carried(&mut self, bytes: u64) {
        match self {
            Self::Request { bytes: counted } => drop(counted.fetch_add(bytes, Ordering::Relaxed)),
            Self::Response { call } => call.iter_mut().for_each(|call| call.response += bytes),
        }
    }

    fn ended(&mut self, code: Code) {
        if let Self::Response { call: Some(call) } = self {
            call.end(code);
        }
    }
}

impl<B> http_body::Body for RecordedBody<B>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let mut this = self.project();
        // A body of `gather` around this one takes large fields out of the frames.
        let gathered = gathered_bytes();
        let frame = ready!(this.inner.as_mut().poll_frame(context));
        let frame = frame.map(|frame| frame.map_err(|error| Status::from_error(error.into())));
        match &frame {
            Some(Ok(frame)) => match (frame.data_ref(), frame.trailers_ref()) {
                (Some(data), _) => {
                    let apart = gathered_bytes().saturating_sub(gathered);
                    this.side.carried(this.messages.add(data) + apart as u64);
                }
                (_, Some(trailers)) => this.side.ended(code_in(trailers).unwrap_or(Code::Unknown)),
                _ => {}
            },
            Some(Err(status)) => this.side.ended(status.code()),
            None => this.side.ended(Code::Unknown),
        }
        // Such a body may not be polled to its end.
        if this.inner.is_end_stream() {
            this.side.ended(Code::Unknown);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Takes the frames of a body apart into messages. A frame may have several messages, or a part of one.
#[derive(Debug, Default)]
struct Messages {
    /// The start of the next message: a flag, and the length.
    prefix: [u8; 5],
    /// How much of it is there.
    known: usize,
    /// The bytes that are missing for the end of the message.
    missing: usize,
}

impl Messages {
    /// Returns the bytes of messages in the next frame, without their prefixes.
    fn add(&mut self, mut data: &[u8]) -> u64 {
        if let Some(length) = landed_length(data) {
            return length as u64;
        }
        let mut bytes = 0;
        while !data.is_empty() {
            if self.missing == 0 {
                let (start, rest) = data.split_at(data.len().min(self.prefix.len() - self.known));
                self.prefix[self.known..][..start.len()].copy_from_slice(start);
                (self.known, data) = (self.known + start.len(), rest);
                if let [_, length @ ..] = self.prefix
                    && self.known == self.prefix.len()
                {
                    (self.known, self.missing) = (0, u32::from_be_bytes(length) as usize);
                }
            }
            let (message, rest) = data.split_at(data.len().min(self.missing));
            self.missing -= message.len();
            bytes += message.len() as u64;
            data = rest;
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use http_body::Body as _;
    use opentelemetry_sdk::metrics::SdkMeterProvider;

    use super::*;

    #[test]
    fn bytes_of_messages_are_counted_however_the_frames_are_cut() {
        let body =
            [&b"\0\0\0\0\x03abc"[..], b"\0\0\0\0\0", b"\x01\0\0\x01\x02", &[7; 258], b"\0\0\0\0\x09cut"];
        let body = body.concat();
        for length in 1..=body.len() {
            let mut messages = Messages::default();
            let counted: u64 = body.chunks(length).map(|frame| messages.add(frame)).sum();
            assert_eq!(counted, 3 + 258 + 3, "frames of {length}");
        }
    }

    /// hyper does not poll such a body again.
    #[test]
    fn a_call_whose_body_has_no_trailers_ends_with_the_last_frame() {
        let instruments = Arc::new(Instruments::server(&SdkMeterProvider::default()));
        let attributes = instruments.attributes("/page", false, None);
        let call = Some(CallRecord::begin(&instruments, attributes, &HeaderMap::new()));
        let (messages, side) = (Messages::default(), Side::Response { call });
        let mut body = RecordedBody { inner: String::from("text"), messages, side };
        let frame = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(frame, Poll::Ready(Some(Ok(_)))));
        assert!(matches!(&body.side, Side::Response { call: Some(call) } if call.ended));
    }

    #[test]
    fn the_code_of_an_error_is_found() {
        let status = Status::not_found("it");
        assert_eq!(code_of(&status), Code::NotFound);
        assert_eq!(code_of::<BoxError>(&status.into()), Code::NotFound);
        assert_eq!(code_of(&std::fmt::Error), Code::Unknown);
    }
}
