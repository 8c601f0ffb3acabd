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
}

impl RequestBody {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, presenter: Presenter::default(), patience: Patience::default() }
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
        let part = match this.stream.poll_part(context) {
            Poll::Ready(part) => part,
            Poll::Pending => Some(Err(ready!(this.patience.poll(&this.stream, context)))),
        };
        Poll::Ready(part.map(|part| match part {
            Ok(Part::Data(bytes)) => Ok(Frame::data(bytes)),
            Ok(Part::Message(message)) => Ok(Frame::data(this.presenter.present(message))),
            Ok(Part::Trailers(trailers)) => Ok(Frame::trailers(trailers)),
            Err(fault) => Err(fault.into()),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end()
    }
}
