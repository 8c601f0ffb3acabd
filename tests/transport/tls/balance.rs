//! One channel over several servers with TLS. A server with a bad certificate gets no calls, and the channel
//! shows the reason.

use tonic_rdma::{BalancedChannel, EndpointState, RdmaConnector};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use super::greeting::{endpoint, serve};
use support::{Authority, config, within};

async fn ask(channel: &BalancedChannel) -> String {
    let request = HelloRequest { name: "client".into() };
    let reply = within(GreeterClient::new(channel.clone()).say_hello(request)).await;
    reply.map_or_else(|status| status.message().to_owned(), |reply| reply.into_inner().message)
}

#[tokio::test]
async fn calls_go_to_the_servers_that_can_be_trusted() {
    let (authority, other) = (Authority::new("authority"), Authority::new("another authority"));
    let (good, bad) = (serve(Some(authority.server())).await, serve(Some(other.server())).await);
    let endpoints = [&good, &bad].map(|server| endpoint(server.address, Some(authority.client())));
    let channel = BalancedChannel::from_list(endpoints, RdmaConnector::new().config(config()));
    for _ in 0..20 {
        let said = ask(&channel).await;
        assert!(said.starts_with("anonymous over rdma with TLS"), "{said}");
    }
}

#[tokio::test]
async fn the_reason_why_no_server_can_be_trusted_is_shown() {
    let (authority, other) = (Authority::new("authority"), Authority::new("another authority"));
    let bad = serve(Some(other.server())).await;
    let endpoints = [endpoint(bad.address, Some(authority.client()))];
    let channel = BalancedChannel::from_list(endpoints, RdmaConnector::new().config(config()));
    let said = ask(&channel).await;
    assert!(said.contains("certificate"), "{said}");
    match &channel.endpoints()[0].state {
        EndpointState::Down(reason) => assert!(reason.contains("certificate"), "{reason}"),
        state => panic!("{state:?}"),
    }
}
