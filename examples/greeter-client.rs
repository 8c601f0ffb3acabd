//! A tonic client over RDMA, and over TCP if the server has no RDMA. One line differs from plain tonic.
//!
//! `cargo run --example greeter-client -- 127.0.0.1:50051 1000` makes a thousand calls and prints the time of
//! a call.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::time::Instant;

use tonic::transport::Endpoint;
use tonic_rdma::RdmaConnector;
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".into());
    let calls = std::env::args().nth(2).map_or(Ok(1), |calls| calls.parse::<u32>())?;
    let connector = RdmaConnector::new();

    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let channel = endpoint.connect_with_connector(connector.clone()).await?; // changed: was connect()
    let mut client = GreeterClient::new(channel);

    let reply = client.say_hello(HelloRequest { name: "tonic".into() }).await?;
    println!("{}", reply.into_inner().message);
    if let Some(info) = connector.last_connection() {
        println!("this end says {}, because {}", info.verdict(), info.reason());
    }
    if calls > 1 {
        let start = Instant::now();
        for _ in 0..calls {
            client.say_hello(HelloRequest { name: "tonic".into() }).await?;
        }
        println!("a call took {:.1?}, the mean of {calls}", start.elapsed() / calls);
    }
    Ok(())
}
