//! The log: no warning after success, one warning for a transfer that was cut short, and few lines in a flood
//! of events.

use std::io::{self, Read as _};
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_stream::StreamExt as _;
use tonic_rdma::{Dialer, EagerThreshold, Policy, RdmaChannel, RdmaErrorKind};
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, Tensor, TensorSpec};

use super::tonic_over_rdma::{connect, serve};
use support::{Child, Content, Log, Runtime, config, listen, logged, logging};

/// Panics if there is a warning or an error in the log.
fn assert_no_warning(name: &str, log: &str) {
    let bad = log.lines().any(|line| line.contains(" WARN ") || line.contains("ERROR "));
    assert!(!bad, "{name}:\n{log}");
}

/// The maker of a channel gets the error of its dial, which the log does not repeat.
#[test]
fn a_dial_that_fails_is_reported_once() {
    const NOBODY: &str = "http://127.0.0.1:1";
    let log = logged(|| {
        Runtime::CurrentThread.run(async {
            let error = RdmaChannel::connect(NOBODY).await.unwrap_err();
            assert_eq!(error.kind(), RdmaErrorKind::Unreachable, "{error}");
        });
    });
    assert_no_warning("connect", &log);
    let log = logged(|| {
        Runtime::CurrentThread.run(async {
            let channel = RdmaChannel::connect_lazy(NOBODY).unwrap();
            TransferClient::new(channel).put(PutRequest::default()).await.unwrap_err();
        });
    });
    assert_eq!(log.matches("endpoint is down").count(), 1, "{log}");
}

/// A server process and a client process log no warning on any thread, whether the client returns or exits.
#[test]
fn two_processes_that_end_in_order_log_no_warning() {
    for how in ["returns", "exits"] {
        let folder = tempfile::tempdir().unwrap();
        let logs = ["server", "client"].map(|name| folder.path().join(name));
        let server = Child::start(&[], &format!("log-serve {}", logs[0].display()));
        let role = format!("log-call {} {} {how}", logs[1].display(), server.word);
        let client = Child::start(&[], &role);
        assert_eq!(client.word, "called");
        client.ends();
        server.ends();
        for (name, log) in ["server", "client"].iter().zip(&logs) {
            let log = std::fs::read_to_string(log).unwrap();
            // One connection for the calls, and one of the tensor devices.
            assert!(log.matches("connected over rdma").count() >= 2, "{how}, {name}:\n{log}");
            assert_no_warning(&format!("{how}, {name}"), &log);
        }
    }
}

/// Plays `role` if it is one of the roles of these tests, and returns whether it is.
pub(crate) fn play(role: &str) -> bool {
    let words: Vec<&str> = role.split(' ').collect();
    let log = |path| {
        let log = std::fs::File::create(Path::new(path)).unwrap();
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_ansi(false)
            .with_writer(log)
            .init();
    };
    match words[..] {
        ["log-serve", path] => {
            log(path);
            Runtime::MultiThread.run_for_ever(serve_until_stdin_closes());
        }
        ["log-call", path, addresses, how] => {
            log(path);
            Runtime::Idle.run_for_ever(call(addresses, how == "exits"));
        }
        ["log-hold", host, port] => Runtime::Idle.run_for_ever(hold(host, port.parse().unwrap())),
        _ => return false,
    }
    true
}

fn spec() -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[100_000]).unwrap()).unwrap()
}

async fn device() -> RdmaDevice {
    RdmaDevice::builder().config(config()).bind("127.0.0.1:0").await.unwrap()
}

/// Waits, on a blocking thread, until the parent closes stdin.
async fn stdin_closed() {
    let wait = || io::stdin().read_to_end(&mut Vec::new());
    tokio::task::spawn_blocking(wait).await.unwrap().unwrap();
}

async fn serve_until_stdin_closes() {
    let running = serve("127.0.0.1:0", config()).await;
    let device = device().await;
    let mut slot = device.static_receiver("slot", &spec(), 1).unwrap();
    support::announce(format!("{},{}", running.address, device.endpoint()));
    let take = tokio::spawn(async move {
        while let Ok(tensor) = slot.recv().await {
            Content::new(7).check(tensor.to_tensor().unwrap().bytes().unwrap());
        }
    });
    stdin_closed().await;
    take.abort();
    running.stop.send(()).unwrap();
    running.server.await.unwrap().unwrap();
}

