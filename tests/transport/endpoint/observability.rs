//! Metrics, log events and counters.

use std::collections::HashMap;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::{Dialer, Policy};

use support::{Log, Runtime, config, listen, logging, pair, until};

const CONNECTIONS: &str = "tonic_rdma_connections";
const SENT: &str = "tonic_rdma_eager_bytes_sent_total";
const RECEIVED: &str = "tonic_rdma_eager_bytes_received_total";

#[test]
fn counters_reach_the_metrics_facade() {
    let recorder = DebuggingRecorder::new();
    let (snapshots, mut totals) = (recorder.snapshotter(), HashMap::new());
    metrics::with_local_recorder(&recorder, || {
        Runtime::Idle.run(async {
            let (mut client, mut server) = pair(config()).await;
            client.write_all(&[1; 50_000]).await.unwrap();
            client.shutdown().await.unwrap();
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            server.shutdown().await.unwrap();
            drop((client, server));
            // Each end publishes its last counts at its end.
            until(|| {
                add(&mut totals, &snapshots);
                let is_all = |name: &str| totals.get(name).is_some_and(|bytes| *bytes >= 50_000.0);
                totals.get(CONNECTIONS) == Some(&0.0) && is_all(SENT) && is_all(RECEIVED)
            })
            .await;
        });
    });
    add(&mut totals, &snapshots);
    assert_eq!(totals["tonic_rdma_negotiations_total"], 2.0, "one at each end");
    assert_eq!((totals[SENT], totals[RECEIVED]), (50_000.0, 50_000.0));
    assert!(totals["tonic_rdma_copies_avoided_bytes_total"] > 40_000.0);
    assert_eq!(totals[CONNECTIONS], 0.0, "none is left");
}

/// Adds what the metrics counted since the last snapshot.
fn add(totals: &mut HashMap<String, f64>, snapshots: &Snapshotter) {
    for (key, .., value) in snapshots.snapshot().into_vec() {
        *totals.entry(key.key().name().to_owned()).or_default() += match value {
            DebugValue::Counter(count) => count as f64,
            DebugValue::Gauge(level) => level.into_inner(),
            DebugValue::Histogram(_) => f64::NAN,
        };
    }
}

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
