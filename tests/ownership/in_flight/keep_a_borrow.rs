use tonic_rdma_tensor::{Channel, MemRegion, RemoteRegion};

async fn keep_a_borrow(channel: Channel, region: MemRegion, remote: RemoteRegion) {
    let bytes = &region[..];
    let copy = channel.write(&remote).from(region, ..8);
    let _ = bytes[0];
    let _ = copy.await;
}

fn main() {}
