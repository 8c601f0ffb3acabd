//! Deadlines of gRPC calls. tonic's channel applies `grpc-timeout` to the head of a response only, and then
//! reports CANCELLED; it waits without limit for the rest. The official case expects DEADLINE_EXCEEDED, and
//! its server sends the head at once.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::body::Body;
use tonic::codegen::StdError;
use tonic::{Status, TimeoutExpired};
use tonic_rdma::unstable::grpc_timeout;

/// Applies the `grpc-timeout` in the headers of a request to the call: it ends with DEADLINE_EXCEEDED when
/// the time has passed.
pub(crate) async fn limited(
    headers: &http::HeaderMap,
    response: impl Future<Output = Result<http::Response<Body>, Status>>,
) -> Result<http::Response<Body>, Status> {
    let timeout = grpc_timeout(headers);
    let Some(timeout) = timeout else { return response.await };
    let deadline = Instant::now() + timeout;
    let response = tokio::time::timeout_at(deadline, response).await.unwrap_or_else(|_| Err(exceeded()))?;
    Ok(response.map(|body| {
        Body::new(ExpiringBody { body, deadline: Box::pin(sleep_until(deadline)), expired: false })
    }))
}

fn exceeded() -> Status {
    Status::deadline_exceeded("the deadline passed before the call was complete")
}

/// Returns the status of a call that failed. tonic's own timer may fire first.
pub(crate) fn status_of(error: StdError) -> Status {
    let mut source: Option<&(dyn Error + 'static)> = Some(&*error);
    while let Some(cause) = source {
        if cause.is::<TimeoutExpired>() {
            return exceeded();
        }
        source = cause.source();
    }
    Status::from_error(error)
}

/// A response's body that ends with an error at the deadline.
struct ExpiringBody {
    body: Body,
    deadline: Pin<Box<Sleep>>,
    expired: bool,
}

impl http_body::Body for ExpiringBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.deadline.as_mut().poll(context).is_ready() && !std::mem::replace(&mut self.expired, true) {
            // Dropping the body resets the stream, so that the server ends the call too.
            self.body = Body::empty();
            return Poll::Ready(Some(Err(exceeded())));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
