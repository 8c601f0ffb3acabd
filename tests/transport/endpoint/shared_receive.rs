//! Receive buffers that connections share. This needs `RDMA_DEVICE` with shared receive queues, and no other test at the same
//! time (`--test-threads=1`). On other devices each connection has its own buffers, and the test checks everything except the
//! memory.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tonic_rdma::EndpointStream;
use tonic_rdma::SharedReceive;

use support::{Content, Runtime, config, pair};

const CONNECTIONS: usize = 50;
const MESSAGES: usize = 40;
const LENGTH: usize = 500;

/// Returns the memory that this process has pinned, in bytes.
fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Sends a burst of small messages in one direction, and checks them.
async fn burst(seed: u64, client: &mut EndpointStream, server: &mut EndpointStream) {
    let (mut sent, mut received) = (Content::new(seed), Content::new(seed));
    let send = async {
        for _ in 0..MESSAGES {
            client.write_all(&sent.take(LENGTH)).await.unwrap();
            client.flush().await.unwrap();
        }
    };
    let receive = async {
        let mut buffer = vec![0; MESSAGES * LENGTH];
        server.read_exact(&mut buffer).await.unwrap();
        received.check(&buffer);
    };
    tokio::join!(send, receive);
}

async fn burst_over_all(
    connections: Vec<(EndpointStream, EndpointStream)>,
) -> Vec<(EndpointStream, EndpointStream)> {
    let mut tasks = JoinSet::new();
    for (seed, (mut client, mut server)) in connections.into_iter().enumerate() {
        tasks.spawn(async move {
            burst(seed as u64, &mut client, &mut server).await;
            (client, server)
        });
    }
    tasks.join_all().await
}

#[test]
fn receive_memory_does_not_grow_with_connections() {
    Runtime::Idle.run(async {
        let config = config()
            .shared_receive(SharedReceive::Always)
            .ping(Duration::from_millis(100), Duration::from_secs(60));
        let mut connections = vec![pair(config.clone()).await];
        let before = pinned();
        for _ in 1..CONNECTIONS {
            connections.push(pair(config.clone()).await);
        }
        let grown = pinned() - before;
        println!("{CONNECTIONS} connections, both ends: {grown} bytes more pinned than for one");
        // With buffers of their own, a hundred ends would need more than 160 MiB.
        assert!(grown < 10 << 20, "{grown} bytes more pinned");

        connections = burst_over_all(connections).await;
        // Some connections end with unread messages.
        for (mut client, server) in connections.split_off(CONNECTIONS / 2) {
            for _ in 0..10 {
                client.write_all(&[7; LENGTH]).await.unwrap();
                client.flush().await.unwrap();
            }
            drop((server, client));
        }
        // After some idle time the connections return the credits beyond their first ones, and get credits again later.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for _ in 0..3 {
            connections = burst_over_all(connections).await;
        }
        let grown = pinned().saturating_sub(before);
        println!("after bursts: {grown} bytes more pinned than for one idle connection");
        // Idle connections free their memory for sending, and keep the receive buffers.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let grown = pinned().saturating_sub(before);
        println!("idle again: {grown} bytes more");
        assert!(grown < 32 << 20, "{grown} bytes more pinned");
    });
}
