//! Connections: made late, made again, ended by age, by idleness and by a shutdown.

use std::sync::Arc;
use std::time::Duration;

use support::{Port, until};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response};

use crate::caller::Caller;
use crate::column::{Column, ServerSettings};
use crate::content::{check, code, joined, message};
use crate::extensions::peer;
use crate::probe::{self, Probe};
use crate::watch::Watch;

const SHORT: Duration = Duration::from_millis(100);

/// Returns a service that answers with the client's address. A request that is not empty waits for a release.
fn addresses(watch: &Watch, releases: &Arc<Semaphore>) -> Probe {
    let (watch, releases) = (watch.clone(), Arc::clone(releases));
    Probe::new().unary(move |request| {
        let guard = watch.begin();
        let releases = Arc::clone(&releases);
        async move {
            if !request.get_ref().is_empty() {
                releases.acquire().await.unwrap().forget();
            }
            drop(guard);
            Ok(Response::new(peer(&request).into()))
        }
    })
}

fn simple() -> Probe {
    addresses(&Watch::default(), &Arc::new(Semaphore::new(0)))
}

pub(crate) async fn shared_by_all_calls(column: Column) -> String {
    let running = column.serve(simple()).await;
    let client = column.client(&running).await;
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.echo("").await.unwrap() })
        })
        .collect();
    let mut addresses = std::collections::BTreeSet::new();
    for call in calls {
        addresses.insert(call.await.unwrap());
    }
    format!("100 calls over {} connection", addresses.len())
}

pub(crate) async fn made_by_the_first_call(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = Caller::new(column.connect_lazily(&running.endpoint()));
    check(&client.echo(message(1, 5000)).await.unwrap(), 1, 5000);
    "OK".to_owned()
}

pub(crate) async fn made_by_many_first_calls(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let client = Caller::new(column.connect_lazily(&running.endpoint()));
    let calls: Vec<_> = (0..50)
        .map(|seed| {
            let mut client = client.clone();
            tokio::spawn(async move { check(&client.echo(message(seed, 300)).await.unwrap(), seed, 300) })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    "OK".to_owned()
}

pub(crate) async fn to_no_server(column: Column) -> String {
    let port = Port::reserve();
    let eager = column.connect(port.endpoint()).await.is_err();
    let mut lazy = Caller::new(column.connect_lazily(&port.endpoint()));
    let calls = [code(lazy.echo("").await), code(lazy.echo("").await)];
    joined([format!("an eager one fails: {eager}"), format!("calls of a lazy one: {}", calls.join(", "))])
}

pub(crate) async fn to_a_server_that_starts_late(column: Column) -> String {
    let port = Port::reserve();
    let mut client = Caller::new(column.connect_lazily(&port.endpoint()));
    let early = code(client.echo("").await);
    let _running = column.serve_on(&port, Probe::new()).await;
    // The channel may wait before it dials again.
    let mut late = client.echo(message(1, 100)).await;
    while late.as_ref().is_err_and(|status| status.code() == Code::Unavailable) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        late = client.echo(message(1, 100)).await;
    }
    check(&late.unwrap(), 1, 100);
    joined([early, "then OK".to_owned()])
}

pub(crate) async fn made_again_after_a_restart(column: Column) -> String {
    let port = Port::reserve();
    let mut running = column.serve_on(&port, Probe::new()).await;
    let mut client = column.client(&running).await;
    for seed in 0..3 {
        check(&client.echo(message(seed, 1000)).await.unwrap(), seed, 1000);
        running.end().await;
        until_unavailable(&mut client).await;
        running = column.serve_on(&port, Probe::new()).await;
        let mut again = client.echo(message(seed, 1000)).await;
        while again.as_ref().is_err_and(|status| status.code() == Code::Unavailable) {
            tokio::time::sleep(Duration::from_millis(20)).await;
            again = client.echo(message(seed, 1000)).await;
        }
        check(&again.unwrap(), seed, 1000);
    }
    "OK after each of 3 restarts".to_owned()
}

/// Makes calls until one ends with UNAVAILABLE. A call that was given to the old connection may end
/// otherwise.
async fn until_unavailable(client: &mut Caller) {
    while client.echo("").await.err().map(|status| status.code()) != Some(Code::Unavailable) {
        tokio::task::yield_now().await;
    }
}

pub(crate) async fn of_a_certain_age(column: Column) -> String {
    let settings = ServerSettings { age: Some((SHORT, None)), ..ServerSettings::default() };
    let running = column.serve_with(settings, simple()).await;
    let mut client = column.client(&running).await;
    // Calls at the moment of the connection's end may fail.
    let first = loop {
        if let Ok(first) = client.echo("").await {
            break first;
        }
    };
    while client.echo("").await.map_or(true, |now| now == first) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    "ends; the next call: a new connection".to_owned()
}

pub(crate) async fn of_a_certain_age_with_a_call_under_way(column: Column) -> String {
    // Long enough for two calls over one connection.
    let settings = ServerSettings { age: Some((20 * SHORT, None)), ..ServerSettings::default() };
    let (watch, releases) = (Watch::default(), Arc::new(Semaphore::new(0)));
    let running = column.serve_with(settings, addresses(&watch, &releases)).await;
    let mut client = column.client(&running).await;
    let mut other = client.clone();
    let call = tokio::spawn(async move { other.echo("wait").await });
    let first = client.echo("").await.unwrap();
    watch.until_began(2).await;
    while client.echo("").await.is_ok_and(|now| now == first) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut beside = "fail";
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        if client.echo("").await.is_ok_and(|now| now != first) {
            beside = "a new connection";
        }
    }
    releases.add_permits(1);
    let old = call.await.unwrap();
    while client.echo("").await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    joined([
        format!("the call: {}", code(old)),
        format!("others before its end: {beside}"),
        "after it: a new connection".to_owned(),
    ])
}

