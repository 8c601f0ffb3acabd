//! Calls that an end gives up: six kinds of cancel by the client, and those by the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use support::until;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::column::Column;
use crate::content::{check, code, joined, message};
use crate::probe::{self, Probe};
use crate::watch::Watch;

/// Returns a service whose handlers never answer.
fn silent(watch: &Watch) -> Probe {
    let [unary, collect, produce] = [(); 3].map(|()| watch.clone());
    Probe::new()
        .unary(move |_| {
            let guard = unary.begin();
            async move {
                std::future::pending::<()>().await;
                drop(guard);
                Err(Status::internal("a pending future ended"))
            }
        })
        .collect(move |request| {
            let guard = collect.begin();
            async move {
                let mut requests = request.into_inner();
                while requests.message().await?.is_some() {}
                drop(guard);
                Ok(Response::new(Bytes::new()))
            }
        })
        .produce(move |_| {
            let guard = produce.begin();
            let silence = tokio_stream::pending::<Result<Bytes, Status>>();
            async move {
                let replies = tokio_stream::StreamExt::map(silence, move |reply| {
                    let _guard = &guard;
                    reply
                });
                Ok(Response::new(probe::stream(replies)))
            }
        })
}

/// Checks that the connection carries calls as before.
async fn goes_on(client: &mut crate::caller::Caller) -> String {
    let mut echoed = client.exchange(Request::new(tokio_stream::once(message(9, 1000)))).await.unwrap();
    check(&probe::first(echoed.get_mut()).await.unwrap(), 9, 1000);
    "the connection goes on".to_owned()
}

pub(crate) async fn before_the_start(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(silent(&watch)).await;
    let mut client = column.client(&running).await;
    drop(client.unary(Request::new(Bytes::new())));
    let mut request = Request::new(Bytes::new());
    request.cancellation_handle().cancel();
    let ended = code(client.unary(request).await);
    let goes_on = goes_on(&mut client).await;
    joined([ended, format!("{} handlers began", watch.began()), goes_on])
}

pub(crate) async fn after_the_start(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(silent(&watch)).await;
    let mut client = column.client(&running).await;
    let mut caller = client.clone();
    let call = tokio::spawn(async move { caller.unary(Request::new(message(1, 5000))).await });
    watch.until_began(1).await;
    call.abort();
    watch.until_ended().await;
    joined(["the handler ends".to_owned(), goes_on(&mut client).await])
}

pub(crate) async fn by_a_handle(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(silent(&watch)).await;
    let mut client = column.client(&running).await;
    let mut request = Request::new(tokio_stream::pending::<Bytes>());
    let handle = request.cancellation_handle();
    let (ended, ()) = tokio::join!(client.collect(request), async {
        watch.until_began(1).await;
        handle.cancel();
    });
    watch.until_ended().await;
    joined([code(ended), "the handler ends".to_owned(), goes_on(&mut client).await])
}

pub(crate) async fn after_the_clients_last_message(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(silent(&watch)).await;
    let mut client = column.client(&running).await;
    let replies = client.produce(Request::new(message(1, 100))).await.unwrap();
    watch.until_began(1).await;
    drop(replies);
    watch.until_ended().await;
    joined(["the handler ends".to_owned(), goes_on(&mut client).await])
}

/// Returns an `Exchange` that echoes, and counts its end.
fn echoing(watch: &Watch) -> Probe {
    let watch = watch.clone();
    Probe::new().exchange(move |request| {
        let guard = watch.begin();
        async move {
            let replies = tokio_stream::StreamExt::map(request.into_inner(), move |reply| {
                let _guard = &guard;
                reply
            });
            Ok(Response::new(probe::stream(replies)))
        }
    })
}

pub(crate) async fn after_the_first_reply(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(echoing(&watch)).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    sender.send(message(1, 3000)).await.unwrap();
    let mut request = Request::new(ReceiverStream::new(requests));
    let handle = request.cancellation_handle();
    let mut replies = client.exchange(request).await.unwrap().into_inner();
    check(&probe::first(&mut replies).await.unwrap(), 1, 3000);
    handle.cancel();
    let ended = code(replies.message().await);
    watch.until_ended().await;
    let dropped = sender.closed().await;
    assert_eq!(dropped, ());
    joined([ended, "the handler and the requests end".to_owned(), goes_on(&mut client).await])
}

pub(crate) async fn while_requests_stream(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(silent(&watch)).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let mut caller = client.clone();
    let call = tokio::spawn(async move { caller.collect(Request::new(ReceiverStream::new(requests))).await });
    for number in 0..50 {
        sender.send(message(number, 5000)).await.unwrap();
    }
    watch.until_began(1).await;
    call.abort();
    watch.until_ended().await;
    sender.closed().await;
    joined(["the handler and the requests end".to_owned(), goes_on(&mut client).await])
}

