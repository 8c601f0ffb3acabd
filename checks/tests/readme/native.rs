//! "Native calls": a server and its client without HTTP/2.

use tokio::sync::oneshot;
use tonic_rdma::{RdmaChannel, RdmaServer};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use super::addresses::{self, Endpoint, RdmaIncoming};
use super::greeter::Greets;
use super::running::{self, Outcome, ROUNDS, default_runtime};

#[test]
fn a_thousand_calls() {
    running::run(default_runtime(), async {
        let (stop, stopped) = oneshot::channel::<()>();
        let ended = running::apart(default_runtime(), async {
            tokio::select! {
                ended = server(GreeterServer::new(Greets { name: "ps0" })) => ended,
                _ = stopped => Ok(()),
            }
        });
        addresses::ready("ps0:50051").await;
        let channel = client().await?;
        let mut client = GreeterClient::new(channel.clone());
        for round in 0..ROUNDS {
            let reply = client.say_hello(HelloRequest { name: round.to_string() }).await?;
            assert_eq!(reply.into_inner().message, format!("ps0 greets {round} over rdma"));
        }
        assert!(channel.last_connection().expect("a connection").is_native());
        drop(stop);
        ended.await?
    });
}

#[rustfmt::skip]
async fn server(service: GreeterServer<Greets>) -> Outcome {
    // server: ONE port for native peers, HTTP/2 peers over RDMA, and stock gRPC clients over TCP.
    let incoming = RdmaIncoming::bind("0.0.0.0:50051").await?;
    RdmaServer::new().add_service(service).serve_with_incoming(incoming).await?;
    Ok(())
}

#[rustfmt::skip]
async fn client() -> Outcome<RdmaChannel> {
    // client: native where the server can, HTTP/2 over RDMA or TCP where not.
    let channel = RdmaChannel::connect(Endpoint::from_static("http://ps0:50051")).await?;
    Ok(channel)
}
