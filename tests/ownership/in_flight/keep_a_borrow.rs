use tonic_rdma_tensor::{Channel, Direction, MemRegion, RemoteRegion};

async fn keep_a_borrow(channel: Channel, region: MemRegion, remote: RemoteRegion) {
    let bytes = &region[..];
    let copy = channel.memcpy(region, 0, &remote, 0, 8, Direction::LocalToRemote);
    let _ = bytes[0];
    let _ = copy.await;
}

fn main() {}
