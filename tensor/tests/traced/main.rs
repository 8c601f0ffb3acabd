//! Tensors of an engine that knows nothing of registered memory: the tracing allocator places them, and slots
//! send them without a copy. These tests are a separate binary, because they set the global allocator.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::alloc::System;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use support::Content;
use tonic_rdma::Config;
use tonic_rdma::memory::sites::SiteAllocator;
use tonic_rdma::memory::trace::TracingAllocator;
use tonic_rdma_tensor::{
    Channel, Dtype, DynamicReceiver, DynamicSender, RdmaDevice, SentCounts, Shape, StaticReceiver,
    StaticSender, Tensor, TensorSpec,
};

#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);

/// Bytes of the tensors here. The software device does not send them inline.
const BYTES: u64 = 300_000;

/// A tensor as engines have it: shared, and changed in place only by its sole owner.
#[derive(Clone)]
struct EngineTensor(Arc<Vec<u8>>);

impl AsRef<[u8]> for EngineTensor {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl EngineTensor {
    /// Executes a node whose kernel computes a tensor of `bytes` bytes.
    fn compute(trace: &SiteAllocator, node: u32, seed: u64, bytes: u64) -> Self {
        let _execution = trace.enter(node);
        let mut scratch = vec![0_u8; 1234];
        scratch.fill(seed as u8);
        Self(Arc::new(pattern(seed, bytes)))
    }

    /// Returns the tensor as the channel sends it, without a copy.
    fn to_send(&self) -> Tensor {
        Tensor::from_bytes(spec(self.0.len() as u64), Bytes::from_owner(self.clone())).unwrap()
    }
}

fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    Content::new(seed).take(bytes as usize)
}

fn spec(bytes: u64) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[bytes]).unwrap()).unwrap()
}

fn trace() -> SiteAllocator {
    SiteAllocator::tracing(64 << 20).unwrap()
}

/// Two devices, and a channel from the second one to the first one.
async fn pair() -> (RdmaDevice, RdmaDevice, Channel) {
    let settings = RdmaDevice::builder().config(Config::from_env().unwrap());
    let server = settings.clone().bind("127.0.0.1:0").await.unwrap();
    let client = settings.bind("127.0.0.1:0").await.unwrap();
    let channel = client.channel(&server.endpoint(), 0).await.unwrap();
    (server, client, channel)
}

async fn static_slot(server: &RdmaDevice, channel: &Channel, bytes: u64) -> (StaticReceiver, StaticSender) {
    let receiver = server.static_receiver("tensor", &spec(bytes), 2).unwrap();
    (receiver, channel.static_sender("tensor", &spec(bytes)).await.unwrap())
}

async fn dynamic_slot(server: &RdmaDevice, channel: &Channel) -> (DynamicReceiver, DynamicSender) {
    let receiver = server.dynamic_receiver("tensor", 2).unwrap();
    (receiver, channel.dynamic_sender("tensor").await.unwrap())
}

/// Returns the numbers of tensors that were sent in place, copied and inline.
fn tensors(sent: SentCounts) -> [u64; 3] {
    [sent.in_place, sent.copied, sent.inline].map(|sent| sent.tensors)
}

#[tokio::test]
async fn a_static_slot_copies_in_the_first_step_only() {
    let (server, _client, channel) = pair().await;
    let (mut receiver, mut sender) = static_slot(&server, &channel, BYTES).await;
    let trace = trace();
    for step in 1..=5 {
        let computed = EngineTensor::compute(&trace, 4, step, BYTES);
        let crossed = trace.crossed(&computed.0);
        assert_eq!((crossed.site.map(|site| site.node), crossed.registered), (Some(4), step > 1));
        sender.send(&computed.to_send()).await.unwrap();
        drop(computed);
        assert_eq!(tensors(sender.sent()), [step - 1, 1, 0]);
        let arrived = receiver.recv().await.unwrap().to_tensor().unwrap();
        assert!(arrived.bytes().unwrap() == pattern(step, BYTES), "step {step}");
    }
    assert_eq!((sender.sent().in_place.bytes, sender.sent().copied.bytes), (4 * BYTES, BYTES));
}

