//! Pairings of our clients and servers with one another and with stock ones: native calls if both make them,
//! RDMA if both have it, TCP otherwise.

use super::{failure, serve_ours, target};
use crate::client::all;
use crate::transport::Target;
use crate::transport::Transport::{self, Native, Rdma, Tcp};

async fn all_cases_pass(client: Transport, server: Transport, expected: Transport) {
    let target = target(serve_ours(server).await, client, expected);
    let mut failures = Vec::new();
    for case in all() {
        failures.extend(failure(case.name, &target).await.map(|reason| format!("{}: {reason}", case.name)));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_if_both_have_rdma() {
    all_cases_pass(Rdma, Rdma, Rdma).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_with_a_stock_client() {
    all_cases_pass(Tcp, Rdma, Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_with_a_stock_server() {
    all_cases_pass(Rdma, Tcp, Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_if_both_make_native_calls() {
    all_cases_pass(Native, Native, Native).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_if_the_server_alone_takes_native_calls() {
    all_cases_pass(Rdma, Native, Rdma).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_if_the_client_alone_makes_native_calls() {
    all_cases_pass(Native, Rdma, Rdma).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_with_a_stock_client_and_a_server_for_native_calls() {
    all_cases_pass(Tcp, Native, Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_with_a_stock_server_and_a_client_for_native_calls() {
    all_cases_pass(Native, Tcp, Tcp).await;
}

/// Runs the control. A failure here is no fault of our transport.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_cases_pass_with_two_stock_ends() {
    all_cases_pass(Tcp, Tcp, Tcp).await;
}

#[tokio::test]
async fn the_required_transport_is_checked() {
    let port = serve_ours(Tcp).await;
    let reason = failure("empty_unary", &target(port, Rdma, Rdma)).await.unwrap();
    assert!(reason.contains("rdma was required") && reason.contains("came out as tcp"), "{reason}");
    assert_eq!(failure("empty_unary", &target(port, Rdma, Tcp)).await, None);
}

#[tokio::test]
async fn the_required_device_is_checked() {
    let of =
        |port, device: &str| Target { require_device: Some(device.to_owned()), ..target(port, Rdma, Rdma) };
    let (ours, stock) = (serve_ours(Rdma).await, serve_ours(Tcp).await);
    assert_eq!(failure("empty_unary", &of(ours, "soft0")).await, None);
    let reason = failure("empty_unary", &of(ours, "rxe0")).await.unwrap();
    assert!(reason.contains("rxe0 was required") && reason.contains("both ends have soft0"), "{reason}");
    let over_tcp = Target { require: None, ..of(stock, "soft0") };
    let reason = failure("empty_unary", &over_tcp).await.unwrap();
    assert!(reason.contains("soft0 was required") && reason.contains("came out as tcp"), "{reason}");
}

#[tokio::test]
async fn an_error_names_a_server_that_does_not_listen() {
    let port = serve_ours(Tcp).await;
    let mut target = target(port, Tcp, Tcp);
    // No process listens on port 1 (tcpmux).
    target.port = 1;
    let reason = failure("empty_unary", &target).await.unwrap();
    assert!(reason.contains("127.0.0.1:1"), "{reason}");
}
