//! Metrics, log events and counters.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_stream::StreamExt as _;
use tonic_rdma::{Dialer, Policy};

use support::{Child, Log, Meters, Runtime, config, listen, logging, pair, until};

const CONNECTIONS: &str = "tonic_rdma_connections";
const NEGOTIATIONS: &str = "tonic_rdma_negotiations_total";
const LOST: &str = "tonic_rdma_peers_lost_total";
const SENT: &str = "tonic_rdma_eager_bytes_sent_total";
const RECEIVED: &str = "tonic_rdma_eager_bytes_received_total";

/// Returns the open connections of clients and of servers over a transport.
fn open(meters: &Meters, transport: &str) -> [f64; 2] {
    ["client", "server"].map(|side| {
        let of_kind = [("side", side), ("transport", transport), ("kind", "http2")];
        meters.sum(CONNECTIONS, &of_kind)
    })
}

#[test]
fn counters_reach_the_metrics_facade() {
    let meters = Meters::default();
    meters.within(|| {
        Runtime::Idle.run(async {
            let (mut client, mut server) = pair(config()).await;
            assert_eq!((open(&meters, "rdma"), open(&meters, "tcp")), ([1.0; 2], [0.0; 2]));
            client.write_all(&[1; 50_000]).await.unwrap();
            client.shutdown().await.unwrap();
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            server.shutdown().await.unwrap();
            tonic_rdma::describe_metrics();
            assert!(meters.sum("tonic_rdma_registered_bytes", &[]) > 0.0, "of these connections");
            drop((client, server));
            // Each end publishes its last counts at its end.
            until(|| open(&meters, "rdma") == [0.0; 2]).await;
        });
    });
    for side in ["client", "server"] {
        let rdma = [("side", side), ("verdict", "rdma"), ("reason", "none")];
        assert_eq!(meters.sum(NEGOTIATIONS, &rdma), 1.0, "{side}");
    }
    assert_eq!(meters.sum(NEGOTIATIONS, &[]), 2.0, "one at each end");
    assert_eq!((meters.sum(SENT, &[]), meters.sum(RECEIVED, &[])), (50_000.0, 50_000.0));
    assert!(meters.sum("tonic_rdma_copies_avoided_bytes_total", &[]) > 40_000.0);
    assert_eq!(meters.sum(CONNECTIONS, &[]), 0.0, "none is left");
    assert_eq!(meters.sum(LOST, &[]), 0.0);
}

#[test]
fn connections_over_tcp_count_until_their_stream_is_dropped() {
    let meters = Meters::default();
    meters.within(|| {
        Runtime::Idle.run(async {
            let mut listener = listen(config().policy(Policy::TcpOnly)).await;
            let port = listener.local_addr().port();
            let dialer = Dialer::new(config());
            let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
            let declined = (client.unwrap(), server.unwrap());
            let mut stock = TcpStream::connect(listener.local_addr()).await.unwrap();
            stock.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
            let served = listener.next().await.unwrap();
            assert_eq!((open(&meters, "tcp"), open(&meters, "rdma")), ([1.0, 2.0], [0.0; 2]));
            drop(served);
            assert_eq!(open(&meters, "tcp"), [1.0; 2]);
            drop(declined);
            assert_eq!(open(&meters, "tcp"), [0.0; 2]);
        });
    });
    for (side, reason) in [("client", "policy"), ("server", "policy"), ("server", "stock_client")] {
        let tcp = [("side", side), ("verdict", "tcp"), ("reason", reason)];
        assert_eq!(meters.sum(NEGOTIATIONS, &tcp), 1.0, "{side} {reason}");
    }
    assert_eq!(meters.sum(NEGOTIATIONS, &[]), 3.0);
}

/// A peer that is killed has left; one that is stopped is silent.
#[test]
fn lost_peers_count_by_the_reason() {
    let meters = Meters::default();
    meters.within(|| {
        Runtime::Idle.run(async {
            let (mut killed, stopped) = (Child::start(&[], "echo"), Child::start(&[], "echo"));
            let pings =
                config().ping_interval(Duration::from_millis(200)).ping_timeout(Duration::from_secs(2));
            let dial = async |peer: &Child| {
                Dialer::new(pings.clone()).dial("127.0.0.1", peer.word.parse().unwrap()).await.unwrap()
            };
            let (mut left, mut silent) = (dial(&killed).await, dial(&stopped).await);
            let of = |reason| meters.sum(LOST, &[("reason", reason)]);
            killed.process.kill().unwrap();
            left.read(&mut [0]).await.unwrap_err();
            until(|| (of("left"), of("silent")) == (1.0, 0.0)).await;
            let process = rustix::process::Pid::from_child(&stopped.process);
            rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
            silent.read(&mut [0]).await.unwrap_err();
            until(|| (of("left"), of("silent")) == (1.0, 1.0)).await;
        });
    });
}

