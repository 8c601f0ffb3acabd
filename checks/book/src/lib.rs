//! Runs the blocks of Rust in README and the book as doc tests, which `build.rs` makes of them. The public items are
//! for the hidden lines of the blocks: runtimes, servers, clients and ranks.
//!
//! Rustdoc runs each block in a process of its own.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for tests")]

use std::error::Error;
use std::net::SocketAddr;
use std::process::{Command, id};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::{env, thread};

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{oneshot, watch};
use tonic_rdma_proto::greeter::HelloReply;
use tonic_rdma_proto::greeter::greeter_server::Greeter;
use tonic_rdma_proto::transfer::PutReply;
use tonic_rdma_proto::transfer::transfer_server::Transfer;

pub use std::time::Duration;
pub use tonic::transport::{
    Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig,
};
pub use tonic::{Request, Response, Status, Streaming};
pub use tonic_rdma::{Config, Policy, PollMode, RdmaChannel, RdmaConnector, RdmaIncoming, RdmaServer};
pub use tonic_rdma_proto::greeter::HelloRequest;
pub use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
pub use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
pub use tonic_rdma_proto::transfer::PutRequest;
pub use tonic_rdma_proto::transfer::transfer_client::TransferClient;
pub use tonic_rdma_proto::transfer::transfer_server::TransferServer;

/// The result of a block.
pub type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// The number of rounds of a block that a program would repeat.
pub const ROUNDS: u64 = 400;

/// The length of a payload in bytes, long enough to go by reference.
pub const LENGTH: usize = 128 << 10;

/// The time limit of a block. It is long enough for a busy machine, so a block that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// Whether the runtimes poll while they are idle.
static POLLS: AtomicBool = AtomicBool::new(false);

/// The address of the server of the block.
static LISTENING: LazyLock<watch::Sender<Option<SocketAddr>>> = LazyLock::new(watch::Sender::default);

/// The metrics of the process.
static METRICS: LazyLock<Snapshotter> = LazyLock::new(|| {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::set_global_recorder(recorder).unwrap();
    snapshotter
});

/// Runs a block in the runtime of `#[tokio::main]`, and again in the runtime that polls while it is idle.
/// Checks that it made connections, and that no timer ended a wait: a timer would hide a wake-up that was
/// lost.
///
/// # Panics
/// The block returns an error, hangs, or fails these checks.
pub fn run(block: impl AsyncFn() -> Outcome) {
    for polls in [false, true] {
        POLLS.store(polls, Relaxed);
        LISTENING.send_replace(None);
        drop(METRICS.snapshot());
        let outcome = runtime().block_on(async { tokio::time::timeout(LIMIT, block()).await });
        outcome.expect("the block hangs").unwrap_or_else(|error| panic!("the block failed: {error:?}"));
        let counts = METRICS.snapshot().into_vec();
        let count = |name: &str| -> u64 {
            let of_name = counts.iter().filter(|(key, ..)| key.key().name() == name);
            of_name.map(|(.., value)| if let DebugValue::Counter(count) = value { *count } else { 0 }).sum()
        };
        assert_ne!(count("tonic_rdma_negotiations_total"), 0, "the block made no connection");
        assert_eq!(count("tonic_rdma_tensor_naps_total"), 0, "waits that a timer ended");
    }
}

fn runtime() -> Runtime {
    if POLLS.load(Relaxed) {
        return tonic_rdma::runtime::idle_polling(&mut Builder::new_current_thread())
            .enable_all()
            .build()
            .unwrap();
    }
    Builder::new_multi_thread().enable_all().build().unwrap()
}

/// Runs one side on a new thread with its own runtime, like a second process: both sides poll independently,
/// and must wake one another.
pub fn apart(side: impl Future<Output = Outcome> + Send + 'static) {
    thread::spawn(|| runtime().block_on(side).unwrap());
}

/// Says where the server of the block listens.
pub fn listens(address: SocketAddr) {
    LISTENING.send_replace(Some(address));
}

/// Waits until a server listens, and returns its address.
pub async fn server() -> SocketAddr {
    LISTENING.subscribe().wait_for(Option::is_some).await.unwrap().unwrap()
}

/// Starts a greeter that answers with what `answer` returns, and returns the URI for its clients.
///
/// # Errors
/// No port is free.
pub async fn serve(answer: fn(&Request<HelloRequest>) -> String) -> Outcome<String> {
    let (bound, address) = oneshot::channel();
    apart(async move {
        let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
        let _ = bound.send(incoming.local_addr());
        Ok(Server::builder().add_service(greeter(answer)).serve_with_incoming(incoming).await?)
    });
    Ok(format!("http://{}", address.await?))
}

