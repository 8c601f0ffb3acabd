//! Tensors above the limit of a request, and above 32 bits. These tests need gigabytes and some time. Run
//! them with `cargo test --release -p tonic-rdma-tensor --test tensor -- --ignored large::`.

use tonic_rdma_tensor::{Dtype, MemRegion, Rights, Shape, TensorSpec};

use crate::pair;

const GIB: u64 = 1 << 30;

/// Returns whether `needed` bytes of memory are available. Prints the skip if not.
fn has_memory(needed: u64) -> bool {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = meminfo.lines().find(|line| line.starts_with("MemAvailable:")).unwrap();
    let available = line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10;
    if available < needed {
        println!("skipped: it takes {needed} bytes of memory, and {available} are available");
    }
    available >= needed
}

/// Returns a word that depends on its place.
fn word(seed: u64, index: usize) -> u64 {
    (index as u64 ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn fill(bytes: &mut [u8], seed: u64) {
    for (index, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, index).to_ne_bytes());
    }
}

/// Checks `bytes`, which begin with word number `first`.
fn check(bytes: &[u8], seed: u64, first: usize) {
    for (index, chunk) in bytes.chunks_exact(8).enumerate() {
        let expected = word(seed, first + index);
        assert!(chunk == expected.to_ne_bytes(), "wrong at byte {}", 8 * (first + index));
    }
}

async fn there_and_back(length: u64) {
    if !has_memory(2 * length + GIB) {
        return;
    }
    let (server, client, channel) = pair().await;
    let memory = server.allocate(length as usize).unwrap();
    let exported = server.export("region", memory, Rights::READ_WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    let mut local: MemRegion = client.allocate(length as usize).unwrap();
    fill(&mut local, 1);
    let mut local = channel.write(&remote).from(local, ..).await.unwrap();
    let last = length as usize - 4096;
    let mut end = [0; 4096];
    exported.memory().copy_out(last, &mut end).unwrap();
    check(&end, 1, last / 8);
    local.fill(0);
    let local = channel.read(&remote).into(local, ..).await.unwrap();
    check(&local, 1, 0);
}

#[tokio::test]
#[ignore = "takes 3 GiB of memory"]
async fn one_gibibyte() {
    there_and_back(GIB).await;
}

#[tokio::test]
#[ignore = "takes 7 GiB of memory"]
async fn three_gibibytes() {
    there_and_back(3 * GIB).await;
}

#[tokio::test]
#[ignore = "takes 3 GiB of memory"]
async fn a_slot_of_one_gibibyte() {
    if !has_memory(3 * GIB) {
        return;
    }
    let (server, client, channel) = pair().await;
    let spec = TensorSpec::new(Dtype::U64, Shape::new(&[GIB / 8]).unwrap()).unwrap();
    let mut receiver = server.static_receiver("slot", &spec, 1).unwrap();
    let mut sender = channel.static_sender("slot", &spec).await.unwrap();
    let mut region = client.allocate(GIB as usize).unwrap();
    for seed in 1..3 {
        fill(&mut region, seed);
        let (sent, arrived) = tokio::join!(sender.send_region(region), receiver.recv());
        region = sent.unwrap();
        let mut at = 0;
        arrived.unwrap().for_each_chunk(|piece| {
            check(piece, seed, at / 8);
            at += piece.len();
        });
        assert_eq!(at as u64, GIB);
    }
}
