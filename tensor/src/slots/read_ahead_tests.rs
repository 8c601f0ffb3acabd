//! A dynamic receiver reads several tensors at once, and returns them in the order of their announcements.

use std::time::{Duration, Instant};

use super::*;
use crate::error::TensorErrorKind;
use crate::{Channel, DeviceBuilder, Dtype, MemRegion, RdmaDevice, Shape, TensorSpec};
use tonic_rdma::Config;

struct Slot {
    server: RdmaDevice,
    client: RdmaDevice,
    channel: Channel,
    receiver: DynamicReceiver,
    sender: DynamicSender,
}

fn tensor(seed: u8, length: usize) -> Tensor {
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[length as u64]).unwrap()).unwrap();
    Tensor::copy_from(spec, &vec![seed; length]).unwrap()
}

async fn eventually(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done().await {
        assert!(Instant::now() < deadline, "waited for {what}");
        tokio::task::yield_now().await;
    }
}

impl Slot {
    async fn new(server: DeviceBuilder, depth: u32) -> Self {
        let server = server.bind("127.0.0.1:0").await.unwrap();
        let client = RdmaDevice::bind("127.0.0.1:0").await.unwrap();
        let channel = client.channel(&server.endpoint(), 0).await.unwrap();
        let receiver = server.dynamic_receiver("slot", depth).unwrap();
        let sender = channel.dynamic_sender("slot").await.unwrap();
        Self { server, client, channel, receiver, sender }
    }

    /// Announces tensors of these lengths, with the bytes 1, 2 and so on, and waits until the announcements
    /// have arrived. Nothing is read yet.
    async fn announce(&mut self, lengths: &[usize]) {
        for (index, length) in lengths.iter().enumerate() {
            self.sender.try_send(&tensor(index as u8 + 1, *length)).unwrap();
        }
        let receiver = &mut self.receiver.receiver;
        eventually("the announcements", async || {
            receiver.poll().unwrap();
            receiver.slot.is_arrived(lengths.len() as u64 - 1)
        })
        .await;
        assert_eq!(self.read(), 0);
    }

    /// Returns the bytes of all reads that were begun.
    fn read(&mut self) -> u64 {
        let by = self.receiver.receiver.attached().unwrap();
        by.link.port(by.port).moved().1
    }

    async fn expect(&mut self, seed: u8, length: usize) -> Tensor {
        let found = tokio::time::timeout(Duration::from_secs(60), self.receiver.recv()).await;
        let found = found.expect("a tensor").unwrap();
        assert!(found.bytes().unwrap() == tensor(seed, length).bytes().unwrap(), "tensor {seed}");
        found
    }

    async fn expect_pending(&mut self, count: u64) {
        let sender = &mut self.sender;
        eventually("a release", async || sender.pending().unwrap() <= count).await;
        assert_eq!(sender.pending().unwrap(), count);
    }
}

#[tokio::test]
async fn all_announced_tensors_are_read_at_once_and_released_in_order() {
    let mut slot = Slot::new(RdmaDevice::builder(), 4).await;
    slot.announce(&[100_000, 0, 50_000, 100_000]).await;
    assert_eq!(slot.sender.try_send(&tensor(9, 1)).unwrap_err().kind(), TensorErrorKind::Busy);
    slot.receiver.arrived().await.unwrap();
    assert_eq!(slot.read(), 250_000, "all were begun before the first was taken");
    slot.expect_pending(4).await;
    for (seed, length) in [(1, 100_000), (2, 0), (3, 50_000), (4, 100_000)] {
        slot.expect(seed, length).await;
        slot.expect_pending(4 - u64::from(seed)).await;
    }
    assert!(slot.receiver.try_recv().unwrap().is_none());
}

