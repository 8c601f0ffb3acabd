//! Metadata that the official service sends back: one header as a header, and a binary one as a trailer. tonic's handlers can't
//! send trailers with a unary reply.

use http::{HeaderName, HeaderValue};
use http_body::Frame;
use http_body_util::BodyExt as _;
use tonic::body::Body;

const INITIAL: HeaderName = HeaderName::from_static("x-grpc-test-echo-initial");
const TRAILING: HeaderName = HeaderName::from_static("x-grpc-test-echo-trailing-bin");

/// Answers a call, and sends the metadata back.
pub(super) async fn echoed<E>(
    request: http::Request<Body>,
    answer: impl AsyncFnOnce(http::Request<Body>) -> Result<http::Response<Body>, E>,
) -> Result<http::Response<Body>, E> {
    let initial = request.headers().get(INITIAL).cloned();
    let trailing = request.headers().get(TRAILING).cloned();
    let mut response = answer(request).await?;
    if let Some(initial) = initial {
        response.headers_mut().insert(INITIAL, initial);
    }
    Ok(match trailing {
        Some(trailing) => with_trailer(response, trailing),
        None => response,
    })
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
