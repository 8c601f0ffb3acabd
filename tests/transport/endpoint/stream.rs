//! The byte stream: its content, its order, and the ways in which it ends.

use std::io::{ErrorKind, IoSlice};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tonic_rdma::memory::Pool;
use tonic_rdma::{Config, Dialer, EagerThreshold, EndpointStream, Policy, PollMode, StockClients, Verdict};

use fastrand::Rng;
use support::{Content, Runtime, config, everywhere, listen, pair, random_length, within};

const MIB: usize = 1 << 20;
const LINGER: Duration = Duration::from_secs(60);

/// Writes pieces of random lengths. About half of them lie in registered memory.
async fn send(mut stream: impl AsyncWrite + Unpin, seed: u64, total: usize, most: usize) {
    let (mut content, mut random) = (Content::new(seed), Rng::with_seed(seed));
    let pool = Pool::for_sending(64 << 20);
    let mut left = total;
    while left > 0 {
        let length = random_length(&mut random, most).min(left);
        let piece = content.take(length);
        match pool.allocate(length) {
            Ok(mut buffer) if random.bool() => {
                buffer.copy_from_slice(&piece);
                within(stream.write_all(&buffer.freeze())).await.unwrap();
            }
            _ => within(stream.write_all(&piece)).await.unwrap(),
        }
        left -= length;
        match random.u32(0..8) {
            0 => stream.flush().await.unwrap(),
            1 => tokio::task::yield_now().await,
            _ => {}
        }
    }
    within(stream.shutdown()).await.unwrap();
}

async fn receive(mut stream: impl AsyncRead + Unpin, seed: u64, total: usize, slow: bool) {
    let (mut content, mut random) = (Content::new(seed), Rng::with_seed(!seed));
    let mut buffer = vec![0; MIB];
    loop {
        let room = random_length(&mut random, MIB - 1) + 1;
        let count = within(stream.read(&mut buffer[..room])).await.unwrap();
        if count == 0 {
            break;
        }
        content.check(&buffer[..count]);
        if slow && random.u32(0..16) == 0 {
            tokio::time::sleep(Duration::from_micros(random.u64(0..300))).await;
        }
    }
    assert_eq!(content.position(), total as u64);
}

async fn both_ways(config: Config, total: usize, most: usize, slow: bool) {
    // The end that finishes first lingers until the other end has fetched the rest, which takes long on a
    // busy machine.
    let (client, server) = pair(config.linger(LINGER)).await;
    let ((client_read, client_write), (server_read, server_write)) = (split(client), split(server));
    tokio::join!(
        send(client_write, 1, total, most),
        send(server_write, 2, total, most),
        receive(server_read, 1, total, slow),
        receive(client_read, 2, total, false),
    );
}

#[test]
fn content_survives_in_every_runtime_and_poll_mode() {
    everywhere(|config| both_ways(config, 8 * MIB, 300_000, false));
}

#[test]
fn small_writes_are_gathered_and_arrive_in_order() {
    everywhere(|config| both_ways(config, MIB, 100, false));
}

#[test]
fn slow_readers_stop_the_writer_and_lose_nothing() {
    Runtime::Idle.run(both_ways(config(), 16 * MIB, 2 * MIB, true));
    Runtime::MultiThread.run(both_ways(config(), 16 * MIB, 2 * MIB, true));
}

#[test]
fn every_threshold_and_chunk_size_carries_the_same_bytes() {
    for threshold in [EagerThreshold::Bytes(0), EagerThreshold::Bytes(u64::MAX), EagerThreshold::Bytes(5000)]
    {
        for chunk in [4096, 65536] {
            let config = config().eager_threshold(threshold).chunk_size(chunk);
            Runtime::Idle.run(both_ways(config, 4 * MIB, 700_000, false));
        }
    }
    let tiny = config().receive_slots(16).slot_size(1024).qp_queue_depth(64);
    Runtime::Idle.run(both_ways(tiny, 4 * MIB, 100_000, false));
}

/// Sends pieces of up to 64 MiB in both directions at once. The second run has a slow reader. `SOAK_MIB` sets
/// the MiB for each direction.
#[test]
fn soak() {
    let total = std::env::var("SOAK_MIB").map_or(256, |mib| mib.parse().unwrap()) * MIB;
    // The total time depends on the amount and the device, so only the steps have a time limit.
    Runtime::Idle.run_for_ever(both_ways(config(), total, 64 * MIB, false));
    Runtime::MultiThread.run_for_ever(both_ways(config(), total * 3 / 4, 64 * MIB, true));
}

