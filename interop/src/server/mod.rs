//! The server: gRPC's test service and ours, with health and reflection for stock tools.

mod callers;
mod checked;
mod echo;
mod limits;
mod options;
mod streams;
mod test_service;

pub(crate) use options::ServerOptions;

use std::convert::Infallible;

use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::service::{AxumRouter, LayerExt as _, Routes};
use tower::layer::layer_fn;
use tower::util::{BoxCloneSyncService, MapRequest};
use tower::{Service, ServiceExt as _, service_fn};

use crate::compression::at_server;
use crate::proto::DESCRIPTORS;
use crate::proto::checked::checked_server::CheckedServer;
use crate::proto::testing::test_service_server::TestServiceServer;
use crate::transport::Listener;
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::{Context as _, Failure};

/// Listens, prints the port, and serves until interrupted. Prints the names of callers to the standard error.
pub(crate) async fn run(options: &ServerOptions) -> Result<(), Failure> {
    let tls = options.tls.load()?;
    let listener = Listener::bind(options.transport, &options.host, options.port).await?;
    report_line(listener.port())?;
    let interrupted = async {
        // Without signals the server runs until it is killed.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    };
    let callers = callers::Callers::default();
    let named = move |request: http::Request<_>| {
        callers.print(request.headers());
        request
    };
    let routes = AxumRouter::new().fallback_service(MapRequest::new(routes().await?, named)).into();
    listener.serve(tls, routes, interrupted).await
}

/// Returns the routes of all services.
pub(crate) async fn routes() -> Result<Routes, Failure> {
    let test_service = TestServiceServer::new(test_service::OfficialService)
        .accept_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(limits::OFFICIAL_REQUEST)
        .max_encoding_message_size(limits::MESSAGE);
    let checked = CheckedServer::new(checked::CheckedService)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Zstd)
        .send_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Zstd)
        .max_decoding_message_size(limits::MESSAGE)
        .max_encoding_message_size(limits::MESSAGE);

    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<TestServiceServer<test_service::OfficialService>>().await;
    health.set_serving::<CheckedServer<checked::CheckedService>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let broken = "the descriptors can't be used for reflection";

    let routes = Routes::new(layer_fn(with_functions).named_layer(test_service))
        .add_service(checked)
        .add_service(health_service)
        // Older tools know only the first version.
        .add_service(reflection().build_v1alpha().context(broken)?);
    Ok(routes.add_service(reflection().build_v1().context(broken)?))
}

/// Adds to the official service what tonic's handlers can't do.
fn with_functions<S>(service: S) -> BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Infallible>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send,
{
    BoxCloneSyncService::new(service_fn(move |request| {
        let service = service.clone();
        let answer = async move |request| service.oneshot(request).await;
        echo::echoed(request, async move |request| at_server(request, answer).await)
    }))
}
