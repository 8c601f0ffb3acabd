//! The book's examples of configuration, and of the information about a connection.

use std::time::Duration;

use tokio::sync::oneshot;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::{Config, Policy, PollMode, RdmaConnectInfo, RdmaConnector};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

use super::addresses::{Endpoint, RdmaIncoming};
use super::running::{self, Outcome, ROUNDS, default_runtime};

#[test]
fn both_ends_know_what_carries_a_connection() {
    running::run(default_runtime(), async {
        let (stop, stopped) = oneshot::channel::<()>();
        let (incoming, _) = configured().await?;
        let server = layered().add_service(GreeterServer::new(CarriedBy));
        let server = tokio::spawn(server.serve_with_incoming_shutdown(incoming, async {
            let _ = stopped.await;
        }));
        let (mut client, info) = connected().await?;
        for _ in 0..ROUNDS {
            let reply = client.say_hello(HelloRequest::default()).await?;
            assert_eq!(reply.into_inner().message, "over rdma, from 127.0.0.1");
        }
        counted(&info)?;
        assert!(info.counters().eager_sent >= ROUNDS);
        drop(client);
        let _ = stop.send(());
        Ok(server.await??)
    });
}

#[test]
fn a_configuration_in_code() {
    let config = in_code().unwrap();
    let same = Config::from_env().unwrap().policy(Policy::Require).spin_limit(Duration::from_micros(500));
    assert_eq!(config, same.ping_interval(Duration::from_secs(5)).ping_timeout(Duration::from_secs(10)));
}

#[rustfmt::skip]
async fn configured() -> Outcome<(tonic_rdma::RdmaIncoming, RdmaConnector)> {
    let config = Config::from_env()?.policy(Policy::Require);                  // RDMA_* variables, but never TCP
    let incoming = RdmaIncoming::builder().config(config.clone()).bind("0.0.0.0:50051").await?;
    let connector = RdmaConnector::new().config(config);
    Ok((incoming, connector))
}

#[rustfmt::skip]
fn in_code() -> Outcome<Config> {
    let config = Config::from_env()?
        .policy(Policy::Require)
        .poll_mode(PollMode::Adaptive)
        .spin_limit(Duration::from_micros(500))
        .ping_interval(Duration::from_secs(5))
        .ping_timeout(Duration::from_secs(10));
    Ok(config)
}

#[allow(clippy::print_stdout, reason = "the book's example prints")]
#[rustfmt::skip]
async fn connected() -> Outcome<(GreeterClient<tonic::transport::Channel>, RdmaConnectInfo)> {
    let connector = RdmaConnector::new();
    let channel = Endpoint::from_static("http://ps0:50051").connect_with_connector(connector.clone()).await?;
    let info = connector.last_connection().ok_or("no connection yet")?;
    println!("over {}, because {}", info.verdict(), info.reason());
    Ok((GreeterClient::new(channel), info))
}

#[allow(clippy::print_stdout, reason = "the book's examples print")]
#[rustfmt::skip]
fn counted(info: &RdmaConnectInfo) -> Outcome {
    let decision = info.why(64 << 10).ok_or("this connection is over TCP")?;
    println!("{decision}");

    let counters = info.counters();
    println!("{} eager messages, {} waits for credits", counters.eager_sent, counters.credit_stalls);
    Ok(())
}

#[allow(clippy::let_and_return, reason = "the book's readers go on with it")]
fn layered() -> Server<tower::layer::util::Stack<tonic_rdma::RemoteAddresses, tower::layer::util::Identity>> {
    let server = Server::builder().layer(tonic_rdma::RemoteAddresses::new());
    server
}

/// A service that answers with the transport of the call, and the address of the client.
#[derive(Debug)]
struct CarriedBy;

#[tonic::async_trait]
impl Greeter for CarriedBy {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        use tonic_rdma::RdmaRequestExt as _;
        let carried_by = request.connection().map(|info| info.verdict());

        let from = request.remote_addr().unwrap().ip();
        Ok(Response::new(HelloReply { message: format!("over {}, from {from}", carried_by.unwrap()) }))
    }

    type ChatStream = tokio_stream::Empty<Result<HelloReply, Status>>;

    async fn chat(&self, _: Request<Streaming<HelloRequest>>) -> Result<Response<Self::ChatStream>, Status> {
        Err(Status::unimplemented("not here"))
    }
}
