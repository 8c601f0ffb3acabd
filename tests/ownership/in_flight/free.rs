use tonic_rdma_tensor::{Channel, MemRegion, RemoteRegion};

async fn free(channel: Channel, region: MemRegion, remote: RemoteRegion) {
    let copy = channel.write(&remote).from(region, ..8);
    drop(region);
    let _ = copy.await;
}

fn main() {}
