//! A request on its way: what is kept of it to send it again, and the task that sends a body that is not
//! there at once.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{Extensions, HeaderMap, HeaderValue, Method, Request, Uri, Version, header};
use http_body::{Body as _, Frame};
use tonic::Status;
use tonic::body::Body;

use super::CallDefaults;
use crate::grpc::core::Parts;
use crate::grpc::outgoing::Outgoing;
use crate::grpc::session::{RequestHeaders, ResetCode, Stream};
use tonic_rdma_verbs::unstable::lock;

/// A request that has not been sent, or may be sent again.
#[derive(Debug)]
pub(super) struct PendingRequest {
    /// The headers as the server gets them, after [`head`](Self::head).
    pub(super) head: Arc<RequestHeaders>,
    /// The user agent of the application.
    user_agent: Option<HeaderValue>,
    pub(super) extensions: Extensions,
    pub(super) body: RequestBody,
}

impl PendingRequest {
    pub(super) fn new(request: Request<Body>) -> Self {
        let (head, body) = request.into_parts();
        let path = head.uri.into_parts().path_and_query;
        let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
        let body = RequestBody { rest: Some(body), ..RequestBody::default() };
        let user_agent = head.headers.get(header::USER_AGENT).cloned();
        let (headers, extensions) = (head.headers, head.extensions);
        let head = Arc::new(RequestHeaders { path, authority: None, headers });
        Self { head, user_agent, extensions, body }
    }

    /// Returns the headers as the server gets them. Headers that were sent before, to a server that refused
    /// them, are copied.
    pub(super) fn head(&mut self, defaults: &CallDefaults) -> Arc<RequestHeaders> {
        let head = Arc::make_mut(&mut self.head);
        head.authority.clone_from(&defaults.origin.authority);
        set_user_agent(&mut head.headers, self.user_agent.as_ref(), defaults.origin.user_agent.as_ref());
        Arc::clone(&self.head)
    }

    /// Returns the request for a channel of tonic's.
    pub(super) fn into_request(self) -> Request<Body> {
        let body = match self.body {
            RequestBody { frames, failed: None, rest: Some(rest) } if frames.is_empty() => rest,
            body => Body::new(body),
        };
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        *request.version_mut() = Version::HTTP_2;
        let mut head = Arc::unwrap_or_clone(self.head);
        set_user_agent(&mut head.headers, self.user_agent.as_ref(), None);
        *request.uri_mut() = Uri::from(head.path);
        *request.headers_mut() = head.headers;
        *request.extensions_mut() = self.extensions;
        request
    }
}

/// Sets the user agent as tonic does: that of the application goes first.
fn set_user_agent(headers: &mut HeaderMap, own: Option<&HeaderValue>, endpoint: Option<&HeaderValue>) {
    let value = match (own, endpoint) {
        (Some(own), Some(endpoint)) => {
            let bytes = [own.as_bytes(), b" ", endpoint.as_bytes()].concat();
            HeaderValue::from_bytes(&bytes).ok()
        }
        (one, other) => one.or(other).cloned(),
    };
    match value {
        Some(value) => drop(headers.insert(header::USER_AGENT, value)),
        None => drop(headers.remove(header::USER_AGENT)),
    }
}

/// The body of a request: frames that were taken from it, then the rest.
#[derive(Debug, Default)]
pub(super) struct RequestBody {
    frames: Parts<Bytes>,
    /// The status of a body that failed behind these frames.
    failed: Option<Status>,
    /// `None` if there is no more.
    rest: Option<Body>,
}

impl RequestBody {
    /// Takes the first frame from the body, if it is there, so that a body which can't be sent is known
    /// before the call begins.
    pub(super) fn take_first(&mut self, context: &mut Context<'_>) -> Result<(), Status> {
        if self.frames.is_empty()
            && let Poll::Ready(Some(frame)) = self.poll_rest(context)
        {
            self.frames.push(frame?);
        }
        Ok(())
    }