#[test]
fn counters_show_how_the_bytes_were_sent() {
    Runtime::Idle.run(async {
        let config = config().eager_threshold(EagerThreshold::Bytes(64 * 1024));
        let (mut client, mut server) = pair(config).await;
        client.write_all(&[7; 1000]).await.unwrap();
        client.flush().await.unwrap();
        server.read_exact(&mut [0; 1000]).await.unwrap();
        let large = vec![9; MIB];
        let mut received = vec![0; MIB];
        let (written, read) = tokio::join!(client.write_all(&large), server.read_exact(&mut received));
        assert_eq!((written.unwrap(), read.unwrap()), ((), MIB));
        assert!(received == large);
        let (sent, taken) = (client.info().counters(), server.info().counters());
        assert!(sent.eager_sent >= 1 && sent.eager_sent_bytes >= 1000, "{sent:?}");
        assert_eq!(sent.eager_sent_bytes + sent.rendezvous_sent_bytes, 1000 + MIB as u64, "{sent:?}");
        assert!(sent.rendezvous_sent >= 1 && sent.rendezvous_sent_bytes >= MIB as u64 / 2, "{sent:?}");
        assert_eq!(taken.rendezvous_received_bytes, sent.rendezvous_sent_bytes, "{taken:?}");
        assert!(taken.reads >= 1 && taken.polls >= 1, "{taken:?}");
    });
}

#[test]
fn a_vectored_write_keeps_its_order() {
    Runtime::Idle.run(async {
        let (mut client, mut server) = pair(config()).await;
        let mut content = Content::new(3);
        let parts: Vec<Vec<u8>> = [1, 0, 9, 5000, 3, 20_000].map(|length| content.take(length)).into();
        let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let written = client.write_vectored(&slices).await.unwrap();
        client.shutdown().await.unwrap();
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, parts.concat()[..written]);
        assert!(written >= 10);
    });
}

#[test]
fn each_direction_closes_by_itself() {
    everywhere(|config| async move {
        let (mut client, mut server) = pair(config).await;
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let error = client.write_all(b"more").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        let mut question = Vec::new();
        server.read_to_end(&mut question).await.unwrap();
        assert_eq!(question, b"question");
        server.write_all(&[5; 100_000]).await.unwrap();
        server.shutdown().await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, [5; 100_000]);
    });
}

#[test]
fn bytes_written_before_a_drop_arrive() {
    everywhere(|config| async move {
        let lengths = [1, 5000, 300_000, 3 * MIB];
        for (length, flush) in lengths.into_iter().flat_map(|length| [(length, true), (length, false)]) {
            let (mut client, mut server) = pair(config.clone().linger(LINGER)).await;
            let writer = tokio::spawn(async move {
                client.write_all(&Content::new(4).take(length)).await.unwrap();
                if flush {
                    client.flush().await.unwrap();
                }
            });
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            writer.await.unwrap();
            Content::new(4).check(&received);
            assert_eq!(received.len(), length);
        }
    });
}

/// Over TCP, the system resets a closed socket to which the peer still writes, such as HTTP/2's frames for flow
/// control, and drops what it has not sent.
#[test]
fn bytes_written_before_a_close_over_tcp_arrive_although_the_peer_writes() {
    Runtime::CurrentThread.run(async {
        let config = config().policy(Policy::TcpOnly).stock_clients(StockClients::Any);
        let mut listener = listen(config.clone()).await;
        let port = listener.local_addr().port();
        let mut client = Dialer::new(config).dial("127.0.0.1", port).await.unwrap();
        client.write_all(b"a client of another protocol").await.unwrap();
        let mut server = listener.next().await.unwrap();
        // More than the client's side of the network takes while the client does not read.
        let (mut content, mut written) = (Content::new(4), Vec::new());
        loop {
            let part = content.take(MIB);
            let count = std::future::poll_fn(|context| {
                Poll::Ready(match Pin::new(&mut server).poll_write(context, &part) {
                    Poll::Ready(count) => count.unwrap(),
                    Poll::Pending => 0,
                })
            });
            match count.await {
                0 => break,
                count => written.extend_from_slice(&part[..count]),
            }
        }
        assert!(!written.is_empty());
        server.read_exact(&mut [0; 28]).await.unwrap();
        server.shutdown().await.unwrap();
        drop(server);
        client.write_all(b"room for more").await.unwrap();
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        assert!(received == written, "{} of {} bytes", received.len(), written.len());
    });
}

/// An end that gives up, such as a server that refuses a certificate, writes the reason, does not flush, and
/// reads nothing more.
#[test]
fn the_last_write_arrives_before_an_abort() {
    everywhere(|config| async move {
        let (mut client, mut server) = pair(config).await;
        client.write_all(b"a question, and more").await.unwrap();
        client.flush().await.unwrap();
        server.read_exact(&mut [0; 10]).await.unwrap();
        server.write_all(b"enough").await.unwrap();
        drop(server);
        let mut answer = Vec::new();
        let end = client.read_to_end(&mut answer).await;
        assert_eq!(answer, b"enough", "{end:?}");
        assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionAborted);
    });
}

