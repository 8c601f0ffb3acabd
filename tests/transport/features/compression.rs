//! Compressed requests and replies.

use tonic::Code;
use tonic::codec::CompressionEncoding::Gzip;
use tonic::transport::Server;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Over, ScriptedGreeter, outcome, say, unchanged};

#[test]
fn gzip_both_ways() {
    let (encoding, long, refused) = unchanged(compressed);
    assert_eq!(encoding, Ok("Some(\"gzip\")".into()));
    assert_eq!(long, Ok("repeated ".repeat(100_000)));
    assert_eq!(refused.unwrap_err().0, Code::Unimplemented, "a server that does not take gzip");
}

type Outcome = Result<String, (Code, String)>;

async fn compressed(over: Over) -> (Outcome, Outcome, Outcome) {
    let service = GreeterServer::new(ScriptedGreeter::new()).accept_compressed(Gzip).send_compressed(Gzip);
    let running = over.serve_at("127.0.0.1:0", Server::builder().add_service(service)).await;
    let mut client = over.client(&running).await.send_compressed(Gzip).accept_compressed(Gzip);
    let encoding = outcome(say(&mut client, "header grpc-encoding").await);
    let long = outcome(say(&mut client, "repeated ".repeat(100_000)).await);

    let plain = over.serve(&ScriptedGreeter::new(), |server| server).await;
    let mut client = over.client(&plain).await.send_compressed(Gzip);
    (encoding, long, outcome(say(&mut client, "hello").await))
}
