//! "The rest of tonic": one channel to two servers.

use std::collections::BTreeSet;

use tonic::transport::Server;
use tonic_rdma::{BalancedChannel, RdmaConnector};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use super::addresses::{self, Endpoint};
use super::greeter::Greets;
use super::running::{self, ROUNDS, default_runtime};

#[test]
fn calls_go_to_both_servers() {
    running::run(default_runtime(), async {
        let mut servers = tokio::task::JoinSet::new();
        for (name, address) in [("ps0", "ps0:50051"), ("ps1", "ps1:50051")] {
            let incoming = tonic_rdma::RdmaIncoming::bind("127.0.0.1:0").await?;
            addresses::listens(address, incoming.local_addr());
            let service = GreeterServer::new(Greets { name });
            servers.spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        }
        let mut client = client();
        let mut greeted = BTreeSet::new();
        for round in 0..ROUNDS {
            let reply = client.say_hello(HelloRequest { name: round.to_string() }).await?.into_inner();
            let (who, greeting) = reply.message.split_once(' ').unwrap();
            assert_eq!(greeting, format!("greets {round} over rdma"));
            greeted.insert(who.to_owned());
        }
        assert_eq!(greeted, ["ps0", "ps1"].map(String::from).into());
        Ok(())
    });
}

#[allow(unused_mut, reason = "the book's readers call it")]
#[rustfmt::skip]
fn client() -> GreeterClient<BalancedChannel> {
    let endpoints = ["http://ps0:50051", "http://ps1:50051"].map(Endpoint::from_static);
    let channel = tonic_rdma::BalancedChannel::from_list(endpoints, RdmaConnector::new());
    let mut client = GreeterClient::new(channel); // as with any other channel
    client
}
