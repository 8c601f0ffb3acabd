//! Metrics of native calls: connections by transport, histograms, landing content.

use std::time::Duration;

use tokio::task::JoinHandle;
use tonic::transport::Endpoint;
use tonic::{Code, Request};
use tonic_rdma::{Config, RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Meters, Runtime, ScriptedGreeter, say, until};

const CONNECTIONS: &str = "tonic_rdma_connections";
const CALLS: &str = "tonic_rdma_call_seconds";
const QUEUE: &str = "tonic_rdma_queue_seconds";
const MESSAGES: &str = "tonic_rdma_message_bytes";
const SIDES: [&str; 2] = ["client", "server"];

async fn start(config: &Config, greeter: &ScriptedGreeter) -> (RdmaChannel, JoinHandle<()>) {
    let incoming = RdmaIncoming::builder().config(config.clone()).bind("127.0.0.1:0").await.unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr())).unwrap();
    let server = RdmaServer::new().add_service(GreeterServer::new(greeter.clone()));
    let served = tokio::spawn(async { server.serve_with_incoming(incoming).await.unwrap() });
    let channel = RdmaChannel::builder(endpoint).config(config.clone()).connect().await.unwrap();
    assert!(channel.last_connection().unwrap().is_native());
    (channel, served)
}

/// The paths of native calls, each with its label.
const PATHS: [(bool, &str); 2] = [(false, "rdma"), (true, "in_process")];

#[test]
fn native_connections_count_by_what_carries_their_calls() {
    for (in_process, transport) in PATHS {
        let meters = Meters::default();
        meters.within(|| {
            Runtime::Idle.run(async {
                let config = support::config().in_process(in_process);
                let (channel, server) = start(&config, &ScriptedGreeter::new()).await;
                let open = |side| {
                    let labels = [("side", side), ("transport", transport), ("kind", "native")];
                    (meters.sum(CONNECTIONS, &labels), meters.sum(CONNECTIONS, &[("side", side)]))
                };
                assert_eq!(SIDES.map(open), [(1.0, 1.0); 2], "{transport}");
                drop(channel);
                until(|| SIDES.map(open) == [(0.0, 0.0); 2]).await;
                server.abort();
            });
        });
    }
}

#[test]
fn each_call_is_in_the_histograms_with_its_status() {
    const OK: usize = 7;
    for (in_process, transport) in PATHS {
        let meters = Meters::default();
        meters.within(|| {
            Runtime::Idle.run(async {
                let config = support::config().in_process(in_process).histograms(true);
                let greeter = ScriptedGreeter::new();
                let (channel, server) = start(&config, &greeter).await;
                let mut client = GreeterClient::new(channel.clone());
                for _ in 0..OK {
                    say(&mut client, "hello").await.unwrap();
                }
                // A status in headers alone.
                let unknown = tonic_health::pb::health_client::HealthClient::new(channel.clone())
                    .check(tonic_health::pb::HealthCheckRequest::default())
                    .await;
                assert_eq!(unknown.unwrap_err().code(), Code::Unimplemented);
                // The client ends the one call, and drops the other.
                let mut late = Request::new(HelloRequest { name: "hold".into() });
                late.set_timeout(Duration::from_millis(50));
                assert_eq!(client.say_hello(late).await.unwrap_err().code(), Code::DeadlineExceeded);
                until(|| greeter.held() == 0).await;
                let held = tokio::spawn({
                    let mut client = client.clone();
                    async move { say(&mut client, "hold").await }
                });
                until(|| greeter.held() == 1).await;
                held.abort();
                until(|| greeter.held() == 0).await;
                // A connection publishes its histograms once a second, and at its end.
                drop((client, channel));
                server.abort();
                let values = |name: &str, labels: &[_]| meters.sum(&format!("{name}_count"), labels);
                let count =
                    |side, code| values(CALLS, &[("side", side), ("code", code), ("transport", transport)]);
                let all = |name| SIDES.map(|side| values(name, &[("side", side)]));
                until(|| [CALLS, QUEUE].map(all) == [[OK as f64 + 3.0; 2]; 2]).await;
                // Each call sent a message, and those that ended well have an answer.
                assert_eq!(all(MESSAGES), [OK as f64 + 3.0, OK as f64], "{transport}");
                // "hello" and "hold" in a field each, and nothing.
                let bytes = meters.sum(&format!("{MESSAGES}_sum"), &[("side", "client")]);
                assert_eq!(bytes, (7 * OK + 2 * 6) as f64, "{transport}");
                for side in SIDES {
                    assert_eq!(
                        (count(side, "OK"), count(side, "UNIMPLEMENTED")),
                        (OK as f64, 1.0),
                        "{side} {transport}"
                    );
                    assert_eq!(
                        count(side, "DEADLINE_EXCEEDED") + count(side, "CANCELLED"),
                        2.0,
                        "{side} {transport}"
                    );
                }
                assert_eq!((count("client", "DEADLINE_EXCEEDED"), count("client", "CANCELLED")), (1.0, 1.0));
                let late = [("code", "DEADLINE_EXCEEDED"), ("side", "client")];
                let seconds = meters.sum(&format!("{CALLS}_sum"), &late);
                assert!((0.05..100.0).contains(&seconds), "{seconds}");
                let up_to = |le| meters.sum(&format!("{CALLS}_bucket"), &[late[0], late[1], ("le", le)]);
                assert_eq!(["0.02", "600", "+Inf"].map(up_to), [0.0, 1.0, 1.0]);
            });
        });
    }
}

