//! Calls that our devices never make: each gets the right status, and correct peers are still served.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use support::{Silence, SilentDevice};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Code;
use tonic_rdma::Config;
use tonic_rdma_proto::tensor_device::{
    AttachRequest, DescribeRequest, Kind, MemoryRange, OpenRequest, QueuePair,
};
use tonic_rdma_tensor::{Dtype, RdmaDevice, Rights, Shape, TensorErrorKind, TensorSpec};

use crate::raw_peer::{RawPeer, client, describe};
use crate::{Served, eventually, pair, pair_with, pattern};

#[tokio::test]
async fn a_device_that_is_not_listed_refuses_describe() {
    let (server, _client, channel) = pair_with(RdmaDevice::builder().listed(false)).await;
    let status = client(&server.endpoint()).await.describe(DescribeRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert_eq!(status.message(), "this tensor device does not list its regions and slots");
    drop(channel);
}

#[tokio::test]
async fn wrong_open_calls_are_refused() {
    type Change = fn(&mut OpenRequest);
    let served = Served::new(pair().await).await;
    let peer = RawPeer::new(&served.endpoint).await;
    let changes: [(&str, Change, Code); 15] = [
        ("version 0", |it| (it.version, it.newest_version) = (0, 0), Code::FailedPrecondition),
        // Its calls name no group, so that a rank would refuse them for another reason.
        (
            "version 2",
            |it| (it.version, it.newest_version, it.group) = (2, 0, Bytes::new()),
            Code::FailedPrecondition,
        ),
        ("version 5", |it| it.version = 5, Code::FailedPrecondition),
        ("version 5 to 6", |it| (it.version, it.newest_version) = (5, 6), Code::FailedPrecondition),
        ("no provider", |it| it.provider.clear(), Code::InvalidArgument),
        ("another provider", |it| it.provider = "nonsense".into(), Code::InvalidArgument),
        ("no queue pair", |it| it.queue_pairs.clear(), Code::InvalidArgument),
        (
            "1000 queue pairs",
            |it| it.queue_pairs = vec![it.queue_pairs[0].clone(); 1000],
            Code::InvalidArgument,
        ),
        ("no address", |it| it.queue_pairs[0].address = Bytes::new(), Code::FailedPrecondition),
        (
            "an address of 10 MB",
            |it| it.queue_pairs[0].address = vec![1; 3 << 20].into(),
            Code::InvalidArgument,
        ),
        ("no receives", |it| it.queue_pairs[0].receives = 0, Code::InvalidArgument),
        ("no words", |it| it.words = None, Code::InvalidArgument),
        ("words of length 0", |it| it.words = Some(MemoryRange::default()), Code::FailedPrecondition),
        ("a name of 1 MiB", |it| it.endpoint = "n".repeat(1 << 20), Code::InvalidArgument),
        ("a message of 10 MiB", |it| it.endpoint = "n".repeat(10 << 20), Code::OutOfRange),
    ];
    for (what, change, code) in changes {
        let mut request = peer.request();
        change(&mut request);
        let status = peer.client.clone().open(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{what}: {status}");
        if let Some(asked) = what.strip_prefix("version ") {
            let both = format!("version {asked} of the tensor service was asked for; this end speaks 3 to 4");
            assert_eq!(status.message(), both);
        }
        served.check().await;
    }
    for seed in 0..50 {
        let mut request = peer.request();
        request.queue_pairs[0].address = pattern(seed, 1 + seed as usize * 5).into();
        let status = peer.client.clone().open(request).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "garbage for an address: {status}");
    }
    served.check().await;
    // Invalid words harm only the peer that sent them.
    let mut request = peer.request();
    request.words = Some(MemoryRange { address: u64::MAX, rkey: 7, length: u64::MAX });
    request.queue_pairs.push(QueuePair { address: Bytes::from_static(b"?"), receives: 16 });
    assert!(peer.client.clone().open(request).await.is_err());
    served.check().await;
    assert_eq!(describe(&served.endpoint).await.links.len(), 1, "the one that behaves");
}

#[tokio::test]
async fn wrong_attach_calls_are_refused() {
    type Change = fn(&mut AttachRequest);
    let served = Served::new(pair().await).await;
    let spec = TensorSpec::new(Dtype::F32, Shape::new(&[10]).unwrap()).unwrap();
    let _slot = served.server.static_receiver("slot", &spec, 1).unwrap();
    let _taken = served.server.static_receiver("taken", &spec, 1).unwrap();
    let _sender = served.channel.static_sender("taken", &spec).await.unwrap();
    let _dynamic = served.server.dynamic_receiver("dynamic", 1).unwrap();
    let mut link = RawPeer::new(&served.endpoint).await.link().await;
    let good = link.attach_request("dynamic", Kind::Dynamic);
    let changes: [(&str, Change, Code); 14] = [
        ("no link", |it| it.link = Bytes::new(), Code::NotFound),
        ("a made-up link", |it| it.link = vec![7; 16].into(), Code::NotFound),
        ("a link's name of 1 MiB", |it| it.link = vec![7; 1 << 20].into(), Code::NotFound),
        ("no name", |it| it.name.clear(), Code::InvalidArgument),
        ("a name of 1 MiB", |it| it.name = "n".repeat(1 << 20), Code::InvalidArgument),
        ("a name of 10 MiB", |it| it.name = "n".repeat(10 << 20), Code::OutOfRange),
        ("another name", |it| it.name = "dynamic\0".into(), Code::NotFound),
        ("another kind", |it| it.kind = Kind::Region.into(), Code::InvalidArgument),
        ("no kind", |it| it.kind = 0, Code::InvalidArgument),
        ("a kind that there is not", |it| it.kind = -77, Code::InvalidArgument),
        ("a queue pair that there is not", |it| it.queue_pair = 1, Code::InvalidArgument),
        ("words that there are not", |it| it.words = 1 << 31, Code::InvalidArgument),
        (
            "a static slot without metadata",
            |it| (it.name, it.kind) = ("slot".into(), Kind::Static.into()),
            Code::InvalidArgument,
        ),
        ("a region's kind for a slot", |it| (it.name, it.kind) = ("slot".into(), 1), Code::InvalidArgument),
    ];
    for (what, change, code) in changes {
        let mut request = good.clone();
        change(&mut request);
        let status = link.peer.client.attach(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{what}: {status}");
    }
    for seed in 0..200 {
        let mut request = link.attach_request("slot", Kind::Static);
        request.metadata = pattern(seed, seed as usize).into();
        let status = link.peer.client.attach(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "garbage for metadata: {status}");
    }
    served.check().await;
    // A second call of one peer replaces the first. A call of another peer is refused.
    let first = link.peer.client.attach(good.clone()).await.unwrap().into_inner();
    let second = link.peer.client.attach(good).await.unwrap().into_inner();
    assert!(second.epoch > first.epoch, "{} after {}", second.epoch, first.epoch);
    let mut other = RawPeer::new(&served.endpoint).await.link().await;
    let request = other.attach_request("dynamic", Kind::Dynamic);
    let taken = other.peer.client.attach(request).await.unwrap_err();
    assert_eq!(taken.code(), Code::AlreadyExists, "{taken}");
    // A peer may attach a region twice, and gets one place.
    assert_eq!(link.attach("region").await, link.attach("region").await);
    served.check().await;
}

#[tokio::test]
async fn a_link_without_a_confirmation_counts_and_has_no_rights() {
    // No link ends during the test, however slow the machine is.
    let settings = RdmaDevice::builder().answer_timeout(Duration::from_secs(600)).max_links(4);
    let served = Served::new(pair_with(settings).await).await;
    let mut links = Vec::new();
    for _ in 0..3 {
        links.push(RawPeer::new(&served.endpoint).await.open().await.unwrap());
    }
    let one_more = RawPeer::new(&served.endpoint).await.open().await.err().unwrap();
    assert_eq!(one_more.code(), Code::ResourceExhausted, "{one_more}");
    let link = &mut links[0];
    let request = link.attach_request("region", Kind::Region);
    let early = link.peer.client.attach(request).await.unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition, "{early}");
    served.check().await;
}

/// Tries again and again. On a busy machine a confirmation may come too late for a device that waits for a
/// short time only, and the links that were late have places for a moment.
async fn in_time<T, E>(mut attempt: impl AsyncFnMut() -> Result<T, E>) -> T {
    let mut made = None;
    eventually("a link that is confirmed in time", async || {
        made = attempt().await.ok();
        made.is_some()
    })
    .await;
    made.unwrap()
}

#[tokio::test]
async fn a_link_without_a_confirmation_ends() {
    let patience = Duration::from_millis(300);
    let settings = RdmaDevice::builder().config(Config::from_env().unwrap());
    let server = settings.clone().answer_timeout(patience).max_links(4).bind("127.0.0.1:0").await.unwrap();
    let client = settings.bind("127.0.0.1:0").await.unwrap();
    let channel = in_time(async || client.channel(&server.endpoint(), 0).await).await;
    let served = Served::new((server, client, channel)).await;
    eventually("the end of late links", async || describe(&served.endpoint).await.links.len() == 1).await;
    let mut links = Vec::new();
    for _ in 0..3 {
        links.push(in_time(async || RawPeer::new(&served.endpoint).await.open().await).await);
    }
    served.check().await;
    // The calls are still open, but the links have ended.
    eventually("their end", async || describe(&served.endpoint).await.links.len() == 1).await;
    let late = links[1].confirm(vec![0]).await.unwrap_err();
    assert_eq!(late.code(), Code::Aborted, "{late}");
    assert!(late.message().contains("open it again"), "{late}");
    for _ in 0..3 {
        links.push(in_time(async || RawPeer::new(&served.endpoint).await.try_link().await).await);
    }
    // The confirmed link stays.
    tokio::time::sleep(2 * patience).await;
    assert_eq!(describe(&served.endpoint).await.links.len(), 4);
    served.check().await;
}

/// Each unconfirmed link holds queue pairs and memory, and its peer has proved nothing.
#[tokio::test]
async fn unconfirmed_links_are_few_and_keep_no_peer_out() {
    const UNCONFIRMED: usize = 64;
    let settings = RdmaDevice::builder().answer_timeout(Duration::from_secs(60));
    let served = Served::new(pair_with(settings).await).await;
    let mut unconfirmed = Vec::new();
    for _ in 0..UNCONFIRMED + 20 {
        unconfirmed.push(RawPeer::new(&served.endpoint).await.open().await.unwrap());
        let links = describe(&served.endpoint).await.links.len();
        assert!(links <= UNCONFIRMED + 1, "{links} links, and one of them is confirmed");
    }
    // The link that was not confirmed for longest has ended, and the latest one has not.
    let late = unconfirmed[0].confirm(vec![0]).await.unwrap_err();
    assert_eq!(late.code(), Code::Aborted, "{late}");
    assert!(late.message().contains("open it again"), "{late}");
    let mut honest = RawPeer::new(&served.endpoint).await.link().await;
    honest.attach("region").await;
    served.check().await;
}

/// A process has one software device. A peer that names a second one would count for the wrong user, and
/// could make this side wait for many devices.
#[tokio::test]
async fn a_link_of_two_devices_is_refused() {
    let served = Served::new(pair().await).await;
    let (peer, other) = (RawPeer::new(&served.endpoint).await, SilentDevice::new(Silence::Accepts));
    let mut request = peer.request();
    let mut second = request.queue_pairs[0].clone();
    let mut address = second.address.to_vec();
    other.replace_in(&mut address);
    second.address = address.into();
    request.queue_pairs.push(second);
    let status = peer.client.clone().open(request).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("two software devices"), "{status}");
    served.check().await;
}

