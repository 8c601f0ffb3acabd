use tonic_rdma_tensor::{Channel, MemRegion, RemoteRegion};

async fn read(channel: Channel, region: MemRegion, remote: RemoteRegion) {
    let copy = channel.write(&remote).from(region, ..8);
    let _: &[u8] = region.as_ref();
    let _ = copy.await;
}

fn main() {}
