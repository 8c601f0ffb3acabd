//! tower's layers around a server and around a channel.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tonic::transport::{Channel, Server};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tower::ServiceBuilder;
use tower::util::MapRequestLayer;

use support::{Over, ScriptedGreeter, outcome, say, unchanged};

type Http = http::Request<tonic::body::Body>;

#[test]
fn layers_around_both_ends() {
    let (answers, counted, timed_out) = unchanged(layered);
    assert_eq!(answers, ["Some(\"added by a layer\")"; 3]);
    assert_eq!(counted, (3, 3), "calls that the client's and the server's layer saw");
    assert!(timed_out.unwrap_err().1.contains("timed out"));
}

async fn layered(over: Over) -> (Vec<String>, (usize, usize), Result<String, (tonic::Code, String)>) {
    let [at_client, at_server] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let (greeter, counter) = (ScriptedGreeter::new(), Arc::clone(&at_server));
    let counting = MapRequestLayer::new(move |mut request: Http| {
        counter.fetch_add(1, Ordering::SeqCst);
        request.headers_mut().insert("layer", http::HeaderValue::from_static("added by a layer"));
        request
    });
    let router = Server::builder().layer(counting).add_service(GreeterServer::new(greeter.clone()));
    let running = over.serve_at("127.0.0.1:0", router).await;

    let channel: Channel = over.connect(running.endpoint()).await.unwrap();
    let client = |limit| {
        let (channel, counter) = (channel.clone(), Arc::clone(&at_client));
        let channel = ServiceBuilder::new()
            .map_request(move |request: Http| {
                counter.fetch_add(1, Ordering::SeqCst);
                request
            })
            .timeout(limit)
            .concurrency_limit(8)
            .service(channel);
        GreeterClient::new(channel)
    };
    let counted = || (at_client.load(Ordering::SeqCst), at_server.load(Ordering::SeqCst));
    let (mut patient, mut hurried) = (client(Duration::from_secs(3600)), client(Duration::from_millis(400)));
    let mut answers = Vec::new();
    for _ in 0..3 {
        answers.push(outcome(say(&mut patient, "header layer").await).unwrap());
    }
    let three = counted();
    let timed_out = outcome(say(&mut hurried, "hold").await);
    // On a busy machine the time may be over before the server has the call.
    while counted().1 == 3 {
        assert_eq!(outcome(say(&mut hurried, "hold").await), timed_out);
    }
    (answers, three, timed_out)
}
