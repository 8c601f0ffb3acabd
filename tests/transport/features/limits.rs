//! Limits on concurrent calls: of a server, of a connection and of a channel, and load shedding above the
//! limit.

use tonic::Code;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use support::{Over, ScriptedGreeter, outcome, say, unchanged, until};

const CALLS: usize = 6;

/// Holds [`CALLS`] calls as far as `server` and `client` allow, and releases them one by one. Returns the
/// largest number held at one time.
async fn held_at_once(
    over: Over,
    server: fn(Server) -> Server,
    client: fn(Endpoint) -> Endpoint,
    allowed: usize,
) -> usize {
    let greeter = ScriptedGreeter::new();
    let running = over.serve(&greeter, server).await;
    let channel = over.connect(client(running.endpoint())).await.unwrap();
    // Before the server's settings arrive, a client does not know how many streams it may open.
    say(&mut GreeterClient::new(channel.clone()), "hello").await.unwrap();
    let calls: Vec<_> = (0..CALLS).map(|_| hold(&channel)).collect();
    until(|| greeter.held() == allowed).await;
    for done in 1..=CALLS {
        greeter.release(1);
        until(|| {
            greeter.calls() == 1 + CALLS.min(allowed + done) && greeter.held() == allowed.min(CALLS - done)
        })
        .await;
    }
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap(), "held");
    }
    greeter.most_held()
}

fn hold(channel: &Channel) -> tokio::task::JoinHandle<Result<String, tonic::Status>> {
    let mut client = GreeterClient::new(channel.clone());
    tokio::spawn(async move { say(&mut client, "hold").await })
}

#[test]
fn without_a_limit_all_calls_run_at_once() {
    assert_eq!(unchanged(|over| held_at_once(over, |server| server, |client| client, CALLS)), CALLS);
}

#[test]
fn a_servers_limit_for_each_connection() {
    let limit: fn(Server) -> Server = |server| server.concurrency_limit_per_connection(2);
    assert_eq!(unchanged(|over| held_at_once(over, limit, |client| client, 2)), 2);
}

#[test]
fn a_servers_limit_on_streams() {
    let limit: fn(Server) -> Server = |server| server.max_concurrent_streams(3);
    assert_eq!(unchanged(|over| held_at_once(over, limit, |client| client, 3)), 3);
}

#[test]
fn a_channels_limit() {
    let limit: fn(Endpoint) -> Endpoint = |client| client.concurrency_limit(2);
    assert_eq!(unchanged(|over| held_at_once(over, |server| server, limit, 2)), 2);
}

#[test]
fn calls_above_the_limit_are_shed() {
    let (shed, kept) = unchanged(async |over: Over| {
        let greeter = ScriptedGreeter::new();
        let running =
            over.serve(&greeter, |server| server.concurrency_limit_per_connection(1).load_shed(true)).await;
        let channel = over.connect(running.endpoint()).await.unwrap();
        let held = hold(&channel);
        until(|| greeter.held() == 1).await;
        let shed = outcome(say(&mut GreeterClient::new(channel), "hello").await);
        greeter.release(1);
        (shed, outcome(held.await.unwrap()))
    });
    assert_eq!(shed.unwrap_err().0, Code::ResourceExhausted);
    assert_eq!(kept, Ok("held".into()));
}
