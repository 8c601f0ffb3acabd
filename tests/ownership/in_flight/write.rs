use tonic_rdma_tensor::{Channel, Direction, MemRegion, RemoteRegion};

async fn write(channel: Channel, mut region: MemRegion, remote: RemoteRegion) {
    let copy = channel.memcpy(region, 0, &remote, 0, 8, Direction::LocalToRemote);
    region[0] = 1;
    let _ = copy.await;
}

fn main() {}
