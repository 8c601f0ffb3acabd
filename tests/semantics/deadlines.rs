//! Deadlines: of a call, of a channel and of a server; passed, negative and not understood.

use std::time::Duration;

use bytes::Bytes;
use tonic::{Code, Request, Response, Status};

use crate::caller::Caller;
use crate::column::{Column, ServerSettings};
use crate::content::{check, code, joined, message};
use crate::probe::{self, Probe};
use crate::watch::Watch;

const SHORT: Duration = Duration::from_millis(100);
/// Longer than any test.
const LONG: Duration = Duration::from_secs(3600);

/// Returns a service that echoes, but never answers an empty request.
fn probe(watch: &Watch) -> Probe {
    let watch = watch.clone();
    Probe::new().unary(move |request| {
        let guard = watch.begin();
        async move {
            if request.get_ref().is_empty() {
                std::future::pending::<()>().await;
            }
            drop(guard);
            Ok(Response::new(request.into_inner()))
        }
    })
}

/// Returns an empty request with a deadline.
fn unanswered(timeout: Duration) -> Request<Bytes> {
    let mut request = Request::new(Bytes::new());
    request.set_timeout(timeout);
    request
}

pub(crate) async fn of_a_call(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(probe(&watch)).await;
    let mut client = column.client(&running).await;
    let ended = code(client.unary(unanswered(SHORT)).await);
    watch.until_ended().await;
    check(&client.echo(message(1, 1000)).await.unwrap(), 1, 1000);
    joined([ended, "the handler ends".to_owned(), "the connection goes on".to_owned()])
}

pub(crate) async fn of_a_channel(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(probe(&watch)).await;
    let channel = column.connect(running.endpoint().timeout(SHORT)).await.unwrap();
    let ended = code(Caller::new(channel).echo("").await);
    watch.until_ended().await;
    joined([ended, "the handler ends".to_owned()])
}

pub(crate) async fn of_a_server(column: Column) -> String {
    let watch = Watch::default();
    let settings = ServerSettings { timeout: Some(SHORT), ..ServerSettings::default() };
    let running = column.serve_with(settings, probe(&watch)).await;
    let mut client = column.client(&running).await;
    let ended = code(client.echo("").await);
    watch.until_ended().await;
    joined([ended, "the handler ends".to_owned()])
}

pub(crate) async fn the_shorter_of_two(column: Column) -> String {
    let watch = Watch::default();
    let settings = ServerSettings { timeout: Some(LONG), ..ServerSettings::default() };
    let running = column.serve_with(settings, probe(&watch)).await;
    let endpoint = running.endpoint().timeout(LONG);
    let mut client = Caller::new(column.connect(endpoint).await.unwrap());
    let calls = client.unary(unanswered(SHORT)).await;
    let settings = ServerSettings { timeout: Some(SHORT), ..ServerSettings::default() };
    let running = column.serve_with(settings, probe(&watch)).await;
    let mut client = column.client(&running).await;
    let servers = client.unary(unanswered(LONG)).await;
    joined([code(calls), code(servers)])
}

pub(crate) async fn of_zero(column: Column) -> String {
    let running = column.serve(probe(&Watch::default())).await;
    let mut client = column.client(&running).await;
    code(client.unary(unanswered(Duration::ZERO)).await)
}

pub(crate) async fn already_passed(column: Column) -> String {
    let running = column.serve(probe(&Watch::default())).await;
    let mut client = column.client(&running).await;
    code(client.unary(unanswered(Duration::from_nanos(1))).await)
}

