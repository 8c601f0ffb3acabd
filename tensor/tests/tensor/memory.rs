//! What tensors cost a process beside their bytes: descriptors, and memory that is held after use. Each test
//! has a process of its own, because these counts are those of a process.

use std::os::unix::fs::MetadataExt as _;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::is_alone;
use tonic_rdma_tensor::{Channel, Dtype, NamedOffer, NamedReply, RdmaDevice, Shape, Tensor, TensorSpec};

use crate::{eventually, pair, pattern};

fn spec(length: usize) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length as u64]).unwrap()).unwrap()
}

/// The files in memory of this process that it has descriptors of.
#[derive(Debug)]
struct MemoryFiles {
    count: usize,
    bytes: u64,
}

impl MemoryFiles {
    fn now() -> Self {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
        let files = descriptors.filter(|descriptor| {
            std::fs::read_link(descriptor.path()).is_ok_and(|path| path.to_string_lossy().contains("memfd:"))
        });
        let lengths = files.filter_map(|file| Some(std::fs::metadata(file.path()).ok()?.size()));
        lengths.fold(Self { count: 0, bytes: 0 }, |sum, bytes| Self {
            count: sum.count + 1,
            bytes: sum.bytes + bytes,
        })
    }
}

/// Moves a tensor with the content of `step` through both devices.
async fn moved(server: &RdmaDevice, channel: &Channel, step: u64, length: usize) -> Tensor {
    let tensor = Tensor::from_bytes(spec(length), pattern(step, length).into()).unwrap();
    server.put("kv", step, NamedOffer::Tensor(tensor), 1).unwrap();
    let NamedReply::Tensor(arrived) = channel.request("kv", step).await.unwrap() else {
        panic!("a dead tensor")
    };
    assert!(arrived.bytes().unwrap() == pattern(step, length));
    arrived
}

#[tokio::test]
async fn ten_thousand_small_tensors_and_a_thousand_slots_fit_in_256_open_files() {
    const LENGTH: usize = 4096;
    if !is_alone(concat!(
        module_path!(),
        "::ten_thousand_small_tensors_and_a_thousand_slots_fit_in_256_open_files"
    )) {
        return;
    }
    let limit = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let (server, client, channel) = pair().await;
    let mut slots = Vec::new();
    for number in 0..1000 {
        slots.push(client.static_receiver(&format!("variable {number}"), &spec(LENGTH), 1).unwrap());
    }
    let mut kept = Vec::new();
    for step in 0..10_000 {
        kept.push(moved(&server, &channel, step, LENGTH).await);
    }
    for (step, tensor) in (0..).zip(&kept) {
        assert!(tensor.bytes().unwrap() == pattern(step, LENGTH), "tensor {step} has changed");
    }
    let _another_link = server.channel(&client.endpoint(), 0).await.unwrap();
}

/// The formula of the book's page "Sizing": buffers of the tensor and 8 bytes, in steps of 64, in whole pages if they
/// have their own slab.
#[tokio::test]
async fn a_long_slot_takes_its_buffers_and_their_tails() {
    const BUFFERS: u32 = 3;
    const LENGTH: usize = 5_000_000;
    if !is_alone(concat!(module_path!(), "::a_long_slot_takes_its_buffers_and_their_tails")) {
        return;
    }
    let (_server, client, _channel) = pair().await;
    let before = MemoryFiles::now();
    let _slot = client.static_receiver("gradients", &spec(LENGTH), BUFFERS).unwrap();
    let now = MemoryFiles::now();
    let bytes = u64::from(BUFFERS) * (LENGTH as u64 + 8).next_multiple_of(64);
    assert_eq!(now.bytes - before.bytes, bytes.next_multiple_of(4096));
    assert_eq!(now.count - before.count, 1);
}

#[tokio::test]
async fn tensors_of_any_length_one_at_a_time_need_memory_for_a_few() {
    if !is_alone(concat!(module_path!(), "::tensors_of_any_length_one_at_a_time_need_memory_for_a_few")) {
        return;
    }
    let (server, _client, channel) = pair().await;
    drop(moved(&server, &channel, 1000, 100).await);
    let before = MemoryFiles::now();
    let lengths = (0..100).map(|step| (4 << 20) + step * 379 % 1024 * 4096);
    for (step, length) in (0..).zip(lengths) {
        drop(moved(&server, &channel, step, length).await);
        let now = MemoryFiles::now();
        // Both devices are in this process.
        assert!(now.bytes <= before.bytes + (64 << 20), "step {step}: {before:?}, then {now:?}");
        assert!(now.count <= before.count + 8, "step {step}: {before:?}, then {now:?}");
    }
    eventually("the end of what is idle", async || {
        let now = MemoryFiles::now();
        now.count <= before.count && now.bytes <= before.bytes
    })
    .await;
    drop(moved(&server, &channel, 1001, 100).await);
}
