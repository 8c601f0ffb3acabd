//! How connections end: shutdown, age, idleness, and clients that die.

use std::time::{Duration, Instant};

use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic_rdma::{CallConfig, RdmaChannel};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use crate::server_acts::{Acts, in_every_runtime, serve};
use support::{Child, Runtime, announce, config, say, until, within};

/// The role of a child that makes calls and then waits to be killed. The address of the server follows.
const CALLER: &str = "caller";

/// Plays the role of a child process.
pub(crate) fn play(role: &str) {
    let Some(address) = role.strip_prefix(CALLER) else { return };
    Runtime::MultiThread.run_for_ever(async {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", address.trim())).unwrap();
        let channel = RdmaChannel::builder(endpoint).config(config()).connect().await.unwrap();
        assert!(channel.last_connection().unwrap().is_native());
        let client = GreeterClient::new(channel);
        let names = (0..8).map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { say(&mut client, "wait").await })
        });
        let _calls = names.collect::<Vec<_>>();
        let names = tokio_stream::once(HelloRequest { name: "one".into() }).chain(tokio_stream::pending());
        let mut chat = client.clone().chat(names).await.unwrap().into_inner();
        announce(chat.next().await.unwrap().unwrap().message);
        std::future::pending::<()>().await;
    });
}

#[test]
fn shutdown_lets_calls_in_flight_finish() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let running = serve(&acts, CallConfig::default()).await;
        let client = running.client().await;
        let (mut first, mut stock) =
            (client.clone(), GreeterClient::new(running.endpoint().connect().await.unwrap()));
        let held = tokio::spawn(async move { say(&mut first, "wait").await });
        let also = tokio::spawn(async move { say(&mut stock, "wait").await });
        let (names, sent) = tokio::sync::mpsc::channel(1);
        names.send(HelloRequest { name: "one".into() }).await.unwrap();
        let sent = tokio_stream::wrappers::ReceiverStream::new(sent);
        let mut chat = client.clone().chat(sent).await.unwrap().into_inner();
        assert_eq!(chat.next().await.unwrap().unwrap().message, "one");
        until(|| acts.waiting() == 2).await;

        let address = running.address;
        let server = running.shut_down();
        while tokio::net::TcpStream::connect(address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // GOAWAY may still be on its way. After it the channel dials again, and fails.
        while say(&mut client.clone(), "hello").await.map_err(|status| status.code())
            != Err(Code::Unavailable)
        {}
        assert!(!server.is_finished(), "the server did not wait for its calls");
        names.send(HelloRequest { name: "two".into() }).await.unwrap();
        assert_eq!(chat.next().await.unwrap().unwrap().message, "two");
        drop(names);
        assert!(chat.next().await.is_none());
        acts.release(2);
        assert_eq!(held.await.unwrap().unwrap(), "wait");
        assert_eq!(also.await.unwrap().unwrap(), "wait");
        server.await.unwrap().unwrap();
    });
}

#[test]
fn shutdown_waits_no_longer_than_its_grace() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let grace = Duration::from_millis(200);
        let running = serve(&acts, CallConfig::default().shutdown_grace(grace)).await;
        let mut client = running.client().await;
        let mut stock = GreeterClient::new(running.endpoint().connect().await.unwrap());
        let held = tokio::spawn(async move { say(&mut client, "wait").await });
        let _also = tokio::spawn(async move { say(&mut stock, "wait").await });
        until(|| acts.waiting() == 2).await;
        let began = Instant::now();
        running.shut_down().await.unwrap().unwrap();
        assert!(began.elapsed() >= grace);
        assert_eq!(held.await.unwrap().unwrap_err().code(), Code::Unavailable);
        until(|| acts.dropped() == 1).await;
        assert_eq!(acts.waiting(), 1, "the call over HTTP/2");
    });
}

#[test]
fn an_old_connection_is_replaced_without_an_error() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let running =
            serve(&acts, CallConfig::default().max_connection_age(Duration::from_millis(100))).await;
        let channel = running.channel().await;
        let first = channel.last_connection().unwrap();
        let client = GreeterClient::new(channel.clone());
        let held = acts.held(&client).await;
        while channel.last_connection().unwrap().is_same_connection(&first) {
            assert_eq!(say(&mut client.clone(), "hello").await.unwrap(), "hello");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(channel.last_connection().unwrap().is_native());
        acts.release(1);
        assert_eq!(held.await.unwrap().unwrap(), "wait", "a call on the old connection");
    });
}

#[test]
fn the_grace_of_an_old_connection_ends() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let limits = CallConfig::default()
            .max_connection_age(Duration::from_millis(50))
            .max_connection_age_grace(Duration::from_millis(100));
        let running = serve(&acts, limits).await;
        let mut client = running.client().await;
        // On a busy machine the grace may end before the server has the call. Then the call is made again.
        while acts.dropped() == 0 {
            let status = say(&mut client, "wait").await.unwrap_err();
            assert_eq!(status.code(), Code::Unavailable, "{status}");
        }
    });
}

#[test]
fn an_idle_connection_ends_and_a_busy_one_stays() {
    Runtime::MultiThread.run(within(async {
        let acts = Acts::default();
        let idle = Duration::from_millis(400);
        let running = serve(&acts, CallConfig::default().max_connection_idle(idle)).await;
        let channel = running.channel().await;
        let mut client = GreeterClient::new(channel.clone());
        let held = acts.held(&client).await;
        let first = channel.last_connection().unwrap();
        tokio::time::sleep(idle * 3).await;
        acts.release(1);
        assert_eq!(held.await.unwrap().unwrap(), "wait");
        assert!(channel.last_connection().unwrap().is_same_connection(&first), "a call was in flight");
        loop {
            tokio::time::sleep(idle * 2).await;
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            if !channel.last_connection().unwrap().is_same_connection(&first) {
                return;
            }
        }
    }));
}

#[test]
fn the_calls_of_a_client_that_dies_are_dropped() {
    for runtime in [Runtime::Idle, Runtime::MultiThread] {
        runtime.run(within(async {
            let acts = Acts::default();
            let running = serve(&acts, CallConfig::default()).await;
            let role = format!("{CALLER} {}", running.address);
            let child = tokio::task::spawn_blocking(move || Child::start(&[], &role)).await.unwrap();
            assert_eq!(child.word, "one");
            until(|| acts.waiting() == 8).await;
            drop(child);
            until(|| acts.dropped() == 8).await;
            assert_eq!(say(&mut running.client().await, "hello").await.unwrap(), "hello");
        }));
    }
}
