//! The body of a request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use tonic::Status;

use crate::grpc::landed::Presenter;
use crate::grpc::session::{Part, Stream};

/// What the client sends after the head: messages with their prefixes, as the client sent them, or stubs of landed messages.
#[derive(Debug)]
pub(super) struct RequestBody {
    stream: Arc<Stream>,
    presenter: Presenter,
}

impl RequestBody {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, presenter: Presenter::default() }
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.stream.poll_part(context).map(|part| match part? {
            Ok(Part::Data(bytes)) => Some(Ok(Frame::data(bytes))),
            Ok(Part::Message(message)) => Some(Ok(Frame::data(self.presenter.present(message)))),
            Ok(Part::Trailers(trailers)) => Some(Ok(Frame::trailers(trailers))),
            Err(fault) => Some(Err(fault.into())),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end()
    }
}
