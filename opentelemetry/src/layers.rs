//! The layers of client and server, and the service that both make.

use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use opentelemetry::metrics::MeterProvider;
use prost::Message as _;
use prost_types::FileDescriptorSet;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{GrpcMethod, Status};
use tonic_rdma::{RdmaConnectInfo, RdmaRequestExt as _, Verdict};
use tower::Layer;
use tower::util::MapErr;
use tower_service::Service;

use crate::instruments::Instruments;
use crate::record::{BoxError, CallRecord, RecordedBody, RecordedFuture};

/// A layer that records the calls of a client.
///
/// The errors of the service are [`Status`]es, as a generated client would make them of the channel's errors.
///
/// ```
/// use opentelemetry_sdk::metrics::SdkMeterProvider;
/// use tonic_rdma::RdmaChannel;
/// use tonic_rdma_opentelemetry::ClientMetrics;
/// use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
/// use tower::Layer as _;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tonic_rdma::RdmaError> {
/// let provider = SdkMeterProvider::builder().build();
/// let channel = RdmaChannel::connect_lazy("http://ps0:50051")?;
/// let client = GreeterClient::new(ClientMetrics::new(&provider, "http://ps0:50051").layer(channel));
/// # drop(client);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ClientMetrics {
    instruments: Arc<Instruments>,
}

impl ClientMetrics {
    /// Makes the layer, with instruments of `provider`. `target` is the value of `grpc.target`: the URI of the
    /// channel. Where a program makes channels to many addresses, give all of them one name, such as `other`.
    pub fn new(provider: &(impl MeterProvider + ?Sized), target: impl Into<String>) -> Self {
        Self { instruments: Arc::new(Instruments::client(provider, target.into())) }
    }

    /// Sets which methods count under their own name although the call is not one of generated code. `record`
    /// gets the name without a slash at its start. Default: none, they count as `other`.
    #[must_use]
    pub fn generic_methods(mut self, record: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.instruments).generic = Some(Arc::new(record));
        self
    }
}

impl<S> Layer<S> for ClientMetrics
where
    S: Service<Request<Body>, Error: Into<BoxError>>,
{
    type Service = RecordedService<MapErr<S, fn(S::Error) -> Status>>;

    fn layer(&self, service: S) -> Self::Service {
        let service = MapErr::new(service, to_status as fn(S::Error) -> Status);
        RecordedService { service, instruments: Arc::clone(&self.instruments) }
    }
}

fn to_status(error: impl Into<BoxError>) -> Status {
    Status::from_error(error.into())
}

/// A layer that records the calls of a server: for [`RdmaServer::layer`](tonic_rdma::RdmaServer::layer), for
/// tonic's `Server::layer`, or for one service.
///
/// ```
/// use opentelemetry_sdk::metrics::SdkMeterProvider;
/// use tonic_rdma::RdmaServer;
/// use tonic_rdma_opentelemetry::ServerMetrics;
///
/// let provider = SdkMeterProvider::builder().build();
/// let metrics = ServerMetrics::new(&provider).methods_of(tonic_rdma_proto::DESCRIPTORS)?;
/// let server = RdmaServer::new().layer(metrics);
/// # drop(server);
/// # Ok::<(), prost::DecodeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ServerMetrics {
    instruments: Arc<Instruments>,
}

impl ServerMetrics {
    /// Makes the layer, with instruments of `provider`. All methods count as `other` until
    /// [`methods_of`](Self::methods_of) or [`generic_methods`](Self::generic_methods) names them.
    pub fn new(provider: &(impl MeterProvider + ?Sized)) -> Self {
        Self { instruments: Arc::new(Instruments::server(provider)) }
    }

    /// Lets the methods of these services count under their own name. `descriptors` is an encoded
    /// `FileDescriptorSet`, as for tonic's reflection service: `tonic_prost_build` writes it with
    /// `file_descriptor_set_path`. May be called several times.
    ///
    /// # Errors
    /// `descriptors` is no `FileDescriptorSet`.
    pub fn methods_of(mut self, descriptors: &[u8]) -> Result<Self, prost::DecodeError> {
        let instruments = Arc::make_mut(&mut self.instruments);
        for file in FileDescriptorSet::decode(descriptors)?.file {
            let package = file.package().to_owned();
            let dot = if package.is_empty() { "" } else { "." };
            for service in &file.service {
                let name = |method: &str| format!("{package}{dot}{}/{method}", service.name());
                let methods = service.method.iter().map(|method| name(method.name()).into());
                instruments.methods.extend(methods);
            }
        }
        Ok(self)
    }

    /// Sets which other methods count under their own name. `record` gets the name without a slash at its
    /// start. Callers choose the names, so a filter that takes every name lets them make any number of series.
    /// Default: none, they count as `other`.
    #[must_use]
    pub fn generic_methods(mut self, record: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.instruments).generic = Some(Arc::new(record));
        self
    }

    /// Adds the attribute `tonic_rdma.transport` to all instruments: `rdma`, `tcp` or `in_process`. It is not
    /// one of gRPC's. Calls through other listeners than [`RdmaIncoming`](tonic_rdma::RdmaIncoming) don't
    /// have it.
    #[must_use]
    pub fn with_transport(mut self) -> Self {
        Arc::make_mut(&mut self.instruments).names_transport = true;
        self
    }
}

impl<S> Layer<S> for ServerMetrics {
    type Service = RecordedService<S>;

    fn layer(&self, service: S) -> RecordedService<S> {
        RecordedService { service, instruments: Arc::clone(&self.instruments) }
    }
}

/// The service that [`ClientMetrics`] and [`ServerMetrics`] make.
#[derive(Clone, Debug)]
pub struct RecordedService<S> {
    service: S,
    instruments: Arc<Instruments>,
}

impl<S, B, R> Service<Request<B>> for RecordedService<S>
where
    S: Service<Request<Body>, Response = Response<R>, Error: 'static>,
    B: http_body::Body<Data = bytes::Bytes, Error: Into<BoxError>> + Send + 'static,
    R: http_body::Body<Data = bytes::Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = RecordedFuture<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let registered = request.extensions().get::<GrpcMethod<'static>>().is_some();
        let connection = request.connection().filter(|_| self.instruments.names_transport);
        let transport = connection.map(transport_of);
        let attributes = self.instruments.attributes(request.uri().path(), registered, transport);
        let call = CallRecord::begin(&self.instruments, attributes, request.headers());
        let request = request.map(|body| Body::new(RecordedBody::request(body, &call)));
        RecordedFuture::new(self.service.call(request), call)
    }
}

impl<S: NamedService> NamedService for RecordedService<S> {
    const NAME: &'static str = S::NAME;
}

fn transport_of(connection: &RdmaConnectInfo) -> &'static str {
    match connection.verdict() {
        _ if connection.is_in_process() => "in_process",
        Verdict::Rdma => "rdma",
        Verdict::Tcp => "tcp",
    }
}
