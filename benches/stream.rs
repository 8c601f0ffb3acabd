//! Measures round trips over the byte stream, without gRPC, over TCP and over RDMA.
//!
//! ```sh
//! cargo bench --bench stream                                            # the software device
//! RDMA_DEVICE=rxe0 cargo bench --features ibverbs --bench stream        # another device
//! ```
//!
//! Client and server each have a thread with a runtime that polls when idle, and a core if there are two. The
//! bench checks the answers.
#![allow(clippy::unwrap_used, reason = "a bench that can't run says so by stopping")]

use std::net::SocketAddr;
use std::sync::{LazyLock, mpsc};
use std::thread;

use bytes::Bytes;
use divan::Bencher;
use divan::counter::BytesCount;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio_stream::StreamExt as _;
use tonic_rdma::{Config, Dialer, EndpointStream, Listener, Policy};
use tonic_rdma_commands::Flavour;
use tonic_rdma_commands::cores::{self, Cores};

fn main() {
    divan::main();
}

/// The transport of the stream.
trait Transport {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    async fn accept(listener: TcpListener) -> Self::Stream;
    async fn connect(address: SocketAddr) -> Self::Stream;
}

struct Tcp;

impl Transport for Tcp {
    type Stream = TcpStream;

    async fn accept(listener: TcpListener) -> TcpStream {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    async fn connect(address: SocketAddr) -> TcpStream {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }
}

struct Rdma;

impl Rdma {
    fn config() -> Config {
        Config::from_env().unwrap().policy(Policy::Require)
    }
}

impl Transport for Rdma {
    type Stream = EndpointStream;

    async fn accept(listener: TcpListener) -> EndpointStream {
        Listener::new(listener, Self::config()).unwrap().next().await.unwrap()
    }

    async fn connect(address: SocketAddr) -> EndpointStream {
        Dialer::new(Self::config()).dial(&address.ip().to_string(), address.port()).await.unwrap()
    }
}

/// Round trips of one measurement. They run in one task, because to enter and leave the runtime for each
/// round trip would cost more than the round trip.
const TRIPS: usize = 10;

/// Sends a message of this length and waits for its return, ten times.
#[divan::bench(types = [Tcp, Rdma], args = [64, 4096, 65_536, 1 << 20])]
fn ten_round_trips<T: Transport>(bencher: Bencher<'_, '_>, length: usize) {
    pin(|cores| cores.client);
    let (address, server) = serve::<T>(length);
    let runtime = runtime();
    let mut stream = Some(runtime.block_on(T::connect(address)));
    let sent: Bytes = (0..length as u32).map(|index| (index.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
    let mut turn = || {
        let trips = runtime.spawn(trips(stream.take().unwrap(), sent.clone()));
        stream = Some(runtime.block_on(trips).unwrap());
    };
    (0..20).for_each(|_| turn());
    bencher.counter(BytesCount::new(2 * TRIPS * length)).bench_local(&mut turn);
    drop(stream);
    server.join().unwrap();
}

async fn trips<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, sent: Bytes) -> S {
    let mut back = vec![0; sent.len()];
    for _ in 0..TRIPS {
        stream.write_all(&sent).await.unwrap();
        stream.flush().await.unwrap();
        stream.read_exact(&mut back).await.unwrap();
    }
    assert!(back == sent, "what came back is not what was sent");
    stream
}

/// Starts a thread that echoes the messages of one connection.
fn serve<T: Transport>(length: usize) -> (SocketAddr, thread::JoinHandle<()>) {
    let (tell, told) = mpsc::channel();
    let server = thread::spawn(move || {
        pin(|cores| cores.server);
        runtime().block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            let stream = T::accept(listener).await;
            tokio::spawn(echo(stream, length)).await.unwrap();
        });
    });
    (told.recv().unwrap(), server)
}

async fn echo(mut stream: impl AsyncRead + AsyncWrite + Unpin, length: usize) {
    let mut message = vec![0; length];
    while stream.read_exact(&mut message).await.is_ok() {
        stream.write_all(&message).await.unwrap();
        stream.flush().await.unwrap();
    }
}

fn runtime() -> Runtime {
    Flavour::IdlePolling.build().unwrap()
}

/// Pins this thread to a core, if there are several.
fn pin(core: fn(&Cores) -> usize) {
    // A thread that is pinned sees one core alone.
    static CORES: LazyLock<Option<Cores>> = LazyLock::new(Cores::choose);
    if let Some(cores) = &*CORES {
        let _ = cores::pin(core(cores));
    }
}
