//! What handlers may do: wait, panic, compute for long, call other servers and their own.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request};
use tonic_rdma::{CallConfig, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tracing::Instrument as _;

use crate::server_acts::{Acts, in_every_runtime, serve};
use support::{Runtime, config, outcome, say, until, within};

#[test]
fn handlers_that_wait_delay_no_other() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let running = serve(&acts, CallConfig::default()).await;
        let client = running.client().await;
        let waiting: Vec<_> = (0..40)
            .map(|_| {
                let mut client = client.clone();
                tokio::spawn(async move { say(&mut client, "wait").await })
            })
            .collect();
        until(|| acts.waiting() == 40).await;
        let mut other = client.clone();
        for name in ["now", "yield", "sleep 1", "spawn", "spin 100"] {
            assert_eq!(say(&mut other, name).await.unwrap(), name);
        }
        assert_eq!(acts.waiting(), 40);
        acts.release(40);
        for call in waiting {
            assert_eq!(call.await.unwrap().unwrap(), "wait");
        }
        assert_eq!((acts.waiting(), acts.dropped()), (0, 0));
    });
}

/// Requests of calls that are made together are sent together. None of them depends on another call's task
/// for that.
#[test]
fn a_call_that_is_polled_once_keeps_no_other_from_being_sent() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let running = serve(&acts, CallConfig::default()).await;
        let client = running.client().await;
        // Calls are made together only while another one is under way.
        let held = acts.held(&client).await;
        for is_dropped in [false, true] {
            let (mut one, mut two) = (client.clone(), client.clone());
            let mut first = Box::pin(say(&mut one, "first"));
            let polled = poll_fn(|context| Poll::Ready(first.as_mut().poll(context).is_ready())).await;
            assert!(!polled, "no call ends in its first poll");
            if is_dropped {
                drop(first);
                assert_eq!(within(say(&mut two, "second")).await.unwrap(), "second");
            } else {
                assert_eq!(within(say(&mut two, "second")).await.unwrap(), "second");
                assert_eq!(first.await.unwrap(), "first");
            }
        }
        acts.release(1);
        assert_eq!(held.await.unwrap().unwrap(), "wait");
    });
}

/// The connection belongs to one runtime, of each kind, and the calls are made in another, of one thread.
#[test]
fn calls_of_another_runtime_are_sent() {
    for runtime in Runtime::ALL {
        let (give, take) = std::sync::mpsc::channel();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let home = std::thread::spawn(move || {
            runtime.run_for_ever(async {
                let running = serve(&Acts::default(), CallConfig::default()).await;
                give.send(running.client().await).unwrap();
                let _ = ended.await;
            });
        });
        let client = take.recv().unwrap();
        Runtime::CurrentThread.run(async {
            let calls = (0..50).map(|number| {
                let mut client = client.clone();
                tokio::spawn(async move { (say(&mut client, format!("{number}")).await.unwrap(), number) })
            });
            for call in calls.collect::<Vec<_>>() {
                let (reply, number) = call.await.unwrap();
                assert_eq!(reply, number.to_string());
            }
        });
        drop((end, client));
        home.join().unwrap();
    }
}

#[test]
fn a_panic_ends_its_call_only() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let running = serve(&acts, CallConfig::default()).await;
        let client = running.client().await;
        let held = acts.held(&client).await;
        for _ in 0..10 {
            let status = say(&mut client.clone(), "panic").await.unwrap_err();
            assert_eq!(
                (status.code(), status.message()),
                (Code::Unknown, "the handler of the call panicked")
            );
            // After a wait, in a task of its own.
            let (names, sent) = mpsc::channel(1);
            let name = |name: &str| HelloRequest { name: name.into() };
            names.send(name("yield")).await.unwrap();
            let mut chat = client.clone().chat(ReceiverStream::new(sent)).await.unwrap().into_inner();
            assert_eq!(chat.next().await.unwrap().unwrap().message, "yield");
            names.send(name("panic")).await.unwrap();
            assert_eq!(chat.next().await.unwrap().unwrap_err().code(), Code::Unknown);
        }
        assert_eq!(say(&mut client.clone(), "hello").await.unwrap(), "hello");
        acts.release(1);
        assert_eq!(held.await.unwrap().unwrap(), "wait", "the connection is still the first one");
    });
}

#[test]
fn handlers_that_compute_for_long_do_not_end_the_connection() {
    in_every_runtime(|| async {
        let running = serve(&Acts::default(), CallConfig::default()).await;
        let client = running.client().await;
        let calls = (0..24).map(|number| {
            let mut client = client.clone();
            let name = if number % 2 == 0 { "spin 20000".to_owned() } else { format!("{number}") };
            tokio::spawn(async move { assert_eq!(say(&mut client, &name).await.unwrap(), name) })
        });
        for call in calls.collect::<Vec<_>>() {
            call.await.unwrap();
        }
    });
}

#[test]
fn a_handler_calls_another_server_and_its_own() {
    in_every_runtime(|| async {
        let (front, back) = (Acts::default(), Acts::default());
        let (first, second) =
            (serve(&front, CallConfig::default()).await, serve(&back, CallConfig::default()).await);
        front.calls(second.channel().await);
        back.calls(first.channel().await);
        let client = first.client().await;
        let calls = (0..32).map(|number| {
            let mut client = client.clone();
            // Back and forth between the two servers, each time from within a handler.
            let name = format!("{}{number}", "call ".repeat(number % 8));
            tokio::spawn(async move { (say(&mut client, name).await.unwrap(), number) })
        });
        for call in calls.collect::<Vec<_>>() {
            let (reply, number) = call.await.unwrap();
            assert_eq!(reply, number.to_string());
        }
        let own = Acts::default();
        let running = serve(&own, CallConfig::default()).await;
        let channel = running.channel().await;
        own.calls(channel.clone());
        let reply = say(&mut GreeterClient::new(channel), "call call call call me").await.unwrap();
        assert_eq!(reply, "me");
    });
}

