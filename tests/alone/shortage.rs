//! A receiver for whose READs no registered memory is left waits for what others give back. Alone in its process, whose
//! budget it uses up.

use std::time::Duration;

use support::{Content, Runtime, pair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tonic_rdma::{Config, EagerThreshold};

const SLOTS: u32 = 96;
const SLOT: u32 = 17 << 10;
const CHUNK: usize = 64 << 10;

#[test]
fn reads_wait_for_memory_that_another_connection_gives_back() {
    // The receive buffers of two connections, both ends of which are here, and one chunk to be read.
    let limit = 4 * u64::from(SLOTS * SLOT) + CHUNK as u64;
    let config = Config::default()
        .receive_buffers(SLOTS, SLOT)
        .eager_threshold(EagerThreshold::Bytes(CHUNK as u64))
        .chunk_size(CHUNK)
        .pinned_limit(limit);
    super::alone(Runtime::Idle, async move {
        let (mut client, mut server) = pair(config.clone()).await;
        let other = pair(config).await;
        let mut content = Content::new(9);
        client.write_all(&content.clone().take(CHUNK)).await.unwrap();
        client.flush().await.unwrap();
        assert_eq!(client.info().counters().rendezvous_sent, 1, "the sender's memory was the last");
        let mut buffer = vec![0; CHUNK];
        let early = timeout(Duration::from_millis(100), server.read(&mut buffer)).await;
        assert!(early.is_err(), "there was memory left: this tests nothing: {early:?}");
        drop(other);
        server.read_exact(&mut buffer).await.unwrap();
        content.check(&buffer);
    });
}
