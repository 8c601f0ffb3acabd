use tonic_rdma_tensor::StaticReceiver;

fn outlives_its_release(mut receiver: StaticReceiver) {
    let arrived = receiver.try_recv().unwrap().unwrap();
    let (memory, _) = arrived.memory();
    drop(arrived);
    let _ = memory.len();
}

fn main() {}
