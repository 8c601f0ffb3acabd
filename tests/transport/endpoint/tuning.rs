//! The choice between eager messages and rendezvous, and its explanation.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic_rdma::{EagerThreshold, Provider, ThresholdSource};

use support::{Runtime, config, pair};

#[test]
fn a_decision_names_a_configured_threshold() {
    Runtime::Idle.run(async {
        let config = config().eager_threshold(EagerThreshold::Bytes(64 * 1024)).chunk_size(32 * 1024);
        let (client, server) = pair(config).await;
        for end in [&client, &server] {
            let decision = end.info().why(1 << 20).unwrap();
            assert_eq!(decision.to_string(), "1 MiB by rendezvous: threshold 64 KiB, set by configuration");
            assert_eq!((&decision.set_by, decision.chunk), (&ThresholdSource::Configured, 32 * 1024));
            assert!(decision.by_rendezvous() && !end.info().why(1000).unwrap().by_rendezvous());
        }
    });
}

/// Returns whether a thread of this process measures a device.
fn is_measuring() -> bool {
    std::fs::read_dir("/proc/self/task").unwrap().any(|thread| {
        // A thread that has ended has no name any more.
        let name = std::fs::read_to_string(thread.unwrap().path().join("comm"));
        name.is_ok_and(|name| name.trim() == "rdma-tune")
    })
}

#[test]
fn on_the_software_device_nothing_is_measured() {
    Runtime::Idle.run(async {
        let (mut client, mut server) = pair(config().provider(Provider::Soft)).await;
        let decision = client.info().why(4 << 20).unwrap();
        assert_eq!(
            decision.to_string(),
            "4 MiB eagerly: no threshold, the default (rendezvous is never faster on the software device)"
        );
        for size in [5000, 1 << 16, 1 << 20, 4 << 20] {
            let (content, mut received) = (vec![7; size], vec![0; size]);
            let write = async {
                client.write_all(&content).await.unwrap();
                client.flush().await.unwrap();
            };
            let ((), read) = tokio::join!(write, server.read_exact(&mut received));
            read.unwrap();
            assert!(received == content && !is_measuring(), "{size}");
            assert_eq!(client.info().why(4 << 20).as_ref(), Some(&decision), "after {size}");
        }
        assert_eq!(client.info().counters().rendezvous_sent, 0);
    });
}

#[test]
fn a_connection_over_tcp_has_no_decision() {
    use tokio_stream::StreamExt as _;
    Runtime::Idle.run(async {
        let mut listener = support::listen(config().policy(tonic_rdma::Policy::TcpOnly)).await;
        let dialer = tonic_rdma::Dialer::new(config());
        let port = listener.local_addr().port();
        let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
        assert_eq!(client.unwrap().info().why(1), None);
        drop(server);
    });
}
