use tonic_rdma_tensor::StaticReceiver;

async fn overlaps_the_next(mut receiver: StaticReceiver) {
    let one = receiver.recv().await.unwrap();
    let two = receiver.recv().await.unwrap();
    let _ = (one.len(), two.len());
}

fn main() {}