#[tokio::test]
async fn the_bytes_that_are_read_at_once_are_limited() {
    const LENGTH: usize = 400_000;
    let mut slot = Slot::new(RdmaDevice::builder(), 5).await;
    slot.announce(&[LENGTH, LENGTH, LENGTH, 2 << 20, 10]).await;
    slot.receiver.arrived().await.unwrap();
    assert_eq!(slot.read(), 2 * LENGTH as u64, "a third tensor would exceed the limit");
    slot.expect(1, LENGTH).await;
    slot.receiver.arrived().await.unwrap();
    assert_eq!(slot.read(), 3 * LENGTH as u64);
    slot.expect(2, LENGTH).await;
    slot.receiver.arrived().await.unwrap();
    assert_eq!(slot.read(), 3 * LENGTH as u64, "a longer tensor is read alone");
    slot.expect(3, LENGTH).await;
    slot.receiver.arrived().await.unwrap();
    assert_eq!(slot.read(), 3 * LENGTH as u64 + (2 << 20));
    slot.expect(4, 2 << 20).await;
    slot.expect(5, 10).await;
}

#[tokio::test]
async fn an_announcement_that_comes_during_a_read_is_read_at_once() {
    let mut slot = Slot::new(RdmaDevice::builder(), 2).await;
    slot.announce(&[100_000]).await;
    slot.receiver.arrived().await.unwrap();
    slot.sender.try_send(&tensor(2, 70_000)).unwrap();
    let begun = slot.read();
    eventually("the second read", async || {
        slot.receiver.arrived().await.unwrap();
        slot.read() == begun + 70_000
    })
    .await;
    slot.expect_pending(2).await;
    slot.expect(1, 100_000).await;
    slot.expect(2, 70_000).await;
}

/// Each wait is dropped at another point.
#[tokio::test]
async fn a_dropped_wait_loses_no_tensor_that_was_read_ahead() {
    let Slot { server: _server, client: _client, channel: _channel, mut receiver, mut sender } =
        Slot::new(RdmaDevice::builder(), 3).await;
    let send = async {
        for seed in 0..120_u8 {
            sender.send(&tensor(seed, 1 + usize::from(seed) * 1000)).await.unwrap();
        }
        sender.flush().await.unwrap();
    };
    let receive = async {
        for seed in 0..120_u8 {
            for _ in 0..seed % 7 {
                tokio::select! {
                    biased;
                    _ = receiver.arrived() => {}
                    () = tokio::task::yield_now() => {}
                }
            }
            let found = receiver.recv().await.unwrap();
            assert!(found.bytes().unwrap() == vec![seed; 1 + usize::from(seed) * 1000], "{seed}");
        }
    };
    tokio::time::timeout(Duration::from_secs(120), async { tokio::join!(send, receive) }).await.unwrap();
}

#[tokio::test]
async fn tensors_before_an_impossible_one_arrive() {
    let mut slot = Slot::new(RdmaDevice::builder().max_tensor_bytes(150_000), 4).await;
    slot.announce(&[100_000, 100_000, 200_000, 100_000]).await;
    slot.receiver.arrived().await.unwrap();
    assert_eq!(slot.read(), 200_000);
    slot.expect(1, 100_000).await;
    assert!(slot.channel.is_open());
    slot.expect(2, 100_000).await;
    let error = slot.receiver.recv().await.unwrap_err();
    assert_eq!(error.kind(), TensorErrorKind::Protocol, "{error}");
    assert!(slot.receiver.try_recv().is_err(), "the link has ended");
}

#[tokio::test]
async fn tensors_before_a_failed_read_arrive_and_none_after() {
    let mut slot = Slot::new(RdmaDevice::builder(), 4).await;
    slot.announce(&[0, 100_000, 100_000]).await;
    // The right to the second tensor ends before the tensor is read.
    slot.sender.lent[1].1 = None;
    slot.expect(1, 0).await;
    let error = slot.receiver.recv().await.unwrap_err();
    assert_eq!(slot.receiver.receiver.slot.arrived.load(std::sync::atomic::Ordering::Relaxed), 2, "{error}");
    assert!(slot.receiver.recv().await.is_err());
    // The slot is free for another sender.
    let endpoint = slot.server.endpoint();
    drop((slot.sender, slot.channel, slot.client));
    let client = RdmaDevice::bind("127.0.0.1:0").await.unwrap();
    let mut sender = client.channel(&endpoint, 0).await.unwrap().dynamic_sender("slot").await.unwrap();
    sender.send(&tensor(9, 1000)).await.unwrap();
    let found = slot.receiver.recv().await.unwrap();
    assert!(found.bytes().unwrap() == [9; 1000]);
}

