//! https over RDMA and over TCP, for our clients and stock clients.

use tonic_rdma::{Policy, RdmaConnector, Verdict};

use super::greeting::{ask, endpoint, greet, greet_stock, serve};
use support::{Authority, config};

#[tokio::test]
async fn calls_with_tls_go_over_rdma() {
    let authority = Authority::new("authority");
    let running = serve(Some(authority.server())).await;
    let connector = RdmaConnector::new().config(config());
    let channel = endpoint(running.address, Some(authority.client()));
    let channel = channel.connect_with_connector(connector.clone()).await.unwrap();
    let said = ask(channel.clone()).await.unwrap();
    assert!(said.starts_with("anonymous over rdma with TLS, from 127.0.0.1:"), "{said}");
    let info = connector.last_connection().unwrap();
    assert_eq!(info.verdict(), Verdict::Rdma, "{}", info.reason());
    assert!(info.is_tls());
    let before = info.counters();
    ask(channel).await.unwrap();
    assert!(info.counters().work_requests > before.work_requests, "the second call went elsewhere");
}

#[tokio::test]
async fn calls_with_tls_go_over_tcp_without_rdma() {
    let authority = Authority::new("authority");
    let running = serve(Some(authority.server())).await;
    let connector = RdmaConnector::new().config(config().policy(Policy::TcpOnly));
    let channel = endpoint(running.address, Some(authority.client()));
    let said = ask(channel.connect_with_connector(connector).await.unwrap()).await.unwrap();
    assert!(said.starts_with("anonymous over tcp with TLS"), "{said}");
}

#[tokio::test]
async fn stock_clients_use_the_same_port() {
    let authority = Authority::new("authority");
    let running = serve(Some(authority.mutual_server())).await;
    let said = greet_stock(running.address, Some(authority.client_named("stock"))).await.unwrap();
    assert!(said.starts_with("stock (spiffe://test/stock) over tcp with TLS"), "{said}");
    let said = greet(running.address, Some(authority.client_named("ours"))).await.unwrap();
    assert!(said.starts_with("ours (spiffe://test/ours) over rdma with TLS"), "{said}");
}

#[tokio::test]
async fn our_client_reaches_a_stock_server_with_tls() {
    let authority = Authority::new("authority");
    let incoming = tonic::transport::server::TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let server = tonic::transport::Server::builder().tls_config(authority.server()).unwrap();
    // The server has no such service. The answer UNIMPLEMENTED shows that the call came through TLS.
    let server = { server }.add_routes(tonic::service::Routes::default()).serve_with_incoming(incoming);
    let server = tokio::spawn(server);
    let error = greet(address, Some(authority.client())).await.unwrap_err();
    assert!(error.starts_with("Unimplemented"), "{error}");
    server.abort();
}

#[tokio::test]
async fn without_tls_the_client_has_no_name() {
    let running = serve(None).await;
    let said = greet(running.address, None).await.unwrap();
    assert!(said.starts_with("anonymous over rdma without TLS, from 127.0.0.1:"), "{said}");
    let said = greet_stock(running.address, None).await.unwrap();
    assert!(said.starts_with("anonymous over tcp without TLS, from 127.0.0.1:"), "{said}");
}
