//! Messages of all sizes, compressed ones, and many of them.

use bytes::Bytes;
use tokio_stream::StreamExt as _;
use tonic::codec::CompressionEncoding::Gzip;
use tonic::{Request, Response};

use crate::column::Column;
use crate::content::{check, code, joined, message};
use crate::probe::{self, Probe};

/// Sends a message of `length` bytes there and back.
async fn there_and_back(column: Column, length: usize) -> String {
    let most = length + 100;
    let running = column.serve(Probe::new().decoding(most).encoding(most)).await;
    let mut client = column.client(&running).await.decoding(most).encoding(most);
    for seed in 1..=if length > 1 << 20 { 1 } else { 3 } {
        check(&client.echo(message(seed, length)).await.unwrap(), seed, length);
    }
    "the same bytes come back".to_owned()
}

pub(crate) async fn of_0_bytes(column: Column) -> String {
    there_and_back(column, 0).await
}

pub(crate) async fn of_1_byte(column: Column) -> String {
    there_and_back(column, 1).await
}

pub(crate) async fn of_4_kib(column: Column) -> String {
    there_and_back(column, 4 << 10).await
}

pub(crate) async fn of_1_mib(column: Column) -> String {
    there_and_back(column, 1 << 20).await
}

pub(crate) async fn of_64_mib(column: Column) -> String {
    there_and_back(column, 64 << 20).await
}

/// Lengths around powers of two, where framing and thresholds have their edges.
fn lengths() -> Vec<usize> {
    (0..=17)
        .flat_map(|power| [-7_i64, -1, 0, 1, 7].map(|by| (1 << power) + by))
        .filter_map(|length| usize::try_from(length).ok())
        .collect()
}

pub(crate) async fn of_lengths_around_powers_of_two(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    for length in lengths() {
        let seed = length as u64;
        check(&client.echo(message(seed, length)).await.unwrap(), seed, length);
    }
    "the same bytes come back".to_owned()
}

pub(crate) async fn of_mixed_lengths_in_a_stream(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let requests = lengths().into_iter().map(|length| message(length as u64, length));
    let requests: Vec<_> = requests.collect();
    let mut replies = client.exchange(Request::new(tokio_stream::iter(requests))).await.unwrap().into_inner();
    for length in lengths() {
        check(&probe::first(&mut replies).await.unwrap(), length as u64, length);
    }
    assert!(replies.message().await.unwrap().is_none(), "a message too many");
    "the same bytes come back, in order".to_owned()
}

pub(crate) async fn empty_ones_in_a_stream(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let requests = tokio_stream::iter(vec![Bytes::new(); 100]);
    let replies = client.exchange(Request::new(requests)).await.unwrap().into_inner();
    let replies: Vec<_> = replies.map(Result::unwrap).collect().await;
    assert!(replies.iter().all(Bytes::is_empty), "content out of nothing");
    format!("{} messages come back", replies.len())
}

pub(crate) async fn ten_thousand_ping_pongs(column: Column) -> String {
    const COUNT: u64 = 10_000;
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = tokio::sync::mpsc::channel(1);
    let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
    let mut replies = client.exchange(Request::new(requests)).await.unwrap().into_inner();
    for number in 0..COUNT {
        sender.send(Bytes::copy_from_slice(&number.to_le_bytes())).await.unwrap();
        assert_eq!(probe::first(&mut replies).await.unwrap(), number.to_le_bytes().as_slice());
    }
    drop(sender);
    assert!(replies.message().await.unwrap().is_none(), "a message too many");
    format!("{COUNT} messages come back, in order")
}

pub(crate) async fn a_thousand_calls_at_once(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let client = column.client(&running).await;
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..1000_u64 {
        let mut client = client.clone();
        calls.spawn(async move {
            let length = (number as usize * 31) % 9001;
            check(&client.echo(message(number, length)).await.unwrap(), number, length);
        });
    }
    let mut answered = 0;
    while let Some(call) = calls.join_next().await {
        call.unwrap();
        answered += 1;
    }
    format!("{answered} calls get their own bytes back")
}

pub(crate) async fn a_hundred_streams_at_once(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let client = column.client(&running).await;
    let mut calls = tokio::task::JoinSet::new();
    for stream in 0..100_u64 {
        let mut client = client.clone();
        calls.spawn(async move {
            let requests = (0..20).map(move |number| message(stream * 100 + number, 3000));
            let requests = Request::new(tokio_stream::iter(requests));
            let mut replies = client.exchange(requests).await.unwrap().into_inner();
            for number in 0..20 {
                check(&probe::first(&mut replies).await.unwrap(), stream * 100 + number, 3000);
            }
            assert!(replies.message().await.unwrap().is_none(), "a message too many");
        });
    }
    let mut ended = 0;
    while let Some(call) = calls.join_next().await {
        call.unwrap();
        ended += 1;
    }
    format!("{ended} streams get their own bytes back, in order")
}

/// Returns a message that becomes much shorter when it is compressed.
fn repeating(length: usize) -> Bytes {
    let sentence = b"a sentence that repeats, and becomes short. ";
    sentence.iter().copied().cycle().take(length).collect::<Vec<_>>().into()
}

pub(crate) async fn compressed_both_ways(column: Column) -> String {
    let probe = Probe::new().accept(Gzip).send(Gzip).unary(async |request| {
        let encoding = request.metadata().get("grpc-encoding").cloned();
        let mut response = Response::new(request.into_inner());
        let seen = format!("{:?}", encoding.map(|value| value.to_str().unwrap().to_owned()));
        response.metadata_mut().insert("seen", seen.parse().unwrap());
        Ok(response)
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await.send(Gzip).accept(Gzip);
    let mut named = String::new();
    for length in [0, 1, 100, 100_000, 1 << 20] {
        let reply = client.unary(Request::new(repeating(length))).await.unwrap();
        assert!(*reply.get_ref() == repeating(length), "the content changed");
        let [there, back] = ["seen", "grpc-encoding"].map(|name| reply.metadata().get(name).cloned());
        named =
            format!("there {}, back {}", there.unwrap().to_str().unwrap(), back.unwrap().to_str().unwrap());
    }
    named
}

pub(crate) async fn compressed_streams(column: Column) -> String {
    let running = column.serve(Probe::new().accept(Gzip).send(Gzip)).await;
    let mut client = column.client(&running).await.send(Gzip).accept(Gzip);
    let lengths = [10_usize, 100_000, 0, 1000, 300_000];
    let requests = tokio_stream::iter(lengths.map(repeating));
    let mut replies = client.exchange(Request::new(requests)).await.unwrap().into_inner();
    for length in lengths {
        assert!(probe::first(&mut replies).await.unwrap() == repeating(length), "the content changed");
    }
    "the same bytes come back, in order".to_owned()
}

pub(crate) async fn compressed_for_a_server_that_takes_none(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await.send(Gzip);
    let refused = client.echo(repeating(1000)).await;
    let mut plain = column.client(&running).await;
    joined([code(refused), format!("plain: {}", code(plain.echo(repeating(1000)).await))])
}
