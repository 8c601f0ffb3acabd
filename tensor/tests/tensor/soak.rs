//! All operations at one time: sizes from 0 to 4 MiB at odd offsets, over several queue pairs and completion
//! queues, in both directions. The tests check every byte. `TENSOR_SOAK_MIB` sets the amount that each part
//! moves.

use tonic_rdma::Config;
use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::{
    BlockCopy, Channel, Dtype, NamedOffer, NamedReply, RdmaDevice, Rights, Shape, Tensor, TensorMut,
    TensorSpec,
};

use crate::{notifications, pair_with, pattern};
use fastrand::Rng;
use support::random_length;

const MOST: usize = 4 << 20;

/// Returns the bytes that each part moves.
fn total() -> usize {
    std::env::var("TENSOR_SOAK_MIB").map_or(1, |mib| mib.parse().unwrap()) << 20
}

fn spec(length: usize) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length as u64]).unwrap()).unwrap()
}

fn tensor(pool: Option<&Pool>, seed: u64, length: usize) -> Tensor {
    let mut tensor = match pool {
        Some(pool) => TensorMut::in_pool(spec(length), pool).unwrap(),
        None => TensorMut::zeroed(spec(length)).unwrap(),
    };
    tensor.bytes_mut().copy_from_slice(&pattern(seed, length));
    tensor.freeze()
}

/// Two devices, and a channel from one to the other.
#[derive(Clone)]
struct Ends {
    here: RdmaDevice,
    there: RdmaDevice,
    to: Channel,
}

/// Writes and reads at random places of its own region, one block and many blocks.
async fn memcpy(ends: Ends, seed: u64, total: usize) {
    let (mut random, name) = (Rng::with_seed(seed), format!("region {seed}"));
    let memory = ends.there.allocate(2 * MOST).unwrap();
    let exported = ends.there.export(&name, memory, Rights::READ_WRITE).unwrap();
    let remote = ends.to.region(&name).await.unwrap();
    let mut expected = vec![0_u8; 2 * MOST];
    let mut local = ends.here.allocate(2 * MOST).unwrap();
    let (mut moved, mut round) = (0, 0);
    while moved < total {
        round += 1;
        let length = random_length(&mut random, MOST);
        let (from, at) = (random.usize(0..MOST), random.usize(0..MOST));
        let content = pattern(seed ^ round, length);
        local[from..from + length].copy_from_slice(&content);
        expected[at..at + length].copy_from_slice(&content);
        let whole = BlockCopy { local: from as u64, remote: at as u64, length: length as u64 };
        local = match random.u32(0..3) {
            0 => {
                let blocks = cut(whole, &mut random);
                let notify = random.bool();
                let write = ends.to.write(&remote).notify(notify);
                let local = write.blocks_from(local, &blocks).await.unwrap();
                if notify {
                    exported.notice().await.unwrap();
                }
                local
            }
            _ => {
                let write = ends.to.write(&remote).at(whole.remote);
                write.from(local, from..from + length).await.unwrap()
            }
        };
        // Reads more bytes back than were written, to another place.
        let (start, into) = (at - random.usize(0..=at), random.usize(0..MOST));
        let length = (at - start + length + random.usize(0..1000)).min(2 * MOST - start.max(into));
        let read = ends.to.read(&remote).at(start as u64);
        let back = read.into(local, into..into + length).await.unwrap();
        assert!(back[into..into + length] == expected[start..start + length], "{name}, round {round}");
        moved += 2 * length;
        local = back;
    }
    let mut found = vec![0; expected.len()];
    exported.memory().copy_out(0, &mut found).unwrap();
    assert!(found == expected, "{name} at the end");
}

/// Cuts a block into up to ten blocks, in any order.
fn cut(whole: BlockCopy, random: &mut Rng) -> Vec<BlockCopy> {
    let mut ends: Vec<_> = (0..random.u32(0..10)).map(|_| random.u64(0..=whole.length)).collect();
    ends.push(whole.length);
    ends.sort_unstable();
    let mut start = 0;
    let mut blocks = Vec::new();
    for end in ends {
        let length = end - start;
        blocks.push(BlockCopy { local: whole.local + start, remote: whole.remote + start, length });
        start = end;
    }
    let turn = random.usize(0..blocks.len());
    blocks.rotate_left(turn);
    blocks
}

