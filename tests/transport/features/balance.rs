//! One channel over several endpoints, some of which are down.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_rdma::{BalancedChannel, EndpointState};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use support::{Child, Over, Port, RunningServer, Runtime, ScriptedGreeter, outcome, say, until};

/// Runs a test over RDMA and over TCP.
fn both<F: Future<Output = ()>>(test: impl Fn(Over) -> F) {
    Runtime::Idle.run(test(Over::Rdma));
    Runtime::MultiThread.run(test(Over::Rdma));
    Runtime::CurrentThread.run(test(Over::Fallback));
}

async fn servers<const COUNT: usize>(over: Over) -> [(RunningServer, ScriptedGreeter); COUNT] {
    let mut servers = Vec::new();
    for _ in 0..COUNT {
        let greeter = ScriptedGreeter::new();
        servers.push((over.serve(&greeter, |server| server).await, greeter));
    }
    servers.try_into().ok().unwrap()
}

/// Returns whether the endpoint that was added as number `index` is up.
pub(crate) fn is_up(channel: &BalancedChannel, index: usize) -> bool {
    matches!(channel.endpoints()[index].state, EndpointState::Up(_))
}

async fn all_up(channel: &BalancedChannel) {
    until(|| (0..channel.endpoints().len()).all(|index| is_up(channel, index))).await;
}

#[test]
fn calls_spread_over_the_endpoints() {
    both(async |over| {
        let servers = servers::<3>(over).await;
        let channel = BalancedChannel::from_list(
            servers.each_ref().map(|(running, _)| running.endpoint()),
            over.connector(),
        );
        all_up(&channel).await;
        let mut client = GreeterClient::new(channel.clone());
        let expected = if over == Over::Rdma { "rdma" } else { "tcp" };
        for _ in 0..300 {
            assert_eq!(say(&mut client, "over").await.unwrap(), expected);
        }
        for (_, greeter) in &servers {
            assert!(greeter.calls() >= 40, "{} of 300 calls", greeter.calls());
        }
        assert!(channel.endpoints().iter().all(|endpoint| endpoint.calls == 0), "{channel:?}");
    });
}

#[test]
fn a_call_goes_to_the_endpoint_with_fewer_calls() {
    both(async |over| {
        let servers = servers::<2>(over).await;
        let channel = BalancedChannel::from_list(
            servers.each_ref().map(|(running, _)| running.endpoint()),
            over.connector(),
        );
        all_up(&channel).await;
        let mut calls = Vec::new();
        for held in 1..=10 {
            let mut client = GreeterClient::new(channel.clone());
            calls.push(tokio::spawn(async move { say(&mut client, "hold").await }));
            until(|| servers.iter().map(|(_, greeter)| greeter.held()).sum::<usize>() == held).await;
        }
        assert_eq!(servers.each_ref().map(|(_, greeter)| greeter.held()), [5, 5]);
        for (_, greeter) in &servers {
            greeter.release(5);
        }
        for call in calls {
            assert_eq!(call.await.unwrap().unwrap(), "held");
        }
    });
}

#[test]
fn a_stream_counts_until_it_ended() {
    both(async |over| {
        let servers = servers::<2>(over).await;
        let channel = BalancedChannel::from_list(
            servers.each_ref().map(|(running, _)| running.endpoint()),
            over.connector(),
        );
        all_up(&channel).await;
        let mut client = GreeterClient::new(channel.clone());
        let calls = || channel.endpoints().iter().map(|endpoint| endpoint.calls).sum::<usize>();
        let mut chats = Vec::new();
        for open in 1..=4 {
            let silence = tokio_stream::pending::<HelloRequest>();
            chats.push(client.chat(silence).await.unwrap().into_inner());
            assert_eq!(calls(), open);
        }
        assert!(channel.endpoints().iter().all(|endpoint| endpoint.calls == 2), "{channel:?}");
        drop(chats);
        assert_eq!(calls(), 0);
    });
}