/// Gauges of the process, and those of no connection.
#[test]
fn the_process_is_described() {
    let meters = Meters::default();
    meters.within(tonic_rdma::describe_metrics);
    let build =
        [("version", env!("CARGO_PKG_VERSION")), ("hello", "3-4"), ("soft", "5"), ("ibverbs", IBVERBS)];
    assert_eq!(meters.sum("tonic_rdma_build_info", &build), 1.0);
    let files: Vec<_> = (0..40).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
    meters.within(tonic_rdma::describe_metrics);
    let open = meters.sum("tonic_rdma_descriptors", &[]);
    let listed = std::fs::read_dir("/proc/self/fd").unwrap().count() as f64;
    // Other tests of this process open and close some meanwhile.
    assert!(open > files.len() as f64 && (listed - open).abs() < 400.0, "{open} of {listed}");
    assert!(meters.sum("tonic_rdma_descriptors_limit", &[]) >= open);
    assert_eq!(meters.sum(LOST, &[]), 0.0);
    assert!(meters.has(LOST) && meters.has(NEGOTIATIONS), "with their first values");
}

const IBVERBS: &str = if cfg!(feature = "ibverbs") { "yes" } else { "no" };

#[test]
fn the_log_has_the_transport_and_the_reason() {
    let log = Log::default();
    logging(&log, || {
        Runtime::Idle.run(async {
            let (client, server) = pair(config()).await;
            drop((client, server));
            let mut listener = listen(config().policy(Policy::TcpOnly)).await;
            let port = listener.local_addr().port();
            let dialer = Dialer::new(config());
            let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
            drop((client.unwrap(), server));
            log.has(1, "rdma connection closed").await;
        });
    });
    let log = log.lines("").join("\n");
    assert!(log.contains("connected over rdma") && log.contains("soft0"), "{log}");
    assert!(log.contains("connected over tcp") && log.contains("the server declined"), "{log}");
}

/// A client that exits drops its runtime, with connections in tasks that never end. The server sees an
/// orderly end and no loss.
#[test]
fn a_dropped_runtime_ends_its_connections_in_order() {
    let log = Log::default();
    logging(&log, || {
        Runtime::Idle.run(async {
            let mut listener = listen(config()).await;
            let port = listener.local_addr().port();
            let client = std::thread::spawn(move || {
                Runtime::Idle.run(async {
                    let mut stream = Dialer::new(config()).dial("127.0.0.1", port).await.unwrap();
                    stream.write_all(b"and that was all").await.unwrap();
                    stream.flush().await.unwrap();
                    tokio::spawn(async move { stream.read(&mut [0]).await });
                    tokio::task::yield_now().await;
                });
            });
            let mut server = listener.next().await.unwrap();
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            assert_eq!(received, b"and that was all");
            drop(server);
            client.join().unwrap();
            log.has(1, "rdma connection").await;
        });
    });
    let log = log.lines("").join("\n");
    assert!(log.contains("rdma connection closed") && !log.contains("lost"), "{log}");
}

#[test]
fn several_completion_queues_serve_all_connections() {
    Runtime::Idle.run(async {
        let config = config().completion_queues(3);
        let mut listener = listen(config.clone()).await;
        let dialer = Dialer::new(config);
        let port = listener.local_addr().port();
        let mut ends = Vec::new();
        for _ in 0..6 {
            let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
            ends.push((client.unwrap(), server.unwrap()));
        }
        for (index, (client, server)) in ends.iter_mut().enumerate() {
            client.write_all(&[index as u8; 3000]).await.unwrap();
            client.flush().await.unwrap();
            let mut received = [0; 3000];
            server.read_exact(&mut received).await.unwrap();
            assert_eq!(received, [index as u8; 3000]);
        }
    });
}
