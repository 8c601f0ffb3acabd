//! One port for all clients: native, HTTP/2 over RDMA, stock TCP; with the same services and layers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio_stream::StreamExt as _;
use tonic::service::{InterceptorLayer, Routes};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_rdma::{
    CallConfig, GrpcService, RdmaChannel, RdmaConnector, RdmaError, RdmaErrorKind, RdmaIncoming, RdmaRoutes,
    RdmaServer, RemoteAddresses,
};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tower::layer::Layer;
use tower::layer::util::Identity;

use crate::server_acts::{Acts, Running, in_every_runtime, serve, serve_as};
use support::{Authority, Port, Runtime, config, outcome, say, within};

async fn over_http2(running: &Running) -> GreeterClient<Channel> {
    let connector = RdmaConnector::new().config(config());
    GreeterClient::new(running.endpoint().connect_with_connector(connector).await.unwrap())
}

async fn stock(running: &Running) -> GreeterClient<Channel> {
    GreeterClient::new(running.endpoint().connect().await.unwrap())
}

#[test]
fn all_kinds_of_clients_call_one_port_at_once() {
    in_every_runtime(|| async {
        let running = serve(&Acts::default(), CallConfig::default()).await;
        let (mut native, mut rdma, mut tcp) =
            (running.client().await, over_http2(&running).await, stock(&running).await);
        let address = running.address;
        for round in 0..50 {
            let name = format!("{round}");
            let (first, second, third) =
                tokio::join!(say(&mut native, &name), say(&mut rdma, &name), say(&mut tcp, &name));
            assert_eq!([first, second, third].map(Result::unwrap), [name.clone(), name.clone(), name]);
        }
        let peers = tokio::join!(say(&mut native, "peer"), say(&mut rdma, "peer"), say(&mut tcp, "peer"));
        assert_eq!(peers.0.unwrap(), format!(r#"Some(true) Some("rdma") true {address}"#));
        assert_eq!(peers.1.unwrap(), format!(r#"Some(false) Some("rdma") true {address}"#));
        assert_eq!(peers.2.unwrap(), format!(r#"Some(false) Some("tcp") true {address}"#));
        drop((native, rdma, tcp));
        running.shut_down().await.unwrap().unwrap();
    });
}

#[test]
fn a_server_of_tonic_offers_no_native_calls() {
    Runtime::MultiThread.run(within(async {
        let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", incoming.local_addr());
        let server =
            Server::builder().layer(RemoteAddresses::new()).add_service(GreeterServer::new(Acts::default()));
        tokio::spawn(server.serve_with_incoming(incoming));
        let channel = tonic_rdma::RdmaChannel::connect(uri).await.unwrap();
        let info = channel.last_connection().unwrap();
        assert!(!info.is_native(), "{}", info.reason());
        let peer = say(&mut GreeterClient::new(channel), "peer").await.unwrap();
        assert!(peer.starts_with(r#"Some(false) Some("rdma") true"#), "{peer}");
    }));
}

/// Serves `server` at `address`, by one of the methods that serve.
async fn serve_by<L>(method: usize, server: RdmaServer<L>, address: SocketAddr) -> Result<(), RdmaError>
where
    L: Layer<RdmaRoutes, Service: GrpcService>,
{
    let incoming = || RdmaIncoming::builder().config(config()).bind(address);
    let server = server.config(config());
    match method {
        0 => server.serve(address).await,
        1 => server.serve_with_shutdown(address, std::future::pending()).await,
        2 => server.serve_with_incoming(incoming().await?).await,
        _ => server.serve_with_incoming_shutdown(incoming().await?, std::future::pending()).await,
    }
}

/// Connects when the server listens.
async fn connected(endpoint: &Endpoint) -> RdmaChannel {
    loop {
        if let Ok(channel) = RdmaChannel::builder(endpoint.clone()).config(config()).connect().await {
            return channel;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_server_with_tls_offers_no_native_calls_however_it_is_made() {
    Runtime::MultiThread.run(within(async {
        let authority = Authority::new("test");
        let greeter = || GreeterServer::new(Acts::default());
        for tls in [true, false] {
            let http2 = || match tls {
                true => Server::builder().tls_config(authority.server()).unwrap(),
                false => Server::builder(),
            };
            let new = RdmaServer::new;
            let last = http2().timeout(Duration::from_secs(60)).http2_keepalive_interval(None);
            let mut servers: Vec<_> =
                (0..4).map(|method| (method, new().http2(http2()).add_service(greeter()))).collect();
            servers.push((3, new().add_service(greeter()).http2(http2())));
            servers.push((3, new().http2(http2()).add_routes(Routes::new(greeter()))));
            servers.push((3, new().http2(Server::builder()).add_service(greeter()).http2(last).clone()));
            let mut running: Vec<_> = servers
                .into_iter()
                .map(|(method, server)| {
                    let port = Port::reserve();
                    tokio::spawn(serve_by(method, server, port.address));
                    port
                })
                .collect();
            let (layered, port) = (new().http2(http2()).layer(Identity::new()), Port::reserve());
            tokio::spawn(serve_by(3, layered.add_service(greeter()), port.address));
            running.push(port);
            for (number, port) in running.iter().enumerate() {
                let plain = port.endpoint();
                if !tls {
                    let info = connected(&plain).await.last_connection().unwrap();
                    assert!(info.is_native(), "server {number}: {}", info.reason());
                    continue;
                }
                let secure = Endpoint::from_shared(format!("https://{}", port.address)).unwrap();
                let channel = connected(&secure.tls_config(authority.client()).unwrap()).await;
                assert!(!channel.last_connection().unwrap().is_native(), "server {number}");
                assert_eq!(say(&mut GreeterClient::new(channel), "hello").await.unwrap(), "hello");
                // Without TLS, this client can't call at all. It must not get around TLS by native calls.
                let channel = RdmaChannel::builder(plain).config(config()).connect_lazy();
                say(&mut GreeterClient::new(channel.clone()), "hello").await.unwrap_err();
                assert!(!channel.last_connection().unwrap().is_native(), "server {number}");
            }
        }
    }));
}

#[test]
fn health_and_reflection_answer_native_calls() {
    in_every_runtime(|| async {
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_serving::<GreeterServer<Acts>>().await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
            .build_v1()
            .unwrap();
        let server = RdmaServer::new().add_service(health).add_routes(Routes::new(reflection));
        let running = serve_as(server.add_service(GreeterServer::new(Acts::default()))).await;
        let channel = running.channel().await;

        let mut health = HealthClient::new(channel.clone());
        let about = |service: &str| HealthCheckRequest { service: service.into() };
        let greeter = "tonic_rdma.greeter.v1.Greeter";
        assert_eq!(health.check(about(greeter)).await.unwrap().into_inner().status, 1);
        assert_eq!(health.check(about("other")).await.unwrap_err().code(), Code::NotFound);
        let mut watch = health.watch(about(greeter)).await.unwrap().into_inner();
        assert_eq!(watch.next().await.unwrap().unwrap().status, 1);
        reporter.set_not_serving::<GreeterServer<Acts>>().await;
        assert_eq!(watch.next().await.unwrap().unwrap().status, 2);

        let list = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut reflection = ServerReflectionClient::new(channel.clone());
        let mut replies =
            reflection.server_reflection_info(tokio_stream::once(list)).await.unwrap().into_inner();
        let reply = replies.next().await.unwrap().unwrap().message_response.unwrap();
        let MessageResponse::ListServicesResponse(services) = reply else { panic!("{reply:?}") };
        assert_eq!(services.service[0].name, "grpc.reflection.v1.ServerReflection");
        assert!(replies.next().await.is_none());
        assert_eq!(say(&mut GreeterClient::new(channel), "hello").await.unwrap(), "hello");
    });
}

#[test]
fn layers_and_interceptors_see_the_calls_of_all_clients() {
    Runtime::MultiThread.run(within(async {
        let seen = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&seen);
        let inspect = move |request: http::Request<tonic::body::Body>| {
            assert_eq!(request.uri().path(), "/tonic_rdma.greeter.v1.Greeter/SayHello");
            assert_eq!((request.method(), request.version()), (&http::Method::POST, http::Version::HTTP_2));
            assert_eq!(request.headers()["content-type"], "application/grpc");
            assert_eq!(request.headers()["te"], "trailers");
            assert!(request.uri().authority().is_some(), "{}", request.uri());
            count.fetch_add(1, Ordering::SeqCst);
            request
        };
        let interceptor = |request: Request<()>| match request.metadata().get("token") {
            Some(_) => Ok(request),
            None => Err(Status::unauthenticated("no token")),
        };
        let server = RdmaServer::new()
            .layer(tower::util::MapRequestLayer::new(inspect))
            .layer(InterceptorLayer::new(interceptor))
            .add_service(GreeterServer::new(Acts::default()));
        let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", incoming.local_addr());
        tokio::spawn(server.serve_with_incoming(incoming));
        let native = tonic_rdma::RdmaChannel::connect(uri.clone()).await.unwrap();
        assert!(native.last_connection().unwrap().is_native());
        let stock = Channel::from_shared(uri).unwrap().connect().await.unwrap();

        let refused = Err((Code::Unauthenticated, "no token".to_owned()));
        assert_eq!(outcome(say(&mut GreeterClient::new(native.clone()), "a").await), refused);
        assert_eq!(outcome(say(&mut GreeterClient::new(stock.clone()), "a").await), refused);
        let token = |mut request: Request<()>| {
            request.metadata_mut().insert("token", "x".parse().unwrap());
            Ok::<_, Status>(request)
        };
        assert_eq!(say(&mut GreeterClient::with_interceptor(native, token), "b").await.unwrap(), "b");
        assert_eq!(say(&mut GreeterClient::with_interceptor(stock, token), "b").await.unwrap(), "b");
        assert_eq!(seen.load(Ordering::SeqCst), 4);
    }));
}

#[test]
fn a_bad_limit_and_a_taken_port_are_errors() {
    Runtime::CurrentThread.run(within(async {
        let server = || RdmaServer::new().add_service(GreeterServer::new(Acts::default()));
        let error =
            server().calls(CallConfig::default().stream_window(1)).serve("127.0.0.1:0").await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::InvalidSetting, "{error}");
        assert!(error.to_string().starts_with("CallConfig::stream_window is 1: takes"), "{error}");
        let config = tonic_rdma::Config::default().completion_queues(0);
        let error = server().config(config).serve("127.0.0.1:0").await.unwrap_err();
        assert!(error.to_string().starts_with("Config::completion_queues is 0"), "{error}");
        let running = serve(&Acts::default(), CallConfig::default()).await;
        let error = server().serve(running.address).await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::Listen, "{error}");
        assert!(error.to_string().contains("another process listens there"), "{error}");
    }));
}
