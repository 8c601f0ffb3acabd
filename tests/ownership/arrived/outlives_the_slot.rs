use tonic_rdma_tensor::{Arrived, StaticReceiver};

fn outlives_the_slot(mut receiver: StaticReceiver) -> Option<Arrived<'static>> {
    receiver.try_recv().unwrap()
}

fn main() {}
