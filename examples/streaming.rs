//! Streams in both directions at once over one RDMA connection: the client sends names while the server sends
//! greetings.
//!
//! `cargo run --example streaming` runs server and client in one process.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use tokio_stream::StreamExt;
use tonic::codegen::BoxStream;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::{RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

#[derive(Debug)]
struct Chatty;

#[tonic::async_trait]
impl Greeter for Chatty {
    async fn chat(
        &self,
        names: Request<Streaming<HelloRequest>>,
    ) -> Result<Response<BoxStream<HelloReply>>, Status> {
        let greet = |name: HelloRequest| HelloReply { message: format!("Hello {}!", name.name) };
        let greetings = names.into_inner().map(move |name| name.map(greet));
        Ok(Response::new(Box::pin(greetings)))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    const NAMES: usize = 10_000;
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let address = incoming.local_addr();
    tokio::spawn(Server::builder().add_service(GreeterServer::new(Chatty)).serve_with_incoming(incoming));

    let connector = RdmaConnector::new();
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let channel = endpoint.connect_with_connector(connector.clone()).await?;

    let names =
        tokio_stream::iter((0..NAMES).map(|number| HelloRequest { name: format!("number {number}") }));
    let mut greetings = GreeterClient::new(channel).chat(names).await?.into_inner();
    let mut count = 0;
    while let Some(greeting) = greetings.next().await {
        let expected = format!("Hello number {count}!");
        if greeting?.message != expected {
            return Err(format!("greeting {count} is not {expected:?}").into());
        }
        count += 1;
    }
    if count != NAMES {
        return Err(format!("{count} greetings for {NAMES} names").into());
    }
    println!("{count} greetings, in order");
    if let Some(info) = connector.last_connection() {
        println!("over {}: {:#?}", info.verdict(), info.counters());
    }
    Ok(())
}