#[test]
fn a_killed_server_fails_few_calls_and_comes_back() {
    both(async |over| {
        const CALLERS: usize = 8;
        let servers = servers::<2>(over).await;
        let port = Port::reserve();
        let role = format!("serve {over:?} {}", port.address);
        let start = || {
            let role = role.clone();
            async { tokio::task::spawn_blocking(move || Child::start(&[], &role)).await.unwrap() }
        };
        let mut doomed = start().await;
        let mut endpoints = vec![port.endpoint()];
        endpoints.extend(servers.iter().map(|(running, _)| running.endpoint()));
        let channel = BalancedChannel::from_list(endpoints, over.connector());
        all_up(&channel).await;

        let (failed, answers) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let callers: Vec<_> = (0..CALLERS)
            .map(|_| {
                let mut client = GreeterClient::new(channel.clone());
                let (failed, answers) = (Arc::clone(&failed), Arc::clone(&answers));
                tokio::spawn(async move {
                    loop {
                        let result = say(&mut client, "hello").await;
                        let count = if result.is_ok() { &answers } else { &failed };
                        count.fetch_add(1, Ordering::SeqCst);
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        until(|| answers.load(Ordering::SeqCst) > 200).await;
        doomed.process.kill().unwrap();
        doomed.process.wait().unwrap();
        until(|| !is_up(&channel, 0)).await;
        let later = answers.load(Ordering::SeqCst) + 200;
        until(|| answers.load(Ordering::SeqCst) > later).await;
        let failed_in_all = failed.load(Ordering::SeqCst);
        // A caller may lose the call in flight, and one more call that it made before the channel saw the end
        // of the connection.
        assert!(failed_in_all <= 2 * CALLERS, "{failed_in_all} calls of {CALLERS} callers failed");

        doomed = start().await;
        until(|| is_up(&channel, 0)).await;
        callers.iter().for_each(|caller| caller.abort());
        let mut client = GreeterClient::new(channel.clone());
        let mut seen: HashMap<String, usize> = HashMap::new();
        for _ in 0..100 {
            *seen.entry(say(&mut client, "process").await.unwrap()).or_default() += 1;
        }
        assert!(seen.contains_key(&doomed.process.id().to_string()), "{seen:?}");
        assert_eq!(failed.load(Ordering::SeqCst), failed_in_all, "none after those that were in flight");
    });
}

/// Starts a server that closes every connection. Returns the count of its connections too.
async fn hangs_up() -> (Endpoint, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", listener.local_addr().unwrap())).unwrap();
    let taken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&taken);
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            drop(connection);
        }
    });
    (endpoint, taken)
}

#[test]
fn an_endpoint_that_is_down_gets_no_calls_and_few_dials() {
    both(async |over| {
        let [(running, greeter)] = servers::<1>(over).await;
        let (broken, taken) = hangs_up().await;
        let started = Instant::now();
        let channel = BalancedChannel::from_list([broken, running.endpoint()], over.connector());
        let mut client = GreeterClient::new(channel.clone());
        let mut calls = 0;
        while taken.load(Ordering::SeqCst) < 5 {
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            calls += 1;
        }
        assert_eq!(greeter.calls(), calls);
        let state = channel.endpoints()[0].state.clone();
        assert!(!matches!(state, EndpointState::Up(_)), "{state:?}");
        // An upper limit for the number of dials: each dial comes at least 80 ms after the one before, and
        // makes three connections until the dialer knows whether the server is stock.
        let taken = taken.load(Ordering::SeqCst) as u128;
        let dials = 1 + started.elapsed().as_millis() / 80;
        assert!(taken <= 3 * dials, "{taken} connections in {dials} dials");
    });
}

#[test]
fn if_no_endpoint_is_up_a_call_fails_with_the_last_reason() {
    both(async |over| {
        let (one, other) = (Port::reserve(), Port::reserve());
        let channel = BalancedChannel::from_list([one.endpoint(), other.endpoint()], over.connector());
        let mut client = GreeterClient::new(channel.clone());
        let (code, message) = outcome(say(&mut client, "hello").await).unwrap_err();
        assert_eq!(code, Code::Unavailable);
        assert!(message.starts_with("all 2 endpoints are down"), "{message}");
        assert!(message.contains("Connection refused"), "{message}");
        // The channel finds an endpoint that comes up, without a call.
        let _running = over.serve_on(&other, &ScriptedGreeter::new()).await;
        until(|| is_up(&channel, 1)).await;
        assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");

        let mut without_endpoints = GreeterClient::new(BalancedChannel::from_list([], over.connector()));
        let (code, message) = outcome(say(&mut without_endpoints, "hello").await).unwrap_err();
        assert_eq!((code, &*message), (Code::Unavailable, "there is no endpoint to call"));
    });
}

#[test]
fn a_server_that_shuts_down_gracefully_keeps_its_stream_and_loses_new_calls() {
    both(async |over| {
        let [(leaving, _), (staying, greeter)] = servers::<2>(over).await;
        let channel = BalancedChannel::from_list([leaving.endpoint(), staying.endpoint()], over.connector());
        all_up(&channel).await;
        let mut client = GreeterClient::new(channel.clone());
        // One stream on each server, in any order.
        let mut chats = Vec::new();
        for _ in 0..2 {
            let (names, sent) = tokio::sync::mpsc::channel(1);
            let sent = tokio_stream::wrappers::ReceiverStream::new(sent);
            chats.push((names, client.chat(sent).await.unwrap().into_inner()));
        }
        let server = leaving.shut_down();
        // A call fails if the server's last GOAWAY refuses its stream. The first call that the old connection
        // does not take fails too, and shows that the server is leaving.
        let mut failed = 0;
        while is_up(&channel, 0) {
            failed += usize::from(say(&mut client, "hello").await.is_err());
        }
        assert!(failed <= 2, "{failed} calls");
        let before = greeter.calls();
        for _ in 0..50 {
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
        }
        assert_eq!(greeter.calls(), before + 50);
        for (names, mut chat) in chats {
            names.send(HelloRequest { name: "still here".into() }).await.unwrap();
            assert_eq!(chat.message().await.unwrap().unwrap().message, "still here");
        }
        server.await.unwrap().unwrap();
    });
}

#[test]
fn a_server_that_never_answers_delays_no_call() {
    Runtime::Idle.run(async {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{}", silent.local_addr().unwrap())).unwrap();
        let [(running, _)] = servers::<1>(Over::Rdma).await;
        let config = support::config().policy(tonic_rdma::Policy::Require);
        let connector = |config| tonic_rdma::RdmaConnector::new().config(config);
        let both =
            BalancedChannel::from_list([endpoint.clone(), running.endpoint()], connector(config.clone()));
        assert_eq!(say(&mut GreeterClient::new(both), "hello").await.unwrap(), "hello");

        let alone = BalancedChannel::from_list(
            [endpoint],
            connector(config.handshake_timeout(Duration::from_millis(200))),
        );
        let (code, message) = outcome(say(&mut GreeterClient::new(alone), "hello").await).unwrap_err();
        assert_eq!(code, Code::Unavailable);
        assert!(message.contains("RDMA is required"), "{message}");
    });
}

#[test]
fn no_call_waits_for_a_runtime_that_has_ended() {
    // Takes connections, and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", silent.local_addr().unwrap())).unwrap();
    let home = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let channel = {
        let _entered = home.enter();
        BalancedChannel::from_list([endpoint], Over::Rdma.connector())
    };
    drop(home);
    Runtime::CurrentThread.run(async {
        let call = tokio::time::timeout(Duration::from_secs(60), async {
            outcome(say(&mut GreeterClient::new(channel), "hello").await).unwrap_err()
        });
        let (code, message) = call.await.expect("the call waits for a task that is gone");
        assert_eq!(code, Code::Unavailable);
        assert!(message.contains("the channel's runtime ended"), "{message}");
    });
}
