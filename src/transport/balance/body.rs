//! The body of a response whose call counts as in flight until the body ends.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

use super::connection::InFlight;

/// The body of a response. Its call is in flight until the body has ended or is dropped.
#[derive(Debug)]
pub(super) struct CountedBody {
    inner: Body,
    in_flight: Option<InFlight>,
}

impl CountedBody {
    pub(super) fn new(inner: Body, in_flight: InFlight) -> Self {
        Self { inner, in_flight: Some(in_flight) }
    }
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.in_flight = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
