//! Slots and regions come and go on one link, many more than a link has words. The unit tests have few words.

use std::sync::Arc;
use std::time::Duration;

use super::Link;
use super::words::{Notification, WordPage};
use crate::wire::SERVICE_VERSIONS;
use crate::wire::tensor_frame::Frame;
use crate::{
    Channel, DeviceBuilder, Dtype, NamedOffer, NamedReply, RdmaDevice, Rights, Shape, StaticSender, Tensor,
    TensorErrorKind, TensorSpec,
};
use tonic_rdma_verbs::unstable::Versions;

const ROUNDS: usize = WordPage::PAIRS * 5;

struct Devices {
    server: RdmaDevice,
    client: RdmaDevice,
    channel: Channel,
}

impl Devices {
    async fn new(server: DeviceBuilder, client: DeviceBuilder) -> Self {
        let server = server.bind("127.0.0.1:0").await.unwrap();
        let client = client.bind("127.0.0.1:0").await.unwrap();
        let channel = client.channel(&server.endpoint(), 0).await.unwrap();
        Self { server, client, channel }
    }

    async fn of(way: Option<Notification>) -> Self {
        let device = || match way {
            Some(way) => RdmaDevice::builder().notification(way).queue_pairs_per_peer(2),
            None => RdmaDevice::builder(),
        };
        Self::new(device(), device()).await
    }

    /// Exports a region, attaches it, writes with a notice, and takes the notice.
    async fn use_region(&self, round: usize) -> Result<Arc<Link>, crate::TensorError> {
        let name = format!("region {round}");
        let exported = self.server.export(&name, self.server.allocate(4096)?, Rights::WRITE)?;
        let remote = self.channel.region(&name).await?;
        let mut region = self.client.allocate(4096)?;
        region.fill(round as u8);
        let channel = self.client.channel(self.channel.endpoint(), round as u32).await?;
        channel.write(&remote).notify(true).from(region, ..).await?;
        exported.notice().await?;
        let mut found = [0; 4096];
        exported.memory().copy_out(0, &mut found).unwrap();
        assert!(found == [round as u8; 4096]);
        assert!(!exported.try_notice(), "a notice of an earlier region, round {round}");
        let link = Arc::clone(&remote.shared.link);
        if round.is_multiple_of(2) {
            drop((remote, exported))
        } else {
            drop((exported, remote))
        }
        Ok(link)
    }
}

async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(240), work).await.expect("it ends in time")
}

const WAYS: [Option<Notification>; 4] =
    [None, Some(Notification::Word), Some(Notification::Immediate), Some(Notification::Message)];

#[tokio::test]
async fn regions_come_and_go() {
    for way in WAYS {
        let devices = Devices::of(way).await;
        in_time(async {
            for round in 0..ROUNDS {
                devices.use_region(round).await.unwrap();
            }
        })
        .await;
    }
}

fn spec(length: usize) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length as u64]).unwrap()).unwrap()
}

#[tokio::test]
async fn slots_and_senders_come_and_go() {
    for way in WAYS {
        let devices = Devices::of(way).await;
        let spec = spec(5000);
        let stays = devices.server.static_receiver("stays", &spec, 1).unwrap();
        let mut stays = stays;
        in_time(async {
            for round in 0..ROUNDS {
                let byte = round as u8;
                let name = format!("slot {round}");
                let mut slot = devices.server.static_receiver(&name, &spec, 2).unwrap();
                let mut senders: Vec<StaticSender> = Vec::new();
                for name in ["stays", &name] {
                    senders.push(devices.channel.static_sender(name, &spec).await.unwrap());
                }
                for sender in &mut senders {
                    sender.send_bytes(&[byte; 5000]).await.unwrap();
                }
                for slot in [&mut stays, &mut slot] {
                    let arrived = slot.recv().await.unwrap().to_tensor().unwrap();
                    assert!(arrived.bytes().unwrap() == [byte; 5000], "round {round}");
                }
                for sender in &mut senders {
                    sender.flush().await.unwrap();
                    assert_eq!(sender.pending().unwrap(), 0, "round {round}");
                }
            }
        })
        .await;
    }
}

/// A peer that attaches one region again and again gets all its notices through.
#[tokio::test]
async fn one_region_is_attached_again_and_again() {
    for way in WAYS {
        let devices = Devices::of(way).await;
        let memory = devices.server.allocate(4096).unwrap();
        let exported = devices.server.export("region", memory, Rights::WRITE).unwrap();
        let first = devices.channel.region("region").await.unwrap();
        in_time(async {
            for _ in 0..ROUNDS {
                let remote = devices.channel.region("region").await.unwrap();
                for remote in [&first, &remote, &first] {
                    let region = devices.client.allocate(64).unwrap();
                    devices.channel.write(remote).notify(true).from(region, ..).await.unwrap();
                }
                drop(remote);
                for _ in 0..3 {
                    exported.notice().await.unwrap();
                }
            }
        })
        .await;
        assert!(!exported.try_notice());
    }
}

