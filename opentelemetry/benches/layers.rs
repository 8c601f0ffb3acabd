//! What the layers add to a small native call. Client and server share one thread, so the times of both add up.
//!
//! ```sh
//! cargo bench -p tonic-rdma-opentelemetry
//! ```
#![allow(clippy::unwrap_used, missing_docs, reason = "a bench that can't run says so by stopping")]

use bytes::Bytes;
use opentelemetry_sdk::metrics::{InMemoryMetricExporter, PeriodicReader, SdkMeterProvider};
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};
use tonic_rdma::{Config, RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_opentelemetry::{ClientMetrics, ServerMetrics};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};
use tower::Layer as _;

fn main() {
    divan::main();
}

#[derive(Debug)]
struct Answers;

#[tonic::async_trait]
impl Transfer for Answers {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        Ok(Response::new(PutReply { bytes: request.get_ref().payload.len() as u64, ..PutReply::default() }))
    }
}

/// A call of 64 bytes, with layers of the SDK at these sides.
#[divan::bench(args = ["no layer", "client", "server", "client and server"], sample_size = 100)]
fn call_of_64_bytes(bencher: divan::Bencher<'_, '_>, layers: &str) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    tonic_rdma::runtime::idle_polling(&mut builder);
    let runtime = builder.enable_all().build().unwrap();
    let provider = SdkMeterProvider::builder()
        .with_reader(PeriodicReader::builder(InMemoryMetricExporter::default()).build())
        .build();
    let mut client = runtime.block_on(connected(&provider, layers));
    let payload = Bytes::from_static(&[7; 64]);
    bencher.bench_local(|| {
        let request = PutRequest { payload: payload.clone(), ..PutRequest::default() };
        let reply = runtime.block_on(async {
            match &mut client {
                Client::Plain(client) => client.put(request).await,
                Client::Recorded(client) => client.put(request).await,
            }
        });
        assert_eq!(reply.unwrap().into_inner().bytes, 64);
    });
}

enum Client {
    Plain(TransferClient<RdmaChannel>),
    Recorded(TransferClient<<ClientMetrics as tower::Layer<RdmaChannel>>::Service>),
}

async fn connected(provider: &SdkMeterProvider, layers: &str) -> Client {
    let config = Config::default().in_process(false);
    let incoming = RdmaIncoming::builder().config(config.clone()).bind("127.0.0.1:0").await.unwrap();
    let target = format!("http://{}", incoming.local_addr());
    let metrics = ServerMetrics::new(provider).methods_of(tonic_rdma_proto::DESCRIPTORS).unwrap();
    let server = RdmaServer::new();
    if layers.ends_with("server") {
        let server = server.layer(metrics).add_service(TransferServer::new(Answers));
        tokio::spawn(server.serve_with_incoming(incoming));
    } else {
        let server = server.add_service(TransferServer::new(Answers));
        tokio::spawn(server.serve_with_incoming(incoming));
    }
    let endpoint = Endpoint::from_shared(target.clone()).unwrap();
    let channel = RdmaChannel::builder(endpoint).config(config).connect().await.unwrap();
    assert!(channel.last_connection().is_some_and(|info| info.is_native()));
    if layers.starts_with("client") {
        Client::Recorded(TransferClient::new(ClientMetrics::new(provider, target).layer(channel)))
    } else {
        Client::Plain(TransferClient::new(channel))
    }
}