/// An end that has sent and received everything closes while its peer still acknowledges data. That is no
/// failure.
#[test]
fn the_end_that_is_done_first_may_close() {
    const ROUNDS: u64 = 60;
    const AT_ONCE: u64 = 4;
    let (address_to, address_from) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        Runtime::Idle.run_for_ever(async {
            let mut listener = listen(config()).await;
            address_to.send(listener.local_addr().port()).unwrap();
            for _ in 0..ROUNDS {
                let mut ends = JoinSet::new();
                for _ in 0..AT_ONCE {
                    let stream = within(listener.next()).await.unwrap();
                    ends.spawn(exchange(stream, Rng::with_seed(7)));
                }
                within(ends.join_all()).await;
            }
        })
    });
    let port = address_from.recv().unwrap();
    Runtime::Idle.run_for_ever(async {
        let dialer = Dialer::new(config());
        for round in 0..ROUNDS {
            let mut ends = JoinSet::new();
            for seed in 1..=AT_ONCE {
                let stream = within(dialer.dial("127.0.0.1", port)).await.unwrap();
                assert_eq!(stream.info().verdict(), Verdict::Rdma);
                ends.spawn(exchange(stream, Rng::with_seed(round * AT_ONCE + seed)));
            }
            within(ends.join_all()).await;
        }
    });
    server.join().unwrap();
}

/// Sends some content, reads everything from the peer, and closes as soon as possible.
async fn exchange(mut stream: EndpointStream, mut random: Rng) {
    let (mut reader, mut writer) = split(&mut stream);
    let write = async {
        let mut content = Content::new(5);
        for _ in 0..random.u32(0..100) {
            let piece = content.take(random_length(&mut random, 60_000));
            writer.write_all(&piece).await.unwrap();
        }
        writer.shutdown().await.unwrap();
    };
    let read = async {
        let (mut content, mut received) = (Content::new(5), vec![0; 4096]);
        loop {
            match reader.read(&mut received).await.unwrap() {
                0 => break,
                count => content.check(&received[..count]),
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::join!(write, read);
    std::future::poll_fn(|context| stream.poll_delivered(context)).await.unwrap();
}

#[test]
fn a_writer_gets_an_error_after_the_reader_has_closed() {
    everywhere(|config| async move {
        let (mut client, server) = pair(config).await;
        drop(server);
        let error = loop {
            if let Err(error) = client.write_all(&[1; 100_000]).await {
                break error;
            }
        };
        assert!(
            matches!(
                error.kind(),
                ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe
            ),
            "{error:?}"
        );
    });
}

/// The bytes that `poll_write` and `poll_flush` took reach a receiver in another runtime, although the
/// sender's runtime is blocked.
#[test]
fn data_moves_while_the_senders_runtime_is_blocked() {
    for mode in [PollMode::Adaptive, PollMode::Event] {
        let config = config().poll_mode(mode);
        let (address_to, address_from) = std::sync::mpsc::channel();
        let (done_to, done_from) = std::sync::mpsc::channel();
        let listening = config.clone();
        let receiver = std::thread::spawn(move || {
            Runtime::Idle.run(async {
                let mut listener = listen(listening).await;
                address_to.send(listener.local_addr().port()).unwrap();
                let mut server = listener.next().await.unwrap();
                let mut bytes = [0; 10_000];
                server.read_exact(&mut bytes).await.unwrap();
                done_to.send(bytes.to_vec()).unwrap();
                // The answer comes after the other end has checked, so that the other end was blocked all the
                // time.
                server.write_all(b"got it").await.unwrap();
                server.flush().await.unwrap();
                let _ = server.read(&mut [0]).await;
            });
        });
        Runtime::CurrentThread.run(async {
            let port = address_from.recv().unwrap();
            let mut client = tonic_rdma::Dialer::new(config).dial("127.0.0.1", port).await.unwrap();
            client.write_all(&Content::new(5).take(10_000)).await.unwrap();
            client.flush().await.unwrap();
            let received = done_from.recv_timeout(Duration::from_secs(60)).expect("nothing arrived");
            Content::new(5).check(&received);
            let mut answer = [0; 6];
            client.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"got it");
        });
        receiver.join().unwrap();
    }
}

/// A runtime polls when it is idle. Data must arrive also while a task that never waits keeps the runtime
/// busy.
#[test]
fn a_runtime_that_is_never_idle_still_receives() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (mut client, mut server) = pair(config()).await;
            let busy = tokio::spawn(async {
                loop {
                    tokio::task::yield_now().await;
                }
            });
            let echo = tokio::spawn(async move {
                let mut message = [0; 100];
                while server.read_exact(&mut message).await.is_ok() {
                    server.write_all(&message).await.unwrap();
                    server.flush().await.unwrap();
                }
            });
            for round in 0..100_u8 {
                client.write_all(&[round; 100]).await.unwrap();
                client.flush().await.unwrap();
                let mut back = [0; 100];
                client.read_exact(&mut back).await.unwrap();
                assert_eq!(back, [round; 100]);
            }
            busy.abort();
            drop(client);
            echo.await.unwrap();
        });
    }
}