/// Calls a greeter in all rounds, and checks that it always answers `expected`.
///
/// # Errors
/// A call fails.
pub async fn greet(
    mut call: impl AsyncFnMut(HelloRequest) -> Result<Response<HelloReply>, Status>,
    expected: &str,
) -> Outcome {
    for _ in 0..ROUNDS {
        assert_eq!(call(HelloRequest::default()).await?.into_inner().message, expected);
    }
    Ok(())
}

/// Sends the payload of each round by `call`, and checks the length that [`transfer`] has accepted.
///
/// # Errors
/// A call fails.
pub async fn put(mut call: impl AsyncFnMut(u64) -> Outcome<Response<PutReply>>) -> Outcome {
    for round in 0..ROUNDS {
        assert_eq!(call(round).await?.into_inner().bytes, LENGTH as u64);
    }
    Ok(())
}

/// Returns the request of a round.
pub fn request(round: u64) -> PutRequest {
    PutRequest { payload: vec![byte(round); LENGTH].into(), ..Default::default() }
}

/// Returns the value of all bytes of a payload, which differs between rounds.
pub fn byte(round: u64) -> u8 {
    round as u8 ^ 0x5a
}

/// Makes a greeter.
pub fn greeter(answer: fn(&Request<HelloRequest>) -> String) -> GreeterServer<GreeterService> {
    GreeterServer::new(GreeterService(answer))
}

/// The greeter.
#[derive(Debug)]
pub struct GreeterService(fn(&Request<HelloRequest>) -> String);

#[tonic::async_trait]
impl Greeter for GreeterService {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        Ok(Response::new(HelloReply { message: self.0(&request) }))
    }
}

/// Makes a service that accepts payloads, in the order of their rounds, and checks all their bytes.
pub fn transfer() -> TransferServer<TransferService> {
    TransferServer::new(TransferService::default())
}

/// The service that accepts payloads.
#[derive(Debug, Default)]
pub struct TransferService(AtomicU64);

#[tonic::async_trait]
impl Transfer for TransferService {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let (round, payload) = (self.0.fetch_add(1, Relaxed), request.into_inner().payload);
        if payload != vec![byte(round); LENGTH] {
            return Err(Status::data_loss(format!("round {round}: another payload than was sent")));
        }
        Ok(Response::new(PutReply { bytes: payload.len() as u64, ..Default::default() }))
    }
}

/// Makes the certificate of an authority, and the identities of a server and of a client that it has issued.
///
/// # Errors
/// Keys can't be made.
pub fn certificates() -> Outcome<(Certificate, Identity, Identity)> {
    let mut params = CertificateParams::new([])?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let issue = |name: &str| -> Outcome<Identity> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new([name.to_owned()])?.signed_by(&key, &authority)?;
        Ok(Identity::from_pem(certificate.pem(), key.serialize_pem()))
    };
    Ok((Certificate::from_pem(authority.pem()), issue("server")?, issue("client")?))
}

/// Runs a block as each of `size` ranks. Like a launcher, it starts a process for each rank, with this
/// process's program.
///
/// # Panics
/// The block of a rank returns an error, hangs or panics.
pub fn ranks(size: usize, block: impl AsyncFn() -> Outcome) {
    if env::var_os("RDMA_COLLECTIVE_RANK").is_some() {
        let outcome = runtime().block_on(async { tokio::time::timeout(LIMIT, block()).await });
        return outcome
            .expect("the block hangs")
            .unwrap_or_else(|error| panic!("the block failed: {error:?}"));
    }
    // An address of this process alone, below the ports that the system gives to clients.
    let [_, high, middle, low] = id().to_be_bytes();
    let address = format!("127.{}.{middle}.{low}:29017", 64 + high % 64);
    let start = |rank: usize| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(env::args_os().skip(1)).env("RDMA_COLLECTIVE_ADDRESS", &address);
        command.env("RDMA_COLLECTIVE_RANK", rank.to_string()).env("RDMA_COLLECTIVE_SIZE", size.to_string());
        command.spawn().unwrap()
    };
    let started: Vec<_> = (0..size).map(start).collect();
    let ended: Vec<_> = started.into_iter().map(|mut rank| rank.wait().unwrap()).collect();
    assert!(ended.iter().all(|status| status.success()), "the ranks ended with {ended:?}");
}

include!(concat!(env!("OUT_DIR"), "/pages.rs"));
