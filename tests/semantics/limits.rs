//! Limits: on messages and metadata at both ends, and on calls at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use support::until;
use tonic::{Request, Response, Status};

use crate::caller::Caller;
use crate::column::{Column, ServerSettings};
use crate::content::{check, code, joined, message, name};
use crate::probe::Probe;
use crate::watch::Watch;

/// The longest message that tonic decodes by default, and that of it which is content: the field's number and
/// length take 5 bytes.
const DEFAULT: usize = (4 << 20) - 5;

/// Echoes messages of `lengths` bytes and returns the codes.
async fn echoes(client: &mut Caller, lengths: &[usize]) -> String {
    let mut codes = Vec::new();
    for (seed, length) in (0..).zip(lengths.iter().copied()) {
        let reply = client.echo(message(seed, length)).await;
        if let Ok(reply) = &reply {
            check(reply, seed, length);
        }
        codes.push(code(reply));
    }
    joined(codes)
}

pub(crate) async fn of_the_servers_decoder(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await.decoding(2 * DEFAULT);
    echoes(&mut client, &[DEFAULT, DEFAULT + 1, 100, DEFAULT]).await
}

pub(crate) async fn of_the_clients_decoder(column: Column) -> String {
    let running = column.serve(Probe::new().decoding(2 * DEFAULT)).await;
    let mut client = column.client(&running).await;
    echoes(&mut client, &[DEFAULT, DEFAULT + 1, 100, DEFAULT]).await
}

pub(crate) async fn of_the_servers_encoder(column: Column) -> String {
    let running = column.serve(Probe::new().encoding(1003)).await;
    let mut client = column.client(&running).await;
    echoes(&mut client, &[1000, 1001, 100]).await
}

pub(crate) async fn of_the_clients_encoder(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await.encoding(1003);
    echoes(&mut client, &[1000, 1001, 100]).await
}

pub(crate) async fn that_are_small(column: Column) -> String {
    let running = column.serve(Probe::new().decoding(12)).await;
    let mut client = column.client(&running).await.decoding(12);
    echoes(&mut client, &[0, 10, 11, 100_000, 10]).await
}

/// Returns a request with a header of `bytes` bytes.
fn with_header(bytes: usize) -> Request<Bytes> {
    let mut request = Request::new(message(1, 10));
    request.metadata_mut().insert("x-large", "v".repeat(bytes).parse().unwrap());
    request
}

pub(crate) async fn on_the_metadata_that_a_server_takes(column: Column) -> String {
    let settings = ServerSettings { head: Some(8 << 10), ..ServerSettings::default() };
    let running = column.serve_with(settings, Probe::new()).await;
    let mut client = column.client(&running).await;
    let below = code(client.unary(with_header(4 << 10)).await);
    let above = client.unary(with_header(12 << 10)).await;
    check(&client.echo(message(1, 100)).await.unwrap(), 1, 100);
    joined([below, code(above), "the connection goes on".to_owned()])
}

pub(crate) async fn on_the_metadata_that_a_client_takes(column: Column) -> String {
    let probe = Probe::new().unary(async |request| {
        let length = request.get_ref().len();
        let mut response = Response::new(request.into_inner());
        response.metadata_mut().insert("x-large", "v".repeat(length).parse().unwrap());
        Ok(response)
    });
    let running = column.serve(probe).await;
    let mut client = Caller::new(column.connect_with_head(running.endpoint(), 8 << 10).await);
    let below = client.echo(message(1, 4 << 10)).await;
    let above = client.echo(message(1, 12 << 10)).await;
    check(&client.echo(message(1, 100)).await.unwrap(), 1, 100);
    joined([code(below), code(above), "the connection goes on".to_owned()])
}

/// Returns a service whose calls wait for `releases`, and the largest number of calls that waited at one
/// time.
fn held(watch: &Watch, releases: &Arc<tokio::sync::Semaphore>) -> (Probe, Arc<AtomicUsize>) {
    let most = Arc::new(AtomicUsize::new(0));
    let (watch, releases, counted) = (watch.clone(), Arc::clone(releases), Arc::clone(&most));
    let probe = Probe::new().unary(move |request| {
        let guard = watch.begin();
        // Others may end between the two counts.
        counted.fetch_max(watch.began().saturating_sub(watch.ended()), Ordering::SeqCst);
        let releases = Arc::clone(&releases);
        async move {
            releases.acquire().await.unwrap().forget();
            drop(guard);
            Ok(Response::new(request.into_inner()))
        }
    });
    (probe, most)
}

/// Makes 20 calls, of which `allowed` may run at a time. Releases them one by one.
async fn at_a_time(
    column: Column,
    settings: ServerSettings,
    client_limit: Option<usize>,
    allowed: usize,
) -> String {
    const CALLS: usize = 20;
    let (watch, releases) = (Watch::default(), Arc::new(tokio::sync::Semaphore::new(1)));
    let (probe, most) = held(&watch, &releases);
    let running = column.serve_with(settings, probe).await;
    let endpoint = match client_limit {
        Some(limit) => running.endpoint().concurrency_limit(limit),
        None => running.endpoint(),
    };
    let client = Caller::new(column.connect(endpoint).await.unwrap());
    // Before the server's settings arrive, a client does not know how many streams it may open.
    check(&client.clone().echo(message(0, 10)).await.unwrap(), 0, 10);
    let calls: Vec<_> = (0..CALLS as u64)
        .map(|seed| {
            let mut client = client.clone();
            tokio::spawn(async move { check(&client.echo(message(seed, 900)).await.unwrap(), seed, 900) })
        })
        .collect();
    for done in 0..CALLS {
        until(|| watch.began() - watch.ended() == allowed.min(CALLS - done)).await;
        releases.add_permits(1);
        until(|| watch.ended() == 1 + done + 1).await;
    }
    for call in calls {
        call.await.unwrap();
    }
    format!("all are answered, {} at a time", most.load(Ordering::SeqCst))
}

pub(crate) async fn on_calls_of_a_connection(column: Column) -> String {
    let settings = ServerSettings { streams: Some(3), ..ServerSettings::default() };
    at_a_time(column, settings, None, 3).await
}

pub(crate) async fn on_calls_of_a_channel(column: Column) -> String {
    at_a_time(column, ServerSettings::default(), Some(2), 2).await
}

/// A call that waits for a free stream may be dropped, and takes no place afterwards.
pub(crate) async fn on_calls_that_wait_and_give_up(column: Column) -> String {
    let (watch, releases) = (Watch::default(), Arc::new(tokio::sync::Semaphore::new(1)));
    let (probe, _) = held(&watch, &releases);
    let settings = ServerSettings { streams: Some(1), ..ServerSettings::default() };
    let running = column.serve_with(settings, probe).await;
    let client = column.client(&running).await;
    check(&client.clone().echo(message(0, 10)).await.unwrap(), 0, 10);
    let mut first = client.clone();
    let first = tokio::spawn(async move { first.echo(message(1, 10)).await.map_err(|status| name(&status)) });
    watch.until_began(2).await;
    let waiting: Vec<_> = (0..10)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.echo(message(2, 10)).await })
        })
        .collect();
    tokio::time::sleep(std::time::Duration::from_millis(30)).await;
    waiting.iter().for_each(|call| call.abort());
    releases.add_permits(1);
    check(&first.await.unwrap().unwrap(), 1, 10);
    releases.add_permits(20);
    check(&client.clone().echo(message(3, 10)).await.unwrap(), 3, 10);
    watch.until_ended().await;
    joined([code(Ok::<_, Status>(())), "the next call gets the place".to_owned()])
}
