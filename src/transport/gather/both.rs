//! The wrappers that send large fields by reference, and take large messages in the memory that they arrive in.

use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tower::layer::Layer;
use tower::util::MapResponse;
use tower::util::future::MapResponseFuture;
use tower_service::Service;

use super::landed::{AlignedField, Landing, LandingSwitch};

/// The channel that [`both`] returns: it sends large fields by reference, and delivers large responses in the memory that they arrive in.
#[derive(Clone, Debug)]
pub struct GatherBoth<S> {
    channel: S,
    landing: Landing,
}

/// The layer that [`both_layer`] returns: it delivers large requests in the memory that they arrive in, and sends large fields of
/// responses by reference.
#[derive(Clone, Copy, Debug)]
pub struct GatherBothLayer {
    landing: Landing,
}

/// The service that [`GatherBothLayer`] makes.
#[derive(Clone, Debug)]
pub struct GatherBothService<S> {
    service: S,
    landing: Landing,
}

/// Wraps a channel for a generated client, so that large fields of its requests go by reference, and large responses of native
/// calls reach the decoder without a copy.
///
/// The generated code has to use [`GatherCodec`](super::GatherCodec): other codecs fail with INTERNAL at the first large response.
/// `channel` is an [`RdmaChannel`](crate::RdmaChannel). On other channels, and where an `RdmaChannel` uses HTTP/2, responses are copied
/// as with [`requests`](super::requests).
///
/// A response lands before tonic sees it, so its limit has to be known here: [`GatherBoth::max_decoding_message_size`].
///
/// ```
/// use tonic_rdma::{RdmaChannel, gather};
/// use tonic_rdma_proto::transfer::transfer_client::TransferClient;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let channel = RdmaChannel::connect_lazy("http://ps0:50051")?;
/// let channel = gather::both(channel).max_decoding_message_size(64 << 20);
/// let client = TransferClient::new(channel).max_decoding_message_size(64 << 20);
/// # drop(client);
/// # Ok(())
/// # }
/// ```
pub fn both<S>(channel: S) -> GatherBoth<S> {
    GatherBoth { channel, landing: Landing::default() }
}

/// Returns a layer for [`RdmaServer::layer`](crate::RdmaServer::layer). With this layer, large requests of native calls reach the decoder
/// without a copy, and large fields of responses go by reference.
///
/// The generated code of all services under the layer has to use [`GatherCodec`](super::GatherCodec): other codecs fail with INTERNAL at
/// the first large request. To opt in some services only, wrap each of them with the layer instead of the server. Requests over
/// HTTP/2 are copied as with [`responses`](super::responses).
///
/// A request lands before tonic sees it, so its limit has to be known here: [`GatherBothLayer::max_decoding_message_size`].
///
/// ```
/// use tonic_rdma::{RdmaServer, gather};
///
/// let server = RdmaServer::new().layer(gather::both_layer().max_decoding_message_size(64 << 20));
/// # drop(server);
/// ```
pub fn both_layer() -> GatherBothLayer {
    GatherBothLayer { landing: Landing::default() }
}

impl<S> GatherBoth<S> {
    /// Sets the longest response that may land, in bytes. Default: 4 MiB, as in tonic. A longer one fails with OUT_OF_RANGE before memory
    /// is used for it. Messages that don't land have the limit of the generated client, which has to be set as well.
    #[must_use]
    pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
        self.landing.limit = limit;
        self
    }

    /// Lands requests of native calls with their last field of 4 KiB or more at a multiple of 64 bytes, not with their longest one. For
    /// messages whose bulk is their last field, whatever the length of the others.
    #[must_use]
    pub fn align_last_field(mut self) -> Self {
        self.landing.aligned = AlignedField::Last;
        self
    }
}

impl GatherBothLayer {
    /// Sets the longest request that may land, in bytes. Default: 4 MiB, as in tonic. A longer one fails with OUT_OF_RANGE before memory
    /// is used for it. Messages that don't land have the limit of the generated server, which has to be set as well.
    #[must_use]
    pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
        self.landing.limit = limit;
        self
    }

    /// Lands responses of native calls with their last field of 4 KiB or more at a multiple of 64 bytes, not with their longest one. For
    /// messages whose bulk is their last field, whatever the length of the others.
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
        self.channel.call(super::gather_request(request))
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
        let mut gather: fn(Response<Body>) -> Response<Body> = super::gather_response;
        if let Some(switch) = request.extensions().get::<LandingSwitch>() {
            switch.set(self.landing);
            gather = super::gather_native_response;
        }
        MapResponse::new(&mut self.service, gather).call(request)
    }
}

impl<S: tonic::server::NamedService> tonic::server::NamedService for GatherBothService<S> {
    const NAME: &'static str = S::NAME;
}
