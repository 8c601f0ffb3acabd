//! Servers that do one thing wrong: the cases that are there to find it fail, and no others of those named do.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt as _;
use tonic::body::Body;
use tonic::service::Routes;
use tower_service::Service;

use super::{failure, serve, target};
use crate::server::routes;
use crate::transport::Transport::{Rdma, Tcp};

/// What is done to requests and responses of the real server.
#[derive(Clone, Copy)]
struct Wrongs {
    request: fn(http::Request<Body>) -> http::Request<Body>,
    response: fn(http::Response<Body>) -> http::Response<Body>,
}

const NONE: Wrongs = Wrongs { request: |request| request, response: |response| response };

#[derive(Clone)]
struct Wrong {
    inner: Routes,
    wrongs: Wrongs,
}

impl<B> Service<http::Request<B>> for Wrong
where
    B: http_body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        <Routes as Service<http::Request<Body>>>::poll_ready(&mut self.inner, context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let Wrongs { request: spoil_request, response: spoil } = self.wrongs;
        let response = self.inner.call(spoil_request(request.map(Body::new)));
        Box::pin(async move { response.await.map(spoil) })
    }
}

/// The real services under a path that takes everything.
async fn spoilt(wrongs: Wrongs) -> Routes {
    let wrong = Wrong { inner: routes().await.unwrap(), wrongs };
    tonic::service::AxumRouter::new().fallback_service(wrong).into()
}

async fn are_caught(wrongs: Wrongs, caught: &[&str], fine: &[&str]) {
    for (client, server) in [(Tcp, Tcp), (Rdma, Rdma)] {
        let target = target(serve(server, spoilt(wrongs).await).await, client, client);
        for name in caught {
            let reason = failure(name, &target).await;
            assert!(reason.is_some(), "{name} did not notice");
        }
        for name in fine {
            assert_eq!(failure(name, &target).await, None, "{name}");
        }
    }
}

/// In front of a message: neither plain (0) nor compressed (1).
const UNKNOWN_FLAG: u8 = 9;

fn map_data(body: Body, change: fn(Bytes) -> Bytes) -> Body {
    Body::new(body.map_frame(move |frame| frame.map_data(change)))
}

fn map_trailers(response: http::Response<Body>, change: fn(&mut http::HeaderMap)) -> http::Response<Body> {
    let (mut parts, body) = response.into_parts();
    change(&mut parts.headers);
    let body = Body::new(body.map_frame(move |frame| match frame.into_trailers() {
        Ok(mut trailers) => {
            change(&mut trailers);
            Frame::trailers(trailers)
        }
        Err(frame) => frame,
    }));
    http::Response::from_parts(parts, body)
}

/// One bit, far from where protobuf has its tags and lengths.
fn flip(data: Bytes) -> Bytes {
    let mut data = data.to_vec();
    let middle = data.len() / 2;
    if data.len() > 100 {
        data[middle] ^= 1;
    }
    data.into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bit_of_the_replies() {
    let wrongs = Wrongs { response: |response| response.map(|body| map_data(body, flip)), ..NONE };
    let caught = [
        "large_unary",
        "concurrent_large_unary",
        "server_streaming",
        "ping_pong",
        "rpc_soak",
        "checked_unary",
        "checked_concurrent",
        "checked_server_streaming",
        "checked_ping_pong",
        "checked_half_close",
        "checked_gzip",
        "checked_zstd",
    ];
    are_caught(wrongs, &caught, &["empty_unary", "empty_stream"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bit_of_the_requests() {
    let wrongs = Wrongs { request: |request| request.map(|body| map_data(body, flip)), ..NONE };
    // What the official cases send nobody looks at: that is why there are others.
    are_caught(wrongs, &["checked_unary", "checked_client_streaming", "checked_ping_pong"], &["large_unary"])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_compression_of_replies() {
    let refuse = |mut request: http::Request<Body>| {
        request.headers_mut().remove("grpc-accept-encoding");
        request
    };
    let caught = ["server_compressed_unary", "server_compressed_streaming", "checked_gzip", "checked_zstd"];
    let fine = ["client_compressed_unary", "client_compressed_streaming", "large_unary"];
    are_caught(Wrongs { request: refuse, ..NONE }, &caught, &fine).await;
}

/// A server that takes messages as they come, whatever it was told to expect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_look_at_flags_of_requests() {
    let forgive = |mut response: http::Response<Body>| {
        if response.headers().get("grpc-status").is_some_and(|status| status == "3") {
            response.headers_mut().insert("grpc-status", http::HeaderValue::from_static("0"));
        }
        response
    };
    let caught = ["client_compressed_unary", "client_compressed_streaming"];
    are_caught(Wrongs { response: forgive, ..NONE }, &caught, &["server_compressed_unary"]).await;
}

/// A server that takes no message compressed which was not announced to come so, as gRPC's own in C++.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_compressed_requests() {
    let refuse = |request: http::Request<Body>| {
        request.map(|body| {
            let mut first = true;
            Body::new(body.map_frame(move |frame| {
                frame.map_data(|data| {
                    let begins = std::mem::take(&mut first) && data.first() == Some(&1);
                    if begins { [&[UNKNOWN_FLAG], &data[1..]].concat().into() } else { data }
                })
            }))
        })
    };
    let caught = ["client_compressed_unary", "client_compressed_streaming"];
    let fine = ["server_compressed_unary", "server_compressed_streaming", "large_unary"];
    are_caught(Wrongs { request: refuse, ..NONE }, &caught, &fine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_metadata() {
    let strip = |response| {
        map_trailers(response, |headers| {
            for name in ["x-grpc-test-echo-trailing-bin", "x-checked-bin", "cache-control"] {
                headers.remove(name);
            }
        })
    };
    let caught = [
        "custom_metadata",
        "checked_binary_metadata",
        "checked_large_metadata",
        "checked_status_details",
        "cacheable_unary",
    ];
    are_caught(Wrongs { response: strip, ..NONE }, &caught, &["large_unary"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statuses_without_message_and_details() {
    let strip = |response| {
        map_trailers(response, |headers| {
            headers.remove("grpc-message");
            headers.remove("grpc-status-details-bin");
        })
    };
    let caught = ["status_code_and_message", "special_status_message", "checked_status_details"];
    are_caught(Wrongs { response: strip, ..NONE }, &caught, &["unimplemented_method"]).await;
}
