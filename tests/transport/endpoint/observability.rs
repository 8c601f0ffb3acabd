//! Metrics, log events and counters.

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::Dialer;
use tonic_rdma::{Config, Policy};

use super::logs::logged;
use support::{Runtime, listen, pair};

#[test]
fn counters_reach_the_metrics_facade() {
    let recorder = DebuggingRecorder::new();
    let snapshots = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        Runtime::Idle.run(async {
            let (mut client, mut server) = pair(Config::default()).await;
            client.write_all(&[1; 50_000]).await.unwrap();
            client.shutdown().await.unwrap();
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            server.shutdown().await.unwrap();
            drop((client, server));
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        });
    });
    let metrics = snapshots.snapshot().into_vec();
    let value = |name: &str| {
        let of_name = metrics.iter().filter(|(key, ..)| key.key().name() == name);
        of_name
            .map(|(.., value)| match value {
                DebugValue::Counter(count) => *count as f64,
                DebugValue::Gauge(level) => level.into_inner(),
                DebugValue::Histogram(_) => f64::NAN,
            })
            .sum::<f64>()
    };
    assert_eq!(value("tonic_rdma_negotiations_total"), 2.0, "one at each end");
    assert_eq!(value("tonic_rdma_eager_bytes_sent_total"), 50_000.0);
    assert_eq!(value("tonic_rdma_eager_bytes_received_total"), 50_000.0);
    assert!(value("tonic_rdma_copies_avoided_bytes_total") > 40_000.0);
    assert_eq!(value("tonic_rdma_connections"), 0.0, "none is left");
}

#[test]
fn the_log_has_the_transport_and_the_reason() {
    let log = logged(|| {
        Runtime::Idle.run(async {
            let (client, server) = pair(Config::default()).await;
            drop((client, server));
            let mut listener = listen(Config::default().policy(Policy::TcpOnly)).await;
            let port = listener.local_addr().port();
            let dialer = Dialer::new(Config::default());
            let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
            drop((client.unwrap(), server));
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        });
    });
    assert!(log.contains("connected over rdma") && log.contains("soft0"), "{log}");
    assert!(log.contains("connected over tcp") && log.contains("the server declined"), "{log}");
    assert!(log.contains("rdma connection closed"), "{log}");
}

/// A client that exits drops its runtime, with connections in tasks that never end. The server sees an orderly end and no loss.
#[test]
fn a_dropped_runtime_ends_its_connections_in_order() {
    let log = logged(|| {
        Runtime::Idle.run(async {
            let mut listener = listen(Config::default()).await;
            let port = listener.local_addr().port();
            let client = std::thread::spawn(move || {
                Runtime::Idle.run(async {
                    let mut stream = Dialer::new(Config::default()).dial("127.0.0.1", port).await.unwrap();
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
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        });
    });
    assert!(log.contains("rdma connection closed") && !log.contains("lost"), "{log}");
}

#[test]
fn several_completion_queues_serve_all_connections() {
    Runtime::Idle.run(async {
        let config = Config::default().completion_queues(3);
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
