//! Tests of links over channels of real devices of this process.

mod faults;
mod messages;
mod references;

use std::time::{Duration, Instant};

use tonic_rdma_tensor::{Channel, DeviceBuilder, Notification, RdmaDevice};

use crate::link::remote::{LinkSettings, RemoteLinks};
use crate::link::{LinkError, RankLinks, Tag};
use crate::memory::MemoryPool;

/// A bound that only a hang exceeds.
const HANG: Duration = Duration::from_secs(60);

/// Whether messages go by views.
const KINDS: [bool; 2] = [VIEWS, WRITES];
const VIEWS: bool = true;
const WRITES: bool = false;

impl RemoteLinks {
    /// Returns the ranks whose messages travel by views.
    fn viewed(&self) -> impl Iterator<Item = usize> {
        let peers = self.peers.iter().enumerate();
        peers.filter(|(_, peer)| peer.as_ref().is_some_and(|peer| peer.is_view())).map(|(rank, _)| rank)
    }

    /// Returns how many regions of a rank are attached.
    fn attached(&self, rank: usize) -> usize {
        self.peers[rank].as_ref().map_or(0, |peer| peer.regions.attached.len())
    }
}

/// One rank of a group in this process.
struct Rank {
    links: RemoteLinks,
    pool: MemoryPool,
    device: RdmaDevice,
}

fn settings(views: bool) -> LinkSettings {
    LinkSettings { views, inline: 4096, slots: 4, chunk: 64 << 10, limit: HANG, ..LinkSettings::default() }
}

/// Makes a group of ranks, each with a device of its own.
async fn group(ranks: usize, settings: &LinkSettings) -> Vec<Rank> {
    noticed_group(ranks, None, settings).await
}

/// Makes a group whose devices learn of arrivals in this way.
async fn noticed_group(
    ranks: usize,
    notification: Option<Notification>,
    settings: &LinkSettings,
) -> Vec<Rank> {
    built_group(ranks, || noticing(notification), settings).await
}

/// Makes a group whose devices have these settings.
async fn built_group(
    ranks: usize,
    builder: impl Fn() -> DeviceBuilder,
    settings: &LinkSettings,
) -> Vec<Rank> {
    let (devices, mut channels) = built_mesh(ranks, builder).await;
    let pools: Vec<_> = devices.iter().map(|device| MemoryPool::new(device, MemoryPool::KEPT)).collect();
    let links = open_all(&mut channels, &pools, 0, settings).await;
    let parts = devices.into_iter().zip(pools).zip(links);
    parts.map(|((device, pool), links)| Rank { links, pool, device }).collect()
}

/// Makes devices, and a channel from each to each other one.
async fn mesh(ranks: usize) -> (Vec<RdmaDevice>, Vec<Vec<Option<Channel>>>) {
    built_mesh(ranks, RdmaDevice::builder).await
}

/// Returns the settings of a device that learns of arrivals in this way.
fn noticing(notification: Option<Notification>) -> DeviceBuilder {
    let builder = RdmaDevice::builder();
    match notification {
        Some(notification) => builder.notification(notification),
        None => builder,
    }
}

async fn built_mesh(
    ranks: usize,
    builder: impl Fn() -> DeviceBuilder,
) -> (Vec<RdmaDevice>, Vec<Vec<Option<Channel>>>) {
    let mut devices = Vec::new();
    for _ in 0..ranks {
        devices.push(builder().bind("127.0.0.1:0").await.unwrap());
    }
    let mut channels = Vec::new();
    for (rank, device) in devices.iter().enumerate() {
        let mut row = Vec::new();
        for (peer, other) in devices.iter().enumerate() {
            let channel = if peer == rank { None } else { device.channel(&other.endpoint(), 0).await.ok() };
            row.push(channel);
        }
        channels.push(row);
    }
    (devices, channels)
}

async fn open_all(
    channels: &mut [Vec<Option<Channel>>],
    pools: &[MemoryPool],
    generation: u64,
    settings: &LinkSettings,
) -> Vec<RemoteLinks> {
    let mut tasks = Vec::new();
    for (rank, (channels, pool)) in channels.iter().zip(pools).enumerate() {
        let (channels, pool, settings) = (channels.clone(), pool.clone(), settings.clone());
        tasks.push(tokio::spawn(async move {
            RemoteLinks::open(channels, rank, &pool, generation, &settings).await
        }));
    }
    let mut links = Vec::new();
    for task in tasks {
        links.push(task.await.unwrap().unwrap());
    }
    links
}

fn tag(operation: u64) -> Tag {
    Tag { operation, step: (operation * 7) as u32 & 0xffff, call: operation ^ 0x1234_5678_9abc_def0 }
}

/// Bytes that differ from message to message.
fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| random.u8(..)).collect()
}

/// Receives the next message of rank `from` whole, by chunks or into memory. Panics on a hang.
fn receive(links: &mut RemoteLinks, from: usize, by_pieces: bool) -> Result<(Tag, Vec<u8>), LinkError> {
    let start = Instant::now();
    let mut shown = None;
    let mut bytes = Vec::new();
    loop {
        assert!(start.elapsed() < HANG, "no message came");
        links.progress()?;
        if shown.is_none() {
            shown = links.peek(from)?;
            bytes.resize(shown.map_or(0, |(_, length)| length), 0);
        }
        let Some((tag, length)) = shown else {
            std::thread::yield_now();
            continue;
        };
        let mut next = None;
        let ended = if by_pieces {
            links.receive(from, &mut |at, chunk| {
                assert!(next.is_none_or(|next| next == at), "chunks are consecutive");
                assert!(chunk.len() % 64 == 0 || at + chunk.len() == length, "only the last chunk is short");
                next = Some(at + chunk.len());
                bytes[at..at + chunk.len()].copy_from_slice(chunk);
            })?
        } else {
            links.receive_into(from, &mut bytes)?
        };
        if ended {
            return Ok((tag, bytes));
        }
        std::thread::yield_now();
    }
}

/// Calls `attempt` until it returns something. Panics on a hang.
fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(start.elapsed() < HANG, "{what} did not happen");
        std::thread::yield_now();
    }
}

/// Returns the links of ranks 0 and 1, borrowed.
fn pair(ranks: &mut [Rank]) -> (&mut Rank, &mut Rank) {
    let (first, second) = ranks.split_at_mut(1);
    (&mut first[0], &mut second[0])
}