#[test]
fn handlers_may_block_their_threads_as_tokio_allows() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // Calls that are polled in place stand still here.
    let blocking = CallConfig::default().poll_in_place(false);
    let calls = async {
        let (front, back) = (Acts::default(), Acts::default());
        let (first, second) = (serve(&front, blocking.clone()).await, serve(&back, blocking).await);
        front.calls(second.channel().await);
        let client = first.client().await;
        let calls = (0..32).map(|number| {
            let mut client = client.clone();
            tokio::spawn(async move { say(&mut client, format!("block {number}")).await.unwrap() })
        });
        for (number, call) in calls.collect::<Vec<_>>().into_iter().enumerate() {
            assert_eq!(call.await.unwrap(), number.to_string());
        }
    };
    runtime.block_on(within(calls));
}

#[test]
fn the_deadline_drops_the_handler() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let running = serve(&acts, CallConfig::default().timeout(Duration::from_millis(200))).await;
        let mut client = running.client().await;
        let status = say(&mut client, "wait").await.unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (Code::DeadlineExceeded, "the call took longer than 200ms")
        );
        until(|| acts.dropped() == 1).await;

        // On a busy machine the deadline may pass before the server has the call. Then the call is made
        // again.
        while acts.dropped() == 1 {
            let mut request = Request::new(HelloRequest { name: "wait".into() });
            request.set_timeout(Duration::from_millis(20));
            assert_eq!(client.say_hello(request).await.unwrap_err().code(), Code::DeadlineExceeded);
        }
        // An answer shows that all calls before it are there.
        assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
        until(|| acts.waiting() == 0).await;
        let before = acts.dropped();

        // After the head of the response, too.
        let names = tokio_stream::once(HelloRequest { name: "wait".into() });
        let mut chat = client.chat(names.chain(tokio_stream::pending())).await.unwrap().into_inner();
        assert_eq!(chat.next().await.unwrap().unwrap_err().code(), Code::DeadlineExceeded);
        until(|| acts.dropped() == before + 1).await;
        assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
    });
}

#[test]
fn a_cancelled_call_drops_its_handler_at_once() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let running = serve(&acts, CallConfig::default()).await;
        let client = running.client().await;
        for round in 0..10 {
            let call = acts.held(&client).await;
            call.abort();
            until(|| acts.dropped() == 2 * round + 1).await;
            // By a response that is dropped.
            let names = tokio_stream::once(HelloRequest { name: "wait".into() });
            let chat = client.clone().chat(names.chain(tokio_stream::pending())).await.unwrap();
            until(|| acts.waiting() == 1).await;
            drop(chat);
            until(|| acts.dropped() == 2 * round + 2).await;
        }
        assert_eq!((say(&mut client.clone(), "hello").await.unwrap().as_str(), acts.waiting()), ("hello", 0));
    });
}

#[test]
fn failures_have_the_words_of_http2() {
    in_every_runtime(|| async {
        let running = serve(&Acts::default(), CallConfig::default()).await;
        let mut client = running.client().await;
        let lost = Err((Code::DataLoss, "with ümlauts % and\nlines".to_owned()));
        assert_eq!(outcome(say(&mut client, "fail with ümlauts % and\nlines").await), lost);
        let mut other = tonic_health::pb::health_client::HealthClient::new(running.channel().await);
        let unknown = other.check(tonic_health::pb::HealthCheckRequest::default()).await.unwrap_err();
        let stock = running.endpoint().connect().await.unwrap();
        let mut stock = tonic_health::pb::health_client::HealthClient::new(stock);
        let same = stock.check(tonic_health::pb::HealthCheckRequest::default()).await.unwrap_err();
        assert_eq!((unknown.code(), unknown.message()), (same.code(), same.message()));
        assert_eq!(unknown.code(), Code::Unimplemented);
    });
}

#[test]
fn the_span_of_a_caller_in_the_same_process_is_not_that_of_the_handler() {
    let subscriber = tracing_subscriber::fmt().with_writer(std::io::sink).finish();
    let _installed = tracing::subscriber::set_default(subscriber);
    for runtime in [Runtime::Idle, Runtime::CurrentThread] {
        runtime.run(within(async {
            let running = serve(&Acts::default(), CallConfig::default()).await;
            let client = running.client().await;
            for _ in 0..20 {
                let mut client = client.clone();
                let call = async move {
                    assert_eq!(tracing::Span::current().metadata().unwrap().name(), "caller");
                    say(&mut client, "span").await.unwrap()
                };
                assert_eq!(call.instrument(tracing::info_span!("caller")).await, "none");
            }
        }));
    }
}

#[test]
fn services_that_are_not_ready_are_waited_for() {
    Runtime::MultiThread.run(within(async {
        let acts = Acts::default();
        let server = RdmaServer::new()
            .layer(tower::limit::GlobalConcurrencyLimitLayer::new(2))
            .add_service(GreeterServer::new(acts.clone()));
        let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", incoming.local_addr());
        tokio::spawn(server.serve_with_incoming(incoming));
        let client = GreeterClient::new(tonic_rdma::RdmaChannel::connect(uri).await.unwrap());
        let calls: Vec<_> = (0..6)
            .map(|_| {
                let mut client = client.clone();
                tokio::spawn(async move { say(&mut client, "wait").await })
            })
            .collect();
        until(|| acts.waiting() == 2).await;
        for _ in 0..6 {
            acts.release(1);
        }
        for call in calls {
            assert_eq!(call.await.unwrap().unwrap(), "wait");
        }
    }));
}