async fn call(addresses: &str, exits: bool) {
    let (calls, tensors) = addresses.split_once(',').unwrap();
    let mut client = connect(calls.parse().unwrap(), config()).await;
    for (seed, length) in [(1, 10), (2, 10_000), (3, 3_000_000)] {
        let payload = Content::new(seed).take(length).into();
        let reply = client.put(PutRequest { seed, payload, ..Default::default() }).await.unwrap();
        assert_eq!(reply.into_inner().bytes, length as u64);
    }
    let device = device().await;
    let channel = device.channel(tensors, 0).await.unwrap();
    let mut sender = channel.static_sender("slot", &spec()).await.unwrap();
    let tensor = Tensor::from_bytes(spec(), Content::new(7).take(100_000).into()).unwrap();
    sender.send(&tensor).await.unwrap();
    support::announce("called");
    stdin_closed().await;
    if exits {
        #[expect(clippy::disallowed_methods, reason = "programs do so, with connections open")]
        std::process::exit(0);
    }
}

/// Connects, makes one round trip, and waits.
async fn hold(host: &str, port: u16) {
    let mut stream = Dialer::new(config()).dial(host, port).await.unwrap();
    stream.write_all(b"there and back").await.unwrap();
    stream.flush().await.unwrap();
    stream.read_exact(&mut [0; 14]).await.unwrap();
    support::announce("holding");
    stdin_closed().await;
}

/// Runs both ends in one process. The client closes first, and in a second run the server.
#[test]
fn ends_that_close_in_order_log_no_warning() {
    for server_first in [false, true] {
        let log = logged(|| {
            Runtime::Idle.run(async {
                let running = serve("127.0.0.1:0", config()).await;
                let mut client = connect(running.address, config()).await;
                let payload = Content::new(9).take(2_000_000).into();
                client.put(PutRequest { seed: 9, payload, ..Default::default() }).await.unwrap();
                let client = if server_first { Some(client) } else { None };
                running.stop.send(()).unwrap();
                running.server.await.unwrap().unwrap();
                drop(client);
                tokio::time::sleep(Duration::from_millis(100)).await;
            });
        });
        assert!(log.contains("connected over rdma"), "{log}");
        assert_no_warning(if server_first { "server first" } else { "client first" }, &log);
    }
}

/// A killed peer causes a warning if a write was waiting for the peer, and an info line otherwise.
#[test]
fn a_killed_peer_causes_a_warning_if_a_write_was_waiting() {
    for busy in [false, true] {
        let log = Log::default();
        logging(&log, || {
            Runtime::Idle.run(async {
                // Without rendezvous the writer waits for credits, whatever calibration this process has.
                let config = config().eager_threshold(EagerThreshold::Bytes(u64::MAX));
                let mut listener = listen(config).await;
                let port = listener.local_addr().port();
                let start = move || Child::start(&[], &format!("log-hold 127.0.0.1 {port}"));
                let starting = tokio::task::spawn_blocking(start);
                let mut stream = listener.next().await.unwrap();
                let mut received = [0; 14];
                stream.read_exact(&mut received).await.unwrap();
                stream.write_all(&received).await.unwrap();
                stream.flush().await.unwrap();
                let mut peer = starting.await.unwrap();
                if busy {
                    // The peer reads nothing, so that the writer comes to wait for credits.
                    let (bytes, info) = (vec![1; 1 << 20], stream.info().clone());
                    let write = async { while stream.write_all(&bytes).await.is_ok() {} };
                    let waits = async {
                        while info.counters().credit_stalls == 0 {
                            tokio::time::sleep(Duration::from_millis(5)).await;
                        }
                    };
                    tokio::select! {
                        () = write => panic!("the peer reads"),
                        () = waits => {}
                    }
                }
                peer.process.kill().unwrap();
                let error = stream.read(&mut received).await.unwrap_err();
                assert!(error.to_string().contains("its process ended"), "{error}");
                log.has(1, if busy { "rdma connection lost" } else { "the peer left without closing" }).await;
            });
        });
        assert_eq!(log.lines(" WARN ").len(), usize::from(busy), "{:?}", log.lines(""));
        let level = if busy { " WARN " } else { " INFO " };
        let told = log.lines(level).into_iter().any(|line| line.contains("its process ended"));
        assert!(told, "{:?}", log.lines(""));
    }
}

