//! Pools for sending: the device reads the content directly from the memory of the application.

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic_rdma::memory::Pool;
use tonic_rdma::{Config, EagerThreshold};

use support::{Content, Runtime, config, pair};

const LENGTH: usize = 300_000;
const ROUNDS: usize = 40;

/// Returns settings of a network card, which sends nothing large inline, so that the source of a message must
/// be registered. The threshold keeps these messages out of rendezvous, which would copy them.
fn nothing_inline() -> Config {
    config().max_inline(200).eager_threshold(EagerThreshold::Bytes(64 << 10))
}

/// Sends the buffer that `make` makes of the content, `ROUNDS` times, each time from the memory of the round
/// before. Returns the share of the bytes that were not copied.
async fn share_in_place(config: Config, make: impl Fn(&[u8]) -> Bytes) -> f64 {
    let (mut client, mut server) = pair(config).await;
    let (mut sent, mut received) = (Content::new(3), Content::new(3));
    let send = async {
        for _ in 0..ROUNDS {
            let bytes = make(&sent.take(LENGTH));
            client.write_all(&bytes).await.unwrap();
            // The memory is free for the next round, although part of the content may still be on its way.
            drop(bytes);
        }
        client.shutdown().await.unwrap();
        client.info().counters()
    };
    let receive = async {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match server.read(&mut buffer).await.unwrap() {
                0 => break,
                count => received.check(&buffer[..count]),
            }
        }
        assert_eq!(received.position(), (ROUNDS * LENGTH) as u64);
    };
    let (counters, ()) = tokio::join!(send, receive);
    assert_eq!(counters.eager_sent_bytes + counters.rendezvous_sent_bytes, (ROUNDS * LENGTH) as u64);
    counters.copies_avoided_bytes as f64 / (ROUNDS * LENGTH) as f64
}

#[test]
fn registered_content_is_not_copied_and_other_content_is() {
    let pool = Pool::for_sending(64 << 20);
    let in_place = Runtime::Idle.run(share_in_place(nothing_inline(), |content| {
        let mut buffer = pool.allocate(content.len()).unwrap();
        buffer.copy_from_slice(content);
        buffer.freeze()
    }));
    assert!(in_place >= 0.98, "{in_place}");
    assert_eq!(pool.statistics().leased_send, 0, "all was given back");
    let copied = Runtime::Idle.run(share_in_place(nothing_inline(), Bytes::copy_from_slice));
    assert!(copied < 0.02, "{copied}");
}
