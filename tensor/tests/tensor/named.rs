//! Tensors by name and step. The offer or the request may come first.

use std::future::Future as _;
use std::task::Poll;
use std::time::Duration;

use tonic::Code;
use tonic_rdma::Config;
use tonic_rdma_tensor::{
    Dtype, NamedOffer, NamedReply, NamedRequest, OfferCounts, RdmaDevice, Shape, Tensor, TensorError,
    TensorMut, TensorSpec,
};

use crate::{eventually, notifications, pair, pair_with, pattern};

fn tensor(seed: u64, length: u64) -> Tensor {
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[length]).unwrap()).unwrap();
    let mut tensor = TensorMut::zeroed(spec).unwrap();
    tensor.bytes_mut().copy_from_slice(&pattern(seed, length as usize));
    tensor.freeze()
}

fn arrived(requested: Result<NamedReply, TensorError>) -> Tensor {
    match requested.unwrap() {
        NamedReply::Tensor(tensor) => tensor,
        NamedReply::Dead => panic!("a dead tensor"),
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
                    server.put("activations", step, NamedOffer::Tensor(sent.clone()), 1).unwrap();
                    channel.request("activations", step).await
                } else {
                    let request = channel.request("activations", step);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    server.put("activations", step, NamedOffer::Tensor(sent.clone()), 1).unwrap();
                    request.await
                };
                let found = arrived(found);
                assert_eq!(found.spec(), sent.spec());
                assert!(found.bytes().unwrap() == sent.bytes().unwrap());
            }
            assert_eq!(server.offer_counts().offers, 0);
        }
    }
}

#[tokio::test]
async fn requests_without_a_tensor_get_the_reason() {
    let (server, _client, channel) = pair_with(RdmaDevice::builder()).await;
    server.put("branch", 1, NamedOffer::Dead, 1).unwrap();
    assert!(matches!(channel.request("branch", 1).await, Ok(NamedReply::Dead)));
    server.put("loss", 1, NamedOffer::Failed(tonic::Status::data_loss("not a number")), 1).unwrap();
    let code = |error: TensorError| (error.code().unwrap(), error.reason().to_owned());
    let (failed, message) = code(channel.request("loss", 1).await.unwrap_err());
    assert_eq!(failed, Code::DataLoss);
    assert!(message.ends_with("refused (DataLoss): not a number"), "{message}");

    server.put("weights", 7, NamedOffer::Tensor(tensor(1, 10)), 2).unwrap();
    arrived(channel.request("weights", 7).await);
    let (twice, message) = code(channel.request("weights", 7).await.unwrap_err());
    assert_eq!(twice, Code::AlreadyExists, "{message}");

    let long = "n".repeat(10 << 20);
    assert!(channel.request(&long, 1).await.unwrap_err().to_string().contains("10485760"));
    assert!(channel.is_open());

    let settings = RdmaDevice::builder().named_tensor_timeout(Duration::from_millis(600));
    let (_server, _client, channel) = pair_with(settings).await;
    let (late, _) = code(channel.request("never", 1).await.unwrap_err());
    assert_eq!(late, Code::DeadlineExceeded);
}

/// Polls `request` at most `most` times, and lets other tasks run in between.
async fn poll_for(request: NamedRequest, most: usize) -> (usize, Option<Result<NamedReply, TensorError>>) {
    let mut request = std::pin::pin!(request);
    for count in 0..most {
        let polled = std::future::poll_fn(|context| Poll::Ready(request.as_mut().poll(context))).await;
        if let Poll::Ready(result) = polled {
            return (count, Some(result));
        }
        tokio::task::yield_now().await;
    }
    (most, None)
}

/// The offer stays until the reader has the tensor, also if the reader gives up in the middle of the write or
/// behind it.
#[tokio::test]
async fn a_reader_that_gave_up_gets_the_tensor_when_it_asks_again() {
    for checksums in [false, true] {
        let (server, _client, channel) = pair_with(RdmaDevice::builder().checksums(checksums)).await;
        let (mut step, mut given_up) = (0, 0);
        for length in [4_u64 << 10, 256 << 10, 4 << 20, 32 << 20] {
            let sent = tensor(length, length);
            let mut whole = 0;
            // An emulated machine needs seconds for each of the longest tensors.
            let parts = if length > 4 << 20 { 4 } else { 24 };
            for part in 0..=parts {
                step += 1;
                server.put("kv", step, NamedOffer::Tensor(sent.clone()), 1).unwrap();
                // The first request tells how many polls there are.
                let most = if part == 0 { usize::MAX } else { whole * part / parts };
                let (polls, first) = poll_for(channel.request("kv", step), most).await;
                whole = whole.max(polls);
                given_up += u64::from(first.is_none());
                let found = match first {
                    Some(found) => found,
                    None => channel.request("kv", step).await,
                };
                let found = arrived(found);
                assert!(found.bytes().unwrap() == sent.bytes().unwrap(), "step {step}, part {part}");
            }
            assert_eq!(server.offer_counts(), OfferCounts::default(), "{length} bytes");
        }
        assert!(given_up > 0, "every first request was faster than its polls");
        // The program does not look at a result, and asks again.
        server.put("kv", 0, NamedOffer::Tensor(tensor(1, 5000)), 1).unwrap();
        let request = channel.request("kv", 0);
        while server.offer_counts().offers > 0 {
            tokio::task::yield_now().await;
        }
        drop(request);
        let found = arrived(channel.request("kv", 0).await);
        assert!(found.bytes().unwrap() == pattern(1, 5000));
        let twice = channel.request("kv", 0).await.unwrap_err().to_string();
        assert!(twice.contains("delivered already"), "{twice}");
    }
}

