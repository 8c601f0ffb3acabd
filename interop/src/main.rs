//! Our side of the checks against stock gRPC peers.
//!
//! `interop-peer serve` listens on a free port of this machine, prints it, and serves the Transfer service for RDMA
//! peers and stock clients alike. `interop-peer tensors` prints the port of a tensor device. `interop-peer call ADDRESS` calls that service, which a stock server may provide, and
//! checks what comes back. Payloads are never zeros: byte `i` is `(i * 31 + seed) mod 251`.

mod tensors;

use std::process::ExitCode;

use bytes::Bytes;
use tokio_stream::StreamExt as _;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::{Config, RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest, UsageReply, UsageRequest};

type Failure = Box<dyn std::error::Error>;

const LIMIT: usize = 64 << 20;
const SIZES: [usize; 6] = [0, 1, 1000, 20_000, 1 << 20, 8 << 20];

fn content(seed: u64, length: usize) -> Bytes {
    (0..length as u64).map(|index| ((index * 31 + seed) % 251) as u8).collect()
}

/// Offset of the first wrong byte, plus one; 0 if all are right.
fn first_mismatch(seed: u64, payload: &[u8]) -> u64 {
    let wrong =
        content(seed, payload.len()).iter().zip(payload).position(|(expected, byte)| expected != byte);
    wrong.map_or(0, |offset| offset as u64 + 1)
}

#[derive(Debug)]
struct Checking;

#[tonic::async_trait]
impl Transfer for Checking {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let request = request.into_inner();
        let bytes = request.payload.len() as u64;
        Ok(Response::new(PutReply {
            bytes,
            first_mismatch: first_mismatch(request.seed, &request.payload),
            ..Default::default()
        }))
    }

    type EchoStream = Streaming<PutRequest>;

    async fn echo(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<Self::EchoStream>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<UsageReply>, Status> {
        Err(Status::unimplemented("usage is not measured here"))
    }
}

#[expect(clippy::print_stdout, reason = "the port is what the script waits for")]
async fn serve() -> Result<(), Failure> {
    let incoming = RdmaIncoming::bind_with("127.0.0.1:0", Config::from_env()?).await?;
    println!("{}", incoming.local_addr().port());
    let service =
        TransferServer::new(Checking).max_decoding_message_size(LIMIT).max_encoding_message_size(LIMIT);
    Server::builder().add_service(service).serve_with_incoming(incoming).await?;
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the script shows it")]
async fn call(address: &str) -> Result<(), Failure> {
    let connector = RdmaConnector::with_config(Config::from_env()?);
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let channel = endpoint.connect_with_connector(connector.clone()).await?;
    let mut client =
        TransferClient::new(channel).max_decoding_message_size(LIMIT).max_encoding_message_size(LIMIT);
    for (seed, length) in (1..).zip(SIZES) {
        let payload = content(seed, length);
        let reply = client.put(PutRequest { seed, check: 1, payload }).await?.into_inner();
        if (reply.bytes, reply.first_mismatch) != (length as u64, 0) {
            return Err(format!("put of {length} bytes: the server saw {reply:?}").into());
        }
    }
    let sent = SIZES.map(|length| PutRequest {
        seed: length as u64,
        check: 1,
        payload: content(length as u64, length),
    });
    let mut echoed = client.echo(tokio_stream::iter(sent.clone())).await?.into_inner();
    for expected in sent {
        match echoed.next().await {
            Some(Ok(message)) if message == expected => {}
            other => return Err(format!("echo of {} bytes: {other:?}", expected.payload.len()).into()),
        }
    }
    match client.usage(UsageRequest {}).await {
        Err(status) if status.code() == tonic::Code::Unimplemented => {}
        other => return Err(format!("an unimplemented method answered {other:?}").into()),
    }
    let info = connector.last_connection().ok_or("no connection")?;
    println!("ok over {}: {}", info.verdict(), info.reason());
    Ok(())
}

#[expect(clippy::print_stderr, reason = "a command says what went wrong")]
#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => serve().await,
        ["tensors"] => tensors::serve().await,
        ["call", address] => call(address).await,
        _ => Err("usage: interop-peer serve | interop-peer tensors | interop-peer call ADDRESS".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("interop-peer: {error}");
            ExitCode::FAILURE
        }
    }
}
