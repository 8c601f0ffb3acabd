//! Messages whose large `bytes` fields are sent from where they are.
//!
//! tonic encodes a message into one buffer: a copy of all of it, made before the first byte is sent. With the
//! [`GatherCodec`] in generated code and [`requests`] or [`responses`] around a channel or a server, small fields are
//! encoded as ever, and the content of every `Bytes` field from [`THRESHOLD`] on goes into the HTTP/2 body by
//! reference. What arrives at the peer is the same, byte for byte. It works over any transport.
//!
//! ```text
//!  generated code              body                                   HTTP/2
//!  message ─▶ GatherCodec ─▶ prefix, small fields ─┐
//!                 │                                ├─▶ gather ─▶ DATA  prefix, small fields
//!                 └──────▶ Bytes, by reference ────┘             DATA  the Bytes themselves
//! ```
//!
//! Three changes, of which the last two are for what sends the large messages:
//!
//! ```ignore
//! // build.rs; `bytes` makes the fields `Bytes`
//! tonic_prost_build::configure().bytes(".").codec_path("tonic_rdma::gather::GatherCodec").compile_fds(descriptors)?;
//! // a client
//! let client = TransferClient::new(tonic_rdma::gather::requests(channel));
//! // a server
//! Server::builder().layer(tonic_rdma::gather::responses()).add_service(service);
//! ```
//!
//! Without the last two the codec does what tonic's own does. The same holds for calls that are compressed, whose bytes
//! have to be looked at anyway.
//!
//! `max_encoding_message_size` limits what is encoded by copying alone: what goes by reference does not count. The limit
//! of 4 GiB on a message holds for all of it.

mod body;
mod codec;
mod pieces;

use http::{HeaderMap, Request, Response};
use tonic::body::Body;
use tower::util::{MapRequest, MapResponseLayer};

pub use codec::{GatherCodec, GatherEncoder};

use body::GatherBody;

/// Shortest content of a `bytes` field that goes by reference: from here on a copy costs more than another DATA frame.
pub const THRESHOLD: usize = 32 * 1024;

/// A channel, or any other service that a generated client takes, that sends large fields by reference.
pub type GatherRequests<S> = MapRequest<S, fn(Request<Body>) -> Request<Body>>;

/// A layer for a server that sends large fields by reference.
pub type GatherResponses = MapResponseLayer<fn(Response<Body>) -> Response<Body>>;

/// Wraps a channel for a generated client.
pub fn requests<S>(channel: S) -> GatherRequests<S> {
    MapRequest::new(channel, gather_request as fn(Request<Body>) -> Request<Body>)
}

/// The layer for [`Server::layer`](tonic::transport::Server::layer).
pub fn responses() -> GatherResponses {
    MapResponseLayer::new(gather_response as fn(Response<Body>) -> Response<Body>)
}

fn gather_request(request: Request<Body>) -> Request<Body> {
    if is_compressed(request.headers()) { request } else { request.map(wrap) }
}

fn gather_response(response: Response<Body>) -> Response<Body> {
    if is_compressed(response.headers()) { response } else { response.map(wrap) }
}

fn wrap(body: Body) -> Body {
    Body::new(GatherBody::new(body))
}

fn is_compressed(headers: &HeaderMap) -> bool {
    headers.get("grpc-encoding").is_some_and(|encoding| encoding != "identity")
}
