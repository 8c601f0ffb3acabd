//! gRPC's health service: `check` and `watch`.

use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic::transport::Server;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Over, ScriptedGreeter, unchanged};

#[test]
fn check_and_watch_report_the_status() {
    let outcome = unchanged(check_and_watch);
    assert_eq!(outcome, (1, Code::NotFound, vec![1, 2, 1]), "SERVING is 1, NOT_SERVING 2");
}

async fn check_and_watch(over: Over) -> (i32, Code, Vec<i32>) {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<GreeterServer<ScriptedGreeter>>().await;
    let router =
        Server::builder().add_service(health).add_service(GreeterServer::new(ScriptedGreeter::new()));
    let running = over.serve_at("127.0.0.1:0", router).await;
    let mut client = HealthClient::new(over.connect(running.endpoint()).await.unwrap());
    let about = |service: &str| HealthCheckRequest { service: service.into() };
    let greeter = "tonic_rdma.greeter.v1.Greeter";

    let known = client.check(about(greeter)).await.unwrap().into_inner().status;
    let unknown = client.check(about("nobody")).await.unwrap_err().code();
    let mut watch = client.watch(about(greeter)).await.unwrap().into_inner();
    let mut seen = vec![watch.next().await.unwrap().unwrap().status];
    reporter.set_not_serving::<GreeterServer<ScriptedGreeter>>().await;
    seen.push(watch.next().await.unwrap().unwrap().status);
    reporter.set_serving::<GreeterServer<ScriptedGreeter>>().await;
    seen.push(watch.next().await.unwrap().unwrap().status);
    (known, unknown, seen)
}
