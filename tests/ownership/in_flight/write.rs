use tonic_rdma_tensor::{Channel, MemRegion, RemoteRegion};

async fn write(channel: Channel, mut region: MemRegion, remote: RemoteRegion) {
    let copy = channel.write(&remote).from(region, ..8);
    region[0] = 1;
    let _ = copy.await;
}

fn main() {}