#[tokio::test]
async fn a_dynamic_slot_copies_in_the_first_step_only_although_the_shapes_differ() {
    let (server, _client, channel) = pair().await;
    let (mut receiver, mut sender) = dynamic_slot(&server, &channel).await;
    let trace = trace();
    for (step, bytes) in (1..).zip([1000, 5, 300_000, 1_500_000, 77, 1]) {
        let computed = EngineTensor::compute(&trace, 4, step, bytes);
        trace.crossed(&computed.0);
        sender.send(&computed.to_send()).await.unwrap();
        drop(computed);
        assert_eq!(tensors(sender.sent()), [step - 1, 1, 0], "{bytes} bytes");
        let arrived = receiver.recv().await.unwrap();
        assert!(arrived.bytes().unwrap() == pattern(step, bytes), "step {step}");
    }
    assert_eq!((sender.sent().in_place.bytes, sender.sent().copied.bytes), (1_800_083, 1000));
}

#[tokio::test]
async fn the_engine_changes_a_tensor_only_after_its_bytes_were_written() {
    let (server, _client, channel) = pair().await;
    let (mut receiver, mut sender) = static_slot(&server, &channel, BYTES).await;
    let trace = trace();
    for step in 1..=20 {
        let mut computed = EngineTensor::compute(&trace, 0, step, BYTES);
        trace.crossed(&computed.0);
        let tensor = computed.to_send();
        assert_eq!(tensor.registered().is_some(), step > 1);
        sender.ready().await.unwrap();
        sender.try_send(&tensor).unwrap();
        drop(tensor);
        // The engine uses the memory again as soon as it is the sole owner.
        let deadline = Instant::now() + Duration::from_secs(60);
        while Arc::get_mut(&mut computed.0).map(|bytes| bytes.fill(0xee)).is_none() {
            assert!(Instant::now() < deadline, "the channel keeps the tensor");
            channel.poll();
            tokio::task::yield_now().await;
        }
        let arrived = receiver.recv().await.unwrap().to_tensor().unwrap();
        assert!(arrived.bytes().unwrap() == pattern(step, BYTES), "step {step}");
    }
    assert_eq!(tensors(sender.sent()), [19, 1, 0]);
}

#[tokio::test]
async fn a_tensor_is_kept_until_the_peer_has_read_it() {
    let (server, _client, channel) = pair().await;
    let (mut receiver, mut sender) = dynamic_slot(&server, &channel).await;
    let trace = trace();
    for step in 1..=5 {
        let mut computed = EngineTensor::compute(&trace, 0, step, BYTES);
        trace.crossed(&computed.0);
        sender.send(&computed.to_send()).await.unwrap();
        let shared = Arc::get_mut(&mut computed.0).is_none();
        assert_eq!(shared, step > 1, "a copied tensor is free at once, a tensor in place is not");
        let arrived = receiver.recv().await.unwrap();
        assert!(arrived.bytes().unwrap() == pattern(step, BYTES));
        sender.flush().await.unwrap();
        assert!(Arc::get_mut(&mut computed.0).is_some(), "the peer has read it");
    }
}

#[tokio::test]
async fn a_tensor_is_freed_after_its_link_has_ended() {
    struct Watched(EngineTensor, Arc<AtomicBool>);
    impl AsRef<[u8]> for Watched {
        fn as_ref(&self) -> &[u8] {
            self.0.as_ref()
        }
    }
    impl Drop for Watched {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Relaxed);
        }
    }
    let (server, client, channel) = pair().await;
    let (receiver, mut sender) = dynamic_slot(&server, &channel).await;
    let trace = trace();
    trace.crossed(&EngineTensor::compute(&trace, 0, 1, BYTES).0);
    let (computed, freed) = (EngineTensor::compute(&trace, 0, 2, BYTES), Arc::new(AtomicBool::new(false)));
    let owner = Watched(computed, Arc::clone(&freed));
    sender.send(&Tensor::from_bytes(spec(BYTES), Bytes::from_owner(owner)).unwrap()).await.unwrap();
    assert_eq!(tensors(sender.sent()), [1, 0, 0]);
    assert!(!freed.load(Ordering::Relaxed), "the peer has not read it");
    drop((receiver, server));
    drop((sender, channel, client));
    let deadline = Instant::now() + Duration::from_secs(60);
    while !freed.load(Ordering::Relaxed) {
        assert!(Instant::now() < deadline, "the tensor is not freed");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(trace.report().pool.leased_send, 0);
}