/// Sends `value` as the deadline of a call that is answered at once.
async fn with_header(column: Column, values: &[&'static str]) -> String {
    let running = column.serve(probe(&Watch::default())).await;
    let mut client = column.client(&running).await;
    let mut outcomes = Vec::new();
    for value in values {
        let mut request = Request::new(message(2, 500));
        request.metadata_mut().insert("grpc-timeout", value.parse().unwrap());
        let reply = client.unary(request).await;
        if let Ok(reply) = &reply {
            check(reply.get_ref(), 2, 500);
        }
        outcomes.push(format!("{value}: {}", code(reply)));
    }
    joined(outcomes)
}

pub(crate) async fn negative(column: Column) -> String {
    with_header(column, &["-1S"]).await
}

pub(crate) async fn not_understood(column: Column) -> String {
    with_header(column, &["soon", "1", "123456789S"]).await
}

pub(crate) async fn the_longest(column: Column) -> String {
    with_header(column, &["99999999H", "99999999S"]).await
}

pub(crate) async fn seen_by_the_handler(column: Column) -> String {
    let running = column
        .serve(Probe::new().unary(async |request| {
            let seen = request.metadata().get("grpc-timeout").cloned();
            Ok(Response::new(Bytes::from(format!("{seen:?}"))))
        }))
        .await;
    let mut client = column.client(&running).await;
    let mut request = Request::new(Bytes::new());
    request.set_timeout(Duration::from_secs(60));
    let seen = client.unary(request).await.unwrap().into_inner();
    String::from_utf8(seen.to_vec()).unwrap()
}

pub(crate) async fn in_the_middle_of_a_stream(column: Column) -> String {
    let watch = Watch::default();
    let handlers = watch.clone();
    let probe = Probe::new().produce(move |_| {
        let guard = handlers.begin();
        let (sender, replies) = probe::channel();
        tokio::spawn(async move {
            let _ = sender.send(Ok(message(1, 1000))).await;
            // The second reply comes later than the deadline, unless the stream ends before.
            tokio::select! {
                () = sender.closed() => {}
                () = tokio::time::sleep(20 * SHORT) => {
                    let _ = sender.send(Ok(message(2, 1000))).await;
                }
            }
            drop(guard);
        });
        async { Ok(Response::new(replies)) }
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    // On a busy machine the deadline may pass before the first reply. Then the call is made again.
    let mut replies = loop {
        let mut request = Request::new(Bytes::new());
        request.set_timeout(2 * SHORT);
        let first = match client.produce(request).await {
            Ok(response) => {
                let mut replies = response.into_inner();
                probe::first(&mut replies).await.map(|first| (first, replies))
            }
            Err(status) => Err(status),
        };
        match first {
            Ok((first, replies)) => {
                check(&first, 1, 1000);
                break replies;
            }
            Err(status) => assert_eq!(status.code(), Code::DeadlineExceeded, "{status}"),
        }
    };
    let second = probe::first(&mut replies).await;
    if let Ok(second) = &second {
        check(second, 2, 1000);
    }
    watch.until_ended().await;
    joined(["the first reply: OK".to_owned(), format!("one after the deadline: {}", code(second))])
}

pub(crate) async fn while_requests_stream(column: Column) -> String {
    let watch = Watch::default();
    let handlers = watch.clone();
    let probe = Probe::new().collect(move |request| {
        let guard = handlers.begin();
        async move {
            let mut requests = request.into_inner();
            while requests.message().await?.is_some() {}
            drop(guard);
            Err(Status::internal("the requests ended"))
        }
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    let mut request = Request::new(tokio_stream::StreamExt::chain(
        tokio_stream::once(message(1, 100)),
        tokio_stream::pending(),
    ));
    request.set_timeout(SHORT);
    let ended = code(client.collect(request).await);
    watch.until_ended().await;
    joined([ended, "the handler ends".to_owned()])
}

pub(crate) async fn of_one_call_of_many(column: Column) -> String {
    let watch = Watch::default();
    let running = column.serve(probe(&watch)).await;
    let mut client = column.client(&running).await;
    let mut other = client.clone();
    let late = tokio::spawn(async move { code(other.unary(unanswered(SHORT)).await) });
    while !late.is_finished() {
        check(&client.echo(message(3, 2000)).await.unwrap(), 3, 2000);
        tokio::task::yield_now().await;
    }
    watch.until_ended().await;
    joined([late.await.unwrap(), "the others: OK".to_owned()])
}
