//! The body of a response without HTTP/2.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use tokio::task::AbortHandle;
use tonic::Status;

use super::deadline::Deadline;
use crate::endpoint::CallUnderWay;
use crate::grpc::fault::CallFault;
use crate::grpc::session::Patience;
use crate::grpc::session::{Part, ResetCode, Stream};
use crate::transport::gather::landed::Presenter;
use tonic_rdma_verbs::internal::lock;

/// A call that has begun. Dropping this before [`has_ended`](Self::has_ended) cancels the call at the server.
#[derive(Debug)]
pub(super) struct Begun {
    stream: Arc<Stream>,
    /// The task that sends the rest of the request, and the reason why it failed.
    pub(super) pump: Option<(AbortHandle, Arc<Mutex<Option<Status>>>)>,
    ended: bool,
    /// A part that came with the head, and trailers behind it.
    pub(super) first: Option<Part>,
    trailers: Option<HeaderMap>,
    _under_way: CallUnderWay,
}

impl Begun {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        let under_way = stream.session().endpoint().begin_call();
        let (first, trailers) = (None, None);
        Self { stream, pump: None, ended: false, first, trailers, _under_way: under_way }
    }

    pub(super) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Returns the status of a call with this fault. If the request's body failed, its status counts.
    pub(super) fn status(&mut self, fault: CallFault) -> Status {
        self.has_ended();
        let failed = self.pump.as_ref().and_then(|(_, failed)| lock(failed).take());
        failed.unwrap_or_else(|| fault.into())
    }

    /// Ends the call for its deadline.
    pub(super) fn is_late(&mut self) -> Status {
        self.stream.reset(ResetCode::DeadlineExceeded);
        self.has_ended();
        Deadline::status()
    }

    /// Notes that the response has ended. The rest of the request is not needed.
    pub(super) fn has_ended(&mut self) {
        self.ended = true;
        if let Some((pump, _)) = &self.pump {
            pump.abort();
        }
    }

    /// Waits for the head of the response. Looks for it on this thread for a short time, then registers the task.
    pub(super) fn poll_head(
        &mut self,
        deadline: &mut Deadline,
        context: &mut Context<'_>,
    ) -> Poll<Result<HeaderMap, CallFault>> {
        let mut head = Poll::Pending;
        let (begun, first, trailers) = (deadline.begun(), &mut self.first, &mut self.trailers);
        self.stream.session().endpoint().spin(Some(begun), || {
            head = self.stream.take_answer(first, trailers);
            head.is_ready() || deadline.has_passed()
        });
        if head.is_ready() { head } else { self.stream.poll_head(context) }
    }

    /// Waits for the next part of the response, in the same way. Most parts come together with the head, so this looks first.
    fn poll_part(
        &self,
        deadline: &Deadline,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Part, CallFault>>> {
        let part = self.stream.poll_part(&mut Context::from_waker(Waker::noop()));
        if part.is_ready() {
            return part;
        }
        self.spin(deadline);
        self.stream.poll_part(context)
    }

    fn spin(&self, deadline: &Deadline) {
        let session = self.stream.session();
        session.endpoint().spin(None, || self.stream.has_arrived() || deadline.has_passed());
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some((pump, _)) = &self.pump {
            pump.abort();
            // The task may hold the stream for a moment.
            if !self.ended {
                self.stream.reset(ResetCode::Cancel);
            }
        }
    }
}

/// The body of a response.
pub(super) struct ResponseBody {
    call: Begun,
    deadline: Deadline,
    presenter: Presenter,
    patience: Patience,
}

impl ResponseBody {
    pub(super) fn new(call: Begun, deadline: Deadline) -> Self {
        Self { call, deadline, presenter: Presenter::default(), patience: Patience::default() }
    }

    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Part, Status>>> {
        if let Some(part) = self.call.first.take() {
            return Poll::Ready(Some(Ok(part)));
        }
        if let Some(trailers) = self.call.trailers.take() {
            return Poll::Ready(Some(Ok(Part::Trailers(trailers))));
        }
        if self.call.ended {
            return Poll::Ready(None);
        }
        match self.call.poll_part(&self.deadline, context) {
            Poll::Ready(Some(Ok(part))) => Poll::Ready(Some(Ok(part))),
            Poll::Ready(Some(Err(fault))) => Poll::Ready(Some(Err(self.call.status(fault)))),
            Poll::Ready(None) => {
                self.call.has_ended();
                Poll::Ready(None)
            }
            Poll::Pending if self.deadline.poll_passed(context).is_ready() => {
                Poll::Ready(Some(Err(self.call.is_late())))
            }
            Poll::Pending => {
                let fault = ready!(self.patience.poll(self.call.stream(), context));
                Poll::Ready(Some(Err(self.call.status(fault))))
            }
        }
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = self.poll_part(context);
        polled.map(|part| {
            part.map(|part| match part? {
                Part::Data(data) => Ok(Frame::data(data)),
                Part::Message(message) => Ok(Frame::data(self.presenter.present(message))),
                Part::Trailers(trailers) => {
                    self.call.has_ended();
                    Ok(Frame::trailers(trailers))
                }
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.call.first.is_none() && self.call.ended
    }
}
