//! Views of a peer's regions, and regions that peers only read. A device that maps no memory of the peer has
//! no views; the tests of views then have nothing to check.

use std::time::Duration;

use tonic_rdma_tensor::{Channel, ExportedRegion, RdmaDevice, RegionView, Rights, TensorErrorKind};

use crate::{eventually, pair, pair_with, pattern};

/// Returns whether this device has views.
fn has_views(channel: &Channel) -> bool {
    channel.device().0 == "soft"
}

/// Exports a region of 64 KiB that holds a pattern, and views it. `None` if the device has no views.
async fn viewed(server: &RdmaDevice, channel: &Channel) -> Option<(ExportedRegion, RegionView)> {
    let mut region = server.allocate(1 << 16).unwrap();
    region.copy_from_slice(&pattern(5, 1 << 16));
    let exported = server.export("region", region, Rights::READ).unwrap();
    let remote = channel.region("region").await.unwrap();
    let view = channel.view(&remote).await.unwrap();
    assert_eq!(view.is_some(), has_views(channel));
    Some((exported, view?))
}

#[tokio::test]
async fn a_view_shows_what_the_owner_stores() {
    let (server, _client, channel) = pair().await;
    let Some((exported, view)) = viewed(&server, &channel).await else { return };
    assert_eq!((view.len(), view.is_empty(), view.is_current()), (1 << 16, false, true));
    let content = pattern(5, 1 << 16);
    let mut bytes = vec![0; 1000];
    view.copy_out(77, &mut bytes).unwrap();
    assert!(bytes == content[77..1077]);
    let mut pieces = Vec::new();
    view.for_each_chunk(100..60_000, |piece| pieces.extend_from_slice(piece)).unwrap();
    assert!(pieces == content[100..60_000]);

    exported.memory().copy_in(8, b"message").unwrap();
    exported.memory().store_u64(0, 12).unwrap();
    assert_eq!(view.load_u64(0), Ok(12));
    let mut message = [0; 7];
    view.clone().copy_out(8, &mut message).unwrap();
    assert_eq!(&message, b"message");

    let beyond = view.load_u64((1 << 16) - 7).unwrap_err();
    assert!(beyond.reason().contains("do not lie within"), "{beyond}");
    let reason = "the word at offset 4 is not at a multiple of 8 bytes";
    assert_eq!(view.load_u64(4).unwrap_err().reason(), reason);
    assert!(view.copy_out(65_000, &mut bytes).is_err());
}

/// The owner stores messages of several words, each followed by its number. The reader sees each message
/// whole.
#[test]
fn a_thread_that_sees_the_number_sees_the_whole_message() {
    const MESSAGES: u64 = 2000;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (server, _client, channel) = pair().await;
        let Some((exported, view)) = viewed(&server, &channel).await else { return };
        let memory = exported.memory().clone();
        memory.store_u64(0, 0).unwrap();
        let taken = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=MESSAGES {
                    memory.copy_in(64, &[number as u8; 256]).unwrap();
                    memory.store_u64(0, number).unwrap();
                    while taken.load(std::sync::atomic::Ordering::Acquire) < number {
                        std::thread::yield_now();
                    }
                }
            });
            for number in 1..=MESSAGES {
                while view.load_u64(0).unwrap() < number {
                    std::thread::yield_now();
                }
                let mut message = [0; 256];
                view.copy_out(64, &mut message).unwrap();
                assert_eq!(message, [number as u8; 256]);
                taken.store(number, std::sync::atomic::Ordering::Release);
            }
        });
    });
}

/// Each of the two devices has a thread with a runtime of its own, and views the other's region.
#[test]
fn two_devices_view_one_another() {
    let (to_first, from_second) = std::sync::mpsc::channel::<String>();
    let (to_second, from_first) = std::sync::mpsc::channel::<String>();
    let run = |mine: u64, tell: std::sync::mpsc::Sender<String>, hear: std::sync::mpsc::Receiver<String>| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
            let board = device.export("board", device.allocate(4096).unwrap(), Rights::READ).unwrap();
            tell.send(device.endpoint()).unwrap();
            let other = hear.recv().unwrap();
            let channel = device.channel(&other, 0).await.unwrap();
            let remote = channel.region("board").await.unwrap();
            let view = channel.view(&remote).await.unwrap();
            assert_eq!(view.is_some(), has_views(&channel));
            let Some(view) = view else { return };
            board.memory().store_u64(8, mine).unwrap();
            eventually("the other's word", async || view.load_u64(8).unwrap() == 3 - mine).await;
            // The other side looks, too, before this device goes.
            board.memory().store_u64(16, 1).unwrap();
            eventually("the other's look", async || view.load_u64(16).unwrap() == 1).await;
        });
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(move || run(1, to_second, from_second));
        scope.spawn(move || run(2, to_first, from_first)).join().unwrap();
        first.join().unwrap();
    });
}

