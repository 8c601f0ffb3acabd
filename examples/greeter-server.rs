//! A tonic service that RDMA peers and stock gRPC clients reach on one port. Two lines differ from plain
//! tonic.
//!
//! Start `cargo run --example greeter-server`, and then `cargo run --example greeter-client` in another
//! terminal.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_rdma::{RdmaConnectInfo, RdmaIncoming};
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

#[derive(Debug)]
struct MyGreeter;

#[tonic::async_trait]
impl Greeter for MyGreeter {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let over = request.extensions().get::<RdmaConnectInfo>().map(|info| info.verdict().to_string());
        let name = request.into_inner().name;
        let message = format!("Hello {name}, over {}!", over.as_deref().unwrap_or("nothing known"));
        Ok(Response::new(HelloReply { message }))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".into());

    let incoming = RdmaIncoming::bind(&*address).await?; // changed: was TcpIncoming::bind
    println!("listening on {}", incoming.local_addr());
    Server::builder()
        .add_service(GreeterServer::new(MyGreeter))
        .serve_with_incoming_shutdown(incoming, async {
            let _ = tokio::signal::ctrl_c().await;
        })
        .await?;
    Ok(())
}
