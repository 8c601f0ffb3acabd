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
    // `tonic-rdma call` and `load` ask it for the messages of the other service.
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;

    let incoming = RdmaIncoming::bind(&*address).await?;
    println!("listening on {}", incoming.local_addr());
    let server = RdmaServer::new(); // was: Server::builder()
    server.add_service(service).add_service(reflection).serve_with_incoming(incoming).await?;
    Ok(())
}
