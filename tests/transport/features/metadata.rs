//! Metadata that the settings of a channel add: user agent and origin. `interceptors.rs` and the interop
//! cases test the metadata of calls.

use tonic::transport::Server;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tower::util::MapRequestLayer;

use support::{Over, ScriptedGreeter, outcome, say, unchanged};

type Http = http::Request<tonic::body::Body>;

#[test]
fn user_agent_and_origin() {
    let [agent, origin] = unchanged(identified);
    assert!(agent.starts_with("Some(\"greeter/1 tonic/"), "{agent}");
    assert_eq!(origin, "Some(\"http://elsewhere.example:81/tonic_rdma.greeter.v1.Greeter/SayHello\")");
}

async fn identified(over: Over) -> [String; 2] {
    let noting = MapRequestLayer::new(|mut request: Http| {
        let uri = http::HeaderValue::from_str(&request.uri().to_string()).unwrap();
        request.headers_mut().insert("seen-uri", uri);
        request
    });
    let router = Server::builder().layer(noting).add_service(GreeterServer::new(ScriptedGreeter::new()));
    let running = over.serve_at("127.0.0.1:0", router).await;
    let endpoint = running.endpoint().user_agent("greeter/1").unwrap();
    let endpoint = endpoint.origin("http://elsewhere.example:81".parse().unwrap());
    let mut client = GreeterClient::new(over.connect(endpoint).await.unwrap());
    let agent = outcome(say(&mut client, "header user-agent").await).unwrap();
    [agent, outcome(say(&mut client, "header seen-uri").await).unwrap()]
}
