//! This file is a test binary of its own, because these tests count the descriptors and mappings of the whole
//! process. They run one after another. Each has devices in two processes, and kills one of the processes.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests, some of which print a time"
)]

mod buffers;
mod child;
mod receiver_dies;
mod sender_dies;
mod takeover;

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use support::{Content, Runtime};
use tonic_rdma::Config;
use tonic_rdma_tensor::{
    Channel, DeviceBuilder, Dtype, MemRegion, Memcpy, RdmaDevice, RemoteRegion, Shape, Tensor, TensorError,
    TensorErrorKind, TensorSpec,
};

/// Time within which a death must be noticed: only a death that is not noticed at all takes so long. The
/// tests print the actual time.
const SOON: Duration = Duration::from_secs(60);
/// Length of a large tensor in bytes: many requests of [`settings`].
const LARGE: usize = 16 << 20;

/// Runs a test while no other test of this process runs.
fn alone<T>(runtime: Runtime, test: impl Future<Output = T>) -> T {
    static PROCESS: Mutex<()> = Mutex::new(());
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    runtime.run(test)
}

/// Returns a builder with small requests and a small window, so that most requests of a large tensor wait.
fn settings() -> DeviceBuilder {
    RdmaDevice::builder()
        .queue_pairs_per_peer(2)
        .config(Config::from_env().unwrap())
        .max_request_bytes(256 << 10)
        .max_outstanding_bytes(1 << 20)
}

async fn device() -> RdmaDevice {
    settings().bind("127.0.0.1:0").await.unwrap()
}

fn spec(length: usize) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length as u64]).unwrap()).unwrap()
}

/// Returns a tensor that begins with its seed, followed by content of this seed.
fn tensor(seed: u64, length: usize) -> Tensor {
    Tensor::from_bytes(spec(length), content(seed, length).into()).unwrap()
}

fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = Content::new(seed).take(length);
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes
}

/// Returns the seed of a tensor, and checks that all bytes belong to this seed.
fn seed_of(bytes: &[u8]) -> u64 {
    let seed = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes == content(seed, bytes.len()), "the bytes of the tensor with seed {seed} are not its own");
    seed
}

/// Waits for an operation that must fail, because the peer was killed at `killed`.
async fn lost<T>(
    what: &str,
    killed: Instant,
    future: impl Future<Output = Result<T, TensorError>>,
) -> TensorError {
    let result = tokio::time::timeout(SOON, future).await;
    let result = result.unwrap_or_else(|_| panic!("{what}: not noticed within {SOON:?}"));
    let error = result.err().unwrap_or_else(|| panic!("{what}: it should have failed"));
    println!("{what}: {error}, after {:?}", killed.elapsed());
    error
}

/// A copy between a whole local region and the beginning of a remote one.
#[derive(Clone, Copy, Debug)]
enum RegionCopy {
    Write,
    Read,
}

impl RegionCopy {
    fn start(self, channel: &Channel, remote: &RemoteRegion, local: MemRegion) -> Memcpy {
        match self {
            Self::Write => channel.write(remote).from(local, ..),
            Self::Read => channel.read(remote).into(local, ..),
        }
    }
}

/// Checks that `error` is the loss of the peer.
fn is_lost(what: &str, error: &TensorError) {
    assert_eq!(error.kind(), TensorErrorKind::PeerLost, "{what}: {error}");
}
