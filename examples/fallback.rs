//! Fallback to TCP: a stock client calls a server with this transport, and a client with this transport calls
//! a stock server. Both connections use TCP, and report the reason.
//!
//! `cargo run --example fallback` runs clients and servers in one process.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_rdma::{Config, Policy, RdmaConnectInfo, RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

#[derive(Debug)]
struct MyGreeter;

#[tonic::async_trait]
impl Greeter for MyGreeter {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let message = match request.extensions().get::<RdmaConnectInfo>() {
            Some(info) => format!("you came over {}: {}", info.verdict(), info.reason()),
            None => "you came to a stock server".into(),
        };
        Ok(Response::new(HelloReply { message }))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ours = RdmaIncoming::bind("127.0.0.1:0").await?;
    let stock = TcpIncoming::bind("127.0.0.1:0".parse()?)?.with_nodelay(Some(true));
    let (our_address, stock_address) = (ours.local_addr(), stock.local_addr()?);
    let service = GreeterServer::new(MyGreeter);
    tokio::spawn(Server::builder().add_service(service.clone()).serve_with_incoming(ours));
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(stock));

    let stock_client = Endpoint::from_shared(format!("http://{our_address}"))?.connect().await?;
    println!("stock client, our server:  {}", ask(stock_client).await?);

    let connector = RdmaConnector::new();
    let endpoint = Endpoint::from_shared(format!("http://{stock_address}"))?;
    let our_client = endpoint.connect_with_connector(connector.clone()).await?;
    println!("our client, stock server:  {}", ask(our_client).await?);
    if let Some(info) = connector.last_connection() {
        println!("                           our client knows: {}, {}", info.verdict(), info.reason());
    }

    let strict = RdmaConnector::new().config(Config::from_env()?.policy(Policy::Require));
    match endpoint.connect_with_connector(strict).await {
        Ok(_) => return Err("a stock server can't have spoken RDMA".into()),
        Err(error) => println!("our client, RDMA required: {}", innermost(&error)),
    }
    Ok(())
}

async fn ask(channel: Channel) -> Result<String, Status> {
    let reply = GreeterClient::new(channel).say_hello(HelloRequest { name: "you".into() }).await?;
    Ok(reply.into_inner().message)
}

fn innermost(error: &dyn std::error::Error) -> &dyn std::error::Error {
    error.source().map_or(error, innermost)
}
