//! The client's identity, as the service sees it.

use super::greeting::{greet, serve};
use support::Authority;

#[tokio::test]
async fn the_service_sees_the_names_in_each_clients_certificate() {
    let authority = Authority::new("authority");
    let running = serve(Some(authority.mutual_server())).await;
    for name in ["worker-1", "worker-2"] {
        let said = greet(running.address, Some(authority.client_named(name))).await.unwrap();
        assert!(said.starts_with(&format!("{name} (spiffe://test/{name}) over rdma with TLS")), "{said}");
    }
}

#[tokio::test]
async fn a_certificate_may_be_optional() {
    let authority = Authority::new("authority");
    let running = serve(Some(authority.mutual_server().client_auth_optional(true))).await;
    let said = greet(running.address, Some(authority.client())).await.unwrap();
    assert!(said.starts_with("anonymous over rdma with TLS"), "{said}");
    let said = greet(running.address, Some(authority.client_named("worker"))).await.unwrap();
    assert!(said.starts_with("worker (spiffe://test/worker) over rdma"), "{said}");
}
