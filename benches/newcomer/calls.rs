//! The measuring client of calls: a greeter, and puts of one large field.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tonic::client::GrpcService;
use tonic::transport::{Channel, Endpoint};
use tonic_rdma::{RdmaConnector, gather};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;

use super::client::repeat;
use super::content::{stamp, text};
use super::path::{Cell, Path};
use super::server::Addresses;

/// Connects over tonic's own transport, or over RDMA.
async fn connect(path: Path, addresses: &Addresses) -> Channel {
    let endpoint = |address: &str| Endpoint::from_shared(format!("http://{address}")).unwrap();
    match path {
        Path::GrpcTcp | Path::PutTcp => endpoint(&addresses.tcp).connect().await.unwrap(),
        _ => endpoint(&addresses.rdma).connect_with_connector(RdmaConnector::new()).await.unwrap(),
    }
}

pub(crate) async fn greeter(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let channel = connect(cell.path, addresses).await;
    if cell.inflight == 1 {
        let mut client = GreeterClient::new(channel);
        return repeat(duration, async |step| greet(&mut client, cell.bytes, step).await).await;
    }
    let start = Instant::now();
    let tasks: Vec<_> = (0..cell.inflight)
        .map(|_| {
            let mut client = GreeterClient::new(channel.clone());
            tokio::spawn(async move {
                let mut calls = 0_u64;
                while start.elapsed() < duration {
                    greet(&mut client, cell.bytes, calls).await;
                    calls += 1;
                }
                calls
            })
        })
        .collect();
    let mut calls = 0;
    for task in tasks {
        calls += task.await.unwrap();
    }
    start.elapsed().as_secs_f64() * 1e6 / calls as f64
}

async fn greet(client: &mut GreeterClient<Channel>, bytes: usize, step: u64) {
    let request = HelloRequest { name: text(bytes, step) };
    let reply = client.say_hello(request).await.unwrap().into_inner();
    assert_eq!(reply.message, format!("Hello {step:08}"));
}

pub(crate) async fn put(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let channel = connect(cell.path, addresses).await;
    let pool = tonic_rdma::memory::Pool::for_sending(1 << 30);
    let fill = |step| -> Bytes {
        if cell.path == Path::Pool {
            let mut payload = pool.allocate(cell.bytes).unwrap();
            stamp(&mut payload, step);
            return payload.freeze();
        }
        let mut payload = vec![0; cell.bytes];
        stamp(&mut payload, step);
        payload.into()
    };
    if cell.path == Path::PutTcp {
        return puts(TransferClient::new(channel), fill, duration).await;
    }
    puts(TransferClient::new(gather::requests(channel)), fill, duration).await
}

async fn puts<S>(mut client: TransferClient<S>, fill: impl Fn(u64) -> Bytes, duration: Duration) -> f64
where
    S: GrpcService<tonic::body::Body, ResponseBody = tonic::body::Body>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    repeat(duration, async |seed| {
        let payload = fill(seed);
        let bytes = payload.len() as u64;
        let request = PutRequest { seed, payload, ..Default::default() };
        assert_eq!(client.put(request).await.unwrap().into_inner().bytes, bytes);
    })
    .await
}
