//! Deadlines: of a channel, of a server, and of one call.

use std::time::Duration;

use tonic::transport::{Endpoint, Server};
use tonic::{Code, Request};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use support::{Over, ScriptedGreeter, outcome, unchanged, until};

const SHORT: Duration = Duration::from_millis(100);

type Outcome = Result<String, (Code, String)>;

/// Makes a call that the test never releases. The server drops it at the deadline. On a busy machine the
/// deadline may pass before the server has the call; then the call is made again.
async fn time_out(
    over: Over,
    server: fn(Server) -> Server,
    client: fn(Endpoint) -> Endpoint,
    header: Option<Duration>,
) -> Outcome {
    let greeter = ScriptedGreeter::new();
    let running = over.serve(&greeter, server).await;
    let mut client = GreeterClient::new(over.connect(client(running.endpoint())).await.unwrap());
    let reply = loop {
        let mut request = Request::new(HelloRequest { name: "hold".into() });
        if let Some(limit) = header {
            request.set_timeout(limit);
        }
        let reply = client.say_hello(request).await;
        if greeter.calls() > 0 {
            break reply;
        }
    };
    until(|| greeter.held() == 0).await;
    outcome(reply.map(|reply| reply.into_inner().message))
}

#[test]
fn a_channels_deadline() {
    let limit: fn(Endpoint) -> Endpoint = |client| client.timeout(SHORT);
    let outcome = unchanged(|over| time_out(over, |server| server, limit, None));
    assert_eq!(outcome.unwrap_err().0, Code::Cancelled);
}

#[test]
fn a_servers_deadline() {
    let limit: fn(Server) -> Server = |server| server.timeout(SHORT);
    let outcome = unchanged(|over| time_out(over, limit, |client| client, None));
    assert_eq!(outcome.unwrap_err().0, Code::Cancelled);
}

#[test]
fn a_calls_deadline() {
    // Client and server both enforce the deadline, and either may be first.
    let outcome = unchanged(async |over: Over| {
        time_out(over, |server| server, |client| client, Some(SHORT)).await.map_err(|(code, _)| code)
    });
    assert_eq!(outcome, Err(Code::Cancelled));
}