pub(crate) async fn of_a_certain_age_and_grace(column: Column) -> String {
    let settings = ServerSettings { age: Some((SHORT, Some(SHORT))), ..ServerSettings::default() };
    let (watch, releases) = (Watch::default(), Arc::new(Semaphore::new(0)));
    let running = column.serve_with(settings, addresses(&watch, &releases)).await;
    let mut client = column.client(&running).await;
    let mut ended = client.echo("wait").await;
    // On a busy machine the connection may be too old before the call is there.
    while watch.began() == 0 {
        ended = client.echo("wait").await;
    }
    watch.until_ended().await;
    joined([format!("a call longer than both: {}", code(ended)), "its handler ends".to_owned()])
}

pub(crate) async fn without_calls(column: Column) -> String {
    let settings = ServerSettings { idle: Some(SHORT), ..ServerSettings::default() };
    let (watch, releases) = (Watch::default(), Arc::new(Semaphore::new(0)));
    let running = column.serve_with(settings, addresses(&watch, &releases)).await;
    let mut client = column.client(&running).await;
    // A call keeps the connection.
    let mut other = client.clone();
    let call = tokio::spawn(async move { other.echo("wait").await });
    watch.until_began(1).await;
    tokio::time::sleep(4 * SHORT).await;
    let mut now = client.echo("").await.unwrap();
    releases.add_permits(1);
    let first = call.await.unwrap().unwrap();
    assert_eq!(now, first, "a connection with a call is not idle");
    while now == first {
        tokio::time::sleep(3 * SHORT).await;
        now = client.echo("").await.unwrap();
    }
    "ends; the next call: a new connection".to_owned()
}

pub(crate) async fn of_a_server_that_shuts_down(column: Column) -> String {
    let port = Port::reserve();
    let (watch, releases) = (Watch::default(), Arc::new(Semaphore::new(0)));
    let probe = addresses(&watch, &releases);
    let running = column.serve_on(&port, probe).await;
    let mut client = column.client(&running).await;
    let mut other = client.clone();
    let call = tokio::spawn(async move { other.echo("wait").await });
    let (sender, requests) = mpsc::channel(1);
    let mut replies =
        client.exchange(Request::new(ReceiverStream::new(requests))).await.unwrap().into_inner();
    sender.send(message(1, 3000)).await.unwrap();
    check(&probe::first(&mut replies).await.unwrap(), 1, 3000);
    watch.until_began(1).await;

    let server = running.shut_down();
    while column.connect(port.endpoint()).await.is_ok() {}
    until_unavailable(&mut client).await;
    assert!(!server.is_finished(), "the server did not wait for its calls");
    sender.send(message(2, 100_000)).await.unwrap();
    check(&probe::first(&mut replies).await.unwrap(), 2, 100_000);
    drop(sender);
    assert!(replies.message().await.unwrap().is_none(), "a message too many");
    releases.add_permits(1);
    let waited = code(call.await.unwrap());
    server.await.unwrap().unwrap();
    joined([
        format!("a call under way: {waited}"),
        "a stream: OK".to_owned(),
        "new calls: UNAVAILABLE".to_owned(),
        "then the server ends".to_owned(),
    ])
}

pub(crate) async fn of_a_server_without_calls_that_shuts_down(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut clients = Vec::new();
    for seed in 0..3 {
        let mut client = column.client(&running).await;
        check(&client.echo(message(seed, 100)).await.unwrap(), seed, 100);
        clients.push(client);
    }
    running.end().await;
    let mut codes = Vec::new();
    for mut client in clients {
        until_unavailable(&mut client).await;
        codes.push(code(client.echo("").await));
    }
    joined(codes)
}

/// A dropped channel ends its connection: a graceful shutdown waits for nothing.
pub(crate) async fn of_a_channel_that_was_dropped(column: Column) -> String {
    let watch = Watch::default();
    let handlers = watch.clone();
    let probe = Probe::new().exchange(move |request| {
        let guard = handlers.begin();
        async move {
            let replies = tokio_stream::StreamExt::map(request.into_inner(), move |reply| {
                let _guard = &guard;
                reply
            });
            Ok(Response::new(probe::stream(replies)))
        }
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let (sender, requests) = mpsc::channel(1);
    let mut replies =
        client.exchange(Request::new(ReceiverStream::new(requests))).await.unwrap().into_inner();
    drop(client);
    // The stream keeps the connection.
    sender.send(message(1, 3000)).await.unwrap();
    check(&probe::first(&mut replies).await.unwrap(), 1, 3000);
    drop((sender, replies));
    until(|| watch.ended() == 1).await;
    running.end().await;
    "the stream goes on without the channel; then the server ends".to_owned()
}
