//! Copies of bytes between a local region and a region of the peer.

use std::sync::mpsc;
use std::time::Duration;

use tonic_rdma::Config;
use tonic_rdma_tensor::{BlockCopy, RdmaDevice, Rights};

use crate::{notifications, pair, pair_with, pattern};

#[tokio::test]
async fn bytes_are_written_and_read_back() {
    let (server, client, channel) = pair().await;
    let exported = server.export("region", server.allocate(1 << 20).unwrap(), Rights::READ_WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    assert_eq!((remote.len(), remote.rights()), (1 << 20, Rights::READ_WRITE));
    let content = pattern(1, 300_000);
    let mut local = client.allocate(content.len() + 7).unwrap();
    local[7..].copy_from_slice(&content);
    let local = channel.write(&remote).at(1001).from(local, 7..300_007).await.unwrap();
    assert_eq!(&local[7..], &content);
    let mut there = vec![0; content.len() + 2];
    exported.memory().copy_out(1000, &mut there).unwrap();
    assert_eq!((there[0], there[content.len() + 1]), (0, 0));
    assert_eq!(&there[1..=content.len()], &content);

    let back = client.allocate(300_000).unwrap();
    let back = channel.read(&remote).at(1001).into(back, ..).await.unwrap();
    assert_eq!(&back[..], &content);
}

#[tokio::test]
async fn a_copy_may_be_longer_than_a_request_and_the_window() {
    let settings = RdmaDevice::builder().max_request_bytes(64 << 10).max_outstanding_bytes(256 << 10);
    let (server, client, channel) = pair_with(settings).await;
    let length = 5 << 20;
    let exported = server.export("region", server.allocate(length).unwrap(), Rights::READ_WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    let content = pattern(2, length);
    let mut local = client.allocate(length).unwrap();
    local.copy_from_slice(&content);
    let mut local = channel.write(&remote).from(local, ..).await.unwrap();
    let mut there = vec![0; length];
    exported.memory().copy_out(0, &mut there).unwrap();
    assert!(there == content);
    local.fill(0);
    let local = channel.read(&remote).into(local, ..).await.unwrap();
    assert!(local[..] == content[..]);
}

#[tokio::test]
async fn a_callback_gets_the_result() {
    let (server, client, channel) = pair().await;
    let _exported = server.export("region", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    let (sender, receiver) = mpsc::channel();
    let local = client.allocate(4096).unwrap();
    channel.write(&remote).from(local, ..).on_completion(move |result| {
        sender.send((result.is_ok(), result.unwrap().len())).unwrap();
    });
    loop {
        match receiver.try_recv() {
            Ok(told) => break assert_eq!(told, (true, 4096)),
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

#[tokio::test]
async fn copies_complete_in_a_thread_that_spins() {
    let (server, client, channel) = pair().await;
    let exported = server.export("region", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    let mut local = client.allocate(4096).unwrap();
    for round in 1..100 {
        local.fill(round);
        let mut memcpy = channel.write(&remote).from(local, ..);
        local = loop {
            match memcpy.try_take() {
                Some(result) => break result.unwrap(),
                None => channel.poll(),
            }
        };
        let mut there = [0; 4096];
        exported.memory().copy_out(0, &mut there).unwrap();
        assert_eq!(there, [round; 4096]);
    }
}

#[tokio::test]
async fn one_operation_writes_thousands_of_blocks_with_one_notice() {
    for way in notifications().await {
        let (server, client, channel) = pair_with(RdmaDevice::builder().notification(way)).await;
        assert_eq!(channel.notification(), way);
        let (count, length) = (4096_u64, 512_u64);
        let size = (2 * count * length) as usize;
        let exported = server.export("cache", server.allocate(size).unwrap(), Rights::READ_WRITE).unwrap();
        let remote = channel.region("cache").await.unwrap();
        assert!(!exported.try_notice());
        let content = pattern(3, size);
        let mut local = client.allocate(size).unwrap();
        // Every second block, in another order at the peer.
        let place = |index: u64| ((index * 1361) % count) * 2 * length;
        let blocks: Vec<_> = (0..count)
            .map(|index| BlockCopy { local: 2 * index * length, remote: place(index), length })
            .collect();
        for round in 0..3 {
            local.copy_from_slice(&content);
            local[..8].copy_from_slice(&[round; 8]);
            let batch = channel.write(&remote).notify(true).blocks_from(local, &blocks);
            let (back, notice) = tokio::join!(batch, exported.notice());
            notice.unwrap();
            local = back.unwrap();
            assert!(!exported.try_notice(), "one notice for a batch");
            let mut there = vec![0; size];
            exported.memory().copy_out(0, &mut there).unwrap();
            for block in &blocks {
                let (from, to) = (block.local as usize, block.remote as usize);
                assert_eq!(there[to..to + 512], local[from..from + 512]);
                assert!(there[to + 512..to + 1024].iter().all(|byte| *byte == 0), "between blocks");
            }
        }
    }
}

#[tokio::test]
async fn a_dropped_future_leaves_the_region_with_the_device() {
    let (server, client, channel) = pair().await;
    let exported = server.export("region", server.allocate(1 << 20).unwrap(), Rights::WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    let content = pattern(4, 1 << 20);
    let mut local = client.allocate(1 << 20).unwrap();
    local.copy_from_slice(&content);
    drop(channel.write(&remote).from(local, ..));
    // A later operation on the channel ends after the copy.
    let after = client.allocate(8).unwrap();
    channel.write(&remote).from(after, ..0).await.unwrap();
    let mut there = vec![0; 1 << 20];
    exported.memory().copy_out(0, &mut there).unwrap();
    assert!(there == content);
}

#[tokio::test]
async fn channels_over_all_queue_pairs_write_and_read() {
    let (server, client, channel) = pair_with(
        RdmaDevice::builder()
            .config(Config::from_env().unwrap().completion_queues(3))
            .queue_pairs_per_peer(5),
    )
    .await;
    let _exported = server.export("region", server.allocate(1 << 16).unwrap(), Rights::READ_WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    for index in 0..7 {
        let channel = client.channel(&server.endpoint(), index).await.unwrap();
        let mut local = client.allocate(64).unwrap();
        local.fill(index as u8 + 1);
        let place = u64::from(index) * 64;
        let mut local = channel.write(&remote).at(place).from(local, ..).await.unwrap();
        local.fill(0);
        let local = channel.read(&remote).at(place).into(local, ..).await.unwrap();
        assert!(local.iter().all(|byte| *byte == index as u8 + 1));
    }
}
