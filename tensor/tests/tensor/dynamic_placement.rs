//! Tensors of any shape, which the receiver reads from the sender.

use tonic_rdma::Config;
use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, Tensor, TensorMut, TensorSpec};

use crate::{eventually, notifications, pair, pair_with, pattern};

fn tensor(pool: Option<&Pool>, seed: u64, dims: &[u64]) -> Tensor {
    let spec = TensorSpec::new(Dtype::U16, Shape::new(dims).unwrap()).unwrap();
    let mut tensor = match pool {
        Some(pool) => TensorMut::in_pool(spec, pool).unwrap(),
        None => TensorMut::zeroed(spec).unwrap(),
    };
    let length = tensor.bytes().len();
    tensor.bytes_mut().copy_from_slice(&pattern(seed, length));
    tensor.freeze()
}

#[tokio::test]
async fn tensors_of_changing_shapes_arrive() {
    for way in notifications().await {
        let (server, _client, channel) = pair_with(RdmaDevice::builder().notification(way)).await;
        let mut receiver = server.dynamic_receiver("activations", 2).unwrap();
        let mut sender = channel.dynamic_sender("activations").await.unwrap();
        let pool = Pool::for_sending(64 << 20);
        let shapes: [&[u64]; 6] = [&[], &[0], &[3], &[100, 7], &[1000, 1000], &[2, 3, 4, 5]];
        for (round, dims) in shapes.into_iter().enumerate() {
            for pool in [None, Some(&pool)] {
                let sent = tensor(pool, round as u64, dims);
                let (result, arrived) = tokio::join!(sender.send(&sent), receiver.recv());
                result.unwrap();
                let arrived = arrived.unwrap();
                assert_eq!(arrived.spec(), sent.spec());
                assert!(arrived.bytes().unwrap() == sent.bytes().unwrap(), "{way:?} {dims:?}");
            }
        }
        sender.flush().await.unwrap();
        assert_eq!(sender.pending().unwrap(), 0);
        assert_eq!(pool.statistics().leased_send, 0, "what was read is free again");
    }
}

#[tokio::test]
async fn tensors_without_a_fixed_layout_are_serialised() {
    let (server, _client, channel) = pair_with(RdmaDevice::builder()).await;
    let mut receiver = server.dynamic_receiver("any", 4).unwrap();
    let mut sender = channel.dynamic_sender("any").await.unwrap();
    let words = ["tensors", "", "need no", "RPC"];
    let strings =
        Tensor::from_strings(Shape::new(&[2, 2]).unwrap(), words.map(bytes::Bytes::from_static_str)).unwrap();
    sender.send(&strings).await.unwrap();
    let matrix = tensor(None, 1, &[30, 40]);
    sender.send(&matrix.transpose()).await.unwrap();
    let arrived = receiver.recv().await.unwrap();
    let found: Vec<_> = arrived.strings().unwrap().cloned().collect();
    assert_eq!(found, words);
    let arrived = receiver.recv().await.unwrap();
    assert_eq!(arrived.shape().dims(), [40, 30]);
    let expected = matrix.transpose().to_contiguous().unwrap();
    assert_eq!(arrived.as_slice::<u16>().unwrap(), expected.as_slice::<u16>().unwrap());
}

trait FromStaticStr {
    fn from_static_str(text: &'static str) -> Self;
}

impl FromStaticStr for bytes::Bytes {
    fn from_static_str(text: &'static str) -> Self {
        Self::from_static(text.as_bytes())
    }
}

#[tokio::test]
async fn a_wait_for_the_next_tensor_takes_nothing() {
    for way in notifications().await {
        let (server, _client, channel) = pair_with(RdmaDevice::builder().notification(way)).await;
        let mut receiver = server.dynamic_receiver("activations", 2).unwrap();
        let mut sender = channel.dynamic_sender("activations").await.unwrap();
        for seed in 0..20 {
            let sent = tensor(None, seed, &[1 + seed * 1000]);
            let (result, arrived) = tokio::join!(sender.send(&sent), async {
                // Each wait is dropped at another point.
                for _ in 0..seed {
                    tokio::select! {
                        biased;
                        _ = receiver.arrived() => {}
                        () = tokio::task::yield_now() => {}
                    }
                }
                receiver.arrived().await.unwrap();
                receiver.arrived().await.unwrap();
                receiver.try_recv().unwrap().expect("it has been read")
            });
            result.unwrap();
            assert!(arrived.bytes().unwrap() == sent.bytes().unwrap(), "{way:?} {seed}");
            assert!(receiver.try_recv().unwrap().is_none(), "{way:?} {seed}");
        }
    }
}

#[tokio::test]
async fn senders_that_leave_before_their_tensor_is_read_keep_no_memory() {
    let (server, _client, channel) = pair().await;
    let mut slot = server.dynamic_receiver("any", 2).unwrap();
    let pool = Pool::for_sending(16 << 20);
    for _ in 0..20 {
        let mut sender = channel.dynamic_sender("any").await.unwrap();
        let spec = TensorSpec::new(Dtype::U8, Shape::new(&[100_000]).unwrap()).unwrap();
        sender.send(&TensorMut::in_pool(spec, &pool).unwrap().freeze()).await.unwrap();
        drop(sender);
        slot.recv().await.unwrap();
    }
    // The peer may read for the last sender until the slot gets another one.
    eventually("the memory of all tensors but the last", async || pool.statistics().frozen <= 1).await;
}

/// The receiver's queue has a READ for each tensor, and a WRITE without a completion that releases its buffer.
#[tokio::test]
async fn a_slot_has_more_buffers_than_the_queue_has_requests() {
    const BUFFERS: u32 = 256;
    let config = Config::from_env().unwrap().qp_queue_depth(64);
    let settings = RdmaDevice::builder().config(config).queue_pairs_per_peer(1);
    let (server, _client, channel) = pair_with(settings).await;
    let mut receiver = server.dynamic_receiver("activations", BUFFERS).unwrap();
    let mut sender = channel.dynamic_sender("activations").await.unwrap();
    let sent = tensor(None, 1, &[500]);
    for _ in 0..4 {
        for _ in 0..BUFFERS {
            sender.send(&sent).await.unwrap();
        }
        for _ in 0..BUFFERS {
            let arrived = receiver.recv().await.unwrap();
            assert!(arrived.bytes().unwrap() == sent.bytes().unwrap());
        }
    }
    sender.flush().await.unwrap();
}
