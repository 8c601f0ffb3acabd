//! Receive buffers that connections share. This needs `RDMA_DEVICE` with shared receive queues, and no other
//! test at the same time (`--test-threads=1`). On other devices each connection has its own buffers, and the
//! test checks everything except the memory.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tonic_rdma::{EndpointStream, SharedReceive};

use support::{Child, Content, Runtime, config, listen, pair, until, within};

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
            .ping_interval(Duration::from_millis(100))
            .ping_timeout(Duration::from_secs(60));
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
        // After some idle time the connections return the credits beyond their first ones, and get credits
        // again later.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for _ in 0..3 {
            connections = burst_over_all(connections).await;
        }
        let grown = pinned().saturating_sub(before);
        println!("after bursts: {grown} bytes more pinned than for one idle connection");
        // Idle connections free their memory for sending, and keep the receive buffers.
        until(|| pinned().saturating_sub(before) < 32 << 20).await;
    });
}

/// Clients are killed in the middle of messages, `RDMA_TEST_KILLS` of them. The buffers of these messages
/// come back: a client that was there from the first to the last can still send, and so can new ones.
#[test]
fn kills_in_a_burst_lose_no_buffers() {
    /// Connections of each client that is killed.
    const KILLED: usize = 8;
    let kills = std::env::var("RDMA_TEST_KILLS").map_or(3, |kills| kills.parse::<usize>().unwrap());
    Runtime::Idle.run(async {
        let config = config().shared_receive(SharedReceive::Always);
        let mut honest = pair(config.clone()).await;
        let mut listener = listen(config.clone()).await;
        let address = listener.local_addr();
        for kill in 0..kills {
            let start = move || Child::start(&[], &format!("burst {address} {KILLED}"));
            let child = tokio::task::spawn_blocking(start);
            let mut readers = JoinSet::new();
            let (started, mut starts) = tokio::sync::mpsc::channel(KILLED);
            for _ in 0..KILLED {
                let mut stream = within(listener.next()).await.unwrap();
                let started = started.clone();
                readers.spawn(async move {
                    let (mut buffer, mut total) = (vec![0; 1 << 16], 0);
                    while let Ok(count) = stream.read(&mut buffer).await {
                        assert_ne!(count, 0, "a kill is no orderly end");
                        assert!(buffer[..count].iter().all(|byte| *byte == 3));
                        total += count;
                        if total >= 100_000 {
                            let _ = started.try_send(());
                        }
                    }
                });
            }
            let mut child = child.await.unwrap();
            within(starts.recv()).await.unwrap();
            child.process.kill().unwrap();
            within(readers.join_all()).await;
            burst(kill as u64, &mut honest.0, &mut honest.1).await;
        }
        let mut connections = vec![honest];
        for _ in 0..KILLED {
            connections.push(pair(config.clone()).await);
        }
        within(burst_over_all(connections)).await;
    });
}
