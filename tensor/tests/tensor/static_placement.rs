//! Tensors of a known shape, which the sender writes into the receiver's slot.

use std::time::{Duration, Instant};

use tokio::time::timeout;
use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::unstable::send_to_end;
use tonic_rdma_tensor::{
    BlockCopy, Dtype, RdmaDevice, Rights, Shape, Tensor, TensorErrorKind, TensorMut, TensorSpec,
};

use crate::{notifications, pair, pair_with, pattern};

/// A bound that only a hang exceeds.
const HANG: Duration = Duration::from_secs(60);

fn bytes(length: u64) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length]).unwrap()).unwrap()
}

#[tokio::test]
async fn tensors_of_all_lengths_arrive_by_all_notifications() {
    for way in notifications().await {
        let (server, client, channel) = pair_with(RdmaDevice::builder().notification(way)).await;
        for length in [0_u64, 1, 7, 8, 64, 4095, 4096, 4097, 65_536, 1_000_003] {
            let (name, spec) = (format!("slot {length}"), bytes(length));
            let mut receiver = server.static_receiver(&name, &spec, 2).unwrap();
            let mut sender = channel.static_sender(&name, &spec).await.unwrap();
            assert!(receiver.try_recv().unwrap().is_none());
            let mut region = client.allocate(length as usize).unwrap();
            for round in 0..5 {
                let content = pattern(round, length as usize);
                region.copy_from_slice(&content);
                let send = sender.send_region(region);
                let receive = async {
                    let arrived = receiver.recv().await.unwrap();
                    let mut found = vec![0; length as usize];
                    arrived.copy_to(&mut found).unwrap();
                    assert!(found == content, "{way:?}, {length} bytes, round {round}");
                };
                let (sent, ()) = tokio::join!(send, receive);
                region = sent.unwrap();
            }
            sender.flush().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_sender_is_busy_when_all_buffers_are_full() {
    for way in notifications().await {
        let (server, _client, channel) = pair_with(RdmaDevice::builder().notification(way)).await;
        let spec = bytes(100);
        let mut receiver = server.static_receiver("slot", &spec, 3).unwrap();
        let mut sender = channel.static_sender("slot", &spec).await.unwrap();
        for round in 0..3 {
            sender.send_bytes(&pattern(round, 100)).await.unwrap();
        }
        assert!(!sender.is_ready().unwrap());
        let busy = sender.try_send_bytes(&[0; 100]).unwrap_err();
        assert_eq!(busy.kind(), TensorErrorKind::Busy, "{busy}");
        for round in 0..3 {
            let arrived = receiver.recv().await.unwrap();
            let mut found = vec![0; 100];
            arrived.copy_to(&mut found).unwrap();
            assert_eq!(found, pattern(round, 100));
        }
        sender.flush().await.unwrap();
        assert!(receiver.try_recv().unwrap().is_none());
    }
}

#[tokio::test]
async fn a_new_sender_replaces_the_last_sender_of_its_peer() {
    let (server, _client, channel) = pair().await;
    let spec = bytes(100);
    let mut receiver = server.static_receiver("slot", &spec, 2).unwrap();
    for round in 0..5 {
        let mut sender = channel.static_sender("slot", &spec).await.unwrap();
        sender.send_bytes(&pattern(round, 100)).await.unwrap();
        let arrived = receiver.recv().await.unwrap();
        assert_eq!(arrived.to_tensor().unwrap().bytes().unwrap(), pattern(round, 100));
        let error = channel.static_sender("slot", &spec).await.unwrap_err();
        assert!(error.to_string().contains("still in use"), "{error}");
        drop(arrived);
    }
    // Tensors that were sent but not received are dropped with their sender, because they are older than the
    // next ones.
    let mut sender = channel.static_sender("slot", &spec).await.unwrap();
    sender.send_bytes(&[1; 100]).await.unwrap();
    let mut sender = channel.static_sender("slot", &spec).await.unwrap();
    assert!(receiver.try_recv().unwrap().is_none());
    sender.send_bytes(&[2; 100]).await.unwrap();
    let arrived = receiver.recv().await.unwrap();
    assert_eq!(arrived.to_tensor().unwrap().bytes().unwrap(), [2; 100]);
}

#[tokio::test]
async fn tensors_of_a_pool_and_of_the_heap_arrive() {
    let (server, _client, channel) = pair().await;
    let spec = TensorSpec::new(Dtype::F32, Shape::new(&[64, 512]).unwrap()).unwrap();
    let mut receiver = server.static_receiver("weights", &spec, 1).unwrap();
    let mut sender = channel.static_sender("weights", &spec).await.unwrap();
    let pool = Pool::for_sending(1 << 20);
    let fill = |tensor: &mut TensorMut| {
        for (index, value) in tensor.as_mut_slice::<f32>().unwrap().iter_mut().enumerate() {
            *value = index as f32;
        }
    };
    let mut registered = TensorMut::in_pool(spec, &pool).unwrap();
    fill(&mut registered);
    let mut heap = TensorMut::zeroed(spec).unwrap();
    fill(&mut heap);
    let heap = heap.freeze();
    let transposed = TensorSpec::new(Dtype::F32, Shape::new(&[512, 64]).unwrap()).unwrap();
    assert!(sender.send(&heap.transpose()).await.unwrap_err().to_string().contains(&transposed.to_string()));
    for tensor in [registered.freeze(), heap] {
        sender.send(&tensor).await.unwrap();
        let arrived = receiver.recv().await.unwrap().to_tensor().unwrap();
        assert_eq!(arrived.as_slice::<f32>().unwrap(), tensor.as_slice::<f32>().unwrap());
    }
    let _: Tensor = Tensor::copy_from(bytes(3), &[1, 2, 3]).unwrap();
}

/// On the software device the receiver's processor carries out the writes of its peer. The first poll after a
/// write does so: it waits neither for a poll of the queue nor for the device's thread.
#[tokio::test]
async fn the_first_poll_after_a_write_finds_its_tensor() {
    let (server, client, channel) = pair().await;
    if channel.device().0 != "soft" {
        return;
    }
    let spec = bytes(64);
    let mut receiver = server.static_receiver("slot", &spec, 1).unwrap();
    let mut sender = channel.static_sender("slot", &spec).await.unwrap();
    let region = server.export("region", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    let mut local = client.allocate(64).unwrap();
    for round in 0..200 {
        assert!(sender.is_ready().unwrap());
        sender.try_send_bytes(&pattern(round, 64)).unwrap();
        assert_eq!(sender.pending().unwrap(), 1);
        let arrived = receiver.try_recv().unwrap().expect("the tensor is not there");
        assert_eq!(arrived.to_tensor().unwrap().bytes().unwrap(), pattern(round, 64));
        drop(arrived);
        assert_eq!(sender.pending().unwrap(), 0, "the release is not there");
        let blocks = [BlockCopy { local: 0, remote: 8 * round, length: 8 }];
        let mut writing = channel.write(&remote).notify(true).blocks_from(local, &blocks);
        assert!(region.try_notice(), "the notice is not there");
        assert!(!region.try_notice());
        local = writing.try_take().expect("the write is not complete").unwrap();
    }
}

/// A thread that only polls one slot carries out the writes for the others, too. It wakes the tasks that wait
/// for them, although no write makes an event then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thread_that_polls_wakes_the_tasks_that_wait() {
    let (server, _client, channel) = pair().await;
    let spec = bytes(64);
    let mut polled = server.static_receiver("looked at", &spec, 1).unwrap();
    let mut waited_for = server.static_receiver("waited for", &spec, 1).unwrap();
    let mut first = channel.static_sender("looked at", &spec).await.unwrap();
    let mut second = channel.static_sender("waited for", &spec).await.unwrap();
    let poller = std::thread::spawn(move || {
        let mut taken = 0;
        while taken < 500 {
            match polled.try_recv().unwrap() {
                Some(_) => taken += 1,
                None => std::thread::yield_now(),
            }
        }
    });
    let waiting = tokio::spawn(async move {
        for round in 0..500 {
            let arrived = waited_for.recv().await.unwrap();
            assert_eq!(arrived.to_tensor().unwrap().bytes().unwrap(), pattern(round, 64));
        }
    });
    let sending = async {
        for round in 0..500 {
            second.send_bytes(&pattern(round, 64)).await.unwrap();
            first.send_bytes(&pattern(round, 64)).await.unwrap();
        }
        second.flush().await.unwrap();
    };
    tokio::time::timeout(HANG, sending).await.expect("a task was not woken");
    waiting.await.unwrap();
    poller.join().unwrap();
}

/// Both sides send more than a send queue holds, and neither runtime gets to poll.
#[test]
fn ends_that_only_poll_memory_never_get_stuck() {
    use std::sync::mpsc;
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let spec = bytes(4096);
    let (announce, endpoints) = mpsc::channel();
    let serving = std::thread::spawn(move || {
        runtime().block_on(async move {
            let server = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
            let mut receiver = server.static_receiver("slot", &spec, 1).unwrap();
            announce.send(server.endpoint()).unwrap();
            receiver.recv().await.unwrap();
            let mut taken = 1;
            while taken < 5000 {
                match receiver.try_recv().unwrap() {
                    Some(_) => taken += 1,
                    None => std::thread::yield_now(),
                }
            }
        });
    });
    let endpoint = endpoints.recv().unwrap();
    runtime().block_on(async {
        let client = RdmaDevice::builder().build().unwrap();
        let channel = client.channel(&endpoint, 0).await.unwrap();
        let mut sender = channel.static_sender("slot", &spec).await.unwrap();
        for round in 0..5000_u64 {
            let began = Instant::now();
            while !sender.is_ready().unwrap() {
                assert!(began.elapsed() < HANG, "stuck in round {round}");
                std::thread::yield_now();
            }
            sender.try_send_bytes(&round.to_le_bytes().repeat(512)).unwrap();
        }
        sender.flush().await.unwrap();
    });
    serving.join().unwrap();
}

/// Both sides only poll memory, as a thread with its own core does. The runtime never polls.
#[tokio::test]
async fn thousands_of_tensors_arrive_without_futures() {
    for way in notifications().await {
        let (server, _client, channel) = pair_with(RdmaDevice::builder().notification(way)).await;
        for length in [64_u64, 100_000] {
            let (name, spec) = (format!("slot {length}"), bytes(length));
            let mut receiver = server.static_receiver(&name, &spec, 3).unwrap();
            let mut sender = channel.static_sender(&name, &spec).await.unwrap();
            assert_eq!(sender.pending().unwrap(), 0);
            let pool = Pool::for_sending(1 << 20);
            let content = pattern(length, length as usize + 64);
            let mut buffer = pool.allocate(content.len()).unwrap();
            buffer.copy_from_slice(&content);
            let whole = Tensor::from_buffer(bytes(length + 64), buffer).unwrap();
            for round in 0..3000_u64 {
                let start = round % 64;
                sender.try_send(&whole.slice(start..start + length).unwrap()).unwrap();
                assert_eq!(sender.pending().unwrap(), 1);
                // Not a number of polls: the device's thread may have no core while it carries out the write.
                let began = Instant::now();
                let arrived = loop {
                    if let Some(arrived) = receiver.try_recv().unwrap() {
                        break arrived;
                    }
                    assert!(began.elapsed() < HANG, "{way:?}: round {round} does not arrive");
                    assert_eq!(sender.pending().unwrap(), 1);
                };
                let mut found = vec![0; length as usize];
                arrived.copy_to(&mut found).unwrap();
                assert!(found == content[start as usize..][..length as usize], "{way:?}, round {round}");
                drop(arrived);
                while sender.pending().unwrap() > 0 {
                    assert!(began.elapsed() < HANG, "{way:?}: round {round} is not released");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_wait_for_the_next_tensor_leaves_it_in_the_slot() {
    for way in notifications().await {
        let (server, _client, channel) = pair_with(RdmaDevice::builder().notification(way)).await;
        let spec = bytes(10_000);
        let mut receiver = server.static_receiver("waited for", &spec, 1).unwrap();
        let mut sender = channel.static_sender("waited for", &spec).await.unwrap();
        for seed in 0..20 {
            let content = pattern(seed, 10_000);
            let (result, ()) = tokio::join!(sender.send_bytes(&content), async {
                tokio::select! {
                    biased;
                    _ = receiver.arrived() => {}
                    () = tokio::task::yield_now() => {}
                }
                receiver.arrived().await.unwrap();
                receiver.arrived().await.unwrap();
            });
            result.unwrap();
            assert!(!sender.is_ready().unwrap(), "{way:?}: the tensor is still in its buffer");
            let arrived = receiver.try_recv().unwrap().expect("it has arrived").to_tensor().unwrap();
            assert!(arrived.bytes().unwrap() == &content[..], "{way:?} {seed}");
            assert!(receiver.try_recv().unwrap().is_none(), "{way:?} {seed}");
        }
    }
}

/// `send` returns before the device has read the tensor, and this one after. Then nothing has the memory.
#[tokio::test]
async fn memory_of_a_tensor_that_was_sent_to_the_end_is_free() {
    let (server, _client, channel) = pair().await;
    let (spec, pool) = (bytes(3 << 20), Pool::for_sending(16 << 20));
    let mut receiver = server.static_receiver("slot", &spec, 1).unwrap();
    let mut sender = channel.static_sender("slot", &spec).await.unwrap();
    let mut tensor = TensorMut::in_pool(spec, &pool).unwrap();
    for round in 0..20_u8 {
        tensor.bytes_mut().fill(round);
        let sent = tensor.freeze();
        send_to_end(&mut sender, &sent).await.unwrap();
        tensor = sent.try_into_mut().expect("the last reference");
        tensor.bytes_mut().fill(0xff);
        receiver.recv().await.unwrap().for_each_chunk(|bytes| assert!(bytes.iter().all(|it| *it == round)));
    }
    assert_eq!(sender.sent().in_place.tensors, 20);
    let copied = Tensor::copy_from(spec, &pattern(1, 3 << 20)).unwrap();
    send_to_end(&mut sender, &copied).await.unwrap();
    let wrong = Tensor::copy_from(bytes(3), &[1, 2, 3]).unwrap();
    assert_eq!(send_to_end(&mut sender, &wrong).await.unwrap_err().kind(), TensorErrorKind::InvalidArgument);
    drop(server);
    let lost = timeout(HANG, send_to_end(&mut sender, &tensor.freeze())).await.unwrap();
    assert!(lost.is_err());
}