/// A peer that merely knows the name of a device would count for the device's user.
#[tokio::test]
async fn a_link_to_a_queue_pair_that_waits_nowhere_is_refused() {
    let served = Served::new(pair().await).await;
    let peer = RawPeer::new(&served.endpoint).await;
    let mut request = peer.request();
    let mut address = request.queue_pairs[0].address.to_vec();
    address[14..26].fill(1);
    request.queue_pairs[0].address = address.into();
    let status = peer.client.clone().open(request).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("no such queue pair waits there"), "{status}");
    served.check().await;
}

/// Peers open links whose queue pairs name devices that do not answer. Some of them give up at once.
#[tokio::test]
async fn peers_whose_device_does_not_answer_keep_no_peer_out() {
    const UNANSWERED: usize = 300;
    for (silence, many) in [(Silence::Full, false), (Silence::Accepts, false), (Silence::Accepts, true)] {
        let settings = RdmaDevice::builder().answer_timeout(Duration::from_secs(600));
        let served = Served::new(pair_with(settings).await).await;
        let template = RawPeer::new(&served.endpoint).await;
        let device = Arc::new(SilentDevice::new(silence));
        let (calling, mut called) = tokio::sync::mpsc::channel(UNANSWERED);
        let mut calls = JoinSet::new();
        for number in 0..UNANSWERED {
            let device = if many { Arc::new(SilentDevice::new(silence)) } else { Arc::clone(&device) };
            let mut request = template.request();
            let mut address = request.queue_pairs[0].address.to_vec();
            device.replace_in(&mut address);
            request.queue_pairs[0].address = address.into();
            let (mut client, calling) = (client(&served.endpoint).await, calling.clone());
            calls.spawn(async move {
                let _device = device;
                loop {
                    let call = client.open(request.clone());
                    let _ = calling.try_send(());
                    if number % 4 == 0 {
                        // The peer gives up.
                        let _ = timeout(Duration::from_millis(1), call).await;
                        return;
                    }
                    assert!(call.await.is_err());
                }
            });
        }
        for _ in 0..UNANSWERED {
            called.recv().await.unwrap();
        }
        for _ in 0..5 {
            RawPeer::new(&served.endpoint).await.link().await.attach("region").await;
        }
        served.check().await;
    }
}

