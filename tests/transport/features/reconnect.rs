//! Channels whose server starts late, stops, and starts again.

use std::time::Duration;

use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::Server;
use tonic_rdma::{RdmaConnector, RdmaIncoming, Verdict};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Over, Port, Runtime, ScriptedGreeter, config, say, unchanged};

#[test]
fn a_lazy_channel_waits_for_its_first_call() {
    let codes = unchanged(async |over: Over| {
        let port = Port::reserve();
        let mut client = GreeterClient::new(over.connect_lazily(&port.endpoint()));
        let early = say(&mut client, "hello").await.unwrap_err().code();
        let _running = over.serve_on(&port, &ScriptedGreeter::new()).await;
        (early, say(&mut client, "hello").await.unwrap())
    });
    assert_eq!(codes, (Code::Unavailable, "hello".into()));
}

#[test]
fn a_channel_outlives_its_server_more_than_once() {
    unchanged(outlive);
}

async fn outlive(over: Over) {
    let (port, greeter) = (Port::reserve(), ScriptedGreeter::new());
    let mut running = over.serve_on(&port, &greeter).await;
    let mut client = over.client(&running).await;
    let first = say(&mut client, "over").await.unwrap();
    for _ in 0..3 {
        running.end().await;
        // CANCELLED while the channel gives calls to the old connection, before it sees its end. This happens
        // over stock TCP too.
        let mut codes = vec![Code::Cancelled];
        while codes.ends_with(&[Code::Cancelled]) {
            codes.push(say(&mut client, "hello").await.unwrap_err().code());
        }
        codes.push(say(&mut client, "hello").await.unwrap_err().code());
        assert!(codes.ends_with(&[Code::Unavailable; 2]), "{codes:?}");
        running = over.serve_on(&port, &greeter).await;
        assert_eq!(say(&mut client, "over").await.unwrap(), first, "as before the restart");
    }
}

/// Behaves like a server that goes away just when a client dials.
#[test]
fn a_server_that_hung_up_once_is_not_taken_for_a_stock_server() {
    Runtime::Idle.run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let serving = tokio::spawn(async move {
            drop(listener.accept().await.unwrap());
            let incoming = RdmaIncoming::builder().config(config()).listen(listener).unwrap();
            Server::builder()
                .add_service(GreeterServer::new(ScriptedGreeter::new()))
                .serve_with_incoming(incoming)
                .await
        });
        let connector = RdmaConnector::new().config(config());
        let endpoint = tonic::transport::Endpoint::from_shared(endpoint).unwrap();
        let channel = endpoint.connect_with_connector(connector.clone()).await.unwrap();
        let info = connector.last_connection().unwrap();
        assert_eq!(info.verdict(), Verdict::Rdma, "{}", info.reason());
        assert_eq!(say(&mut GreeterClient::new(channel), "over").await.unwrap(), "rdma");
        serving.abort();
    });
}

#[test]
fn a_connection_that_is_old_enough_is_replaced() {
    unchanged(async |over: Over| {
        let age = Duration::from_millis(50);
        let running = over.serve(&ScriptedGreeter::new(), |server| server.max_connection_age(age)).await;
        let mut client = over.client(&running).await;
        // A call at the moment of the connection's end may fail, as over TCP.
        let first = loop {
            if let Ok(first) = say(&mut client, "peer").await {
                break first;
            }
        };
        while say(&mut client, "peer").await.is_ok_and(|now| now == first) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        while say(&mut client, "peer").await.is_err() {}
    });
}
