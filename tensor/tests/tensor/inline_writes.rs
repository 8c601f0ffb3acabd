//! Writes of a few bytes that need no region.

use std::io::IoSlice;
use std::time::Duration;

use tonic_rdma_tensor::{BlockCopy, RdmaDevice, Rights, TensorErrorKind};

use crate::{notifications, pair, pair_with};

/// Returns the content of the first `length` bytes from `offset` on.
fn content(exported: &tonic_rdma_tensor::ExportedRegion, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    exported.memory().copy_out(offset, &mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn bytes_arrive_before_their_notice() {
    for kind in notifications().await {
        let (server, _client, channel) = pair_with(RdmaDevice::builder().notification(kind)).await;
        let exported = server.export("region", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
        let remote = channel.region("region").await.unwrap();
        for round in 1..=300_u64 {
            let (first, second) = (round.to_ne_bytes(), [round as u8; 3]);
            let parts = [IoSlice::new(&first), IoSlice::new(&second)];
            let begun = channel.write(&remote).at(100).notify(true).bytes(&parts);
            begun.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            if round % 2 == 0 {
                exported.notice().await.unwrap();
            } else {
                crate::eventually("the notice", async || exported.try_notice()).await;
            }
            let expected = [&first[..], &second[..]].concat();
            assert_eq!(content(&exported, 100, 12), [&expected[..], &[0]].concat(), "{kind:?}");
        }
        assert!(!exported.try_notice(), "{kind:?}: one notice for each write");
        // Without a notice, and without bytes.
        channel.write(&remote).bytes(&[IoSlice::new(b"abc")]).unwrap();
        crate::eventually("the bytes", async || {
            exported.try_notice();
            content(&exported, 0, 3) == b"abc"
        })
        .await;
        channel.write(&remote).at(4096).notify(true).bytes(&[]).unwrap();
        exported.notice().await.unwrap();
    }
}

#[tokio::test]
async fn bytes_that_can_not_be_written_are_refused() {
    let (server, _client, channel) = pair().await;
    let exported = server.export("region", server.allocate(1 << 16).unwrap(), Rights::WRITE).unwrap();
    let _readable = server.export("readable", server.allocate(4096).unwrap(), Rights::READ).unwrap();
    let remote = channel.region("region").await.unwrap();
    let limit = channel.max_inline();
    let bytes = vec![7; limit + 1];
    let error = channel.write(&remote).notify(true).bytes(&[IoSlice::new(&bytes)]).unwrap_err();
    assert!(error.to_string().contains(&format!("at most {limit} bytes")), "{error}");
    channel.write(&remote).at(65_536 - limit as u64).bytes(&[IoSlice::new(&bytes[1..])]).unwrap();
    let beyond = channel.write(&remote).at(65_533).bytes(&[IoSlice::new(b"four")]).unwrap_err();
    assert_eq!(beyond.kind(), TensorErrorKind::InvalidArgument, "{beyond}");
    let beyond = channel.write(&remote).at(u64::MAX).bytes(&[IoSlice::new(b"four")]).unwrap_err();
    assert_eq!(beyond.kind(), TensorErrorKind::InvalidArgument, "{beyond}");
    let readable = channel.region("readable").await.unwrap();
    let refused = channel.write(&readable).bytes(&[IoSlice::new(b"four")]).unwrap_err();
    assert_eq!(refused.kind(), TensorErrorKind::NotPermitted, "{refused}");
    crate::eventually("the last write", async || {
        exported.try_notice();
        content(&exported, 65_535, 1) == [7]
    })
    .await;
    assert!(!exported.try_notice(), "no refused write gave a notice");
}

/// A queue that is full takes nothing, and loses nothing: the bytes that were taken arrive in order.
#[tokio::test]
async fn a_full_queue_is_busy() {
    let (server, client, channel) = pair().await;
    let exported = server.export("region", server.allocate(4 << 20).unwrap(), Rights::WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    // Requests that wait: a queue pair takes fewer at a time than this.
    let blocks: Vec<_> =
        (0..20_000).map(|index| BlockCopy { local: 0, remote: 64 + 16 * index, length: 8 }).collect();
    let write = channel.write(&remote).blocks_from(client.allocate(8).unwrap(), &blocks);
    let error = channel.write(&remote).notify(true).bytes(&[IoSlice::new(&[1; 8])]).unwrap_err();
    assert_eq!(error.kind(), TensorErrorKind::Busy, "{error}");
    write.await.unwrap();
    assert!(!exported.try_notice());
    channel.write(&remote).notify(true).bytes(&[IoSlice::new(&[1; 8])]).unwrap();
    tokio::time::timeout(Duration::from_secs(60), exported.notice()).await.unwrap().unwrap();
    assert_eq!(content(&exported, 0, 8), [1; 8]);
    assert!(!exported.try_notice(), "the refused write gave a notice");
}

#[tokio::test]
async fn a_link_that_has_ended_takes_no_bytes() {
    let (server, _client, channel) = pair().await;
    let exported = server.export("region", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    drop((exported, server));
    tokio::time::timeout(Duration::from_secs(60), channel.closed()).await.unwrap();
    let error = channel.write(&remote).bytes(&[IoSlice::new(b"late")]).unwrap_err();
    assert!(matches!(error.kind(), TensorErrorKind::PeerLost | TensorErrorKind::Closed), "{error}");
}
