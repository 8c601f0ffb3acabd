//! A process that writes, reads, offers or requests is killed. The device at the other side goes on.

use std::time::{Duration, Instant};

use tonic_rdma_tensor::{NamedOffer, NamedReply, RdmaDevice, Rights};

use crate::{LARGE, alone, content, device, is_lost, lost, seed_of, spec, tensor};
use support::{Child, Runtime, descriptors_and_mappings, settled};

/// Starts children that do `what` to a device, and passes the device to `test`, which kills the children.
async fn die(what: &str, test: impl AsyncFn(&RdmaDevice, &mut dyn FnMut() -> Child)) {
    drop(device().await);
    let before = descriptors_and_mappings();
    {
        let ours = device().await;
        let (endpoint, role) = (ours.endpoint(), format!("send {what}"));
        test(&ours, &mut || {
            // The child announces itself after it has a channel. This process must serve that call meanwhile.
            let role = format!("{role} {endpoint}");
            tokio::task::block_in_place(|| Child::start(&[], &role))
        })
        .await;
    }
    settled(before).await;
}

fn kill(mut peer: Child) -> Instant {
    peer.process.kill().unwrap();
    peer.process.wait().unwrap();
    Instant::now()
}

async fn a_moment(moment: u64) {
    tokio::time::sleep(Duration::from_millis(moment)).await;
}

#[test]
fn a_process_that_copies_to_and_from_a_region() {
    alone(Runtime::MultiThread, async {
        for what in ["write", "read", "batch"] {
            die(what, async |ours, start| {
                let region = ours.allocate(LARGE).unwrap();
                let region = ours.export("region", region, Rights::READ_WRITE).unwrap();
                for round in 0..3 {
                    let peer = start();
                    if what == "batch" {
                        // The end of the last child is reported until the next child is attached.
                        while let Err(error) = region.notice().await {
                            assert!(round > 0, "{error}");
                            a_moment(1).await;
                        }
                    } else {
                        a_moment(20 + round).await;
                    }
                    let killed = kill(peer);
                    let end = async {
                        loop {
                            region.notice().await?;
                        }
                        #[expect(unreachable_code, reason = "the type")]
                        Ok(())
                    };
                    is_lost(what, &lost(what, killed, end).await);
                }
                // No peer has rights to the memory any more, so the owner gets it back.
                let mut back = region.withdraw();
                assert!(back.is_some(), "{what}: the region is still out");
                back.as_mut().unwrap().fill(0);
            })
            .await;
        }
    });
}

#[test]
fn a_process_that_writes_to_a_static_slot() {
    alone(Runtime::MultiThread, async {
        for (what, length) in [("small", 100), ("large", LARGE)] {
            die(what, async |ours, start| {
                let mut slot = ours.static_receiver("slot", &spec(length), 2).unwrap();
                for round in 0..3 {
                    let peer = start();
                    let mut found = vec![0; length];
                    for expected in 0..2 {
                        // The end of the last child is reported until the next child is attached.
                        while let Err(error) = slot.recv().await.and_then(|it| it.copy_to(&mut found)) {
                            is_lost(what, &error);
                            assert!(round > 0 && expected == 0, "{error}");
                            a_moment(1).await;
                        }
                        assert_eq!(seed_of(&found), expected, "round {round}");
                    }
                    let killed = kill(peer);
                    // Complete tensors can still be received, in order.
                    let mut expected = 2;
                    let rest = async {
                        loop {
                            slot.recv().await?.copy_to(&mut found)?;
                            assert_eq!(seed_of(&found), expected, "round {round}");
                            expected += 1;
                        }
                        #[expect(unreachable_code, reason = "the type")]
                        Ok(())
                    };
                    is_lost(what, &lost(what, killed, rest).await);
                    is_lost(what, &slot.try_recv().unwrap_err());
                }
            })
            .await;
        }
    });
}

#[test]
fn a_process_that_lends_tensors() {
    alone(Runtime::MultiThread, async {
        die("announcements", async |ours, start| {
            let mut slot = ours.dynamic_receiver("dynamic", 3).unwrap();
            for round in 0..6 {
                let peer = start();
                let first = loop {
                    match slot.recv().await {
                        Ok(first) => break first,
                        // The end of the last child is reported until the next child is attached.
                        Err(error) => assert!(round > 0, "{error}"),
                    }
                    a_moment(1).await;
                };
                assert_eq!(seed_of(first.bytes().unwrap()), 1);
                // In some rounds the kill comes before the announcement, in other rounds after an unread
                // announcement or during the read.
                if round % 3 == 1 {
                    a_moment(20).await;
                }
                if round % 3 == 2 {
                    let _ = slot.try_recv().unwrap();
                }
                let killed = kill(peer);
                let rest = async {
                    loop {
                        assert_eq!(seed_of(slot.recv().await?.bytes().unwrap()), 1);
                    }
                    #[expect(unreachable_code, reason = "the type")]
                    Ok(())
                };
                is_lost("announcements", &lost("notes", killed, rest).await);
            }
        })
        .await;
    });
}

#[test]
fn a_process_that_requests() {
    alone(Runtime::MultiThread, async {
        die("requests", async |ours, start| {
            let sent = tensor(1, LARGE);
            for round in 0..3 {
                for step in 0..20 {
                    let offer = NamedOffer::Tensor(sent.clone());
                    // The tensors that the last child took are gone. The others are still on offer.
                    match ours.put("weights", step, offer, 1) {
                        Ok(()) => {}
                        Err(error) => assert!(round > 0, "{error}"),
                    }
                }
                let peer = start();
                a_moment(5 + round).await;
                kill(peer);
                let deadline = Instant::now() + crate::SOON;
                while ours.offer_counts().requests > 0 {
                    assert!(Instant::now() < deadline, "requests of the dead: {:?}", ours.offer_counts());
                    a_moment(1).await;
                }
            }
            for step in 0..20 {
                ours.withdraw("weights", step);
            }
            assert_eq!((ours.offer_counts().offers, ours.offer_counts().bytes), (0, 0));
            // Other peers still get their tensors.
            let other = device().await;
            let channel = other.channel(&ours.endpoint(), 0).await.unwrap();
            ours.put("biases", 1, NamedOffer::Tensor(tensor(9, 1000)), 1).unwrap();
            let NamedReply::Tensor(found) = channel.request("biases", 1).await.unwrap() else { panic!() };
            assert!(found.bytes().unwrap() == content(9, 1000));
        })
        .await;
    });
}
