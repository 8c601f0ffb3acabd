//! Pools for sending: the device, or the peer by READ, takes the content directly from the memory of the
//! application.

use std::io::IoSlice;
use std::time::Duration;

use bytes::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::memory::Pool;
use tonic_rdma::{Config, CounterSnapshot, EagerThreshold, EndpointStream};

use support::{Child, Content, Runtime, config, listen, pair};

const LENGTH: usize = 300_000;
const ROUNDS: usize = 40;

/// Returns settings of a network card, which sends nothing large inline, so that the source of a message must
/// be registered.
fn nothing_inline(threshold: u64) -> Config {
    config().max_inline(200).eager_threshold(EagerThreshold::Bytes(threshold))
}

/// Lets the peer READ registered payloads of 64 KiB.
fn by_read() -> Config {
    nothing_inline(64 << 10).chunk_size(64 << 10)
}

/// Returns whether the device grants a payload to the peer without a registration. Elsewhere a payload in
/// registered memory goes eagerly, without a copy.
fn lends(stream: &EndpointStream) -> bool {
    stream.info().device() == Some("soft0")
}

/// Returns a copy of `content` in memory of `pool`.
fn registered(pool: &Pool, content: &[u8]) -> Bytes {
    let mut buffer = pool.allocate(content.len()).unwrap();
    buffer.copy_from_slice(content);
    buffer.freeze()
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
    for threshold in [u64::MAX, 64 << 10] {
        let settings = || nothing_inline(threshold);
        let in_place = Runtime::Idle.run(share_in_place(settings(), |content| registered(&pool, content)));
        assert!(in_place >= 0.98, "{in_place}");
        assert_eq!(pool.statistics().leased_send, 0, "all was given back");
        let copied = Runtime::Idle.run(share_in_place(settings(), Bytes::copy_from_slice));
        assert!(copied < 0.02, "{copied}");
    }
}

/// Writes the parts in one vectored write after the other, and reads them at the peer. Returns the writer's
/// counters.
async fn exchange(
    client: &mut EndpointStream,
    server: &mut EndpointStream,
    parts: &[Bytes],
) -> CounterSnapshot {
    let content = parts.concat();
    let mut received = vec![0; content.len()];
    let write = async {
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let (mut slices, mut left) = (&mut slices[..], content.len());
        while left > 0 {
            let written = client.write_vectored(slices).await.unwrap();
            assert!(written > 0, "{left} bytes are left");
            IoSlice::advance_slices(&mut slices, written);
            left -= written;
        }
        client.flush().await.unwrap();
    };
    let (_, read) = tokio::join!(write, server.read_exact(&mut received));
    read.unwrap();
    assert!(received == content, "the peer got other bytes, or in another order");
    client.info().counters()
}

/// A frame's header, a payload in registered memory, and bytes of other memory: the payload is read from where
/// it lies, the rest goes before and after it.
#[test]
fn a_payload_is_read_in_place_and_keeps_its_position_among_other_bytes() {
    Runtime::Idle.run(async {
        let pool = Pool::for_sending(8 << 20);
        let (mut client, mut server) = pair(by_read()).await;
        let mut content = Content::new(4);
        let mut plain = |length| Bytes::from(content.take(length));
        let (nothing, header, trailer) = (plain(0), plain(9), plain(5000));
        let [long, short] = [300_000, 60_000].map(|length| registered(&pool, &plain(length)));
        let payloads = [long.clone(), long.slice(1..70_000), long.slice(70_000..70_000 + (64 << 10))];
        let mut parts = vec![nothing.clone()];
        for payload in &payloads {
            parts.extend([nothing.clone(), header.clone(), payload.clone(), trailer.clone()]);
        }
        parts.extend([payloads[1].clone(), payloads[2].clone(), short.clone(), header]);
        let counters = exchange(&mut client, &mut server, &parts).await;
        let all: usize = parts.iter().map(Bytes::len).sum();
        let lent = payloads[0].len() + 2 * (payloads[1].len() + payloads[2].len());
        assert_eq!(counters.eager_sent_bytes + counters.rendezvous_sent_bytes, all as u64, "{counters:?}");
        assert!(counters.copies_avoided_bytes >= (lent + short.len()) as u64 * 98 / 100, "{counters:?}");
        if lends(&client) {
            assert_eq!(counters.rendezvous_sent_bytes, lent as u64, "{counters:?}");
            assert_eq!(counters.copies_avoided_bytes, (lent + short.len()) as u64, "{counters:?}");
            assert_eq!(server.info().counters().rendezvous_received_bytes, lent as u64);
        }
        drop((payloads, parts, long, short));
        client.shutdown().await.unwrap();
        assert_eq!(server.read(&mut [0]).await.unwrap(), 0);
        server.shutdown().await.unwrap();
        std::future::poll_fn(|context| client.poll_delivered(context)).await.unwrap();
        assert_eq!(pool.statistics().leased_send, 0, "all was given back");
    });
}

/// A peer hangs, and reads nothing of a payload that it was offered, until it is killed. The payload is free
/// again although the handle of the connection is still there.
#[test]
fn the_death_of_a_peer_frees_a_payload_that_was_lent_to_it() {
    Runtime::Idle.run(async {
        let pool = Pool::for_sending(8 << 20);
        let mut listener = listen(by_read()).await;
        let role = format!("write-and-wait {} 1 1", listener.local_addr());
        let child = tokio::task::spawn_blocking(move || Child::start(&[], &role));
        let mut stream = listener.next().await.unwrap();
        let mut child = child.await.unwrap();
        stream.read_exact(&mut [0]).await.unwrap();
        kill_process(Pid::from_child(&child.process), Signal::STOP).unwrap();
        let payload = registered(&pool, &Content::new(1).take(LENGTH));
        stream.write_all(&payload).await.unwrap();
        stream.flush().await.unwrap();
        drop(payload);
        if lends(&stream) {
            assert_eq!(stream.info().counters().rendezvous_sent_bytes, LENGTH as u64);
            assert_ne!(pool.statistics().leased_send, 0, "the peer may still read it");
        }
        child.process.kill().unwrap();
        child.process.wait().unwrap();
        std::future::poll_fn(|context| stream.poll_delivered(context)).await.expect_err("the peer has gone");
        // A device may end the peer's right a moment later.
        while lends(&stream) && pool.statistics().leased_send > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(stream);
    });
}

/// Each chunk is offered as soon as it is copied, if the peer has receive buffers to spare. If it has few, one
/// offer names several chunks.
#[test]
fn chunks_are_offered_one_by_one() {
    const CHUNK: usize = 64 << 10;
    for (slots, offers) in [(96, 8..=8), (16, 1..=5)] {
        Runtime::Idle.run(async {
            let (mut client, mut server) = pair(by_read().receive_slots(slots)).await;
            let content = Content::new(6).take(8 * CHUNK);
            assert_eq!(client.write(&content).await.unwrap(), content.len());
            let counters = client.info().counters();
            assert!(offers.contains(&counters.rendezvous_sent), "{slots} buffers: {counters:?}");
            assert_eq!(counters.rendezvous_sent_bytes, content.len() as u64);
            let mut received = vec![0; content.len()];
            server.read_exact(&mut received).await.unwrap();
            assert!(received == content);
            assert_eq!(server.info().counters().reads, 8);
        });
    }
}