    /// Returns the body if it is one frame of small messages, and has ended. Polls for the end behind the
    /// first frame.
    pub(super) fn whole(&mut self, context: &mut Context<'_>) -> Option<Bytes> {
        let only = self.frames.only()?;
        if !Outgoing::default().is_small(only) || self.failed.is_some() {
            return None;
        }
        match self.poll_rest(context) {
            Poll::Ready(None) => return self.frames.only().cloned(),
            Poll::Ready(Some(Ok(frame))) => self.frames.push(frame),
            Poll::Ready(Some(Err(status))) => self.failed = Some(status),
            Poll::Pending => {}
        }
        None
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        if let Some(frame) = self.frames.pop() {
            return Poll::Ready(Some(Ok(frame)));
        }
        if let Some(status) = self.failed.take() {
            return Poll::Ready(Some(Err(status)));
        }
        self.poll_rest(context)
    }

    fn poll_rest(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        while let Some(rest) = &mut self.rest {
            match ready!(Pin::new(rest).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    // An empty frame has nothing to send.
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => return Poll::Ready(Some(Ok(data))),
                    // Clients send no trailers.
                    Err(_) => self.rest = None,
                },
                Some(Err(status)) => {
                    self.rest = None;
                    return Poll::Ready(Some(Err(status)));
                }
                None => self.rest = None,
            }
        }
        Poll::Ready(None)
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.poll_next(context).map_ok(Frame::data)
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty()
            && self.failed.is_none()
            && self.rest.as_ref().is_none_or(http_body::Body::is_end_stream)
    }
}

/// The frames of a body that were sent, to send them again.
#[derive(Debug, Default)]
pub(super) struct SentFrames {
    frames: Parts<Bytes>,
    /// Bytes of all but the first.
    bytes: usize,
}

impl SentFrames {
    /// The most bytes beside the first frame that are kept.
    const MOST: usize = 256 << 10;

    fn note(&mut self, data: &Bytes) {
        if !self.frames.is_empty() {
            self.bytes += data.len();
        }
        if self.bytes <= Self::MOST {
            self.frames.push(data.clone());
        }
    }

    /// Returns the whole body, if all frames were kept.
    pub(super) fn into_body(self) -> Option<RequestBody> {
        (self.bytes <= Self::MOST).then_some(RequestBody { frames: self.frames, ..RequestBody::default() })
    }
}

/// How far a body was sent.
#[derive(Debug)]
pub(super) enum Progress {
    /// The whole body is queued, or the call takes no more of it.
    Finished,
    /// The body, or the stream, is not ready. The context's task is woken when it is.
    Waits,
    /// The body failed.
    Failed(Status),
}

/// Queues what the body has now. `sent` notes it. `outgoing` takes it apart into messages.
pub(super) fn advance(
    body: &mut RequestBody,
    outgoing: &mut Outgoing,
    stream: &Stream,
    mut sent: Option<&mut SentFrames>,
    context: &mut Context<'_>,
) -> Progress {
    /// The most frames in one turn.
    const FRAMES: usize = 64;
    for _ in 0..FRAMES {
        match stream.poll_send_ready(context) {
            Poll::Pending => return Progress::Waits,
            Poll::Ready(Err(_)) => return Progress::Finished,
            Poll::Ready(Ok(())) => {}
        }
        match body.poll_next(context) {
            Poll::Pending => {
                outgoing.flush(stream, false);
                return Progress::Waits;
            }
            Poll::Ready(None) => {
                outgoing.flush(stream, false);
                stream.end();
                return Progress::Finished;
            }
            Poll::Ready(Some(Err(status))) => return Progress::Failed(status),
            Poll::Ready(Some(Ok(data))) => {
                if let Some(sent) = &mut sent {
                    sent.note(&data);
                }
                let end = body.is_end_stream();
                outgoing.send(stream, data, end);
                if end {
                    return Progress::Finished;
                }
            }
        }
    }
    context.waker().wake_by_ref();
    Progress::Waits
}

/// The task that sends the rest of a body.
#[derive(Debug)]
pub(super) struct Pump {
    pub(super) body: RequestBody,
    pub(super) outgoing: Outgoing,
    pub(super) stream: Arc<Stream>,
    /// The reason why the body failed.
    pub(super) failed: Arc<Mutex<Option<Status>>>,
}

impl Future for Pump {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let progress = advance(&mut this.body, &mut this.outgoing, &this.stream, None, context);
        if let Progress::Failed(status) = progress {
            *lock(&this.failed) = Some(status);
            this.stream.reset(ResetCode::Cancel);
            return Poll::Ready(());
        }
        this.stream.drive();
        match progress {
            Progress::Waits => Poll::Pending,
            _ => Poll::Ready(()),
        }
    }
}
