use tonic_rdma_tensor::{Channel, Direction, MemRegion, RemoteRegion};

async fn read(channel: Channel, region: MemRegion, remote: RemoteRegion) {
    let copy = channel.memcpy(region, 0, &remote, 0, 8, Direction::LocalToRemote);
    let _: &[u8] = region.as_ref();
    let _ = copy.await;
}

fn main() {}
