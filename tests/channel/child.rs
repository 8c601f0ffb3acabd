//! The entry point of child processes.

use std::time::Duration;

use support::{Runtime, ScriptedGreeter, announce, config, say};
use tokio::time::timeout;
use tonic::transport::Endpoint;
use tonic_rdma::{CallConfig, RdmaChannel, RdmaConnector};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use crate::environment;
use crate::servers::Kind;

/// Does nothing when run as a test. In a child process, serves until the process is killed, or calls a
/// server.
#[test]
fn role() {
    let Ok(role) = std::env::var(support::ROLE) else { return };
    if role == environment::ROLE {
        return environment::report();
    }
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["serve", kind, address] => Runtime::Idle.run_for_ever(async {
            let greeter = ScriptedGreeter::new();
            let running = Kind::named(kind).serve_at(address, &greeter, CallConfig::default()).await;
            announce(running.address);
            std::future::pending::<()>().await;
        }),
        ["call", uri] => Runtime::Idle.run_for_ever(call(uri)),
        _ => panic!("{role:?} is no role"),
    }
}

/// Calls a server through both kinds of channel, and announces the answers. Gives up long before the connect
/// timeout.
async fn call(uri: &str) {
    const ENOUGH: Duration = Duration::from_secs(60);
    let config = config().connect_timeout(10 * ENOUGH);
    let endpoint = Endpoint::from_shared(uri.to_owned()).unwrap();
    let native = RdmaChannel::builder(endpoint.clone()).config(config.clone()).connect();
    let native = timeout(ENOUGH, native).await.expect("RdmaChannel connects").unwrap();
    let native = say(&mut GreeterClient::new(native), "one").await.unwrap();
    let http2 = endpoint.connect_with_connector(RdmaConnector::new().config(config));
    let http2 = timeout(ENOUGH, http2).await.expect("RdmaConnector connects").unwrap();
    let http2 = say(&mut GreeterClient::new(http2), "two").await.unwrap();
    announce(format!("{native} {http2}"));
}
