//! Sends large fields by reference, between our codec and the stock codec, over RDMA and TCP.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::net::TcpListener;
use tokio_stream::{Stream, StreamExt, wrappers::TcpListenerStream};
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codec::{Codec, EncodeBody};
use tonic::codegen::BoxStream;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{Service, http};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::memory::Pool;
use tonic_rdma::{Config, EagerThreshold, RdmaConnector, RdmaIncoming, gather};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

/// Lengths around the threshold, around a DATA frame, and of several windows.
const SIZES: [usize; 9] = [
    0,
    1,
    gather::THRESHOLD - 1,
    gather::THRESHOLD,
    gather::THRESHOLD + 1,
    100_000,
    0,
    (3 << 20) + 7,
    (9 << 20) + 1,
];

struct Echo;

#[tonic::async_trait]
impl Transfer for Echo {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let request = request.into_inner();
        let wrong = request
            .payload
            .iter()
            .zip(content(request.seed, request.payload.len()))
            .position(|(a, b)| *a != b);
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
        Ok(Response::new(Box::pin(request.into_inner())))
    }
}

/// Returns content that depends on the seed and on the position.
fn content(seed: u64, length: usize) -> impl Iterator<Item = u8> {
    (0..length as u64).map(move |at| ((at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
}

fn message(seed: u64, length: usize) -> PutRequest {
    PutRequest { seed, check: 0, payload: content(seed, length).collect() }
}

fn messages() -> impl Stream<Item = PutRequest> {
    tokio_stream::iter(SIZES.iter().zip(0..)).map(|(&length, seed)| message(seed, length))
}

/// Starts a server that gathers, on a port for RDMA and a port for TCP. Returns channels to both.
async fn channels() -> [Channel; 2] {
    let service = || TransferServer::new(Echo).max_decoding_message_size(usize::MAX);
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
    let rdma = incoming.local_addr();
    let server = Server::builder().layer(gather::GatherResponses::new()).add_service(service());
    tokio::spawn(server.serve_with_incoming(incoming));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let tcp = listener.local_addr().unwrap();
    let server = Server::builder().layer(gather::GatherResponses::new()).add_service(service());
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let endpoint = |address| Endpoint::from_shared(format!("http://{address}")).unwrap();
    [
        endpoint(rdma).connect_with_connector(RdmaConnector::new()).await.unwrap(),
        endpoint(tcp).connect().await.unwrap(),
    ]
}

#[tokio::test]
async fn every_size_arrives_whole() {
    for channel in channels().await {
        let mut client = TransferClient::new(gather::GatherRequests::new(channel));
        for (&length, seed) in SIZES.iter().zip(10..) {
            let reply = client.put(message(seed, length)).await.unwrap().into_inner();
            assert_eq!((reply.bytes, reply.first_mismatch), (length as u64, 0), "{length} bytes");
        }
    }
}

/// Uses settings of a network card, which sends nothing large inline, and registered memory for the messages.
/// The payload must go from there to the peer without a copy by the codec, HTTP/2 or the endpoint.
#[tokio::test]
async fn registered_payloads_are_not_copied_on_the_sending_side() {
    payloads_are_not_copied(None).await;
}

/// Frames that are longer than the threshold are not even sent: the peer reads the payload where it lies, if the
/// device can show it that alone.
#[tokio::test]
async fn registered_payloads_of_long_frames_are_read_by_the_peer() {
    payloads_are_not_copied(Some(256 << 10)).await;
}

async fn payloads_are_not_copied(frame: Option<u32>) {
    const LENGTH: usize = 3 << 20;
    const MESSAGES: u64 = 5;
    let config = Config::from_env().unwrap().max_inline(200).eager_threshold(EagerThreshold::Bytes(64 << 10));
    let incoming = RdmaIncoming::builder().config(config.clone()).bind("127.0.0.1:0").await.unwrap();
    let address = incoming.local_addr();
    let service = TransferServer::new(Echo).max_decoding_message_size(usize::MAX);
    let server = Server::builder().max_frame_size(frame).initial_stream_window_size(frame.map(|_| 16 << 20));
    let server = server.initial_connection_window_size(frame.map(|_| 16 << 20));
    let server = server.layer(gather::GatherResponses::new()).add_service(service);
    tokio::spawn(server.serve_with_incoming(incoming));
    let connector = RdmaConnector::new().config(config);
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = endpoint.connect_with_connector(connector.clone()).await.unwrap();
    let mut client =
        TransferClient::new(gather::GatherRequests::new(channel)).max_decoding_message_size(usize::MAX);
    let pool = Pool::for_sending(64 << 20);
    let counters = || connector.last_connection().unwrap().counters();
    for (registered, least, most) in [(true, 0.98, 1.0), (false, 0.0, 0.02)] {
        let before = counters();
        for seed in 0..MESSAGES {
            let mut message = message(seed, LENGTH);
            if registered {
                let mut buffer = pool.allocate(LENGTH).unwrap();
                buffer.copy_from_slice(&message.payload);
                message.payload = buffer.freeze();
            }
            let reply = client.put(message).await.unwrap().into_inner();
            assert_eq!((reply.bytes, reply.first_mismatch), (LENGTH as u64, 0));
        }
        let after = counters();
        let share = |bytes| bytes as f64 / (MESSAGES as usize * LENGTH) as f64;
        let in_place = share(after.copies_avoided_bytes - before.copies_avoided_bytes);
        assert!((least..=most).contains(&in_place), "registered: {registered}, not copied: {in_place}");
        if registered && connector.last_connection().unwrap().device() == Some("soft0") {
            let read = share(after.rendezvous_sent_bytes - before.rendezvous_sent_bytes);
            assert_eq!(read >= 0.9, frame.is_some(), "{read} of the payload");
        }
    }
    assert_eq!(pool.statistics().leased_send, 0, "all was given back");
}

#[tokio::test]
async fn streams_keep_their_messages_apart_both_ways() {
    for channel in channels().await {
        let mut client =
            TransferClient::new(gather::GatherRequests::new(channel)).max_decoding_message_size(usize::MAX);
        let replies = client.echo(messages()).await.unwrap().into_inner();
        let replies: Vec<PutRequest> = replies.map(Result::unwrap).collect().await;
        let sent: Vec<PutRequest> = messages().collect().await;
        assert!(replies == sent, "the echo differs");
    }
}

#[tokio::test]
async fn our_codec_and_the_stock_codec_understand_each_other() {
    let path = || PathAndQuery::from_static("/tonic_rdma.transfer.v1.Transfer/Echo");
    for channel in channels().await {
        // The stock codec in the client, ours in the server.
        let mut stock = Grpc::new(channel.clone()).max_decoding_message_size(usize::MAX);
        stock.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<PutRequest, PutRequest>::default();
        let replies = stock.streaming(Request::new(messages()), path(), codec).await.unwrap().into_inner();
        let replies: Vec<PutRequest> = replies.map(Result::unwrap).collect().await;
        assert!(replies == messages().collect::<Vec<_>>().await, "the echo differs");

        // Our codec over a transport that takes no payload by reference.
        let mut plain = TransferClient::new(channel);
        let reply = plain.put(message(5, 1 << 20)).await.unwrap().into_inner();
        assert_eq!((reply.bytes, reply.first_mismatch), (1 << 20, 0));
    }
}

/// Sends every frame back.
#[derive(Clone)]
struct Mirror;

impl Service<http::Request<Body>> for Mirror {
    type Response = Vec<Bytes>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, Status>>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut body = request.into_body();
            let mut frames = Vec::new();
            while let Some(frame) = body.frame().await {
                frames.extend(frame?.into_data());
            }
            Ok(frames)
        })
    }
}

#[tokio::test]
async fn the_payload_is_not_copied_unless_the_call_is_compressed() {
    let message = message(1, 1 << 20);
    let mut channel = gather::GatherRequests::new(Mirror);
    let mut frames = Vec::new();
    for encoding in ["identity", "gzip"] {
        let encoder = gather::GatherCodec::<PutRequest, PutRequest>::default().encoder();
        let source = tokio_stream::once(Ok(message.clone()));
        let body = Body::new(EncodeBody::new_client(encoder, source, None, None));
        let request = http::Request::builder().header("grpc-encoding", encoding).body(body).unwrap();
        frames.push(channel.call(request).await.unwrap());
    }
    let (gathered, compressed) = (&frames[0], &frames[1]);
    assert_eq!(gathered.len(), 2);
    let inside = message.payload.len() - gathered[1].len();
    assert!(inside < 4096, "{inside} bytes copied");
    assert_eq!(gathered[1].as_ptr(), message.payload[inside..].as_ptr());
    assert_eq!(compressed.len(), 1);
    assert_eq!(gathered.concat(), compressed.concat());
}
