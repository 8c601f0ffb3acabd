use tonic_rdma_tensor::{Channel, Direction, MemRegion, RemoteRegion};

async fn send_twice(channel: Channel, region: MemRegion, remote: RemoteRegion) {
    let one = channel.memcpy(region, 0, &remote, 0, 8, Direction::LocalToRemote);
    let two = channel.memcpy(region, 8, &remote, 8, 8, Direction::LocalToRemote);
    let _ = (one.await, two.await);
}

fn main() {}
