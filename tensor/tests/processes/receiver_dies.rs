//! A process is killed while its device is written, read or asked for tensors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tonic_rdma_tensor::{BlockCopy, Channel, NamedReply, RdmaDevice};

use crate::{LARGE, RegionCopy, alone, content, device, is_lost, lost, seed_of, spec, tensor};
use support::{Child, Runtime, descriptors_and_mappings, settled};

/// Runs `test` against a child that dies, and checks that the device of this process goes on.
async fn die(runtime: Runtime, what: &str, test: impl AsyncFn(&str, &RdmaDevice, &Channel, &mut Child)) {
    // The runtime and the software device create their lasting parts here, before the count.
    drop(device().await);
    let before = descriptors_and_mappings();
    {
        let healthy = device().await;
        let ours = device().await;
        let mut doomed = Child::start(&[], "receive");
        let channel = ours.channel(&doomed.word, 0).await.unwrap();
        test(what, &ours, &channel, &mut doomed).await;
        let fault = channel.closed().await;
        is_lost(what, &fault);
        assert!(!channel.is_open());
        let again = ours.channel(channel.endpoint(), 1).await;
        assert!(again.is_err(), "{what}: a channel to a process that was killed");
        // The device of this process still works.
        let other = ours.channel(&healthy.endpoint(), 0).await.unwrap();
        let mut receiver = healthy.static_receiver("slot", &spec(1000), 1).unwrap();
        let mut sender = other.static_sender("slot", &spec(1000)).await.unwrap();
        sender.send_bytes(&content(7, 1000)).await.unwrap();
        let mut found = vec![0; 1000];
        receiver.recv().await.unwrap().copy_to(&mut found).unwrap();
        assert_eq!(seed_of(&found), 7);
    }
    settled(before).await;
    println!("{what}, {runtime:?}: nothing was left behind");
}

fn kill(peer: &mut Child) -> Instant {
    peer.process.kill().unwrap();
    peer.process.wait().unwrap();
    Instant::now()
}

/// Kills the peer after a moment, when operations are under way.
async fn after_a_moment(peer: &mut Child, moment: u64) -> Instant {
    tokio::time::sleep(Duration::from_millis(moment)).await;
    kill(peer)
}

#[test]
fn during_a_memcpy() {
    for runtime in [Runtime::Idle, Runtime::MultiThread] {
        alone(runtime, async {
            for direction in [RegionCopy::Write, RegionCopy::Read] {
                die(runtime, &format!("{direction:?}"), async |what, ours, channel, doomed| {
                    let remote = channel.region("region").await.unwrap();
                    // Much more than the window, so that requests wait in a queue.
                    let copies: Vec<_> = (0..20)
                        .map(|_| {
                            let local = ours.allocate(LARGE).unwrap();
                            direction.start(channel, &remote, local)
                        })
                        .collect();
                    let last = ours.allocate(8).unwrap();
                    let killed = after_a_moment(doomed, 1).await;
                    for copy in copies {
                        // A copy that had ended before the kill succeeded.
                        let region = match tokio::time::timeout(crate::SOON, copy).await.unwrap() {
                            Ok(region) => region,
                            Err(failed) => {
                                is_lost(what, failed.error());
                                failed.into_region()
                            }
                        };
                        assert_eq!(region.len(), LARGE, "the memory is the caller's again");
                    }
                    let next = async { Ok(direction.start(channel, &remote, last).await.map(drop)?) };
                    is_lost(what, &lost(what, killed, next).await);
                })
                .await;
            }
        });
    }
}

/// A view keeps the bytes of a process that was killed.
#[test]
fn during_looks_at_a_view() {
    alone(Runtime::Idle, async {
        die(Runtime::Idle, "looks at a view", async |_, _, channel, doomed| {
            let remote = channel.region("region").await.unwrap();
            let view = channel.view(&remote).await.unwrap();
            assert_eq!(view.is_some(), channel.device().0 == "soft");
            let Some(view) = view else {
                kill(doomed);
                return;
            };
            assert_eq!((view.len(), view.is_current()), (LARGE, true));
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let looks = scope.spawn(|| {
                    let mut looks = 0_u64;
                    while !stop.load(Ordering::Relaxed) {
                        assert_eq!(view.load_u64(LARGE - 8), Ok(0));
                        view.for_each_chunk(0..100_000, |piece| assert!(piece.iter().all(|byte| *byte == 0)))
                            .unwrap();
                        looks += 1;
                    }
                    looks
                });
                std::thread::sleep(Duration::from_millis(5));
                kill(doomed);
                std::thread::sleep(Duration::from_millis(5));
                stop.store(true, Ordering::Relaxed);
                println!("{} looks", looks.join().unwrap());
            });
            let deadline = Instant::now() + crate::SOON;
            while view.is_current() {
                assert!(Instant::now() < deadline, "the end of the peer was not noticed");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(view.load_u64(0), Ok(0));
        })
        .await;
    });
}