pub(crate) async fn while_both_directions_stream(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(echoing(&watch)).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let mut request = Request::new(ReceiverStream::new(requests));
    let handle = request.cancellation_handle();
    let mut replies = client.exchange(request).await.unwrap().into_inner();
    let sending = tokio::spawn(async move {
        let mut number = 0;
        while sender.send(message(number, 5000)).await.is_ok() {
            number += 1;
        }
    });
    for number in 0..20 {
        check(&probe::first(&mut replies).await.unwrap(), number, 5000);
    }
    handle.cancel();
    drop(replies);
    watch.until_ended().await;
    sending.await.unwrap();
    joined(["the handler and the requests end".to_owned(), goes_on(&mut client).await])
}

/// The client drops the replies, but its stream of requests is still open.
pub(crate) async fn of_the_replies_alone(column: Column) -> String {
    let (watch, seen) = (Watch::default(), Arc::new(AtomicUsize::new(0)));
    let (handlers, count) = (watch.clone(), Arc::clone(&seen));
    let probe = Probe::new().exchange(move |request| {
        let (guard, count) = (handlers.begin(), Arc::clone(&count));
        let mut requests = request.into_inner();
        let (sender, replies) = probe::channel();
        tokio::spawn(async move {
            while let Ok(Some(message)) = requests.message().await {
                count.fetch_add(1, Ordering::SeqCst);
                if sender.send(Ok(message)).await.is_err() {
                    break;
                }
            }
            drop(guard);
        });
        async { Ok(Response::new(replies)) }
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let mut replies =
        client.exchange(Request::new(ReceiverStream::new(requests))).await.unwrap().into_inner();
    sender.send(message(0, 100)).await.unwrap();
    check(&probe::first(&mut replies).await.unwrap(), 0, 100);
    drop(replies);
    // Sends until the handler has seen ten more requests, or the call has ended.
    let mut number = 1;
    while number <= 10 && sender.send(message(number, 100)).await.is_ok() {
        until(|| seen.load(Ordering::SeqCst) > number as usize || sender.is_closed()).await;
        number += 1;
    }
    let ended = if sender.is_closed() { "the handler and the requests end" } else { "the handler goes on" };
    drop(sender);
    watch.until_ended().await;
    joined([ended.to_owned(), goes_on(&mut client).await])
}

pub(crate) async fn while_the_server_waits_for_room(column: Column) -> String {
    const LENGTH: usize = 100_000;
    let watch = Watch::default();
    let sent = Arc::new(AtomicUsize::new(0));
    let (handlers, count) = (watch.clone(), sent.clone());
    let probe = Probe::new().produce(move |_| {
        let (guard, count) = (handlers.begin(), count.clone());
        let (sender, replies) = probe::channel();
        tokio::spawn(async move {
            for number in 0.. {
                if sender.send(Ok(message(number, LENGTH))).await.is_err() {
                    break;
                }
                count.fetch_add(1, Ordering::SeqCst);
            }
            drop(guard);
        });
        async { Ok(Response::new(replies)) }
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let mut replies = client.produce(Request::new(Bytes::new())).await.unwrap().into_inner();
    check(&probe::first(&mut replies).await.unwrap(), 0, LENGTH);
    // The server fills the window, and then its count stands still.
    let mut before = usize::MAX;
    loop {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let now = sent.load(Ordering::SeqCst);
        if now == before {
            break;
        }
        before = now;
    }
    let running_before = watch.began() - watch.ended();
    drop(replies);
    watch.until_ended().await;
    joined([format!("{running_before} handler waits"), "it ends".to_owned(), goes_on(&mut client).await])
}

pub(crate) async fn of_the_connection(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(silent(&watch)).await;
    let client = column.client(&running).await;
    let calls: Vec<_> = (0..20)
        .map(|number| {
            let mut client = client.clone();
            tokio::spawn(async move { client.unary(Request::new(message(number, 100))).await })
        })
        .collect();
    watch.until_began(20).await;
    drop(client);
    calls.iter().for_each(|call| call.abort());
    watch.until_ended().await;
    format!("{} handlers end", watch.ended())
}

pub(crate) async fn of_a_thousand_calls(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(silent(&watch)).await;
    let mut client = column.client(&running).await;
    for round in 1..=10 {
        let calls: Vec<_> = (0..100)
            .map(|_| {
                let mut client = client.clone();
                tokio::spawn(async move { client.unary(Request::new(Bytes::new())).await })
            })
            .collect();
        watch.until_began(100 * round).await;
        calls.iter().for_each(|call| call.abort());
        watch.until_ended().await;
    }
    joined([format!("{} handlers end", watch.ended()), goes_on(&mut client).await])
}

pub(crate) async fn by_the_server(column: Column) -> String {
    let probe = Probe::new().exchange(async |request| {
        // Drops the requests: the client must not send into the void for ever.
        drop(request);
        let end = Err(Status::cancelled("the server gave up"));
        Ok(Response::new(probe::stream(tokio_stream::iter([Ok(message(1, 10)), end]))))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let mut replies =
        client.exchange(Request::new(ReceiverStream::new(requests))).await.unwrap().into_inner();
    check(&probe::first(&mut replies).await.unwrap(), 1, 10);
    let status = replies.message().await.unwrap_err();
    assert_eq!(status.message(), "the server gave up");
    drop(replies);
    until(|| sender.is_closed()).await;
    joined([crate::content::name(&status), "the requests end".to_owned()])
}
