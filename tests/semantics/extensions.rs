//! What a handler learns of its connection and its request, and gRPC's standard services.

use bytes::Bytes;
use tokio_stream::StreamExt as _;
use tonic::service::Routes;
use tonic::{Request, Response};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_rdma::RdmaConnectInfo;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tower::util::MapRequestLayer;

use crate::caller::Caller;
use crate::column::Column;
use crate::content::{code, joined};
use crate::probe::Probe;

/// Returns the client's address.
pub(crate) fn peer<T>(request: &Request<T>) -> String {
    let info = request.extensions().get::<RdmaConnectInfo>();
    format!("{:?}", info.map(RdmaConnectInfo::peer_addr).or(request.remote_addr()))
}

fn text(reply: &Bytes) -> String {
    String::from_utf8(reply.to_vec()).unwrap()
}

pub(crate) async fn addresses_by_tonics_request(column: Column) -> String {
    let running = column
        .serve(Probe::new().unary(async |request| {
            let is_some = |known: bool| if known { "known" } else { "unknown" };
            let [remote, local] = [request.remote_addr(), request.local_addr()];
            Ok(Response::new(
                format!("remote {}, local {}", is_some(remote.is_some()), is_some(local.is_some())).into(),
            ))
        }))
        .await;
    text(&column.client(&running).await.echo("").await.unwrap())
}

pub(crate) async fn connect_info(column: Column) -> String {
    let running = column
        .serve(Probe::new().unary(async |request| {
            let info = request.extensions().get::<RdmaConnectInfo>();
            let verdict = info.map_or("none".to_owned(), |info| {
                assert!(info.peer_addr().ip().is_loopback(), "{}", info.peer_addr());
                info.verdict().to_string()
            });
            Ok(Response::new(verdict.into()))
        }))
        .await;
    text(&column.client(&running).await.echo("").await.unwrap())
}

/// Returns what a layer of the server sees of a request.
async fn seen(column: Column, origin: Option<&str>) -> String {
    let layer = MapRequestLayer::new(|mut request: http::Request<tonic::body::Body>| {
        let uri = request.uri();
        let seen = joined([
            format!("{}", request.method()),
            format!("scheme {}", uri.scheme_str().unwrap_or("none")),
            format!("host {}", uri.host().unwrap_or("none")),
            format!("path {}", uri.path()),
        ]);
        request.headers_mut().insert("seen", seen.parse().unwrap());
        request
    });
    let probe = Probe::new().unary(async |request| {
        let seen = request.metadata().get("seen").unwrap().to_str().unwrap().to_owned();
        Ok(Response::new(seen.into()))
    });
    let running = column.serve_layered(layer, Routes::new(probe)).await;
    let mut endpoint = running.endpoint();
    if let Some(origin) = origin {
        endpoint = endpoint.origin(origin.parse().unwrap());
    }
    text(&Caller::new(column.connect(endpoint).await.unwrap()).echo("").await.unwrap())
}

pub(crate) async fn request_line_and_authority(column: Column) -> String {
    seen(column, None).await
}

pub(crate) async fn another_origin(column: Column) -> String {
    seen(column, Some("http://elsewhere.example:81")).await
}

/// What a layer puts into a request's extensions reaches the handler.
pub(crate) async fn of_a_layer(column: Column) -> String {
    #[derive(Clone)]
    struct Note(&'static str);
    let layer = MapRequestLayer::new(|mut request: http::Request<tonic::body::Body>| {
        request.extensions_mut().insert(Note("from a layer"));
        request
    });
    let probe = Probe::new().unary(async |request| {
        let note = request.extensions().get::<Note>().map_or("nothing", |note| note.0);
        Ok(Response::new(note.into()))
    });
    let running = column.serve_layered(layer, Routes::new(probe)).await;
    text(&column.client(&running).await.echo("").await.unwrap())
}

pub(crate) async fn health(column: Column) -> String {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("probe", tonic_health::ServingStatus::Serving).await;
    let layer = tower::layer::util::Identity::new();
    let running = column.serve_layered(layer, Routes::new(health).add_service(Probe::new())).await;
    let mut client = HealthClient::new(column.connect(running.endpoint()).await.unwrap());
    let ask = |service: &str| HealthCheckRequest { service: service.into() };
    let known = client.check(ask("probe")).await.unwrap().into_inner().status();
    let unknown = code(client.check(ask("unknown")).await);
    let mut watched = client.watch(ask("probe")).await.unwrap().into_inner();
    let mut statuses = vec![watched.next().await.unwrap().unwrap().status()];
    reporter.set_service_status("probe", tonic_health::ServingStatus::NotServing).await;
    statuses.push(watched.next().await.unwrap().unwrap().status());
    format!("check {known:?} and {unknown}, watch {statuses:?}")
}

pub(crate) async fn reflection(column: Column) -> String {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tonic_rdma_proto::DESCRIPTORS)
        .build_v1()
        .unwrap();
    let layer = tower::layer::util::Identity::new();
    let running = column.serve_layered(layer, Routes::new(reflection)).await;
    let mut client = ServerReflectionClient::new(column.connect(running.endpoint()).await.unwrap());
    let ask = |request| ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let requests = tokio_stream::iter([
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("tonic_rdma.greeter.v1.Greeter".into())),
    ]);
    let mut replies = client.server_reflection_info(requests).await.unwrap().into_inner();
    let list = replies.next().await.unwrap().unwrap().message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = list else { panic!("not a list: {list:?}") };
    let file = replies.next().await.unwrap().unwrap().message_response;
    let Some(MessageResponse::FileDescriptorResponse(file)) = file else { panic!("not a file: {file:?}") };
    let file = file.file_descriptor_proto.concat();
    let greets = String::from_utf8_lossy(&file).contains("SayHello");
    let listed = list.service.iter().any(|service| service.name == "tonic_rdma.greeter.v1.Greeter");
    format!("the service is listed: {listed}, its file is found: {greets}")
}