#[tokio::test]
async fn tensors_that_were_read_ahead_outlive_their_sender() {
    let mut slot = Slot::new(RdmaDevice::builder(), 4).await;
    slot.announce(&[100_000, 100_000, 100_000]).await;
    eventually("the reads", async || {
        slot.receiver.arrived().await.unwrap();
        slot.receiver.reading.len() == 3 && slot.receiver.reading.iter().all(|read| read.outcome.is_over())
    })
    .await;
    let link = slot.receiver.receiver.attached().unwrap().link;
    let Slot { server: _server, client, channel, mut receiver, sender } = slot;
    drop((sender, channel, client));
    eventually("the end of the link", async || link.fault().is_some()).await;
    for seed in 1..=3 {
        assert!(receiver.recv().await.unwrap().bytes().unwrap() == [seed; 100_000]);
    }
    assert!(receiver.recv().await.is_err());
}

#[tokio::test]
async fn reads_stop_while_memory_is_short_and_no_tensor_is_lost() {
    // The length of a size class.
    const LENGTH: usize = 192 << 10;
    let config = Config::from_env().unwrap().pinned_limit(8 << 20);
    let mut slot = Slot::new(RdmaDevice::builder().config(config), 5).await;
    slot.announce(&[LENGTH; 5]).await;
    let cache = Arc::clone(&slot.receiver.region_cache);
    // Half of the budget and two tensors are left.
    let mut ballast: Vec<MemRegion> = Vec::new();
    while cache.leaves_half(3 * LENGTH as u64) {
        ballast.push(MemRegion::allocate(4096, &cache.budget).unwrap());
    }
    slot.receiver.arrived().await.unwrap();
    assert_eq!(slot.read(), 2 * LENGTH as u64, "the others would take the half that stays free");
    // Now none is left.
    while let Ok(region) = cache.take(LENGTH as u64) {
        ballast.push(region);
    }
    let first = slot.expect(1, LENGTH).await;
    let second = slot.expect(2, LENGTH).await;
    for _ in 0..3 {
        let error = slot.receiver.recv().await.unwrap_err();
        assert_eq!(error.kind(), TensorErrorKind::NoMemory, "{error}");
    }
    drop(first);
    let third = slot.expect(3, LENGTH).await;
    assert_eq!(slot.receiver.try_recv().unwrap_err().kind(), TensorErrorKind::NoMemory);
    drop((second, third, ballast));
    slot.receiver.arrived().await.unwrap();
    assert_eq!(slot.read(), 5 * LENGTH as u64);
    slot.expect(4, LENGTH).await;
    slot.expect(5, LENGTH).await;
}

#[tokio::test]
async fn a_full_port_refuses_a_read_and_the_tensor_can_be_taken_again() {
    use crate::link::port::Port;
    let mut slot = Slot::new(RdmaDevice::builder(), 2).await;
    slot.announce(&[100_000]).await;
    let by = slot.receiver.receiver.attached().unwrap();
    // Nothing polls the queue until the next await.
    let start = slot.receiver.receiver.slot.layout.start(1);
    let place = slot.receiver.announced(start).unwrap().1;
    for _ in 0..Port::WAITING {
        let local = LocalMemory::Region(slot.server.allocate(4096).unwrap());
        let transfer = Transfer::of_range(local, 0, 8, TransferKind::Read, place, Token::unobserved());
        by.link.port(by.port).submit(transfer).unwrap();
    }
    assert_eq!(slot.receiver.try_recv().unwrap_err().kind(), TensorErrorKind::Busy);
    let receiver = &mut slot.receiver;
    eventually("room on the port", async || match receiver.arrived().await {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.kind(), TensorErrorKind::Busy, "{error}");
            false
        }
    })
    .await;
    slot.expect(1, 100_000).await;
}
