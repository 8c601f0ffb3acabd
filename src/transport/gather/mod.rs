//! Sends large `bytes` fields of messages from where they are.
//!
//! tonic encodes a message into one buffer, which copies all of it before the first byte is sent. With
//! [`GatherCodec`] in generated code, and [`GatherRequests`] or [`GatherResponses`] around a channel or a
//! server, small fields are copied as before, and the content of each `Bytes` field of [`THRESHOLD`] bytes or
//! more goes into the HTTP/2 body by reference. The bytes on the wire stay the same, so the peer needs no
//! change. It works over any transport, TCP included.
//!
//! ```text
//!  generated code              body                                   HTTP/2
//!  message ─▶ GatherCodec ─▶ prefix, small fields ─┐
//!                 │                                ├─▶ gather ─▶ DATA  prefix, small fields
//!                 └──────▶ Bytes, by reference ────┘             DATA  the Bytes themselves
//! ```
//!
//! # When to use it
//!
//! Use it where messages have `bytes` fields of 32 KiB and more: tensors, files, batches of records. It
//! changes nothing for messages of small fields, for strings and repeated numbers, and for calls that are
//! compressed, because compression reads all bytes anyway. Such calls work; they are encoded by tonic's
//! rules.
//!
//! # How to use it
//!
//! First, the build script makes the fields `Bytes` and names the codec. Its options come from
//! `tonic-prost-build`; `compile_protos` goes with them as `compile_fds` does:
//!
//! ```text
//! tonic_prost_build::configure().bytes(".").codec_path("tonic_rdma::gather::GatherCodec").compile_fds(descriptors)?;
//! ```
//!
//! Then the end that sends the large messages gets one wrapper: the client for large requests, the server for
//! large responses. Without a wrapper the codec encodes as tonic's own codec does.
//!
//! ```
//! use tonic::transport::{Endpoint, Server};
//! use tonic_rdma::gather::{GatherRequests, GatherResponses};
//! use tonic_rdma::{RdmaConnector, RdmaIncoming};
//! # use tonic::{Request, Response, Status};
//! # use tonic_rdma_proto::transfer::transfer_client::TransferClient;
//! # use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
//! # use tonic_rdma_proto::transfer::{PutReply, PutRequest};
//! # #[derive(Debug)]
//! # struct Counts;
//! # #[tonic::async_trait]
//! # impl Transfer for Counts {
//! #     async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
//! #         let bytes = request.get_ref().payload.len() as u64;
//! #         Ok(Response::new(PutReply { bytes, ..Default::default() }))
//! #     }
//! # }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!
//! // The server: `GatherResponses` is for services that answer with large messages.
//! let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
//! let address = incoming.local_addr();
//! let server = Server::builder().layer(GatherResponses::new()).add_service(TransferServer::new(Counts));
//! tokio::spawn(server.serve_with_incoming(incoming));
//!
//! // The client: `GatherRequests` is for calls with large requests.
//! let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
//! let channel = endpoint.connect_with_connector(RdmaConnector::new()).await?;
//! let mut client = TransferClient::new(GatherRequests::new(channel));
//!
//! let payload = bytes::Bytes::from(vec![7; 1 << 20]);
//! let reply = client.put(PutRequest { payload, ..Default::default() }).await?;
//! assert_eq!(reply.into_inner().bytes, 1 << 20);
//! # Ok(())
//! # }
//! ```
//!
//! On a network card the transport still copies the payload once, into memory that the card can read. This
//! copy is not needed if the payload lies in such memory from the start:
//! [`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending) makes such buffers.
//! [`copies_avoided_bytes`](crate::CounterSnapshot::copies_avoided_bytes) counts the bytes that were sent
//! without this copy.
//!
//! # Native calls: no copy at the receiver either
//!
//! Calls between an [`RdmaChannel`](crate::RdmaChannel) and an [`RdmaServer`](crate::RdmaServer) need no
//! HTTP/2. There, a large message can reach the decoder in the registered memory that it arrived in:
//! [`GatherBoth`] wraps a channel, and [`GatherBothLayer`] is the layer of a server. They also send large
//! fields by reference, here from 4 KiB on. `Bytes` fields of such a message are slices of that memory. Its
//! longest field begins at a multiple of 64 bytes, and the memory is free again when the last slice is
//! dropped:
//!
//! ```
//! use tonic_rdma::gather::{GatherBoth, GatherBothLayer};
//! use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
//! # use tonic::{Request, Response, Status};
//! # use tonic_rdma_proto::transfer::transfer_client::TransferClient;
//! # use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
//! # use tonic_rdma_proto::transfer::{PutReply, PutRequest};
//! # #[derive(Debug)]
//! # struct Aligned;
//! #[tonic::async_trait]
//! impl Transfer for Aligned {
//!     async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
//!         let payload = request.into_inner().payload;
//!         assert_eq!(payload.as_ptr() as usize % 64, 0);
//!         Ok(Response::new(PutReply { bytes: payload.len() as u64, ..Default::default() }))
//!     }
//!     // ...
//! }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!
//! let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
//! let address = incoming.local_addr();
//! let server = RdmaServer::new().layer(GatherBothLayer::new()).add_service(TransferServer::new(Aligned));
//! tokio::spawn(server.serve_with_incoming(incoming));
//!
//! let channel = RdmaChannel::connect(format!("http://{address}")).await?;
//! let mut client = TransferClient::new(GatherBoth::new(channel.clone()));
//! let payload = bytes::Bytes::from(vec![7; 1 << 20]);
//! let reply = client.put(PutRequest { payload, ..Default::default() }).await?;
//! assert_eq!(reply.into_inner().bytes, 1 << 20);
//! # assert!(channel.last_connection().is_some_and(|info| info.is_native()));
//! # Ok(())
//! # }
//! ```
//!
//! A message lands before tonic sees it. Therefore its limit is set on the wrapper, too. An application that
//! keeps more than [`CallConfig::connection_limit`](crate::CallConfig::connection_limit) gets copies.
//! [`CounterSnapshot`](crate::CounterSnapshot) has the copies: none were made while `offered_copied_bytes`,
//! `landed_copied_bytes` and `landed_moved_bytes` are 0.
//!
//! # What it costs
//!
//! - A field of [`THRESHOLD`] bytes or more gets its own DATA frames. Below that length a copy costs less
//!   than a frame.
//! - The field's memory is held until the transport has taken the bytes, so it is freed later than with a
//!   copy.
//! - Over HTTP/2 the receiver copies as before: from the transport into HTTP/2's buffer, and from there into
//!   tonic's buffer.
//!
//! # Limits
//!
//! - `max_encoding_message_size` counts the bytes that are encoded by copying. Bytes that go by reference
//!   don't count.
//! - A message, large fields included, has less than 4 GiB, because gRPC's length prefix has 32 bits. A
//!   longer message fails with RESOURCE_EXHAUSTED.
//! - A gathered body must not poll another body that encodes with the same codec: such a call fails with
//!   INTERNAL. Generated code does not do this.
//!
//! The book's page on gathered messages has the measurements and the design.

