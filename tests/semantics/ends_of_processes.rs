//! A server or a client whose process is killed or stopped.

use std::time::Duration;

use bytes::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use support::Child;
use tonic::transport::Endpoint;
use tonic::{Request, Response};

use crate::caller::Caller;
use crate::column::{Column, ServerSettings};
use crate::content::{check, code, joined, message};
use crate::probe::{self, Probe};
use crate::watch::Watch;

const OFTEN: Duration = Duration::from_millis(200);
/// The time for an answer to a ping. It is longer than a busy machine keeps a live process from running.
const PATIENT: Duration = Duration::from_secs(5);

async fn start(role: String) -> Child {
    tokio::task::spawn_blocking(move || Child::start(&[], &role)).await.unwrap()
}

fn signal(child: &Child, signal: Signal) {
    let process = Pid::from_raw(child.process.id().try_into().unwrap()).unwrap();
    kill_process(process, signal).unwrap();
}

/// Starts a server in a process of its own. Returns an endpoint that finds a silent server.
async fn server(column: Column) -> (Child, Endpoint) {
    let child = start(format!("serve {column:?}")).await;
    let endpoint = Endpoint::from_shared(format!("http://{}", child.word)).unwrap();
    (child, endpoint)
}

/// Makes a call and a stream, sends `sent` to the server, and returns how both end.
async fn ends_with(column: Column, sent: Signal, settings: fn(Endpoint) -> Endpoint) -> String {
    let (child, endpoint) = server(column).await;
    let channel = column.connect_watched(settings(endpoint), OFTEN, PATIENT).await.unwrap();
    let mut client = Caller::new(channel);
    check(&client.echo(message(1, 1000)).await.unwrap(), 1, 1000);
    let mut replies = client.produce(Request::new(Bytes::new())).await.unwrap().into_inner();
    check(&probe::first(&mut replies).await.unwrap(), 1, 3000);
    let mut other = client.clone();
    let mut call = Box::pin(async move { code(other.echo("").await) });
    // The server has the call once it has answered a later one.
    tokio::select! {
        biased;
        ended = &mut call => panic!("the call ended: {ended}"),
        later = client.echo(message(2, 1000)) => check(&later.unwrap(), 2, 1000),
    }
    signal(&child, sent);
    let (stream, call) = tokio::join!(async { code(replies.message().await) }, call);
    drop(tokio::task::spawn_blocking(move || drop(child)).await);
    joined([format!("a call: {call}"), format!("a stream: {stream}")])
}

pub(crate) async fn of_a_server_that_is_killed(column: Column) -> String {
    ends_with(column, Signal::KILL, |endpoint| endpoint).await
}

pub(crate) async fn of_a_server_that_is_stopped(column: Column) -> String {
    ends_with(column, Signal::STOP, |endpoint| {
        endpoint.http2_keep_alive_interval(OFTEN).keep_alive_timeout(PATIENT)
    })
    .await
}

/// Has a client make a call, and sends `sent` to it. Returns what becomes of the handler.
async fn handler_ends(column: Column, sent: Signal) -> String {
    let watch = Watch::default();
    let handlers = watch.clone();
    let probe = Probe::new().collect(move |request| {
        let guard = handlers.begin();
        async move {
            let mut requests = request.into_inner();
            while requests.message().await?.is_some() {}
            drop(guard);
            Ok(Response::new(Bytes::new()))
        }
    });
    let settings = ServerSettings { keepalive: Some((OFTEN, PATIENT)), ..ServerSettings::default() };
    let running = column.serve_with(settings, probe).await;
    let child = start(format!("hold {column:?} {}", running.address)).await;
    watch.until_began(1).await;
    signal(&child, sent);
    watch.until_ended().await;
    drop(tokio::task::spawn_blocking(move || drop(child)).await);
    // Others are served as before.
    check(&column.client(&running).await.echo(message(1, 10)).await.unwrap(), 1, 10);
    "the handler ends; others are served".to_owned()
}

pub(crate) async fn of_a_client_that_is_killed(column: Column) -> String {
    handler_ends(column, Signal::KILL).await
}

pub(crate) async fn of_a_client_that_is_stopped(column: Column) -> String {
    handler_ends(column, Signal::STOP).await
}