#[tokio::test]
async fn a_view_of_a_withdrawn_region_stays_readable() {
    let (server, _client, channel) = pair().await;
    let Some((exported, view)) = viewed(&server, &channel).await else { return };
    let remote = channel.region("region").await.unwrap();
    let mut region = exported.withdraw().expect("no view holds the owner's region");
    assert!(!view.is_current());
    let error = channel.view(&remote).await.unwrap_err();
    assert!(error.to_string().contains("withdrawn the region \"region\""), "{error}");
    assert!(channel.is_open());
    region[..8].copy_from_slice(&9_u64.to_ne_bytes());
    assert_eq!(view.load_u64(0), Ok(9), "the owner uses the same memory");
    drop(region);
    assert_eq!(view.load_u64(0), Ok(9), "the mapping stays");
}

#[tokio::test]
async fn a_view_outlives_the_peer() {
    for dropped_first in [true, false] {
        let (server, client, channel) = pair().await;
        let Some((exported, view)) = viewed(&server, &channel).await else { return };
        let remote = channel.region("region").await.unwrap();
        exported.memory().store_u64(0, 31).unwrap();
        if dropped_first {
            drop((exported, server));
            eventually("the end of the link", async || !channel.is_open()).await;
            assert!(channel.view(&remote).await.is_err());
        } else {
            drop((exported, remote, client, channel));
        }
        eventually("the end of the right", async || !view.is_current()).await;
        assert_eq!(view.load_u64(0), Ok(31));
    }
}

#[tokio::test]
async fn a_view_needs_the_right_to_read_and_a_region_of_the_link() {
    let (server, client, channel) = pair().await;
    let _writable = server.export("writable", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
    let remote = channel.region("writable").await.unwrap();
    let error = channel.view(&remote).await.unwrap_err();
    assert_eq!(error.kind(), TensorErrorKind::NotPermitted, "{error}");
    let other = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
    let elsewhere = client.channel(&other.endpoint(), 0).await.unwrap();
    let error = elsewhere.view(&remote).await.unwrap_err();
    assert!(error.to_string().contains("of another link"), "{error}");
}

#[tokio::test]
async fn many_views_of_many_regions() {
    let (server, _client, channel) = pair_with(RdmaDevice::builder()).await;
    if !has_views(&channel) {
        return;
    }
    let mut views = Vec::new();
    for index in 0..100_u64 {
        let name = format!("region {index}");
        let exported = server.export(&name, server.allocate(8).unwrap(), Rights::READ).unwrap();
        let remote = channel.region(&name).await.unwrap();
        let view = channel.view(&remote).await.unwrap().unwrap();
        exported.memory().store_u64(0, index).unwrap();
        views.push((view, exported));
    }
    for (index, (view, exported)) in (0..).zip(views) {
        drop(exported);
        assert_eq!((view.load_u64(0), view.is_current(), view.len()), (Ok(index), false, 8));
    }
}

#[tokio::test]
async fn a_published_region_is_a_slice_that_peers_read() {
    let (server, client, channel) = pair().await;
    let mut published = server.publish("gradients", server.allocate(1 << 16).unwrap()).unwrap();
    assert_eq!((published.name(), published.len()), ("gradients", 1 << 16));
    let content = pattern(8, 1 << 16);
    published.copy_from_slice(&content);
    let taken = server.publish("gradients", server.allocate(8).unwrap()).unwrap_err();
    assert_eq!(taken.kind(), TensorErrorKind::NameTaken, "{taken}");

    let remote = channel.region("gradients").await.unwrap();
    assert_eq!((remote.len(), remote.rights()), (1 << 16, Rights::READ));
    let local = client.allocate(1000).unwrap();
    let local = channel.read(&remote).at(500).into(local, ..).await.unwrap();
    assert!(local[..] == content[500..1500]);
    let refused = channel.write(&remote).from(local, ..).await.unwrap_err();
    assert_eq!(refused.error().kind(), TensorErrorKind::NotPermitted, "{refused}");

    let view = channel.view(&remote).await.unwrap();
    assert_eq!(view.is_some(), has_views(&channel));
    published[8..16].copy_from_slice(&77_u64.to_ne_bytes());
    if let Some(view) = &view {
        assert_eq!(view.load_u64(8), Ok(77));
    }
    let region = published.withdraw().expect("nothing else holds the memory");
    assert_eq!(region[8..16], 77_u64.to_ne_bytes());
    assert!(view.is_none_or(|view| !view.is_current()));
    let again = server.publish("gradients", region).unwrap();
    drop(again);
    let gone = tokio::time::timeout(Duration::from_secs(60), channel.region("gradients")).await.unwrap();
    assert!(gone.is_err(), "a dropped region is not on offer");
}