/// The budget holds one tensor and not two, so each step needs the memory of the tensor that no request has
/// taken.
#[tokio::test]
async fn a_tensor_that_nobody_took_makes_room_for_the_whole_device() {
    const LENGTH: u64 = 40 << 20;
    let config = Config::from_env().unwrap();
    let bind = |config| RdmaDevice::builder().config(config).bind("127.0.0.1:0");
    let (server, other) = (bind(config.clone()).await.unwrap(), bind(config.clone()).await.unwrap());
    // The first connection of the process sets the limit for all connections, also those of other tests.
    let _first = server.channel(&other.endpoint(), 0).await.unwrap();
    let client = bind(config.pinned_limit(64 << 20)).await.unwrap();
    let from_server = client.channel(&server.endpoint(), 0).await.unwrap();
    let from_other = client.channel(&other.endpoint(), 0).await.unwrap();
    let from_client = other.channel(&client.endpoint(), 0).await.unwrap();
    let leave_untaken = async |step| {
        server.put("kv", step, NamedOffer::Tensor(tensor(step, LENGTH)), 1).unwrap();
        let request = from_server.request("kv", step);
        while server.offer_counts().offers > 0 {
            tokio::task::yield_now().await;
        }
        drop(request);
        // The frames of a link keep their order, so behind this answer the tensor has arrived.
        server.put("barrier", step, NamedOffer::Dead, 1).unwrap();
        assert!(matches!(from_server.request("barrier", step).await, Ok(NamedReply::Dead)));
    };

    leave_untaken(1).await;
    other.put("other", 1, NamedOffer::Tensor(tensor(1, LENGTH)), 1).unwrap();
    drop(arrived(from_other.request("other", 1).await));

    leave_untaken(2).await;
    // The software device charges memory until the peer has unmapped it.
    let mut region = None;
    eventually("memory of a tensor that nobody took", async || {
        region = region.take().or_else(|| client.allocate(LENGTH as usize + 1).ok());
        region.is_some()
    })
    .await;
    drop(region);

    leave_untaken(3).await;
    client.put("own", 1, NamedOffer::Tensor(tensor(2, LENGTH)), 1).unwrap();
    drop(arrived(from_client.request("own", 1).await));
}

#[tokio::test]
async fn a_dropped_request_is_withdrawn() {
    let (server, _client, channel) = pair().await;
    drop(channel.request("gradient", 1));
    tokio::time::sleep(Duration::from_millis(5)).await;
    server.put("gradient", 1, NamedOffer::Tensor(tensor(1, 1000)), 1).unwrap();
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
        server.put(&format!("t{}", index % 10), index, NamedOffer::Tensor(sent), 1).unwrap();
    }
    for (index, request) in requests.into_iter().enumerate() {
        let found = arrived(request.await);
        assert!(found.bytes().unwrap() == pattern(index as u64, 100 + index % 10 * 1000));
    }
}

/// So many requests and answers use up the receives of both sides, and each arrival makes its side send a
/// frame.
#[tokio::test]
async fn hundreds_of_requests_are_answered_at_once() {
    const COUNT: usize = 600;
    let (server, _client, channel) = pair_with(RdmaDevice::builder().queue_pairs_per_peer(1)).await;
    let requests: Vec<_> = (0..COUNT).map(|index| channel.request(&format!("t{index}"), 0)).collect();
    eventually("the requests", async || server.offer_counts().requests == COUNT).await;
    let sent = tensor(1, 100);
    for index in 0..COUNT {
        server.put(&format!("t{index}"), 0, NamedOffer::Tensor(sent.clone()), 1).unwrap();
    }
    for (index, request) in requests.into_iter().enumerate() {
        let answer = tokio::time::timeout(Duration::from_secs(60), request).await;
        let tensor = arrived(answer.unwrap_or_else(|_| panic!("no answer to request {index}")));
        assert!(tensor.bytes().unwrap() == sent.bytes().unwrap());
    }
}
