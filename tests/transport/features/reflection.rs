//! gRPC's reflection service, version 1: the list of services, and the file that defines a symbol.

use tokio_stream::StreamExt as _;
use tonic::transport::Server;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::server::Builder;

use support::{Over, unchanged};

#[test]
fn services_are_listed_and_files_found_by_symbol() {
    let (services, file) = unchanged(reflect);
    for service in ["tonic_rdma.greeter.v1.Greeter", "grpc.reflection.v1.ServerReflection"] {
        assert!(services.iter().any(|listed| listed == service), "{services:?}");
    }
    let file = String::from_utf8_lossy(&file).into_owned();
    assert!(file.contains("greeter.proto") && file.contains("SayHello"), "{file}");
}

async fn reflect(over: Over) -> (Vec<String>, Vec<u8>) {
    let reflection = Builder::configure()
        .register_encoded_file_descriptor_set(tonic_rdma_proto::DESCRIPTORS)
        .build_v1()
        .unwrap();
    let running = over.serve_at("127.0.0.1:0", Server::builder().add_service(reflection)).await;
    let mut client = ServerReflectionClient::new(over.connect(running.endpoint()).await.unwrap());
    let ask = |request| ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let requests = tokio_stream::iter([
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("tonic_rdma.greeter.v1.Greeter".into())),
    ]);
    let mut replies = client.server_reflection_info(requests).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) =
        replies.next().await.unwrap().unwrap().message_response
    else {
        panic!("not a list")
    };
    let Some(MessageResponse::FileDescriptorResponse(files)) =
        replies.next().await.unwrap().unwrap().message_response
    else {
        panic!("not a file")
    };
    let mut services: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    services.sort();
    (services, files.file_descriptor_proto.concat())
}