pub(crate) mod body;
pub(crate) mod landed;

use std::task::{Context, Poll};

use http::{HeaderMap, Request, Response};
use tonic::body::Body;
use tower::layer::Layer;
use tower::util::MapResponse;
use tower::util::future::MapResponseFuture;
use tower_service::Service;

use self::body::GatherBody;
use self::landed::{AlignedField, Landing, LandingSwitch, NativeFlag};
use super::request::field;

pub use self::body::{GatherCodec, GatherDecoder, GatherEncoder};

/// The shortest content of a `bytes` field that goes by reference, in bytes. From this length on a copy costs
/// more than another DATA frame.
pub const THRESHOLD: usize = 32 * 1024;

/// The shortest content of a `bytes` field that goes by reference in a native call, in bytes.
const NATIVE_THRESHOLD: usize = 4096;

/// A channel for a generated client that sends large fields of its requests by reference.
///
/// The generated code has to use [`GatherCodec`]. `channel` may be tonic's `Channel`, a
/// [`BalancedChannel`](crate::BalancedChannel), or any service that a generated client takes.
#[derive(Clone, Debug)]
pub struct GatherRequests<S> {
    channel: S,
}

impl<S> GatherRequests<S> {
    /// Wraps `channel`.
    ///
    /// ```
    /// use tonic::transport::Endpoint;
    /// use tonic_rdma::RdmaConnector;
    /// use tonic_rdma::gather::GatherRequests;
    /// use tonic_rdma_proto::transfer::transfer_client::TransferClient;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let channel = Endpoint::from_static("http://ps0:50051").connect_with_connector_lazy(RdmaConnector::new());
    /// let client = TransferClient::new(GatherRequests::new(channel));
    /// # drop(client);
    /// # }
    /// ```
    pub fn new(channel: S) -> Self {
        Self { channel }
    }
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for GatherRequests<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        self.channel.call(gather_request(request))
    }
}

/// A layer for [`Server::layer`](tonic::transport::Server::layer). With this layer, the server sends large
/// fields of responses by reference.
///
/// The generated code has to use [`GatherCodec`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct GatherResponses;

impl GatherResponses {
    /// Makes the layer.
    ///
    /// ```
    /// use tonic::transport::Server;
    ///
    /// let server = Server::builder().layer(tonic_rdma::gather::GatherResponses::new());
    /// # drop(server);
    /// ```
    pub fn new() -> Self {
        Self
    }
}

impl<S> Layer<S> for GatherResponses {
    type Service = MapResponse<S, fn(Response<Body>) -> Response<Body>>;

    fn layer(&self, service: S) -> Self::Service {
        MapResponse::new(service, gather_response::<false>)
    }
}

fn gather_request(mut request: Request<Body>) -> Request<Body> {
    if is_compressed(request.headers()) {
        return request;
    }
    let native = NativeFlag::default();
    request.extensions_mut().insert(native.clone());
    request.map(|body| Body::new(GatherBody::new(body, native)))
}

/// Gathers the response of a call, which may be a native one.
fn gather_response<const NATIVE: bool>(response: Response<Body>) -> Response<Body> {
    if is_compressed(response.headers()) {
        return response;
    }
    let native = NativeFlag::default();
    if NATIVE {
        native.set();
    }
    response.map(|body| Body::new(GatherBody::new(body, native)))
}

