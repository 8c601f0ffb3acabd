use tonic_rdma_tensor::{Channel, MemRegion, RemoteRegion};

async fn send_twice(channel: Channel, region: MemRegion, remote: RemoteRegion) {
    let one = channel.write(&remote).from(region, ..8);
    let two = channel.write(&remote).at(8).from(region, 8..16);
    let _ = (one.await, two.await);
}

fn main() {}
