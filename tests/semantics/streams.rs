//! Streams: half-close each way, a server that ends early, order, and readers that are slow.

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::column::Column;
use crate::content::{check, code, joined, message, name};
use crate::probe::{self, Probe};

pub(crate) async fn of_requests(column: Column) -> String {
    let running = column.serve(Probe::new().decoding(usize::MAX)).await;
    let mut client = column.client(&running).await.decoding(usize::MAX);
    let requests = (0..100).map(|number| message(number, 10_000));
    let joined: Vec<u8> = requests.clone().flatten().collect();
    let reply = client.collect(Request::new(tokio_stream::iter(requests))).await.unwrap();
    assert!(*reply.get_ref() == joined, "the joined requests");
    "100 requests, one reply".to_owned()
}

pub(crate) async fn of_replies(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let mut replies = client.produce(Request::new(message(1, 100))).await.unwrap().into_inner();
    let mut received = Vec::new();
    while let Some(reply) = replies.message().await.unwrap() {
        received.push(reply);
    }
    check(&received.concat(), 1, 100);
    format!("one request, {} replies", received.len())
}

pub(crate) async fn without_messages(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let nothing = || Request::new(tokio_stream::empty::<Bytes>());
    let mut exchanged = client.exchange(nothing()).await.unwrap().into_inner();
    let mut produced = client.produce(Request::new(Bytes::new())).await.unwrap().into_inner();
    joined([
        format!("exchange: {:?}", exchanged.message().await.unwrap()),
        format!("produce: {:?}", produced.message().await.unwrap()),
        format!("collect: {} bytes", client.collect(nothing()).await.unwrap().get_ref().len()),
    ])
}

pub(crate) async fn closed_by_the_client_first(column: Column) -> String {
    // Replies begin when the requests have ended.
    let probe = Probe::new().exchange(async |request| {
        let mut requests = request.into_inner();
        let (sender, replies) = probe::channel();
        tokio::spawn(async move {
            let mut kept = Vec::new();
            while let Ok(Some(message)) = requests.message().await {
                kept.push(message);
            }
            for message in kept {
                let _ = sender.send(Ok(message)).await;
            }
        });
        Ok(Response::new(replies))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let requests = (0..50).map(|number| message(number, 2000));
    let mut replies = client.exchange(Request::new(tokio_stream::iter(requests))).await.unwrap().into_inner();
    for number in 0..50 {
        check(&probe::first(&mut replies).await.unwrap(), number, 2000);
    }
    format!("50 replies after the end of the requests, then {:?}", replies.message().await.unwrap())
}

pub(crate) async fn closed_by_the_server_first(column: Column) -> String {
    let probe = Probe::new().exchange(async |request| {
        let mut requests = request.into_inner();
        let first = requests.message().await?.ok_or_else(|| Status::internal("no request"))?;
        Ok(Response::new(probe::stream(tokio_stream::once(Ok(first)))))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    sender.send(message(1, 2000)).await.unwrap();
    let mut replies =
        client.exchange(Request::new(ReceiverStream::new(requests))).await.unwrap().into_inner();
    check(&probe::first(&mut replies).await.unwrap(), 1, 2000);
    let end = replies.message().await.unwrap();
    sender.closed().await;
    joined([format!("the client reads {end:?}"), "the requests end".to_owned()])
}

/// The server answers without reading more than the first request, while the client goes on sending.
pub(crate) async fn answered_before_the_requests_end(column: Column) -> String {
    let probe = Probe::new().collect(async |request| {
        let first = request.into_inner().message().await?;
        Ok(Response::new(first.unwrap_or_default()))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let sending = tokio::spawn(async move {
        let mut number = 0;
        while sender.send(message(number, 10_000)).await.is_ok() {
            number += 1;
        }
    });
    let reply = client.collect(Request::new(ReceiverStream::new(requests))).await;
    let ended = code(reply.as_ref().map_err(Clone::clone));
    if let Ok(reply) = reply {
        check(reply.get_ref(), 0, 10_000);
    }
    sending.await.unwrap();
    joined([ended, "the requests end".to_owned()])
}

pub(crate) async fn refused_before_the_requests_end(column: Column) -> String {
    let probe = Probe::new().collect(async |_| Err(Status::resource_exhausted("no room for this")));
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let sending = tokio::spawn(async move {
        let mut number = 0;
        while sender.send(message(number, 10_000)).await.is_ok() {
            number += 1;
        }
    });
    let status = client.collect(Request::new(ReceiverStream::new(requests))).await.unwrap_err();
    assert_eq!(status.message(), "no room for this");
    sending.await.unwrap();
    joined([name(&status), "the requests end".to_owned()])
}

/// One stream is not read. The others go on.
pub(crate) async fn beside_one_that_is_not_read(column: Column) -> String {
    let probe = Probe::new().produce(async |_| {
        let (sender, replies) = probe::channel();
        tokio::spawn(async move {
            for number in 0..200 {
                if sender.send(Ok(message(number, 20_000))).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(replies))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let mut blocked = client.produce(Request::new(Bytes::new())).await.unwrap().into_inner();
    check(&probe::first(&mut blocked).await.unwrap(), 0, 20_000);
    for seed in 0..200 {
        check(&client.echo(message(seed, 5000)).await.unwrap(), seed, 5000);
    }
    for number in 1..200 {
        check(&probe::first(&mut blocked).await.unwrap(), number, 20_000);
    }
    format!("200 calls beside it: OK, then its own replies and {:?}", blocked.message().await.unwrap())
}

/// The client sends more than a window before it reads a reply, so both directions fill up.
pub(crate) async fn read_late_in_both_directions(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let requests = (0..100).map(|number| message(number, 50_000));
    let mut replies = client.exchange(Request::new(tokio_stream::iter(requests))).await.unwrap().into_inner();
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    for number in 0..100 {
        check(&probe::first(&mut replies).await.unwrap(), number, 50_000);
    }
    format!("100 messages come back, then {:?}", replies.message().await.unwrap())
}

/// The head of the response arrives before the first message.
pub(crate) async fn with_a_head_before_messages(column: Column) -> String {
    let probe = Probe::new().exchange(async |request| {
        let mut response = Response::new(probe::stream(request.into_inner()));
        response.metadata_mut().insert("early", "yes".parse().unwrap());
        Ok(response)
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let response = client.exchange(Request::new(ReceiverStream::new(requests))).await.unwrap();
    assert_eq!(response.metadata().get("early").unwrap(), "yes");
    // The first request goes only now.
    sender.send(message(1, 100)).await.unwrap();
    let mut replies = response.into_inner();
    check(&probe::first(&mut replies).await.unwrap(), 1, 100);
    drop(sender);
    format!("head, message, {:?}", replies.message().await.unwrap())
}

/// Requests flow while the client only waits for the response, and while it only reads replies.
pub(crate) async fn whose_requests_move_by_themselves(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let feeding = tokio::spawn(async move {
        for number in 0..20 {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            sender.send(message(number, 1000)).await.unwrap();
        }
    });
    let reply = client.collect(Request::new(ReceiverStream::new(requests))).await.unwrap();
    feeding.await.unwrap();
    let expected: Vec<u8> = (0..20).flat_map(|number| message(number, 1000)).collect();
    assert!(*reply.get_ref() == expected, "the joined requests");
    "20 requests arrive".to_owned()
}