/// Sends through a static slot of one length.
async fn static_slot(ends: Ends, seed: u64, length: usize, total: usize) {
    let name = format!("static {seed}");
    let rounds = (total / length.max(1000)) as u64;
    let mut receiver = ends.there.static_receiver(&name, &spec(length), 1 + seed as u32 % 3).unwrap();
    let mut sender = ends.to.static_sender(&name, &spec(length)).await.unwrap();
    let pool = Pool::for_sending(64 << 20);
    let send = async {
        for round in 0..rounds {
            match round % 3 {
                0 => sender.send(&tensor(Some(&pool), seed ^ round, length)).await.unwrap(),
                1 => sender.send_bytes(&pattern(seed ^ round, length)).await.unwrap(),
                _ => {
                    let mut region = ends.here.allocate(length).unwrap();
                    region.copy_from_slice(&pattern(seed ^ round, length));
                    sender.send_region(region).await.unwrap();
                }
            }
        }
        sender.flush().await.unwrap();
    };
    let receive = async {
        let mut found = vec![0; length];
        for round in 0..rounds {
            receiver.recv().await.unwrap().copy_to(&mut found).unwrap();
            assert!(found == pattern(seed ^ round, length), "{name}, round {round}");
        }
    };
    tokio::join!(send, receive);
}

async fn dynamic_slot(ends: Ends, seed: u64, total: usize) {
    let name = format!("dynamic {seed}");
    let mut receiver = ends.there.dynamic_receiver(&name, 2).unwrap();
    let mut sender = ends.to.dynamic_sender(&name).await.unwrap();
    let pool = Pool::for_sending(64 << 20);
    let lengths = lengths(seed, total);
    let send = async {
        for (round, length) in lengths.iter().enumerate() {
            let pool = (round % 2 == 0).then_some(&pool);
            sender.send(&tensor(pool, seed ^ round as u64, *length)).await.unwrap();
        }
        sender.flush().await.unwrap();
    };
    let receive = async {
        for (round, length) in lengths.iter().enumerate() {
            let found = receiver.recv().await.unwrap();
            assert!(found.bytes().unwrap() == pattern(seed ^ round as u64, *length), "{name}, round {round}");
        }
    };
    tokio::join!(send, receive);
}

/// Offers tensors at one device and requests them from the other, in either order.
async fn named(ends: Ends, seed: u64, total: usize) {
    let (name, pool) = (format!("offer {seed}"), Pool::for_sending(64 << 20));
    for (step, length) in lengths(seed, total).into_iter().enumerate() {
        let step = step as u64;
        let offer = || {
            let pool = step.is_multiple_of(2).then_some(&pool);
            ends.there.put(&name, step, NamedOffer::Tensor(tensor(pool, seed ^ step, length)), 1).unwrap();
        };
        if step.is_multiple_of(3) {
            offer();
        }
        let request = ends.to.request(&name, step);
        if !step.is_multiple_of(3) {
            tokio::task::yield_now().await;
            offer();
        }
        let NamedReply::Tensor(found) = request.await.unwrap() else { panic!("a dead tensor") };
        assert!(found.bytes().unwrap() == pattern(seed ^ step, length), "{name}, step {step}");
    }
}

/// Draws lengths that add up to about `total`.
fn lengths(seed: u64, total: usize) -> Vec<usize> {
    let (mut random, mut sum) = (Rng::with_seed(seed), 0);
    let mut lengths = Vec::new();
    while sum < total {
        let length = random_length(&mut random, MOST);
        sum += length + 1000;
        lengths.push(length);
    }
    lengths
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_operations_at_one_time_are_correct() {
    let total = total();
    for (index, way) in notifications().await.into_iter().enumerate() {
        let settings = RdmaDevice::builder()
            .config(Config::from_env().unwrap().completion_queues(2))
            .queue_pairs_per_peer(3)
            .notification(way)
            .max_request_bytes(1 << 20)
            .max_outstanding_bytes(4 << 20);
        let (one, other, _) = pair_with(settings).await;
        let mut parts = tokio::task::JoinSet::new();
        for port in 0..3_u32 {
            let to = one.channel(&other.endpoint(), port).await.unwrap();
            let back = other.channel(&one.endpoint(), port).await.unwrap();
            let forth = Ends { here: one.clone(), there: other.clone(), to };
            let back = Ends { here: other.clone(), there: one.clone(), to: back };
            for (direction, ends) in [forth, back].into_iter().enumerate() {
                let seed = 1000 * (index as u64 + 1) + 100 * u64::from(port) + 10 * direction as u64;
                parts.spawn(memcpy(ends.clone(), seed, total));
                for (number, length) in [0, 13, 4097, 1_000_001].into_iter().enumerate() {
                    parts.spawn(static_slot(ends.clone(), seed + number as u64, length, total / 4));
                }
                parts.spawn(dynamic_slot(ends.clone(), seed, total / 2));
                parts.spawn(named(ends, seed, total / 2));
            }
        }
        while let Some(part) = parts.join_next().await {
            part.unwrap();
        }
    }
}
