//! A tonic service over RDMA: calls, streams, concurrency, shutdown, restart.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tonic::codegen::BoxStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_rdma::{Config, PollMode, RdmaConnectInfo, RdmaConnector, RdmaIncoming, Verdict};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

use support::{Content, Runtime, config, everywhere, until};

const LIMIT: usize = 128 << 20;

/// A service that compares each payload with the content of its seed.
#[derive(Debug)]
struct Checking {
    /// A call that takes a while has arrived.
    is_busy: Arc<AtomicBool>,
}

#[tonic::async_trait]
impl Transfer for Checking {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let info = request.extensions().get::<RdmaConnectInfo>().expect("connect info").clone();
        assert_eq!(info.verdict(), Verdict::Rdma, "{}", info.reason());
        let request = request.into_inner();
        if request.seed == u64::MAX {
            self.is_busy.store(true, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        Content::new(request.seed).check(&request.payload);
        Ok(Response::new(PutReply {
            bytes: request.payload.len() as u64,
            first_mismatch: 0,
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

pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    is_busy: Arc<AtomicBool>,
    pub(crate) stop: oneshot::Sender<()>,
    pub(crate) server: JoinHandle<Result<(), tonic::transport::Error>>,
}

pub(crate) async fn serve(address: &str, config: Config) -> Running {
    let incoming = RdmaIncoming::builder().config(config).bind(address).await.unwrap();
    let address = incoming.local_addr();
    let (stop, stopped) = oneshot::channel::<()>();
    let is_busy = Arc::<AtomicBool>::default();
    let service = TransferServer::new(Checking { is_busy: Arc::clone(&is_busy) });
    let service = service.max_decoding_message_size(LIMIT).max_encoding_message_size(LIMIT);
    let server = Server::builder().add_service(service).serve_with_incoming_shutdown(incoming, async {
        let _ = stopped.await;
    });
    Running { address, is_busy, stop, server: tokio::spawn(server) }
}

fn client_of(channel: Channel) -> TransferClient<Channel> {
    TransferClient::new(channel).max_decoding_message_size(LIMIT).max_encoding_message_size(LIMIT)
}

pub(crate) async fn connect(address: SocketAddr, config: Config) -> TransferClient<Channel> {
    let connector = RdmaConnector::new().config(config);
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let client = client_of(endpoint.connect_with_connector(connector.clone()).await.unwrap());
    assert_eq!(connector.last_connection().unwrap().verdict(), Verdict::Rdma);
    client
}

fn request(seed: u64, length: usize) -> PutRequest {
    PutRequest { seed, check: 1, payload: Content::new(seed).take(length).into() }
}

async fn put(client: &mut TransferClient<Channel>, seed: u64, length: usize) {
    let reply = client.put(request(seed, length)).await.unwrap().into_inner();
    assert_eq!((reply.bytes, reply.first_mismatch), (length as u64, 0));
}

#[test]
fn calls_of_every_size() {
    everywhere(|config| async move {
        let running = serve("127.0.0.1:0", config.clone()).await;
        let mut client = connect(running.address, config).await;
        for (seed, length) in [0, 1, 100, 16_384, 70_000, 1 << 20, 5_000_000].into_iter().enumerate() {
            put(&mut client, seed as u64, length).await;
        }
    });
}

#[test]
fn a_message_of_a_hundred_megabytes() {
    Runtime::Idle.run(async {
        let running = serve("127.0.0.1:0", config()).await;
        let mut client = connect(running.address, config()).await;
        put(&mut client, 1, 100 << 20).await;
    });
}

#[test]
fn five_hundred_calls_in_flight() {
    for (runtime, mode) in [
        (Runtime::Idle, PollMode::Adaptive),
        (Runtime::MultiThread, PollMode::Adaptive),
        (Runtime::CurrentThread, PollMode::Event),
    ] {
        runtime.run(async {
            let config = config().poll_mode(mode);
            let running = serve("127.0.0.1:0", config.clone()).await;
            let client = connect(running.address, config).await;
            let calls: Vec<_> = (0..512)
                .map(|seed| {
                    let mut client = client.clone();
                    tokio::spawn(async move {
                        for round in 0..4 {
                            put(&mut client, seed * 4 + round, 8192).await;
                        }
                    })
                })
                .collect();
            for call in calls {
                call.await.unwrap();
            }
        });
    }
}

#[test]
fn streams_in_both_directions() {
    everywhere(|config| async move {
        const MESSAGES: u64 = 200;
        let running = serve("127.0.0.1:0", config.clone()).await;
        let mut client = connect(running.address, config).await;
        let sent =
            tokio_stream::iter((0..MESSAGES).map(|seed| request(seed, (seed * 397 % 20_000) as usize)));
        let mut echoed = client.echo(sent).await.unwrap().into_inner();
        for seed in 0..MESSAGES {
            let message = echoed.next().await.unwrap().unwrap();
            assert_eq!(message.seed, seed);
            Content::new(seed).check(&message.payload);
        }
        assert!(echoed.next().await.is_none());
    });
}

#[test]
fn graceful_shutdown_lets_a_call_finish() {
    everywhere(|config| async move {
        let running = serve("127.0.0.1:0", config.clone()).await;
        let mut client = connect(running.address, config).await;
        let call = tokio::spawn(async move { put(&mut client, u64::MAX, 1000).await });
        until(|| running.is_busy.load(Ordering::SeqCst)).await;
        running.stop.send(()).unwrap();
        call.await.unwrap();
        running.server.await.unwrap().unwrap();
    });
}

#[test]
fn a_channel_reconnects_after_the_server_came_back() {
    Runtime::Idle.run(async {
        let running = serve("127.0.0.1:0", config()).await;
        let address = running.address;
        let mut client = connect(address, config()).await;
        put(&mut client, 1, 100).await;
        running.stop.send(()).unwrap();
        running.server.await.unwrap().unwrap();
        let mut error = client.put(request(2, 100)).await.unwrap_err();
        // CANCELLED while the channel gives calls to the old connection, before it sees its end.
        while error.code() == Code::Cancelled {
            error = client.put(request(2, 100)).await.unwrap_err();
        }
        assert_eq!(error.code(), Code::Unavailable, "{error:?}");
        let _running = serve(&address.to_string(), config()).await;
        put(&mut client, 3, 100).await;
    });
}

#[test]
fn a_port_in_use_says_what_to_do() {
    Runtime::Idle.run(async {
        let first = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
        let error = RdmaIncoming::bind(first.local_addr()).await.unwrap_err();
        assert!(error.to_string().contains("another process listens there"), "{error}");
    });
}