#[tokio::test]
async fn a_part_of_a_tensor_is_sent_in_place() {
    let (server, _client, channel) = pair().await;
    let (mut receiver, mut sender) = static_slot(&server, &channel, BYTES / 3).await;
    let trace = trace();
    for step in 1..=3 {
        let computed = EngineTensor::compute(&trace, 0, step, BYTES);
        trace.crossed(&computed.0);
        let row = computed.to_send().slice(BYTES / 3..BYTES / 3 * 2).unwrap();
        drop(computed);
        sender.send(&row).await.unwrap();
        let arrived = receiver.recv().await.unwrap().to_tensor().unwrap();
        let third = BYTES as usize / 3;
        assert!(arrived.bytes().unwrap() == &pattern(step, BYTES)[third..2 * third]);
    }
    assert_eq!(tensors(sender.sent()), [2, 1, 0]);
}

#[tokio::test]
async fn copies_and_inline_tensors_are_counted_as_such() {
    let (server, client, channel) = pair().await;
    let trace = trace();
    trace.crossed(&EngineTensor::compute(&trace, 0, 1, BYTES).0);
    let computed = EngineTensor::compute(&trace, 0, 2, BYTES);
    assert!(computed.to_send().registered().is_some());

    let (mut receiver, mut sender) = static_slot(&server, &channel, BYTES).await;
    sender.send_bytes(&computed.0).await.unwrap();
    assert_eq!(tensors(sender.sent()), [0, 1, 0], "copied although the memory is registered");
    drop(receiver.recv().await.unwrap());
    let region = client.allocate(BYTES as usize).unwrap();
    sender.send_region(region).await.unwrap();
    assert_eq!(tensors(sender.sent()), [1, 1, 0]);
    drop(receiver.recv().await.unwrap());
    let other = spec(BYTES - 1);
    sender.send(&Tensor::copy_from(other, &vec![1; BYTES as usize - 1]).unwrap()).await.unwrap_err();
    assert_eq!(tensors(sender.sent()), [1, 1, 0], "a refused tensor does not count");
    drop((receiver, sender));

    let mut receiver = server.static_receiver("small", &spec(16), 1).unwrap();
    let mut sender = channel.static_sender("small", &spec(16)).await.unwrap();
    assert!(channel.max_inline() > 32, "otherwise it is copied");
    sender.send_bytes(&[1; 16]).await.unwrap();
    assert_eq!((tensors(sender.sent()), sender.sent().inline.bytes), ([0, 0, 1], 16));
    drop(receiver.recv().await.unwrap());

    let mut receiver = server.dynamic_receiver("dynamic", 4).unwrap();
    let mut sender = channel.dynamic_sender("dynamic").await.unwrap();
    let square = TensorSpec::new(Dtype::U8, Shape::new(&[100, 3000]).unwrap()).unwrap();
    let whole = Tensor::from_bytes(square, Bytes::from_owner(computed)).unwrap();
    sender.send(&whole).await.unwrap();
    sender.send(&whole.transpose()).await.unwrap();
    sender.send(&Tensor::copy_from(spec(0), &[]).unwrap()).await.unwrap();
    assert_eq!(
        tensors(sender.sent()),
        [1, 1, 1],
        "a transposed tensor is copied, one without elements is inline"
    );
    assert!(receiver.recv().await.unwrap().bytes().unwrap() == whole.bytes().unwrap());
    assert_eq!(receiver.recv().await.unwrap().shape().dims(), [3000, 100]);
    assert_eq!(receiver.recv().await.unwrap().shape().dims(), [0]);
}
