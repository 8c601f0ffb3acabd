use tonic_rdma_tensor::{Channel, Direction, MemRegion, RemoteRegion};

async fn free(channel: Channel, region: MemRegion, remote: RemoteRegion) {
    let copy = channel.memcpy(region, 0, &remote, 0, 8, Direction::LocalToRemote);
    drop(region);
    let _ = copy.await;
}

fn main() {}