#[tokio::test]
async fn the_end_of_a_link_reaches_a_region_that_the_peer_has_let_go() {
    let Devices { server, client, channel } = Devices::of(None).await;
    let exported = server.export("region", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
    for _ in 0..3 {
        channel.region("region").await.unwrap();
    }
    // This call comes after the frames that let the region go.
    let remote = channel.region("region").await.unwrap();
    let region = client.allocate(64).unwrap();
    channel.write(&remote).notify(true).from(region, ..).await.unwrap();
    drop((remote, channel, client));
    in_time(async {
        exported.notice().await.unwrap();
        exported.notice().await.unwrap_err();
    })
    .await;
    assert!(exported.withdraw().is_some(), "nothing holds the memory any more");
}

#[tokio::test]
async fn refused_and_dropped_requests_use_up_nothing() {
    let devices = Devices::of(None).await;
    let _exported =
        devices.server.export("region", devices.server.allocate(4096).unwrap(), Rights::READ).unwrap();
    in_time(async {
        for round in 0..ROUNDS {
            devices.channel.region("missing").await.unwrap_err();
            // The request is dropped at another point.
            tokio::select! {
                biased;
                remote = devices.channel.region("region") => drop(remote.unwrap()),
                () = async {
                    for _ in 0..round % 50 {
                        tokio::task::yield_now().await;
                    }
                } => {}
            }
            // What is left of it is over before the next begins.
            devices.channel.region("region").await.unwrap();
        }
    })
    .await;
}

/// All words are in use, and come free.
#[tokio::test]
async fn a_link_without_free_words_refuses_and_goes_on_later() {
    let devices = Devices::of(None).await;
    let _exported =
        devices.server.export("region", devices.server.allocate(4096).unwrap(), Rights::READ).unwrap();
    let mut held = Vec::new();
    let refused = loop {
        match devices.channel.region("region").await {
            Ok(remote) => held.push(remote),
            Err(error) => break error,
        }
    };
    assert_eq!(held.len(), WordPage::PAIRS);
    assert!(refused.to_string().contains("64 slots and regions at a time"), "{refused}");
    held.truncate(10);
    in_time(async {
        while devices.channel.region("region").await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(devices.channel.is_open());
}

#[tokio::test]
async fn a_late_message_does_not_reach_the_next_user_of_the_words() {
    let devices = Devices::of(None).await;
    let link = devices.use_region(0).await.unwrap();
    let spec = spec(100);
    let mut slots = Vec::new();
    // The client's pair of the region was number 0, and the words of this number are used again.
    let mut sender = in_time(async {
        loop {
            let name = format!("slot {}", slots.len());
            slots.push(devices.server.static_receiver(&name, &spec, 1).unwrap());
            let sender = devices.channel.static_sender(&name, &spec).await.unwrap();
            if link.pairs.lock().unwrap().get(WordPage::PAIRS as u32).is_some() {
                break sender;
            }
        }
    })
    .await;
    assert!(link.pair_of(0).is_none());
    sender.send_bytes(&[1; 100]).await.unwrap();
    let mut wakers = Vec::new();
    for late in [
        Frame::Released { slot: 0, epoch: u64::MAX },
        Frame::Placed { slot: 0, epoch: u64::MAX },
        Frame::Bell { slot: 0 },
    ] {
        link.handle(late, &mut wakers).unwrap();
    }
    link.placed(0, None).unwrap();
    assert_eq!(sender.pending().unwrap(), 1);
    assert!(!sender.is_ready().unwrap(), "nothing was released");
    let error = link.handle(Frame::Ended { slot: 0 }, &mut wakers).unwrap_err();
    assert_eq!(error.kind(), TensorErrorKind::Protocol, "{error}");
}

/// A peer of the version before gets a frame behind each named tensor, and sends one.
#[tokio::test]
async fn a_peer_of_the_last_version_is_served_as_before() {
    let new = || RdmaDevice::builder().queue_pairs_per_peer(3);
    let old = || new().versions(Versions::only(SERVICE_VERSIONS.oldest));
    for (server, client, announces) in
        [(old(), new(), false), (new(), old(), false), (old(), old(), false), (new(), new(), true)]
    {
        let devices = Devices::new(server, client).await;
        let link = devices.use_region(0).await.unwrap();
        assert_eq!(link.announces_named, announces);
        for (step, name) in ["some", "names", "for", "other", "queue", "pairs"].into_iter().enumerate() {
            let tensor = Tensor::copy_from(spec(4), &[1, 2, 3, step as u8]).unwrap();
            devices.server.put(name, 1, NamedOffer::Tensor(tensor), 1).unwrap();
            let reply = in_time(devices.channel.request(name, 1)).await.unwrap();
            let NamedReply::Tensor(found) = reply else { panic!("a dead tensor") };
            assert_eq!(found.bytes().unwrap(), [1, 2, 3, step as u8]);
        }
        assert!(devices.channel.is_open());
    }
    let far = new().versions(Versions::only(SERVICE_VERSIONS.newest + 1)).bind("127.0.0.1:0").await.unwrap();
    let near = new().bind("127.0.0.1:0").await.unwrap();
    for (from, to) in [(&near, &far), (&far, &near)] {
        let error = from.channel(&to.endpoint(), 0).await.unwrap_err();
        assert!(error.to_string().contains("version"), "{error}");
    }
}
