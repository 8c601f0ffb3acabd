//! The server: a Flight service with `GatherCodec` for the calls that carry record batches.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::{FlightData, PutResult, Ticket};
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::codec::Codec;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::{Grpc, NamedService};
use tonic_rdma::gather::{GatherBothLayer, GatherBothService, GatherCodec};
use tower::{Layer as _, service_fn};

use crate::decode::DEFAULT_LIMIT;

/// Serves an arrow-flight [`FlightService`], for
/// [`RdmaServer::add_service`](tonic_rdma::RdmaServer::add_service).
///
/// In `do_get`, `do_put` and `do_exchange`, a device sends bodies from where they are, and native calls pass
/// bodies to the service in the memory that they arrived in. All other calls, and stock clients, are served
/// as arrow-flight's own server does. The service needs no change; it is fastest if it encodes by
/// [`BatchEncoder`](crate::BatchEncoder).
///
/// ```no_run
/// # async fn serve(service: impl arrow_flight::flight_service_server::FlightService) -> Result<(), Box<dyn std::error::Error>> {
/// use tonic_rdma::RdmaServer;
/// use tonic_rdma_flight::FlightServer;
///
/// RdmaServer::new().add_service(FlightServer::new(service)).serve("0.0.0.0:50051").await?;
/// # Ok(())
/// # }
/// ```
pub struct FlightServer<T> {
    batches: GatherBothService<BatchMethods<T>>,
    others: FlightServiceServer<T>,
    service: Arc<T>,
}

impl<T: FlightService> FlightServer<T> {
    /// Makes a server of `service`.
    pub fn new(service: T) -> Self {
        Self::from_arc(Arc::new(service))
    }

    /// Makes a server of a service that others use as well.
    pub fn from_arc(service: Arc<T>) -> Self {
        Self::with_limit(service, DEFAULT_LIMIT)
    }

    /// Sets the longest message that the server accepts, in bytes. Default: 64 MiB. A longer one ends its
    /// call with OUT_OF_RANGE.
    #[must_use]
    pub fn max_message_size(self, limit: usize) -> Self {
        Self::with_limit(self.service, limit)
    }

    fn with_limit(service: Arc<T>, limit: usize) -> Self {
        let batches = BatchMethods { service: Arc::clone(&service), limit };
        Self {
            // The body is the last field. Metadata of the application may be longer.
            batches: GatherBothLayer::new()
                .max_decoding_message_size(limit)
                .align_last_field()
                .layer(batches),
            others: FlightServiceServer::from_arc(Arc::clone(&service)).max_decoding_message_size(limit),
            service,
        }
    }
}

impl<T: FlightService> Service<Request<Body>> for FlightServer<T> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if Method::of(&request).is_some() {
            Box::pin(self.batches.call(request))
        } else {
            self.others.call(request)
        }
    }
}

impl<T: FlightService> NamedService for FlightServer<T> {
    const NAME: &'static str = <FlightServiceServer<T> as NamedService>::NAME;
}

impl<T> Clone for FlightServer<T> {
    fn clone(&self) -> Self {
        let service = Arc::clone(&self.service);
        Self { batches: self.batches.clone(), others: self.others.clone(), service }
    }
}

impl<T> fmt::Debug for FlightServer<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FlightServer").finish_non_exhaustive()
    }
}

/// A method that carries record batches.
enum Method {
    Get,
    Put,
    Exchange,
}

impl Method {
    fn of(request: &Request<Body>) -> Option<Self> {
        match request.uri().path() {
            "/arrow.flight.protocol.FlightService/DoGet" => Some(Self::Get),
            "/arrow.flight.protocol.FlightService/DoPut" => Some(Self::Put),
            "/arrow.flight.protocol.FlightService/DoExchange" => Some(Self::Exchange),
            _ => None,
        }
    }
}

/// The methods that carry record batches, with our codec.
struct BatchMethods<T> {
    service: Arc<T>,
    limit: usize,
}

impl<T> Clone for BatchMethods<T> {
    fn clone(&self) -> Self {
        Self { service: Arc::clone(&self.service), limit: self.limit }
    }
}

impl<T: FlightService> Service<Request<Body>> for BatchMethods<T> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (service, limit) = (Arc::clone(&self.service), self.limit);
        Box::pin(async move {
            let service = &*service;
            Ok(match Method::of(&request) {
                Some(Method::Get) => {
                    let get = service_fn(|ticket| service.do_get(ticket));
                    grpc::<GatherCodec<FlightData, Ticket>>(limit).server_streaming(get, request).await
                }
                Some(Method::Put) => {
                    let put = service_fn(|messages| service.do_put(messages));
                    grpc::<GatherCodec<PutResult, FlightData>>(limit).streaming(put, request).await
                }
                Some(Method::Exchange) => {
                    let exchange = service_fn(|messages| service.do_exchange(messages));
                    grpc::<GatherCodec<FlightData, FlightData>>(limit).streaming(exchange, request).await
                }
                None => Status::unimplemented("not a method with record batches").into_http(),
            })
        })
    }
}

fn grpc<C: Codec + Default>(limit: usize) -> Grpc<C> {
    Grpc::new(C::default()).max_decoding_message_size(limit)
}
