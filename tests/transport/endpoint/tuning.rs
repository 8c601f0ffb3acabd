//! The choice between eager messages and rendezvous, and its explanation.

use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic_rdma::EndpointStream;
use tonic_rdma::internal::tuner::{
    CalibrationKey, ThresholdSource, TransferDecision, TransferMode, TuneCache, WriteLoad,
};
use tonic_rdma::{Config, EagerThreshold};

use support::{Runtime, config, pair};

fn cache_in(folder: &TempDir) -> TuneCache {
    TuneCache::Directory(folder.path().to_owned())
}

fn why(stream: &EndpointStream, size: usize) -> TransferDecision {
    stream.info().why(size, WriteLoad::Light).unwrap()
}

/// Sends `content` and waits until it has arrived.
async fn transfer(client: &mut EndpointStream, server: &mut EndpointStream, content: &[u8]) {
    let mut received = vec![0; content.len()];
    let write = async {
        client.write_all(content).await.unwrap();
        client.flush().await.unwrap();
    };
    let ((), read) = tokio::join!(write, server.read_exact(&mut received));
    read.unwrap();
    assert!(received == content);
}

/// Sends data until the connection has a calibration or has given up.
async fn settled(config: Config) -> TransferDecision {
    let (mut client, mut server) = pair(config).await;
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        transfer(&mut client, &mut server, &[7; 100_000]).await;
        let decision = why(&client, 100_000);
        match &decision.set_by {
            ThresholdSource::Default { reason } if &**reason == "the calibration is under way" => {
                assert!(Instant::now() < deadline, "the calibration does not end");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            _ => return decision,
        }
    }
}

#[test]
fn a_decision_names_a_configured_threshold() {
    Runtime::Idle.run(async {
        let config = config().eager_threshold(EagerThreshold::Bytes(64 * 1024)).chunk_size(32 * 1024);
        let (client, server) = pair(config).await;
        for end in [&client, &server] {
            let decision = why(end, 1 << 20);
            assert_eq!(decision.to_string(), "1 MiB by rendezvous: threshold 64 KiB, set by configuration");
            assert_eq!((decision.set_by, decision.chunk), (ThresholdSource::Configured, 32 * 1024));
            assert_eq!(why(end, 1000).mode, TransferMode::Eager);
        }
    });
}

#[test]
fn without_a_threshold_the_device_is_measured_while_connections_go_on() {
    let folder = tempfile::tempdir().unwrap();
    // No other test has receive buffers of this length: a process measures a device once for each length.
    let config = config().receive_buffers(64, 3000).tune_cache(cache_in(&folder));
    let decision = Runtime::Idle.run(settled(config));
    assert!(matches!(decision.set_by, ThresholdSource::Calibration { .. }), "{decision}");
    assert_eq!(
        decision.threshold.is_some_and(|threshold| threshold <= 100_000),
        decision.mode == TransferMode::Rendezvous
    );
}

/// Writes a calibration of the software device with receive buffers of `slot_size` bytes into the cache. The test has its own copy
/// of the format, because the library must stay able to read the files on users' disks.
fn put(folder: &TempDir, slot_size: u32, sizes: &str) {
    let key = CalibrationKey::new(&tonic_rdma_verbs::soft::attributes(), slot_size);
    let CalibrationKey { provider, device, driver, version, cpu, .. } = key;
    let body = format!(
        "tonic-rdma calibration 1\nprovider={provider}\ndevice={device}\ndriver={driver}\nversion={version}\n\
         processor={cpu}\nslot size={slot_size}\npost_ns=90\nmessage_ns=140\nround_trip_ns=500\n{sizes}"
    );
    let sum = body.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let build = if cfg!(debug_assertions) { "-debug" } else { "" };
    let file = folder.path().join(format!("soft-soft0-{slot_size}{build}"));
    std::fs::write(&file, format!("{body}sum={sum:016x}\n")).unwrap();
}

/// The connection follows the calibration on disk, beginning with its first write. Writes of 32 KiB and more go by rendezvous.
#[test]
fn a_calibration_on_disk_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    put(&folder, 3100, "size=16384 1000 3000 300\nsize=32768 9000 3000 300\nsize=65536 18000 5000 300\n");
    Runtime::Idle.run(async {
        let config = config().receive_buffers(64, 3100).tune_cache(cache_in(&folder));
        let (mut client, mut server) = pair(config).await;
        assert_eq!(
            why(&client, 32_768).to_string(),
            "32 KiB by rendezvous: threshold 32 KiB, set by calibration of soft0"
        );
        transfer(&mut client, &mut server, &[7; 100_000]).await;
        assert_eq!(client.info().counters().rendezvous_sent_bytes, 100_000);
        transfer(&mut client, &mut server, &[9; 20_000]).await;
        assert_eq!(client.info().counters().rendezvous_sent_bytes, 100_000, "20 KB go eagerly");
    });
}

#[test]
fn a_bad_file_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    put(&folder, 3200, "size=16384 1000 99000000000 300\n");
    let config = config().receive_buffers(64, 3200).tune_cache(cache_in(&folder));
    let decision = Runtime::Idle.run(settled(config));
    assert!(matches!(decision.set_by, ThresholdSource::Calibration { .. }), "{decision}");
}

#[test]
fn an_unusable_cache_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let config = config().receive_buffers(64, 3300).tune_cache(TuneCache::Directory(file));
    let decision = Runtime::Idle.run(settled(config));
    assert!(matches!(decision.set_by, ThresholdSource::Calibration { .. }), "{decision}");
}

#[test]
fn a_connection_over_tcp_has_no_decision() {
    use tokio_stream::StreamExt as _;
    Runtime::Idle.run(async {
        let mut listener = support::listen(config().policy(tonic_rdma::Policy::TcpOnly)).await;
        let dialer = tonic_rdma::Dialer::new(config());
        let port = listener.local_addr().port();
        let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
        assert_eq!(client.unwrap().info().why(1, WriteLoad::Light), None);
        drop(server);
    });
}