fn is_compressed(headers: &HeaderMap) -> bool {
    field(headers, "grpc-encoding").is_some_and(|encoding| encoding != "identity")
}

/// A channel for a generated client that sends large fields of its requests by reference, and delivers large
/// responses of native calls in the memory that they arrive in.
///
/// The generated code has to use [`GatherCodec`]: other codecs fail with INTERNAL at the first large
/// response. `channel` is an [`RdmaChannel`](crate::RdmaChannel). On other channels, and where an
/// `RdmaChannel` uses HTTP/2, responses are copied as with [`GatherRequests`].
///
/// A response lands before tonic sees it, so its limit has to be known here:
/// [`GatherBoth::max_decoding_message_size`].
#[derive(Clone, Debug)]
pub struct GatherBoth<S> {
    channel: S,
    landing: Landing,
}

/// A layer for [`RdmaServer::layer`](crate::RdmaServer::layer). With this layer, the server delivers large
/// requests of native calls in the memory that they arrive in, and sends large fields of responses by
/// reference.
///
/// The generated code of all services under the layer has to use [`GatherCodec`]: other codecs fail with
/// INTERNAL at the first large request. To opt in some services only, wrap each of them with the layer
/// instead of the server. Requests over HTTP/2 are copied as with [`GatherResponses`].
///
/// A request lands before tonic sees it, so its limit has to be known here:
/// [`GatherBothLayer::max_decoding_message_size`].
#[derive(Clone, Copy, Debug, Default)]
pub struct GatherBothLayer {
    landing: Landing,
}

/// The service that [`GatherBothLayer`] makes.
#[derive(Clone, Debug)]
pub struct GatherBothService<S> {
    service: S,
    landing: Landing,
}

impl<S> GatherBoth<S> {
    /// Wraps `channel`.
    ///
    /// ```
    /// use tonic_rdma::RdmaChannel;
    /// use tonic_rdma::gather::GatherBoth;
    /// use tonic_rdma_proto::transfer::transfer_client::TransferClient;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let channel = RdmaChannel::connect_lazy("http://ps0:50051")?;
    /// let channel = GatherBoth::new(channel).max_decoding_message_size(64 << 20);
    /// let client = TransferClient::new(channel).max_decoding_message_size(64 << 20);
    /// # drop(client);
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(channel: S) -> Self {
        Self { channel, landing: Landing::default() }
    }

    /// Sets the longest response that may land, in bytes. Default: 4 MiB, as in tonic. A longer one fails
    /// with OUT_OF_RANGE before memory is used for it. Messages that don't land have the limit of the
    /// generated client, which has to be set as well.
    #[must_use]
    pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
        self.landing.limit = limit;
        self
    }

    /// Lands requests of native calls with their last field of 4 KiB or more at a multiple of 64 bytes, not
    /// with their longest one. For messages whose bulk is their last field, whatever the length of the
    /// others.
    #[must_use]
    pub fn align_last_field(mut self) -> Self {
        self.landing.aligned = AlignedField::Last;
        self
    }
}

impl GatherBothLayer {
    /// Makes the layer.
    ///
    /// ```
    /// use tonic_rdma::RdmaServer;
    /// use tonic_rdma::gather::GatherBothLayer;
    ///
    /// let server = RdmaServer::new().layer(GatherBothLayer::new().max_decoding_message_size(64 << 20));
    /// # drop(server);
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the longest request that may land, in bytes. Default: 4 MiB, as in tonic. A longer one fails with
    /// OUT_OF_RANGE before memory is used for it. Messages that don't land have the limit of the generated
    /// server, which has to be set as well.
    #[must_use]
    pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
        self.landing.limit = limit;
        self
    }

    /// Lands responses of native calls with their last field of 4 KiB or more at a multiple of 64 bytes, not
    /// with their longest one. For messages whose bulk is their last field, whatever the length of the
    /// others.
    #[must_use]
    pub fn align_last_field(mut self) -> Self {
        self.landing.aligned = AlignedField::Last;
        self
    }
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for GatherBoth<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> S::Future {
        request.extensions_mut().insert(self.landing);
        self.channel.call(gather_request(request))
    }
}

impl<S> Layer<S> for GatherBothLayer {
    type Service = GatherBothService<S>;

    fn layer(&self, service: S) -> GatherBothService<S> {
        GatherBothService { service, landing: self.landing }
    }
}

impl<S> Service<Request<Body>> for GatherBothService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = MapResponseFuture<S::Future, fn(Response<Body>) -> Response<Body>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut gather: fn(Response<Body>) -> Response<Body> = gather_response::<false>;
        if let Some(switch) = request.extensions().get::<LandingSwitch>() {
            switch.set(self.landing);
            gather = gather_response::<true>;
        }
        MapResponse::new(&mut self.service, gather).call(request)
    }
}

impl<S: tonic::server::NamedService> tonic::server::NamedService for GatherBothService<S> {
    const NAME: &'static str = S::NAME;
}
