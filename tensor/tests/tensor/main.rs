//! The tensor channel between two devices.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests, some of which say why they skip"
)]

mod buffers;
mod child;
mod churn;
mod dlpack;
mod dynamic_placement;
mod hostile_calls;
mod hostile_queue_pair;
mod inline_writes;
mod large;
mod memcpy;
mod memory;
mod named;
mod own_polling;
mod raw_peer;
mod refusals;
mod soak;
mod static_placement;
mod tls;
mod tls_links;
mod views;
mod waits;

use std::time::{Duration, Instant};

use support::Content;
use tonic_rdma_tensor::{
    Channel, DeviceBuilder, ExportedRegion, Notification, RdmaDevice, RemoteRegion, Rights,
};

type ConnectedDevices = (RdmaDevice, RdmaDevice, Channel);

/// Creates two devices, and a channel from the second to the first. `RDMA_DEVICE` chooses the RDMA device.
async fn pair_with(settings: DeviceBuilder) -> ConnectedDevices {
    let server = settings.clone().bind("127.0.0.1:0").await.unwrap();
    let client = settings.bind("127.0.0.1:0").await.unwrap();
    let channel = client.channel(&server.endpoint(), 0).await.unwrap();
    (server, client, channel)
}

async fn pair() -> ConnectedDevices {
    pair_with(RdmaDevice::builder().queue_pairs_per_peer(2)).await
}

/// Returns the kinds of notification that the device supports, the best first, which is also the default.
async fn notifications() -> Vec<Notification> {
    let (_server, _client, channel) = pair().await;
    let all = [Notification::Word, Notification::Immediate, Notification::Message];
    all.into_iter().skip_while(|kind| *kind != channel.notification()).collect()
}

/// Returns content that depends on `seed` and on the place of each byte.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    Content::new(seed).take(length)
}

/// Waits until `done` returns true, or fails.
async fn eventually(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done().await {
        assert!(Instant::now() < deadline, "waited for {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A device under attack, and a correct peer that the device must always serve.
struct Served {
    server: RdmaDevice,
    endpoint: String,
    client: RdmaDevice,
    channel: Channel,
    remote: RemoteRegion,
    exported: ExportedRegion,
}

impl Served {
    async fn new((server, client, channel): ConnectedDevices) -> Self {
        let memory = server.allocate(1 << 16).unwrap();
        let exported = server.export("region", memory, Rights::READ_WRITE).unwrap();
        let remote = channel.region("region").await.unwrap();
        Self { endpoint: server.endpoint(), server, client, channel, remote, exported }
    }

    /// Writes through the correct peer, and reads back.
    async fn check(&self) {
        let length = self.remote.len();
        let content = pattern(self.exported.memory().load_u64(0).unwrap() + 1, length as usize);
        let mut local = self.client.allocate(length as usize).unwrap();
        local.copy_from_slice(&content);
        let mut local = self.channel.write(&self.remote).from(local, ..).await.unwrap();
        local.fill(0);
        let local = self.channel.read(&self.remote).into(local, ..).await.unwrap();
        assert!(local[..] == content[..]);
    }
}
