//! What the log says: no warning where all went well, one where a transfer was cut short, and few lines whatever peers do.

use std::io::{self, Read as _};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_stream::StreamExt as _;
use tonic_rdma::Dialer;
use tonic_rdma::{Config, Policy};
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, Tensor, TensorSpec};

use super::child::Peer;
use super::support::{Content, Runtime, config, listen};
use super::tonic_over_rdma::{connect, serve};
use super::tuning::Place;

/// Collects what is logged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// The lines that have `text`, so far.
    fn lines(&self, text: &str) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        log.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    /// Waits until there are as many lines with `text`; the caller has a deadline.
    async fn has(&self, count: usize, text: &str) {
        while self.lines(text).len() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What `test` logs, on this thread.
pub(crate) fn logged(test: impl FnOnce()) -> String {
    let log = Log::default();
    logging(&log, test);
    let bytes = log.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

fn logging(log: &Log, test: impl FnOnce()) {
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, test);
}

/// Panics if there is a warning or an error in the log.
fn all_went_well(whose: &str, log: &str) {
    let bad = log.lines().any(|line| line.contains(" WARN ") || line.contains("ERROR "));
    assert!(!bad, "{whose}:\n{log}");
}

/// A process that serves, and one that calls and leaves: neither warns of anything, on any of its threads, however the
/// client leaves.
#[test]
fn two_processes_that_part_in_good_order_warn_of_nothing() {
    for how in ["returns", "exits"] {
        let folder = Place::new(how);
        let logs = ["server", "client"].map(|name| folder.0.join(name));
        let server = Peer::start_test("logs::role", &[], &format!("serve {}", logs[0].display()));
        let role = format!("call {} {} {how}", logs[1].display(), server.word);
        let client = Peer::start_test("logs::role", &[], &role);
        assert_eq!(client.word, "called");
        client.ends();
        server.ends();
        for (whose, log) in ["server", "client"].iter().zip(&logs) {
            let log = std::fs::read_to_string(log).unwrap();
            // Calls, and the tensor devices' own.
            assert!(log.matches("connected over rdma").count() >= 2, "{how}, {whose}:\n{log}");
            all_went_well(&format!("{how}, {whose}"), &log);
        }
    }
}

/// Nothing when run as a test; in a child, its role.
#[test]
fn role() {
    let Ok(role) = std::env::var(super::child::ROLE) else { return };
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
        ["serve", path] => {
            log(path);
            Runtime::MultiThread.run_for_ever(serve_until_told());
        }
        ["call", path, addresses, how] => {
            log(path);
            Runtime::Idle.run_for_ever(call(addresses, how == "exits"));
        }
        ["hold", host, port] => Runtime::Idle.run_for_ever(hold(host, port.parse().unwrap())),
        _ => panic!("unknown role {role}"),
    }
}

fn spec() -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[100_000]).unwrap()).unwrap()
}

async fn device() -> RdmaDevice {
    RdmaDevice::builder().config(config()).bind("127.0.0.1:0").await.unwrap()
}

/// Waits, off the runtime, until the parent closes stdin.
async fn told() {
    let wait = || io::stdin().read_to_end(&mut Vec::new());
    tokio::task::spawn_blocking(wait).await.unwrap().unwrap();
}

async fn serve_until_told() {
    let running = serve("127.0.0.1:0", config()).await;
    let device = device().await;
    let mut slot = device.static_receiver("slot", &spec(), 1).unwrap();
    super::child::say(format!("{},{}", running.address, device.endpoint()));
    let take = tokio::spawn(async move {
        while let Ok(tensor) = slot.recv().await {
            Content::new(7).check(tensor.to_tensor().unwrap().bytes().unwrap());
        }
    });
    told().await;
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
    super::child::say("called");
    told().await;
    if exits {
        #[expect(clippy::disallowed_methods, reason = "programs do so, with connections open")]
        std::process::exit(0);
    }
}

/// Connects, has a round trip, and leaves it at that.
async fn hold(host: &str, port: u16) {
    let mut stream = Dialer::new(config()).dial(host, port).await.unwrap();
    stream.write_all(b"there and back").await.unwrap();
    stream.flush().await.unwrap();
    stream.read_exact(&mut [0; 14]).await.unwrap();
    super::child::say("holding");
    told().await;
}

/// Both ends in one process, whichever leaves first.
#[test]
fn ends_that_leave_in_good_order_warn_of_nothing() {
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
        all_went_well(if server_first { "server first" } else { "client first" }, &log);
    }
}

/// A killed peer is a warning where a write was waiting for it, and information otherwise.
#[test]
fn a_killed_peer_is_a_warning_where_a_write_was_waiting() {
    for busy in [false, true] {
        let log = Log::default();
        logging(&log, || {
            Runtime::Idle.run(async {
                let mut listener = listen(config()).await;
                let port = listener.local_addr().port();
                let start = move || Peer::start_test("logs::role", &[], &format!("hold 127.0.0.1 {port}"));
                let starting = tokio::task::spawn_blocking(start);
                let mut stream = listener.next().await.unwrap();
                let mut received = [0; 14];
                stream.read_exact(&mut received).await.unwrap();
                stream.write_all(&received).await.unwrap();
                stream.flush().await.unwrap();
                let mut peer = starting.await.unwrap();
                if busy {
                    // More than can be on its way: the peer reads none of it, and the writer comes to wait for credits.
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

/// Health probes connect and close, or reset.
#[test]
fn connections_without_a_byte_are_no_warning() {
    const PROBES: usize = 20;
    let log = Log::default();
    logging(&log, || {
        Runtime::Idle.run(async {
            let listener = listen(Config::default()).await;
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

/// How many lines with `text` there are, and how many more they say were left out.
fn accounted_for(log: &Log, text: &str) -> (usize, usize) {
    let lines = log.lines(text);
    let suppressed = lines.iter().map(|line| {
        let (_, count) = line.split_once("suppressed=").unwrap_or_else(|| panic!("{line}"));
        let digits = count.split(|letter: char| !letter.is_ascii_digit()).next().unwrap();
        digits.parse::<usize>().unwrap()
    });
    (lines.len(), suppressed.sum())
}

/// Makes `one` happen often, and then until its line is written again. Of all that happened every one is a line or counted
/// by one, and lines are no more than the burst and one a second.
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
            let listener = listen(Config::default()).await;
            flood(&log, "connection refused", async || {
                let mut tcp = TcpStream::connect(listener.local_addr()).await.unwrap();
                tcp.write_all(b"SSH-2.0-scanner\r\n").await.unwrap();
                // Its line is written before it is closed, or in the same turn.
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
            let mut listener = listen(Config::default()).await;
            let port = listener.local_addr().port();
            flood(&log, "a stock client, without TLS", async || {
                let mut tcp = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                tcp.write_all(b"PRI * HTTP/2.0\r\n\r\n").await.unwrap();
                drop(listener.next().await.unwrap());
            })
            .await;
            let dialer = Dialer::new(Config::default().policy(Policy::TcpOnly));
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
            // The listener's lines of TCP are used up; that does not hide a connection over RDMA.
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
            // The dialer's and the listener's.
            assert_eq!(log.lines("connected over rdma").len(), 2);
        });
    });
    assert!(log.lines(" WARN ").is_empty(), "{:?}", log.lines(" WARN "));
}