/// Health probes connect and then close or reset.
#[test]
fn connections_without_a_byte_cause_no_warning() {
    const PROBES: usize = 20;
    let log = Log::default();
    logging(&log, || {
        Runtime::Idle.run(async {
            let listener = listen(config()).await;
            for probe in 0..PROBES {
                let tcp = TcpStream::connect(listener.local_addr()).await.unwrap();
                if probe % 2 == 1 {
                    tcp.set_zero_linger().unwrap();
                }
            }
            log.has(PROBES, "left without a word").await;
        });
    });
    assert_eq!(log.lines("DEBUG").len(), log.lines("").len(), "{:?}", log.lines(""));
}

/// Returns the number of lines with `text`, and the number of suppressed lines that these lines name.
fn accounted_for(log: &Log, text: &str) -> (usize, usize) {
    let lines = log.lines(text);
    let suppressed = lines.iter().map(|line| {
        let (_, count) = line.split_once("suppressed=").unwrap_or_else(|| panic!("{line}"));
        let digits = count.split(|letter: char| !letter.is_ascii_digit()).next().unwrap();
        digits.parse::<usize>().unwrap()
    });
    (lines.len(), suppressed.sum())
}

/// Runs `one` many times, and then until its line appears again. Every event must have a line or be counted
/// in a line. There must be at most one burst of lines, and after it one line a second.
async fn flood(log: &Log, text: &str, mut one: impl AsyncFnMut()) {
    const FLOOD: usize = 100;
    const BURST: usize = 10;
    let start = Instant::now();
    for _ in 0..FLOOD {
        one().await;
    }
    let before = accounted_for(log, text);
    let seconds = start.elapsed().as_secs() as usize;
    assert!(
        (BURST..=BURST + 1 + seconds).contains(&before.0),
        "{before:?} within {seconds} s: {:?}",
        log.lines(text)
    );
    let mut happened = FLOOD;
    while accounted_for(log, text).0 == before.0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        one().await;
        happened += 1;
    }
    let (lines, suppressed) = accounted_for(log, text);
    assert_eq!(lines + suppressed, happened, "{:?}", log.lines(text));
}

#[test]
fn a_flood_of_garbage_is_a_few_warnings_that_name_the_peer() {
    let log = Log::default();
    logging(&log, || {
        Runtime::Idle.run(async {
            let listener = listen(config()).await;
            flood(&log, "connection refused", async || {
                let mut tcp = TcpStream::connect(listener.local_addr()).await.unwrap();
                tcp.write_all(b"SSH-2.0-scanner\r\n").await.unwrap();
                // The listener writes the line before it closes the connection, or in the same poll.
                let _ = tcp.read(&mut [0]).await;
            })
            .await;
        });
    });
    assert!(
        log.lines(" WARN ").iter().all(|line| line.contains("peer=127.0.0.1:")),
        "{:?}",
        log.lines(" WARN ")
    );
}

#[test]
fn a_flood_of_connections_is_a_few_lines() {
    let log = Log::default();
    logging(&log, || {
        Runtime::Idle.run(async {
            let mut listener = listen(config()).await;
            let port = listener.local_addr().port();
            flood(&log, "a stock client, without TLS", async || {
                let mut tcp = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                tcp.write_all(b"PRI * HTTP/2.0\r\n\r\n").await.unwrap();
                drop(listener.next().await.unwrap());
            })
            .await;
            let dialer = Dialer::new(config().policy(Policy::TcpOnly));
            flood(&log, "the policy is tcp-only", async || {
                let (client, server) = tokio::join!(
                    async {
                        let mut client = dialer.dial("127.0.0.1", port).await.unwrap();
                        client.write_all(b"PRI * HTTP/2.0\r\n\r\n").await.unwrap();
                        client
                    },
                    listener.next()
                );
                drop((client, server));
            })
            .await;
            // The listener has used up its lines for TCP. That must not hide a connection over RDMA.
            let rdma = Dialer::new(config());
            let (client, server) = tokio::join!(
                async {
                    let mut client = rdma.dial("127.0.0.1", port).await.unwrap();
                    client.write_all(b"PRI * HTTP/2.0\r\n\r\n").await.unwrap();
                    client
                },
                listener.next()
            );
            drop((client, server));
            // One line of the dialer and one of the listener.
            assert_eq!(log.lines("connected over rdma").len(), 2);
        });
    });
    assert!(log.lines(" WARN ").is_empty(), "{:?}", log.lines(" WARN "));
}
