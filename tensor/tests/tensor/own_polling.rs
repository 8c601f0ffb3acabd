//! Threads that poll slots themselves, while the runtime does not.

use std::time::{Duration, Instant};

use tonic_rdma_tensor::unstable::OwnPolling;
use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, StaticReceiver, Tensor, TensorSpec};

use super::{pair, pattern};

const LENGTH: usize = 40_000;
const TENSORS: u64 = 100;
/// A bound that only detects a hang.
const LONGEST: Duration = Duration::from_secs(60);

fn spec() -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[LENGTH as u64]).unwrap()).unwrap()
}

fn tensor(number: u64) -> Tensor {
    Tensor::from_bytes(spec(), pattern(number, LENGTH).into()).unwrap()
}

async fn receive(slot: &mut StaticReceiver, number: u64) {
    let arrived = tokio::time::timeout(LONGEST, slot.recv()).await.expect("a tensor does not come").unwrap();
    assert!(arrived.to_tensor().unwrap().bytes().unwrap() == pattern(number, LENGTH), "tensor {number}");
}

/// Takes a tensor as a thread that only polls.
fn poll_until_arrived(slot: &mut StaticReceiver, polling: &OwnPolling, number: u64) {
    let began = Instant::now();
    loop {
        if let Some(arrived) = slot.try_recv().unwrap() {
            assert!(
                arrived.to_tensor().unwrap().bytes().unwrap() == pattern(number, LENGTH),
                "tensor {number}"
            );
            return;
        }
        assert!(began.elapsed() < LONGEST, "tensor {number} does not come");
        polling.poll();
    }
}

async fn moves(hold: impl Fn(&RdmaDevice) -> Option<OwnPolling>) {
    let (server, client, channel) = pair().await;
    let mut slot = server.static_receiver("loss", &spec(), 2).unwrap();
    let mut sender = channel.static_sender("loss", &spec()).await.unwrap();
    let _held = (hold(&server), hold(&client));
    for number in 0..TENSORS {
        tokio::time::timeout(LONGEST, sender.send(&tensor(number))).await.expect("a send hangs").unwrap();
        receive(&mut slot, number).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn futures_get_their_tensors_while_a_thread_has_said_that_it_polls_and_does_not() {
    moves(|device| Some(OwnPolling::new(device))).await;
}

#[tokio::test]
async fn futures_of_the_only_thread_get_their_tensors_too() {
    moves(|device| Some(OwnPolling::new(device))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_threads_of_the_runtime_take_over_again_and_again() {
    let (server, _client, channel) = pair().await;
    let mut slot = server.static_receiver("loss", &spec(), 1).unwrap();
    let mut sender = channel.static_sender("loss", &spec()).await.unwrap();
    for number in (0..TENSORS).step_by(3) {
        let polling = OwnPolling::new(&server);
        let second = OwnPolling::new(&server);
        sender.send(&tensor(number)).await.unwrap();
        tokio::task::block_in_place(|| poll_until_arrived(&mut slot, &polling, number));
        drop(polling);
        // One thread has ended, the other one still polls.
        sender.send(&tensor(number + 1)).await.unwrap();
        tokio::task::block_in_place(|| poll_until_arrived(&mut slot, &second, number + 1));
        drop(second);
        // From here on nothing polls but the runtime.
        sender.send(&tensor(number + 2)).await.unwrap();
        receive(&mut slot, number + 2).await;
        sender.flush().await.unwrap();
    }
}
