//! Who reads the variables: types that are made without a `Config`.

use std::error::Error;
use std::io;
use std::time::Duration;

use tonic::transport::{Endpoint, Server};
use tonic_rdma::{
    Config, RdmaChannel, RdmaConnectInfo, RdmaConnector, RdmaError, RdmaIncoming, RdmaServer, Verdict,
};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use crate::servers::endpoint;
use support::{Child, Runtime, ScriptedGreeter, announce, free_address, say};

/// The role of a child that reports.
pub(crate) const ROLE: &str = "environment";

/// How a connection was made, or why it was not.
type Outcome = Result<String, Box<dyn Error + Send + Sync>>;

#[test]
fn the_environment_decides_where_code_does_not() {
    let outcomes = outcomes("RDMA_POLICY=tcp-only");
    assert_eq!(outcomes[..4], ["the policy is tcp-only"; 4], "the clients");
    assert_eq!(outcomes[4..6], ["the server declined: the server's policy is tcp-only"; 2], "the servers");
    assert_eq!(outcomes[6..], ["rdma"; 4], "explicit configurations");
}

#[test]
fn a_bad_variable_is_an_error_that_names_it() {
    let outcomes = outcomes("RDMA_POLICY=always");
    for outcome in &outcomes[..6] {
        let named = r#"RDMA_POLICY="always": takes one of require, prefer, tcp-only"#;
        assert!(outcome.contains(named), "{outcomes:#?}");
    }
    assert_eq!(outcomes[6..], ["rdma"; 4], "explicit configurations");
}

/// Starts a child with this variable. Returns what it reports.
fn outcomes(variable: &str) -> Vec<String> {
    let child = Child::start(&["env", "RDMA_HANDSHAKE_TIMEOUT=60s", variable], ROLE);
    child.word.split(" | ").map(str::to_owned).collect()
}

/// Makes a connection with each type that reads the environment, and with explicit configurations. The other
/// end always has an explicit one. Announces the outcomes.
pub(crate) fn report() {
    Runtime::MultiThread.run(async {
        let incoming = RdmaIncoming::builder().config(explicit()).bind("127.0.0.1:0").await.unwrap();
        let native = endpoint(incoming.local_addr());
        tokio::spawn(RdmaServer::new().add_service(greeter()).serve_with_incoming(incoming));
        let outcomes = [
            by_connector(RdmaConnector::new(), &native).await,
            by_channel(RdmaChannel::builder(native.clone()).connect().await),
            by_lazy_channel(RdmaChannel::builder(native.clone()).connect_lazy()).await,
            by_channel(RdmaChannel::balance([native.clone()]).connect().await),
            to_incoming(RdmaIncoming::bind("127.0.0.1:0").await).await,
            to_server(RdmaServer::new()).await,
            by_connector(RdmaConnector::new().config(explicit()), &native).await,
            by_channel(RdmaChannel::builder(native.clone()).config(explicit()).connect().await),
            to_incoming(RdmaIncoming::builder().config(explicit()).bind("127.0.0.1:0").await).await,
            to_server(RdmaServer::new().config(explicit())).await,
        ];
        let outcomes = outcomes.map(|outcome| outcome.unwrap_or_else(|error| texts(&*error)));
        announce(outcomes.join(" | "));
    });
}

/// A busy machine may need longer for a negotiation than the default.
fn explicit() -> Config {
    Config::default().handshake_timeout(Duration::from_secs(60))
}

fn greeter() -> GreeterServer<ScriptedGreeter> {
    GreeterServer::new(ScriptedGreeter::new())
}

async fn by_connector(connector: RdmaConnector, endpoint: &Endpoint) -> Outcome {
    endpoint.connect_with_connector(connector.clone()).await?;
    described(connector.last_connection())
}

fn by_channel(channel: Result<RdmaChannel, RdmaError>) -> Outcome {
    described(channel?.last_connection())
}

async fn by_lazy_channel(channel: RdmaChannel) -> Outcome {
    say(&mut GreeterClient::new(channel.clone()), "hello").await?;
    described(channel.last_connection())
}

async fn to_incoming(incoming: io::Result<RdmaIncoming>) -> Outcome {
    let incoming = incoming?;
    let address = incoming.local_addr();
    tokio::spawn(Server::builder().add_service(greeter()).serve_with_incoming(incoming));
    by_connector(RdmaConnector::new().config(explicit()), &endpoint(address)).await
}

async fn to_server(server: RdmaServer) -> Outcome {
    let address = free_address();
    let endpoint = endpoint(address.parse()?);
    let serving = tokio::spawn(server.add_service(greeter()).serve(address));
    while !serving.is_finished() {
        // It may not listen yet.
        match RdmaChannel::builder(endpoint.clone()).config(explicit()).connect().await {
            Ok(channel) => return described(channel.last_connection()),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
    Err(serving.await?.expect_err("a server ends by an error").into())
}

fn described(info: Option<RdmaConnectInfo>) -> Outcome {
    let info = info.ok_or("there was no connection")?;
    Ok(if info.verdict() == Verdict::Rdma { "rdma".to_owned() } else { info.reason().to_owned() })
}

/// Returns the texts of an error and of its causes.
fn texts(error: &dyn Error) -> String {
    error.source().map_or_else(String::new, texts) + "; " + &error.to_string()
}
