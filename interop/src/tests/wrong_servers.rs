//! Servers with one fault. The cases that have to find the fault fail, and other named cases pass.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt as _;
use tonic::body::Body;
use tonic::service::Routes;
use tower::Service;

use super::{failure, serve, target};
use crate::server::routes;
use crate::transport::Transport::{Native, Rdma, Tcp};

/// Changes to requests and responses of the real server.
#[derive(Clone, Copy)]
struct Faults {
    request: fn(http::Request<Body>) -> http::Request<Body>,
    response: fn(http::Response<Body>) -> http::Response<Body>,
}

const NONE: Faults = Faults { request: |request| request, response: |response| response };

#[derive(Clone)]
/// The real server with faults.
struct FaultyServer {
    inner: Routes,
    faults: Faults,
}

impl<B> Service<http::Request<B>> for FaultyServer
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
        let Faults { request: change_request, response: change_response } = self.faults;
        let response = self.inner.call(change_request(request.map(Body::new)));
        Box::pin(async move { response.await.map(change_response) })
    }
}

/// Returns the real services with faults, behind a route for all paths.
async fn faulty_routes(faults: Faults) -> Routes {
    let server = FaultyServer { inner: routes().await.unwrap(), faults };
    tonic::service::AxumRouter::new().fallback_service(server).into()
}

async fn check_cases(faults: Faults, caught: &[&str], fine: &[&str]) {
    for (client, server) in [(Tcp, Tcp), (Rdma, Rdma), (Native, Native)] {
        let target = target(serve(server, faulty_routes(faults).await).await, client, client);
        for name in caught {
            let reason = failure(name, &target).await;
            assert!(reason.is_some(), "{name} did not notice");
        }
        for name in fine {
            assert_eq!(failure(name, &target).await, None, "{name}");
        }
    }
}

/// A flag before a message that is neither plain (0) nor compressed (1).
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

/// Inverts one bit, far from protobuf's tags and lengths.
fn flip(data: Bytes) -> Bytes {
    let mut data = data.to_vec();
    let middle = data.len() / 2;
    if data.len() > 100 {
        data[middle] ^= 1;
    }
    data.into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_bits_in_replies_are_found() {
    let faults = Faults { response: |response| response.map(|body| map_data(body, flip)), ..NONE };
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
    check_cases(faults, &caught, &["empty_unary", "empty_stream"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_bits_in_requests_are_found() {
    let faults = Faults { request: |request| request.map(|body| map_data(body, flip)), ..NONE };
    // The official servers ignore the content of requests. Our own cases check it.
    check_cases(
        faults,
        &["checked_unary", "checked_client_streaming", "checked_ping_pong"],
        &["large_unary"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_compression_of_replies_is_found() {
    let refuse = |mut request: http::Request<Body>| {
        request.headers_mut().remove("grpc-accept-encoding");
        request
    };
    let caught = ["server_compressed_unary", "server_compressed_streaming", "checked_gzip", "checked_zstd"];
    let fine = ["client_compressed_unary", "client_compressed_streaming", "large_unary"];
    check_cases(Faults { request: refuse, ..NONE }, &caught, &fine).await;
}

/// Tests a server that accepts messages with any flag.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ignored_flags_of_requests_are_found() {
    let forgive = |mut response: http::Response<Body>| {
        if response.headers().get("grpc-status").is_some_and(|status| status == "3") {
            response.headers_mut().insert("grpc-status", http::HeaderValue::from_static("0"));
        }
        response
    };
    let caught = ["client_compressed_unary", "client_compressed_streaming"];
    check_cases(Faults { response: forgive, ..NONE }, &caught, &["server_compressed_unary"]).await;
}

/// Tests a server that refuses compressed messages without an announcement, like gRPC's own server in C++.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_compressed_requests_are_found() {
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
    check_cases(Faults { request: refuse, ..NONE }, &caught, &fine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_metadata_is_found() {
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
    check_cases(Faults { response: strip, ..NONE }, &caught, &["large_unary"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_messages_and_details_are_found() {
    let strip = |response| {
        map_trailers(response, |headers| {
            headers.remove("grpc-message");
            headers.remove("grpc-status-details-bin");
        })
    };
    let caught = ["status_code_and_message", "special_status_message", "checked_status_details"];
    check_cases(Faults { response: strip, ..NONE }, &caught, &["unimplemented_method"]).await;
}
