//! Interceptors of a client and of a server.

use tonic::metadata::MetadataValue;
use tonic::transport::Server;
use tonic::{Code, Request, Status};
use tonic_rdma::RdmaConnectInfo;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Over, ScriptedGreeter, outcome, say, unchanged};

#[test]
fn interceptors_see_refuse_and_add() {
    let [accepted, refused, failed] = unchanged(intercept);
    assert_eq!(accepted, Ok("Some(\"seen\")".into()));
    assert_eq!(refused, Err((Code::Unauthenticated, "no token".into())));
    assert_eq!(failed, Err((Code::FailedPrecondition, "not sent".into())));
}

async fn intercept(over: Over) -> [Result<String, (Code, String)>; 3] {
    let guard = move |mut request: Request<()>| {
        let info = request.extensions().get::<RdmaConnectInfo>().map(|info| info.verdict().to_string());
        let expected = match over {
            Over::Stock => None,
            Over::Rdma => Some("rdma"),
            Over::Fallback => Some("tcp"),
        };
        assert_eq!(info.as_deref(), expected, "what an interceptor sees of the connection");
        if request.metadata().get("token").is_none() {
            return Err(Status::unauthenticated("no token"));
        }
        request.metadata_mut().insert("stamp", MetadataValue::from_static("seen"));
        Ok(request)
    };
    let service = GreeterServer::with_interceptor(ScriptedGreeter::new(), guard);
    let running = over.serve_at("127.0.0.1:0", Server::builder().add_service(service)).await;
    let channel = over.connect(running.endpoint()).await.unwrap();

    let mut with_token = GreeterClient::with_interceptor(channel.clone(), |mut request: Request<()>| {
        request.metadata_mut().insert("token", MetadataValue::from_static("open sesame"));
        Ok(request)
    });
    let mut refusing = GreeterClient::with_interceptor(channel.clone(), |_: Request<()>| {
        Err(Status::failed_precondition("not sent"))
    });
    let mut without = GreeterClient::new(channel);
    [
        outcome(say(&mut with_token, "header stamp").await),
        outcome(say(&mut without, "header stamp").await),
        outcome(say(&mut refusing, "header stamp").await),
    ]
}
