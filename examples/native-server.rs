//! A server of native calls: gRPC without HTTP/2, to `native-client`. HTTP/2 peers over RDMA and stock gRPC
//! clients arrive on the same port.
//!
//! Start `cargo run --example native-server`, and then `cargo run --example native-client` in another
//! terminal.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use tonic_rdma::{RdmaIncoming, RdmaServer};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".into());
    let (_reporter, service) = tonic_health::server::health_reporter();

    let incoming = RdmaIncoming::bind(&*address).await?;
    println!("listening on {}", incoming.local_addr());
    RdmaServer::new().add_service(service).serve_with_incoming(incoming).await?; // was: Server::builder()
    Ok(())
}
