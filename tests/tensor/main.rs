//! The tensor channel between two devices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod dynamic_placement;
mod memcpy;
mod refusals;
mod rendezvous;
mod static_placement;

use tonic_rdma::tensor::{Channel, Notification, RdmaDevice, Settings};

/// Two devices, and a channel from the second to the first.
async fn pair_with(settings: Settings) -> (RdmaDevice, RdmaDevice, Channel) {
    let server = RdmaDevice::bind(settings.clone(), "127.0.0.1:0").await.unwrap();
    let client = RdmaDevice::bind(settings, "127.0.0.1:0").await.unwrap();
    let channel = client.channel(&server.endpoint(), 0).await.unwrap();
    (server, client, channel)
}

async fn pair() -> (RdmaDevice, RdmaDevice, Channel) {
    pair_with(Settings::new(1, 2)).await
}

/// Every way to tell of an arrival.
const WAYS: [Notification; 3] = [Notification::Word, Notification::Immediate, Notification::Message];

/// Content that depends on its place and on `seed`.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|at| ((at ^ seed.wrapping_mul(0x9e37)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8)
        .collect()
}
