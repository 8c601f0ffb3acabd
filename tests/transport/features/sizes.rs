//! Limits on the size of a message, to the byte, in both directions.

use tonic::Code;
use tonic::transport::{Channel, Server};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Over, ScriptedGreeter, say, unchanged};

/// The longest message that tonic decodes by default.
const DEFAULT: usize = 4 << 20;

type Outcome = Result<usize, (Code, String)>;

/// Sends a message of exactly `bytes` bytes to the server and back.
async fn echo(client: &mut GreeterClient<Channel>, bytes: usize) -> Outcome {
    let name: String = (0..bytes - overhead(bytes)).map(|at| char::from(b'a' + (at % 23) as u8)).collect();
    match say(client, name.clone()).await {
        Ok(echoed) => {
            assert!(echoed == name, "the content changed");
            Ok(bytes)
        }
        Err(status) => Err((status.code(), status.message().into())),
    }
}

/// Returns the length of the field number and the length prefix of a string of about this size.
fn overhead(bytes: usize) -> usize {
    match bytes {
        0..128 => 2,
        128..16_384 => 3,
        _ => 5,
    }
}

fn codes(outcomes: &[Outcome]) -> Vec<Result<usize, Code>> {
    outcomes.iter().cloned().map(|outcome| outcome.map_err(|(code, _)| code)).collect()
}

#[test]
fn the_servers_limit_is_exact() {
    let outcomes = unchanged(async |over: Over| {
        let running = over.serve(&ScriptedGreeter::new(), |server| server).await;
        let mut client = over.client(&running).await.max_decoding_message_size(2 * DEFAULT);
        [echo(&mut client, DEFAULT).await, echo(&mut client, DEFAULT + 1).await, echo(&mut client, 100).await]
    });
    assert_eq!(codes(&outcomes), [Ok(DEFAULT), Err(Code::OutOfRange), Ok(100)]);
}

#[test]
fn the_clients_limit_is_exact() {
    let outcomes = unchanged(async |over: Over| {
        let service = GreeterServer::new(ScriptedGreeter::new()).max_decoding_message_size(2 * DEFAULT);
        let running = over.serve_at("127.0.0.1:0", Server::builder().add_service(service)).await;
        let mut client = over.client(&running).await;
        [echo(&mut client, DEFAULT).await, echo(&mut client, DEFAULT + 1).await, echo(&mut client, 100).await]
    });
    assert_eq!(codes(&outcomes), [Ok(DEFAULT), Err(Code::OutOfRange), Ok(100)]);
}

#[test]
fn limits_can_be_raised_and_lowered() {
    let outcomes = unchanged(async |over: Over| {
        let service = GreeterServer::new(ScriptedGreeter::new())
            .max_decoding_message_size(3 * DEFAULT)
            .max_encoding_message_size(2 * DEFAULT);
        let running = over.serve_at("127.0.0.1:0", Server::builder().add_service(service)).await;
        let mut client = over.client(&running).await.max_decoding_message_size(3 * DEFAULT);
        let raised = echo(&mut client, 2 * DEFAULT).await;
        let servers = echo(&mut client, 2 * DEFAULT + 1).await;
        let mut frugal = client.clone().max_encoding_message_size(1000);
        [raised, servers, echo(&mut frugal, 1000).await, echo(&mut frugal, 1001).await]
    });
    // A client notices the limit after it has begun to send, so the call ends as a broken one.
    let expected = [Ok(2 * DEFAULT), Err(Code::OutOfRange), Ok(1000), Err(Code::Internal)];
    assert_eq!(codes(&outcomes), expected);
}