#[tokio::test]
async fn a_confirmation_without_the_evidence_ends_the_link() {
    let served = Served::new(pair().await).await;
    for read in [vec![], vec![0], vec![u64::MAX], vec![0; 1000]] {
        let mut link = RawPeer::new(&served.endpoint).await.open().await.unwrap();
        let status = link.confirm(read).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
        eventually("its end", async || describe(&served.endpoint).await.links.len() == 1).await;
    }
    served.check().await;
}

/// Opens links one after another, up to the limit at one time.
#[tokio::test]
async fn the_number_of_links_is_limited() {
    // Links end because they are dropped, and not because this test is too slow to confirm them.
    let settings = RdmaDevice::builder().max_links(20).answer_timeout(Duration::from_secs(600));
    let served = Served::new(pair_with(settings).await).await;
    let (mut links, mut refused) = (std::collections::VecDeque::new(), 0);
    for _ in 0..1000 {
        match RawPeer::new(&served.endpoint).await.open().await {
            Ok(link) => links.push_back(link),
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                refused += 1;
                links.pop_front();
            }
        }
        assert!(links.len() < 20, "{} and the one that behaves", links.len());
    }
    assert!(refused > 0);
    served.check().await;
    drop(links);
    eventually("their end", async || describe(&served.endpoint).await.links.len() == 1).await;
    let taken = served.server.export("region", served.server.allocate(1).unwrap(), Rights::READ);
    assert_eq!(taken.unwrap_err().kind(), TensorErrorKind::NameTaken);
}
