//! A large message without the copy of encoding: the transport takes the payload from its own memory.
//!
//! `cargo run --example gather` runs both sides in one process. The generated code uses
//! `gather::GatherCodec`; `proto/generate/src/main.rs` names that codec.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use bytes::Bytes;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_rdma::gather::{GatherRequests, GatherResponses};
use tonic_rdma::{RdmaConnectInfo, RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

/// The length of the message, in bytes.
const LENGTH: usize = 64 << 20;

#[derive(Debug)]
struct Sink;

#[tonic::async_trait]
impl Transfer for Sink {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        if let Some(info) = request.extensions().get::<RdmaConnectInfo>() {
            println!("the server got a message over {}", info.verdict());
        }
        let payload = request.into_inner().payload;
        let wrong = payload.iter().zip(0..).position(|(byte, at)| *byte != content(at));
        let first_mismatch = wrong.map_or(0, |at| at as u64 + 1);
        Ok(Response::new(PutReply { bytes: payload.len() as u64, first_mismatch, ..Default::default() }))
    }
}

fn content(at: usize) -> u8 {
    (at % 251) as u8
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let address = incoming.local_addr();
    let service = TransferServer::new(Sink).max_decoding_message_size(2 * LENGTH);
    // With this layer, large answers go by reference, too. This server has no large answers.
    let server = Server::builder().layer(GatherResponses::new()).add_service(service);
    tokio::spawn(server.serve_with_incoming(incoming));

    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let connector = RdmaConnector::new();
    let channel = endpoint.connect_with_connector(connector).await?;
    let mut client = TransferClient::new(GatherRequests::new(channel)); // was: TransferClient::new(channel)
    let payload: Bytes = (0..LENGTH).map(content).collect();
    let reply = client.put(PutRequest { seed: 0, check: 0, payload }).await?.into_inner();
    if (reply.bytes, reply.first_mismatch) != (LENGTH as u64, 0) {
        return Err(format!("byte {} is wrong, or the length {}", reply.first_mismatch, reply.bytes).into());
    }
    println!("{} bytes arrived as they were sent", reply.bytes);
    Ok(())
}
