//! A receiver waits when no registered memory is left for its READs, and goes on when another connection
//! gives memory back. A client without memory for a connection says so to its server.

use std::time::Duration;

use support::{Child, Content, Runtime, announce, config, listen, pair};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tonic_rdma::{Dialer, EagerThreshold, Policy, ReasonCode, Verdict};

const SLOTS: u32 = 96;
const SLOT: u32 = 17 << 10;
const CHUNK: usize = 64 << 10;

/// The receive buffers of two connections with both ends in this process, and one chunk to be read.
const LIMIT: u64 = 4 * (SLOTS * SLOT) as u64 + CHUNK as u64;

/// Runs in a child, because a process takes its limit from the first connection.
#[test]
fn reads_wait_for_memory_that_another_connection_gives_back() {
    let child = Child::start(&[], "shortage");
    assert_eq!(child.word, "read");
    child.ends();
}

/// Plays the role `shortage`.
pub(crate) fn play() {
    let config = config()
        .receive_slots(SLOTS)
        .slot_size(SLOT)
        .eager_threshold(EagerThreshold::Bytes(CHUNK as u64))
        .chunk_size(CHUNK)
        .pinned_limit(LIMIT);
    Runtime::Idle.run(async move {
        let (mut client, mut server) = pair(config.clone()).await;
        let other = pair(config).await;
        let mut content = Content::new(9);
        client.write_all(&content.clone().take(CHUNK)).await.unwrap();
        client.flush().await.unwrap();
        assert_eq!(client.info().counters().rendezvous_sent, 1, "the sender's chunk was the last memory");
        let mut buffer = vec![0; CHUNK];
        let early = timeout(Duration::from_millis(100), server.read(&mut buffer)).await;
        assert!(early.is_err(), "memory was left, so this tests nothing: {early:?}");
        drop(other);
        server.read_exact(&mut buffer).await.unwrap();
        content.check(&buffer);
    });
    announce("read");
}

/// The server's log would send its reader after a device that the client has.
#[test]
fn a_server_learns_that_its_client_has_no_memory_left() {
    super::alone(Runtime::Idle, async {
        let mut listener = listen(config().policy(Policy::Prefer)).await;
        let role = format!("poor {}", listener.local_addr().port());
        let client = tokio::task::spawn_blocking(move || Child::start(&[], &role));
        let stream = listener.next().await.unwrap();
        let info = stream.info();
        assert_eq!((info.verdict(), info.reason_code()), (Verdict::Tcp, Some(ReasonCode::MemoryBudget)));
        assert!(info.reason().contains("the client has no memory for RDMA left"), "{}", info.reason());
        client.await.unwrap().ends();
    });
}

/// Plays the role `poor`: connects to the port with less memory than a connection needs.
pub(crate) fn play_poor(port: u16) {
    Runtime::Idle.run(async move {
        let config = config().policy(Policy::Prefer).pinned_limit(1 << 20);
        let stream = Dialer::new(config).dial("127.0.0.1", port).await.unwrap();
        assert!(stream.info().reason().contains("pinned memory"), "{}", stream.info().reason());
        announce("connected");
    });
}
