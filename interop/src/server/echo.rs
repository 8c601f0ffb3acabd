//! Metadata that the official service sends back: one header as a header, and a binary one as a trailer. tonic's handlers can't
//! send trailers with a unary reply.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{HeaderName, HeaderValue};
use http_body::Frame;
use http_body_util::BodyExt as _;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

const INITIAL: HeaderName = HeaderName::from_static("x-grpc-test-echo-initial");
const TRAILING: HeaderName = HeaderName::from_static("x-grpc-test-echo-trailing-bin");

/// A service that sends the metadata back.
#[derive(Clone, Debug)]
pub(super) struct Echo<S> {
    inner: S,
}

impl<S> Echo<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S: NamedService> NamedService for Echo<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Echo<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let initial = request.headers().get(INITIAL).cloned();
        let trailing = request.headers().get(TRAILING).cloned();
        let response = self.inner.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            if let Some(initial) = initial {
                response.headers_mut().insert(INITIAL, initial);
            }
            Ok(match trailing {
                Some(trailing) => with_trailer(response, trailing),
                None => response,
            })
        })
    }
}

fn with_trailer(mut response: http::Response<Body>, value: HeaderValue) -> http::Response<Body> {
    // A response with a status and no messages has its trailers in its head.
    if response.headers().contains_key("grpc-status") {
        response.headers_mut().insert(TRAILING, value);
        return response;
    }
    response.map(|body| {
        Body::new(body.map_frame(move |frame| match frame.into_trailers() {
            Ok(mut trailers) => {
                trailers.insert(TRAILING, value.clone());
                Frame::trailers(trailers)
            }
            Err(frame) => frame,
        }))
    })
}