/// A server that lets in one call at a time: the second one waits at the client.
#[test]
fn a_call_that_waits_is_in_the_histogram_of_queues() {
    const WAIT: Duration = Duration::from_millis(100);
    for (in_process, waits_at) in [(false, "client"), (true, "server")] {
        let meters = Meters::default();
        meters.within(|| {
            Runtime::Idle.run(async {
                let config = support::config().in_process(in_process).histograms(true);
                let incoming =
                    RdmaIncoming::builder().config(config.clone()).bind("127.0.0.1:0").await.unwrap();
                let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr())).unwrap();
                let greeter = ScriptedGreeter::new();
                let limits = tonic_rdma::CallConfig::default().max_concurrent_streams(1);
                let server = RdmaServer::new().calls(limits).add_service(GreeterServer::new(greeter.clone()));
                let server = tokio::spawn(server.serve_with_incoming(incoming));
                let channel = RdmaChannel::builder(endpoint).config(config).connect().await.unwrap();
                let held = tokio::spawn({
                    let mut client = GreeterClient::new(channel.clone());
                    async move { say(&mut client, "hold").await.unwrap() }
                });
                until(|| greeter.held() == 1).await;
                let waits = tokio::spawn({
                    let mut client = GreeterClient::new(channel.clone());
                    async move { say(&mut client, "second").await.unwrap() }
                });
                tokio::time::sleep(WAIT).await;
                greeter.release(1);
                assert_eq!((held.await.unwrap(), waits.await.unwrap()), ("held".into(), "second".into()));
                drop(channel);
                server.abort();
                let count = |side| meters.sum(&format!("{QUEUE}_count"), &[("side", side)]);
                until(|| SIDES.map(count) == [2.0; 2]).await;
                let short = |side| meters.sum(&format!("{QUEUE}_bucket"), &[("side", side), ("le", "0.05")]);
                assert_eq!(SIDES.map(|side| short(side) == 1.0), SIDES.map(|side| side == waits_at));
            });
        });
    }
}

#[test]
fn without_a_wish_calls_are_not_timed() {
    let meters = Meters::default();
    meters.within(|| {
        Runtime::Idle.run(async {
            let (channel, server) = start(&support::config(), &ScriptedGreeter::new()).await;
            say(&mut GreeterClient::new(channel), "hello").await.unwrap();
            server.abort();
        });
    });
    assert!([CALLS, QUEUE, MESSAGES].iter().all(|name| !meters.has(&format!("{name}_count"))));
    assert!(meters.has(CONNECTIONS));
}

/// Answers that nobody takes are held, and are gone with their calls.
#[test]
fn what_is_not_taken_is_in_the_gauges_of_memory() {
    const CALLS: usize = 12;
    let meters = Meters::default();
    meters.within(|| {
        Runtime::Idle.run(async {
            let (channel, server) =
                start(&support::config().in_process(false), &ScriptedGreeter::new()).await;
            let mut client = GreeterClient::new(channel);
            let mut calls = Vec::new();
            for _ in 0..CALLS {
                let names = (0..64).map(|_| HelloRequest { name: "x".repeat(3 << 10) });
                calls.push(client.chat(tokio_stream::iter(names)).await.unwrap());
            }
            let of = |name| {
                tonic_rdma::describe_metrics();
                ["bytes", "limit_bytes"].map(|end| meters.sum(&format!("tonic_rdma_{name}_{end}"), &[]))
            };
            // Other tests of this process hold little.
            until(|| of("held")[0] > 256e3).await;
            let ([held, most], [registered, limit]) = (of("held"), of("registered"));
            assert!(
                held < most && 0.0 < registered && registered < limit,
                "{held} {most} {registered} {limit}"
            );
            assert!(meters.has("tonic_rdma_landing_bytes"));
            drop(calls);
            until(|| of("held")[0] < 256e3).await;
            server.abort();
        });
    });
}
