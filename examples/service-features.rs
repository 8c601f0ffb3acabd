//! The usual parts of a tonic service, unchanged: health, reflection, an interceptor, a layer, limits,
//! keepalive, a channel that connects with its first call, and a shutdown that lets calls finish.
//!
//! `cargo run --example service-features` runs both sides in one process.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_rdma::{RdmaConnectInfo, RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};
use tower::util::MapRequestLayer;

/// A service whose calls take a while. It reports when a call began.
#[derive(Debug)]
struct Slow(Arc<Notify>);

#[tonic::async_trait]
impl Greeter for Slow {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        self.0.notify_one();
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok(Response::new(HelloReply { message: format!("Hello {}!", request.into_inner().name) }))
    }
}

/// Accepts calls that have a token and came over RDMA.
#[allow(clippy::result_large_err, reason = "tonic's signature")]
fn guard(request: Request<()>) -> Result<Request<()>, Status> {
    let over = request.extensions().get::<RdmaConnectInfo>().map(|info| info.verdict().to_string());
    match (request.metadata().get("token"), over.as_deref()) {
        (None, _) => Err(Status::unauthenticated("no token")),
        (Some(_), Some("rdma")) => Ok(request),
        (Some(_), _) => Err(Status::permission_denied("over RDMA only")),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<GreeterServer<Slow>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tonic_rdma_proto::DESCRIPTORS)
        .build_v1()?;
    let began = Arc::new(Notify::new());
    let requests = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&requests);

    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let address = incoming.local_addr();
    let (stop, stopped) = oneshot::channel();
    let server = Server::builder()
        .concurrency_limit_per_connection(64)
        .http2_keepalive_interval(Some(Duration::from_secs(20)))
        .layer(MapRequestLayer::new(move |request: http::Request<tonic::body::Body>| {
            counter.fetch_add(1, Ordering::Relaxed);
            request
        }))
        .add_service(health)
        .add_service(reflection)
        .add_service(GreeterServer::with_interceptor(Slow(Arc::clone(&began)), guard))
        .serve_with_incoming_shutdown(incoming, async {
            let _ = stopped.await;
        });
    let server = tokio::spawn(server);

    let channel = Endpoint::from_shared(format!("http://{address}"))?
        .timeout(Duration::from_secs(10))
        .connect_with_connector_lazy(RdmaConnector::new());
    let service = "tonic_rdma.greeter.v1.Greeter".to_owned();
    let status = HealthClient::new(channel.clone()).check(HealthCheckRequest { service }).await?;
    println!("health:      {:?}", status.into_inner().status());

    let hello = || HelloRequest { name: "you".into() };
    match GreeterClient::new(channel.clone()).say_hello(hello()).await {
        Ok(_) => return Err("the interceptor let a call without a token pass".into()),
        Err(status) => println!("interceptor: {}", status.message()),
    }

    let mut client = GreeterClient::with_interceptor(channel, |mut request: Request<()>| {
        request.metadata_mut().insert("token", tonic::metadata::MetadataValue::from_static("open sesame"));
        Ok(request)
    });
    let mut call = tokio::spawn(async move { client.say_hello(hello()).await });
    tokio::select! {
        () = began.notified() => {}
        ended = &mut call => return Err(format!("the call did not begin: {:?}", ended?).into()),
    }
    stop.send(()).map_err(|()| "the server has ended by itself")?;
    println!("shutdown:    began with a call in flight");
    println!("             {}", call.await??.into_inner().message);
    server.await??;
    println!("             ended; the layer saw {} calls", requests.load(Ordering::Relaxed));
    Ok(())
}
