//! Allocation sites register the buffers that gRPC calls send by reference, and no others: over RDMA and TCP,
//! in both directions.

use std::net::SocketAddr;

use bytes::Bytes;
use support::config;
use tokio_stream::StreamExt;
use tonic::codegen::BoxStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::memory::Pool;
use tonic_rdma::memory::sites::{
    PlacementReason, Site, SiteAllocator, SiteBuf, SitePlacement, SiteSettings, SiteStatus,
};
use tonic_rdma::{Config, EagerThreshold, Policy, RdmaConnector, RdmaIncoming, gather};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

const LENGTH: usize = 300_000;

/// A service that checks the payload of a put, and answers a stream with buffers of its own.
struct Worker {
    sites: SiteAllocator,
}

#[tonic::async_trait]
impl Transfer for Worker {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let request = request.into_inner();
        let expected = content(request.seed, request.payload.len());
        let wrong = request.payload.iter().zip(expected).position(|(a, b)| *a != b);
        let first_mismatch = wrong.map_or(0, |at| at as u64 + 1);
        Ok(Response::new(PutReply {
            bytes: request.payload.len() as u64,
            first_mismatch,
            ..Default::default()
        }))
    }

    async fn echo(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<BoxStream<PutRequest>>, Status> {
        let sites = self.sites.clone();
        let answers = request.into_inner().map(move |message| {
            let PutRequest { seed, check, payload } = message?;
            drop(filled(sites.allocate_named("scratch", payload.len()), seed));
            let payload = filled(sites.allocate_named("answer", payload.len()), seed).freeze();
            Ok(PutRequest { seed, check, payload })
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// Returns content that depends on the seed and on the position.
fn content(seed: u64, length: usize) -> impl Iterator<Item = u8> {
    (0..length as u64).map(move |at| ((at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
}

fn filled(mut buffer: SiteBuf, seed: u64) -> SiteBuf {
    let length = buffer.len();
    buffer.iter_mut().zip(content(seed, length)).for_each(|(byte, value)| *byte = value);
    buffer
}

fn allocator() -> SiteAllocator {
    SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default())
}

/// Starts a server that gathers, and allocates from `sites`.
async fn serve(sites: &SiteAllocator) -> SocketAddr {
    let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
    let address = incoming.local_addr();
    let service = TransferServer::new(Worker { sites: sites.clone() });
    let server = Server::builder().layer(gather::GatherResponses::new()).add_service(service);
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

async fn connect(address: SocketAddr, config: Config) -> Channel {
    let connector = RdmaConnector::new().config(config);
    Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .connect_with_connector(connector)
        .await
        .unwrap()
}

fn over_rdma() -> Config {
    config().policy(Policy::Require)
}

/// Puts `payload`, and checks that all of it arrived.
macro_rules! put {
    ($client:expr, $seed:expr, $payload:expr) => {{
        let payload: Bytes = $payload;
        let expected = (payload.len() as u64, 0);
        let reply = $client.put(PutRequest { seed: $seed, check: 0, payload }).await.unwrap().into_inner();
        assert_eq!((reply.bytes, reply.first_mismatch), expected);
    }};
}

fn is_registered(sites: &SiteAllocator, bytes: &Bytes) -> bool {
    sites.pool().find(bytes.as_ptr() as usize, bytes.len()).is_some()
}

fn named(sites: &SiteAllocator, wanted: &str) -> SiteStatus {
    let is_wanted = |site: &SiteStatus| matches!(&site.site, Site::Named { name, .. } if **name == *wanted);
    sites.report().sites.into_iter().find(is_wanted).unwrap()
}

/// Allocates the buffers of a training loop. Only the gradients are sent by reference over RDMA.
async fn exactly_the_sites_that_send_are_registered(config: Config) {
    let sites = allocator();
    let address = serve(&sites).await;
    let mut gathers = TransferClient::new(gather::GatherRequests::new(connect(address, config).await));
    let tcp = connect(address, support::config().policy(Policy::TcpOnly)).await;
    let mut over_tcp = TransferClient::new(gather::GatherRequests::new(tcp));
    for step in 1..=3_u64 {
        let activations = filled(sites.allocate(LENGTH), step);
        let gradients = filled(sites.allocate(LENGTH), step).freeze();
        let summary = filled(sites.allocate(gather::THRESHOLD - 1), step).freeze();
        let logs = filled(sites.allocate(LENGTH), step).freeze();
        assert_eq!(activations.placement(), SitePlacement::Heap, "computed on");
        assert_eq!(is_registered(&sites, &gradients), step > 1, "sent, in step {step}");
        assert!(!is_registered(&sites, &summary), "copied by the encoder");
        assert!(!is_registered(&sites, &logs), "sent over TCP");
        put!(gathers, step, gradients);
        put!(gathers, step, summary);
        put!(over_tcp, step, logs);
        sites.next_iteration();
    }
    let report = sites.report();
    let sent: Vec<_> = report.sites.iter().map(|site| (site.buffers, site.sent, site.registered)).collect();
    assert_eq!((sent.len(), sent.iter().filter(|&&counts| counts == (3, 3, 2)).count()), (4, 1), "{report}");
    assert_eq!(sent.iter().filter(|&&counts| counts == (3, 0, 0)).count(), 3, "{report}");
}

#[tokio::test]
async fn sent_sites_are_registered_when_writes_are_eager() {
    exactly_the_sites_that_send_are_registered(over_rdma()).await;
}

#[tokio::test]
async fn sent_sites_are_registered_when_writes_go_by_rendezvous() {
    exactly_the_sites_that_send_are_registered(over_rdma().eager_threshold(EagerThreshold::Bytes(8192)))
        .await;
}

#[tokio::test]
async fn buffers_that_a_client_copies_stay_on_the_heap() {
    let sites = allocator();
    let mut plain = TransferClient::new(connect(serve(&sites).await, over_rdma()).await);
    for step in 1..=2 {
        let payload = filled(sites.allocate_named("payload", LENGTH), step).freeze();
        assert!(!is_registered(&sites, &payload));
        put!(plain, step, payload);
        sites.next_iteration();
    }
    assert_eq!((named(&sites, "payload").why, named(&sites, "payload").sent), (PlacementReason::NotSent, 0));
}

#[tokio::test]
async fn a_server_learns_which_buffers_are_its_answers() {
    let sites = allocator();
    let channel = connect(serve(&sites).await, over_rdma()).await;
    let mut client = TransferClient::new(gather::GatherRequests::new(channel));
    for step in 1..=3 {
        let payload = content(step, LENGTH).collect::<Bytes>();
        let request = tokio_stream::once(PutRequest { seed: step, check: 0, payload: payload.clone() });
        let mut answers = client.echo(request).await.unwrap().into_inner();
        assert!(
            answers.next().await.unwrap().unwrap().payload == payload,
            "the answer of step {step} differs"
        );
        sites.next_iteration();
    }
    let (answer, scratch) = (named(&sites, "answer"), named(&sites, "scratch"));
    assert_eq!((answer.buffers, answer.sent, answer.registered), (3, 3, 2));
    assert_eq!((scratch.buffers, scratch.sent, scratch.registered), (3, 0, 0));
}
