//! Receive buffers that connections share, on a device with shared receive queues: with `RDMA_DEVICE` set to one, and
//! the process to itself (`--test-threads=1`). Elsewhere connections have buffers of their own, and the same must hold
//! but for the memory.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tonic_rdma::EndpointStream;
use tonic_rdma::SharedReceive;

use support::{Content, Runtime, config, pair};

const CONNECTIONS: usize = 50;
const MESSAGES: usize = 40;
const LENGTH: usize = 500;

/// Memory that this process has pinned, in bytes.
fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Small messages one way, all at once, and checked.
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
        // A hundred ends with buffers of their own would have more than 160 MiB.
        assert!(grown < 10 << 20, "{grown} bytes more pinned");

        connections = burst_over_all(connections).await;
        // Some end with messages that nobody has read.
        for (mut client, server) in connections.split_off(CONNECTIONS / 2) {
            for _ in 0..10 {
                client.write_all(&[7; LENGTH]).await.unwrap();
                client.flush().await.unwrap();
            }
            drop((server, client));
        }
        // After a while of silence, credits beyond those of the start go back; and come again.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for _ in 0..3 {
            connections = burst_over_all(connections).await;
        }
        let grown = pinned().saturating_sub(before);
        println!("after bursts: {grown} bytes more pinned than for one idle connection");
        // What they sent from goes when they have been idle for a while; what they received in stays.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let grown = pinned().saturating_sub(before);
        println!("idle again: {grown} bytes more");
        assert!(grown < 32 << 20, "{grown} bytes more pinned");
    });
}
