//! The body of a request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Frame;
use tonic::Status;

use crate::grpc::landed::Presenter;
use crate::grpc::patience::Patience;
use crate::grpc::session::{Part, Stream};

/// What the client sends after the head: messages with their prefixes, as the client sent them, or stubs of landed messages.
#[derive(Debug)]
pub(super) struct RequestBody {
    stream: Arc<Stream>,
    presenter: Presenter,
    patience: Patience,
    /// The status of a call that ended early, until the next poll.
    failed: Option<Status>,
}

impl RequestBody {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, presenter: Presenter::default(), patience: Patience::default(), failed: None }
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
        let part = match this.stream.poll_part(context) {
            Poll::Ready(part) => part,
            Poll::Pending => Some(Err(ready!(this.patience.poll(&this.stream, context)))),
        };
        let part = match part {
            Some(Ok(part)) => part,
            Some(Err(fault)) => {
                // tonic takes CANCELLED of a request for its end, so a handler would take a request that was cut short for complete. At
                // the next poll of the call the handler is dropped. A task that the handler started with the body gets the status then.
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
