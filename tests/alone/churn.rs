//! Many connections: one after another, and all at one time.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::{Dialer, Verdict};

use support::{Child, Runtime, config, descriptors_and_mappings, echo_stream, listen, settled, within};

/// Returns the resident memory of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Returns the number of connections that are made one after the other: `TONIC_RDMA_CONNECTS`, or 3000.
fn connects() -> u64 {
    std::env::var("TONIC_RDMA_CONNECTS").map_or(3_000, |number| number.parse().unwrap())
}

#[test]
fn thousands_of_connects_and_closes_leak_nothing() {
    super::alone_in_steps(Runtime::Idle, async {
        let mut listener = listen(config()).await;
        let port = listener.local_addr().port();
        let dialer = Dialer::new(config());
        let mut once = async || {
            let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
            let (mut client, mut server) = (client.unwrap(), server.unwrap());
            assert_eq!(client.info().verdict(), Verdict::Rdma, "{}", client.info().reason());
            client.write_all(b"hello").await.unwrap();
            client.shutdown().await.unwrap();
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            assert_eq!(received, b"hello");
        };
        for _ in 0..500 {
            within(once()).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (before, memory) = (descriptors_and_mappings(), resident());
        for _ in 500..connects() {
            within(once()).await;
        }
        settled(before).await;
        let grown = resident().saturating_sub(memory);
        assert!(grown < 16 << 20, "{grown} bytes more than after 500 connections");
    });
}

#[test]
fn five_hundred_and_twelve_connections_at_once() {
    super::alone(Runtime::Idle, async {
        let before = descriptors_and_mappings();
        let mut listener = listen(config()).await;
        let port = listener.local_addr().port();
        let dialer = Dialer::new(config());
        let mut clients = Vec::new();
        let mut servers = Vec::new();
        for _ in 0..512 {
            let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
            let client = client.unwrap();
            assert_eq!(client.info().verdict(), Verdict::Rdma, "{}", client.info().reason());
            clients.push(client);
            servers.push(tokio::spawn(echo_stream(server.unwrap())));
        }
        for round in 0..4_u8 {
            for client in &mut clients {
                client.write_all(&[round; 5000]).await.unwrap();
                client.flush().await.unwrap();
            }
            for client in &mut clients {
                let mut echo = [0; 5000];
                client.read_exact(&mut echo).await.unwrap();
                assert_eq!(echo, [round; 5000]);
            }
        }
        drop(clients);
        for server in servers {
            server.await.unwrap();
        }
        drop(listener);
        settled(before).await;
    });
}

/// Returns the CPU time of a process so far, in clock ticks.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Checks an upper limit of the CPU time of an idle server. Other load on the machine can only make this time
/// smaller.
#[test]
fn a_hundred_idle_connections_let_the_server_sleep() {
    super::alone(Runtime::Idle, async {
        let server = Child::start(&[], "echo");
        let dialer = Dialer::new(config());
        let mut clients = Vec::new();
        for _ in 0..100 {
            let mut client = dialer.dial("127.0.0.1", server.word.parse().unwrap()).await.unwrap();
            assert_eq!(client.info().verdict(), Verdict::Rdma, "{}", client.info().reason());
            client.write_all(b"ping").await.unwrap();
            client.flush().await.unwrap();
            client.read_exact(&mut [0; 4]).await.unwrap();
            clients.push(client);
        }
        // 1 % of 4 s is 4 ticks of 10 ms. A busy machine may take long for what the server still has to do at
        // first: it also measures its device.
        let mut used = u64::MAX;
        for _ in 0..10 {
            let before = ticks(server.process.id());
            tokio::time::sleep(Duration::from_secs(4)).await;
            used = ticks(server.process.id()) - before;
            if used < 4 {
                break;
            }
        }
        assert!(used < 4, "{used} ticks of CPU in 4 s with nothing to do");
    });
}
