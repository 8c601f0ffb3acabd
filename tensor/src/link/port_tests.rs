//! A full port refuses transfers, and accepts them again later.

use std::time::Duration;

use super::{Port, lock};
use crate::channel::copy::Memcpy;
use crate::error::TensorErrorKind;
use crate::regions::RemoteRegion;
use crate::{BlockCopy, Channel, Dtype, ExportedRegion, Notification, RdmaDevice, Rights, Shape, TensorSpec};

const BYTES: usize = 100_000;

struct Devices {
    server: RdmaDevice,
    client: RdmaDevice,
    exported: ExportedRegion,
    channel: Channel,
    remote: RemoteRegion,
}

impl Devices {
    async fn new() -> Self {
        let device = async || RdmaDevice::bind("127.0.0.1:0").await.unwrap();
        Self::between(device().await, device().await).await
    }

    async fn between(server: RdmaDevice, client: RdmaDevice) -> Self {
        let exported = server.export("region", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
        let channel = client.channel(&server.endpoint(), 0).await.unwrap();
        let remote = channel.region("region").await.unwrap();
        Self { server, client, exported, channel, remote }
    }

    fn write(&self, notify: bool) -> Memcpy {
        let region = self.client.allocate(4096).unwrap();
        self.channel.write(&self.remote).notify(notify).from(region, ..)
    }

    /// Begins as many writes as the port accepts. Nothing polls the queue until the next await.
    fn fill(&self) -> Vec<Memcpy> {
        (0..Port::WAITING).map(|_| self.write(false)).collect()
    }
}

async fn end(writes: Vec<Memcpy>) {
    for write in writes {
        write.await.unwrap();
    }
}

#[tokio::test]
async fn a_refused_tensor_takes_no_buffer_of_the_slot() {
    let devices = Devices::new().await;
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[BYTES as u64]).unwrap()).unwrap();
    let mut slot = devices.server.static_receiver("slot", &spec, 4).unwrap();
    let mut sender = devices.channel.static_sender("slot", &spec).await.unwrap();
    let mut region = devices.client.allocate(BYTES).unwrap();
    region.fill(7);
    let writes = devices.fill();
    let refused = sender.try_send_region(region).try_take().unwrap().unwrap_err();
    assert_eq!(refused.error().kind(), TensorErrorKind::Busy, "{refused}");
    assert_eq!(sender.pending().unwrap(), 0);
    end(writes).await;
    let region = sender.send_region(refused.into_region()).await.unwrap();
    let arrived = tokio::time::timeout(Duration::from_secs(60), slot.recv()).await;
    let arrived = arrived.expect("the receiver waits for the refused tensor").unwrap().to_tensor().unwrap();
    assert!(arrived.bytes().unwrap() == &region[..]);
}

#[tokio::test]
async fn a_refused_write_gives_no_notice() {
    let devices = Devices::new().await;
    let writes = devices.fill();
    let refused = devices.write(true).try_take().unwrap().unwrap_err();
    assert_eq!(refused.error().kind(), TensorErrorKind::Busy, "{refused}");
    end(writes).await;
    let blocks = [BlockCopy { local: 0, remote: 0, length: 4096 }];
    let written =
        devices.channel.write(&devices.remote).notify(true).blocks_from(refused.into_region(), &blocks);
    written.await.unwrap();
    devices.exported.notice().await.unwrap();
    assert!(!devices.exported.try_notice(), "the refused write was counted");
}

/// Otherwise this side would send frames for which the peer has no receive.
#[tokio::test]
async fn a_write_with_immediate_data_uses_up_a_receive_of_the_peer() {
    let device = || RdmaDevice::builder().notification(Notification::Immediate).bind("127.0.0.1:0");
    let devices = Devices::between(device().await.unwrap(), device().await.unwrap()).await;
    for _ in 0..2 * Port::RECEIVES {
        devices.write(true).await.unwrap();
        devices.exported.notice().await.unwrap();
    }
    let link = &devices.remote.shared.link;
    let state = lock(&link.port(0).state);
    let left = state.credits.peer_posted.wrapping_sub(state.credits.sent);
    assert!(left <= Port::RECEIVES, "{left} receives are left, and the peer has {}", Port::RECEIVES);
}
