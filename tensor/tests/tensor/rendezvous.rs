//! Tensors by name and step. The offer or the request may come first.

use std::time::Duration;

use tonic::Code;
use tonic_rdma_tensor::{
    ChannelError, Dtype, Offer, RdmaDevice, Requested, Shape, Tensor, TensorMut, TensorSpec,
};

use crate::{notifications, pair, pair_with, pattern};

fn tensor(seed: u64, length: u64) -> Tensor {
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[length]).unwrap()).unwrap();
    let mut tensor = TensorMut::zeroed(spec).unwrap();
    tensor.bytes_mut().copy_from_slice(&pattern(seed, length as usize));
    tensor.freeze()
}

fn arrived(requested: Result<Requested, ChannelError>) -> Tensor {
    match requested.unwrap() {
        Requested::Tensor(tensor) => tensor,
        Requested::Dead => panic!("a dead tensor"),
    }
}

#[tokio::test]
async fn tensors_arrive_in_either_order_and_with_changing_shapes() {
    for way in notifications().await {
        for validate in [false, true] {
            let settings =
                RdmaDevice::builder().queue_pairs_per_peer(2).notification(way).checksums(validate);
            let (server, _client, channel) = pair_with(settings).await;
            for step in 0..12_u64 {
                let sent = tensor(step, [1000, 1000, 0, 70_000][step as usize / 3]);
                let found = if step % 2 == 0 {
                    server.put("activations", step, Offer::Tensor(sent.clone()), 1).unwrap();
                    channel.request("activations", step).await
                } else {
                    let request = channel.request("activations", step);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    server.put("activations", step, Offer::Tensor(sent.clone()), 1).unwrap();
                    request.await
                };
                let found = arrived(found);
                assert_eq!(found.spec(), sent.spec());
                assert!(found.bytes().unwrap() == sent.bytes().unwrap());
            }
            assert_eq!(server.held().offers, 0);
        }
    }
}

#[tokio::test]
async fn requests_without_a_tensor_get_the_reason() {
    let settings = RdmaDevice::builder().rendezvous_timeout(Duration::from_millis(600));
    let (server, _client, channel) = pair_with(settings).await;
    server.put("branch", 1, Offer::Dead, 1).unwrap();
    assert!(matches!(channel.request("branch", 1).await, Ok(Requested::Dead)));
    server.put("loss", 1, Offer::Failed(tonic::Status::data_loss("not a number")), 1).unwrap();
    let code = |error: ChannelError| match error {
        ChannelError::Refused { code, message, .. } => (code, message),
        other => panic!("{other}"),
    };
    let (failed, message) = code(channel.request("loss", 1).await.unwrap_err());
    assert_eq!((failed, &*message), (Code::DataLoss, "not a number"));

    server.put("weights", 7, Offer::Tensor(tensor(1, 10)), 2).unwrap();
    arrived(channel.request("weights", 7).await);
    let (twice, message) = code(channel.request("weights", 7).await.unwrap_err());
    assert_eq!(twice, Code::AlreadyExists, "{message}");

    let (late, _) = code(channel.request("never", 1).await.unwrap_err());
    assert_eq!(late, Code::DeadlineExceeded);
    let long = "n".repeat(10 << 20);
    assert!(channel.request(&long, 1).await.unwrap_err().to_string().contains("10485760"));
    assert!(channel.is_open());
}

#[tokio::test]
async fn a_dropped_request_is_withdrawn() {
    let (server, _client, channel) = pair().await;
    drop(channel.request("gradient", 1));
    tokio::time::sleep(Duration::from_millis(5)).await;
    server.put("gradient", 1, Offer::Tensor(tensor(1, 1000)), 1).unwrap();
    let found = arrived(channel.request("gradient", 1).await);
    assert!(found.bytes().unwrap() == pattern(1, 1000));
}

#[tokio::test]
async fn many_requests_at_one_time_get_their_tensors() {
    let (server, _client, channel) = pair().await;
    let requests: Vec<_> =
        (0..500).map(|index| channel.request(&format!("t{}", index % 10), index)).collect();
    for index in (0..500_u64).rev() {
        let sent = tensor(index, 100 + index % 10 * 1000);
        server.put(&format!("t{}", index % 10), index, Offer::Tensor(sent), 1).unwrap();
    }
    for (index, request) in requests.into_iter().enumerate() {
        let found = arrived(request.await);
        assert!(found.bytes().unwrap() == pattern(index as u64, 100 + index % 10 * 1000));
    }
}
