//! The network interface of the device gets another address. This needs root, a throw-away machine, and the
//! interface in `RDMA_TEST_NETDEV`; without it the test does nothing.

use std::process::Command;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic_rdma::EndpointStream;

use support::{Runtime, config, pair, within};

async fn exchange((client, server): &mut (EndpointStream, EndpointStream)) {
    client.write_all(b"over this address").await.unwrap();
    client.flush().await.unwrap();
    let mut bytes = [0; 17];
    within(server.read_exact(&mut bytes)).await.unwrap();
    assert_eq!(&bytes, b"over this address");
}

/// A connection keeps the device open. Connections that are made after the change use RDMA too.
#[test]
fn new_connections_use_a_changed_address() {
    let Ok(interface) = std::env::var("RDMA_TEST_NETDEV") else { return };
    let ip = |words: &str| {
        let words = words.split(' ').chain(["dev", &interface]);
        assert!(Command::new("ip").args(words).status().unwrap().success());
    };
    Runtime::Idle.run(async {
        let mut before = pair(config()).await;
        exchange(&mut before).await;
        ip("address add 10.78.0.9/24");
        ip("address delete 10.77.0.1/24");
        // The kernel changes the table of addresses a moment later.
        tokio::time::sleep(Duration::from_secs(2)).await;
        exchange(&mut within(pair(config())).await).await;
    });
}
