//! The server: gRPC's test service and ours, with health and reflection for stock tools.

mod checked;
mod replies;
mod test_service;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io::Write as _;
use std::sync::{Arc, Mutex};

use clap::Args;
use http::{HeaderName, HeaderValue};
use http_body::Frame;
use http_body_util::BodyExt as _;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::service::{AxumRouter, LayerExt as _, Routes};
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::{Context as _, Failure};
use tonic_rdma_verbs::unstable::lock;
use tower::layer::layer_fn;
use tower::util::{BoxCloneSyncService, MapRequest};
use tower::{Service, ServiceExt as _, service_fn};

use crate::compression::at_server;
use crate::proto::DESCRIPTORS;
use crate::proto::checked::checked_server::CheckedServer;
use crate::proto::testing::test_service_server::TestServiceServer;
use crate::tls::ServerTlsOptions;
use crate::transport::{Listener, Transport};

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
    let callers = Callers::default();
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
        .max_decoding_message_size(replies::OFFICIAL_REQUEST)
        .max_encoding_message_size(replies::MESSAGE);
    let checked = CheckedServer::new(checked::CheckedService)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Zstd)
        .send_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Zstd)
        .max_decoding_message_size(replies::MESSAGE)
        .max_encoding_message_size(replies::MESSAGE);

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
        echoed(request, async move |request| at_server(request, answer).await)
    }))
}

/// Options of `server`.
#[derive(Debug, Args)]
pub(crate) struct ServerOptions {
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Transport of the calls: ours, ours with native calls, or tonic's own TCP as a control
    #[arg(long, default_value = "rdma")]
    pub(crate) transport: Transport,
    #[command(flatten)]
    pub(crate) tls: ServerTlsOptions,
}

/// Maximum number of printed names, so that a client can't fill a log.
const MAX_NAMES: usize = 16;
/// Maximum number of printed characters of a name.
const MAX_LENGTH: usize = 200;

/// The names of callers (`user-agent`) that were printed. A name has the caller's library and version.
#[derive(Clone, Debug, Default)]
struct Callers(Arc<Mutex<BTreeSet<String>>>);

impl Callers {
    /// Prints the caller's name to the standard error, unless it was printed already.
    fn print(&self, headers: &http::HeaderMap) {
        if let Some(name) = self.new_name(headers) {
            // stderr may be closed.
            let _ = writeln!(std::io::stderr(), "called by {name}");
        }
    }

    /// Returns the caller's name if it was not printed yet.
    fn new_name(&self, headers: &http::HeaderMap) -> Option<String> {
        let name = headers.get(http::header::USER_AGENT)?.to_str().ok()?;
        let name: String = name.chars().take(MAX_LENGTH).collect();
        let mut printed = lock(&self.0);
        (printed.len() < MAX_NAMES && printed.insert(name.clone())).then_some(name)
    }
}

const INITIAL: HeaderName = HeaderName::from_static("x-grpc-test-echo-initial");
const TRAILING: HeaderName = HeaderName::from_static("x-grpc-test-echo-trailing-bin");

/// Answers a call, and sends metadata back: one header as a header, and a binary one as a trailer. tonic's
/// handlers can't send trailers with a unary reply.
async fn echoed<E>(
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

#[cfg(test)]
mod callers_tests {
    use super::*;

    fn named(name: &str) -> http::HeaderMap {
        let name = http::HeaderValue::from_str(name).unwrap();
        [(http::header::USER_AGENT, name)].into_iter().collect()
    }

    #[test]
    fn each_name_is_printed_once() {
        let callers = Callers::default();
        assert_eq!(callers.new_name(&named("tonic/0.14")), Some("tonic/0.14".to_owned()));
        assert_eq!(callers.new_name(&named("tonic/0.14")), None);
        assert_eq!(callers.new_name(&named("grpc-go/1.33.3")), Some("grpc-go/1.33.3".to_owned()));
        assert_eq!(callers.new_name(&http::HeaderMap::new()), None);
    }

    #[test]
    fn printed_names_are_bounded() {
        let callers = Callers::default();
        let printed = (0..1000).filter(|number| callers.new_name(&named(&format!("a/{number}"))).is_some());
        assert_eq!(printed.count(), MAX_NAMES);
        let long = Callers::default().new_name(&named(&"x".repeat(5000)));
        assert_eq!(long.map(|name| name.len()), Some(MAX_LENGTH));
    }
}