#[test]
fn during_a_batch() {
    alone(Runtime::Idle, async {
        die(Runtime::Idle, "batch", async |what, ours, channel, doomed| {
            let remote = channel.region("region").await.unwrap();
            let blocks: Vec<_> = (0..8192)
                .rev()
                .map(|at| BlockCopy { local: at * 2048, remote: at * 2048, length: 1000 })
                .collect();
            let killed = after_a_moment(doomed, 0).await;
            let local = ours.allocate(LARGE).unwrap();
            let batch = channel.write(&remote).notify(true).blocks_from(local, &blocks);
            is_lost(what, &lost(what, killed, async { Ok(batch.await.map(drop)?) }).await);
        })
        .await;
    });
}

#[test]
fn while_the_sender_waits_for_room() {
    alone(Runtime::Idle, async {
        die(Runtime::Idle, "slots", async |what, ours, channel, doomed| {
            let mut sender = channel.static_sender("not taken", &spec(100)).await.unwrap();
            sender.send_bytes(&content(1, 100)).await.unwrap();
            assert!(!sender.is_ready().unwrap());
            let mut large = channel.static_sender("large", &spec(LARGE)).await.unwrap();
            let region = ours.allocate(LARGE).unwrap();
            let large = tokio::spawn(async move {
                let mut region = region;
                loop {
                    region = large.send_region(region).await?;
                }
                #[expect(unreachable_code, reason = "the type")]
                Ok::<(), tonic_rdma_tensor::TensorError>(())
            });
            let mut notes = channel.dynamic_sender("not read").await.unwrap();
            notes.send(&tensor(1, LARGE)).await.unwrap();
            let waiting = tokio::spawn(async move { (sender.ready().await, sender) });
            let flushing = tokio::spawn(async move { notes.flush().await });
            let killed = after_a_moment(doomed, 20).await;
            let flushed = async { flushing.await.unwrap() };
            is_lost(what, &lost("a note that is not read", killed, flushed).await);
            is_lost(what, &lost("a large tensor", killed, async { large.await.unwrap() }).await);
            let (result, mut sender) = waiting.await.unwrap();
            is_lost(what, &lost("a slot that is not taken", killed, async { result }).await);
            is_lost(what, &sender.is_ready().unwrap_err());
            is_lost(what, &sender.try_send_bytes(&content(2, 100)).unwrap_err());
        })
        .await;
    });
}

#[test]
fn while_it_reads_tensors_from_this_process() {
    alone(Runtime::Idle, async {
        die(Runtime::Idle, "dynamic", async |what, _, channel, doomed| {
            let mut sender = channel.dynamic_sender("dynamic").await.unwrap();
            let sent = tensor(1, LARGE);
            for _ in 0..3 {
                sender.send(&sent).await.unwrap();
            }
            let killed = kill(doomed);
            let error = lost(what, killed, async {
                loop {
                    sender.send(&sent).await?;
                }
                #[expect(unreachable_code, reason = "the type")]
                Ok(())
            });
            is_lost(what, &error.await);
        })
        .await;
    });
}

#[test]
fn while_it_offers_tensors() {
    alone(Runtime::Idle, async {
        die(Runtime::Idle, "provider", async |what, _, channel, doomed| {
            let NamedReply::Tensor(first) = channel.request("weights", 0).await.unwrap() else { panic!() };
            assert_eq!(seed_of(first.bytes().unwrap()), 0);
            let never = channel.request("never", 1);
            let (one, other) = (channel.request("weights", 1), channel.request("weights", 2));
            let killed = after_a_moment(doomed, 1).await;
            is_lost(what, &lost("a request for what is not there", killed, never).await);
            for (step, request) in [(1, one), (2, other)] {
                match tokio::time::timeout(crate::SOON, request).await.unwrap() {
                    Ok(NamedReply::Tensor(tensor)) => assert_eq!(seed_of(tensor.bytes().unwrap()), step),
                    Ok(NamedReply::Dead) => panic!("a dead tensor that was not offered as dead"),
                    Err(error) => is_lost(what, &error),
                }
            }
            is_lost(what, &lost("the next request", killed, channel.request("weights", 3)).await);
        })
        .await;
    });
}
