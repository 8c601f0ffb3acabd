//! Roles of child processes, which connect to others or which others connect to.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_stream::StreamExt as _;
use tonic::transport::{Endpoint, Server};
use tonic_rdma::EndpointStream;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use crate::{Content, Over, Runtime, ScriptedGreeter, announce, config, echo_stream, listen, say};

/// Seed of the content that the writing roles write.
pub const WRITER_SEED: u64 = 9;

/// Plays one of the shared roles. Fails if there is no role of this name.
pub fn play(role: &str) {
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["echo"] => Runtime::Idle.run_for_ever(echo("127.0.0.1:0")),
        ["echo-on", address] => Runtime::Idle.run_for_ever(echo(address)),
        ["dial", address] => Runtime::Idle.run_for_ever(dial(address)),
        ["load", address] => Runtime::Idle.run_for_ever(load(address)),
        ["burst", address, connections] => Runtime::Idle.run_for_ever(burst(address, number(connections))),
        ["write-and-exit", address, length, piece] => {
            Runtime::Idle.run_for_ever(write(address, number(length), number(piece), After::Exit));
        }
        ["deliver-and-exit", address, length, piece] => {
            Runtime::Idle.run_for_ever(write(address, number(length), number(piece), After::DeliverAndExit));
        }
        ["write-and-wait", address, length, piece] => {
            Runtime::Idle.run_for_ever(write(address, number(length), number(piece), After::Wait));
        }
        ["serve", over, address] => Runtime::Idle.run_for_ever(serve(Over::named(over), address)),
        ["hold", over, address] => Runtime::Idle.run_for_ever(hold(Over::named(over), address)),
        _ => panic!("unknown role {role}"),
    }
}

fn number(text: &str) -> usize {
    text.parse().unwrap()
}

/// Echoes every connection for ever.
async fn echo(address: &str) {
    let mut listener = match address {
        "127.0.0.1:0" => listen(config()).await,
        address => {
            let socket = tokio::net::TcpListener::bind(address).await.unwrap();
            tonic_rdma::Listener::new(socket, config()).unwrap()
        }
    };
    announce(listener.local_addr().port());
    while let Some(stream) = listener.next().await {
        tokio::spawn(echo_stream(stream));
    }
}

async fn connect(address: &str) -> EndpointStream {
    let (host, port) = address.rsplit_once(':').unwrap();
    let dialer = tonic_rdma::Dialer::new(config());
    dialer.dial(host, port.parse().unwrap()).await.unwrap()
}

/// Connects once, checks that bytes come back, and announces the negotiated transport with the reason.
async fn dial(address: &str) {
    let mut stream = connect(address).await;
    stream.write_all(b"there and back").await.unwrap();
    stream.flush().await.unwrap();
    let mut echo = [0; 14];
    stream.read_exact(&mut echo).await.unwrap();
    assert_eq!(&echo, b"there and back");
    announce(format!("{}: {}", stream.info().verdict(), stream.info().reason()));
}

/// Connects, announces the connection, and writes without end.
async fn load(address: &str) {
    let mut stream = connect(address).await;
    announce("loading");
    let bytes = vec![3; 1 << 20];
    while stream.write_all(&bytes).await.is_ok() {}
}

/// Makes connections, announces them, and sends messages of several packets over each of them without end.
async fn burst(address: &str, connections: usize) {
    let mut streams = Vec::new();
    for _ in 0..connections {
        streams.push(connect(address).await);
    }
    announce("sending");
    let send = |mut stream: EndpointStream| async move {
        let bytes = vec![3; 12_000];
        while stream.write_all(&bytes).await.is_ok() && stream.flush().await.is_ok() {}
    };
    let tasks: tokio::task::JoinSet<()> = streams.into_iter().map(send).collect();
    tasks.join_all().await;
}

/// The action of a writer after its last flush.
enum After {
    Exit,
    DeliverAndExit,
    Wait,
}

/// Connects, and writes `length` bytes of content in pieces of `piece` bytes, each flushed.
#[allow(clippy::disallowed_methods, reason = "a process that ends without destructors is what is tested")]
async fn write(address: &str, length: usize, piece: usize, after: After) {
    let mut stream = connect(address).await;
    announce("writing");
    let content = Content::new(WRITER_SEED).take(length);
    for piece in content.chunks(piece) {
        stream.write_all(piece).await.unwrap();
        stream.flush().await.unwrap();
    }
    match after {
        // Ends the process with the stream as it is: no destructor runs.
        After::Exit => std::process::exit(0),
        After::DeliverAndExit => {
            stream.shutdown().await.unwrap();
            // The reader closes its direction when it has read everything.
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
            std::future::poll_fn(|context| stream.poll_delivered(context)).await.unwrap();
            std::process::exit(0)
        }
        After::Wait => std::future::pending().await,
    }
}

/// Serves a scripted greeter until the process is killed.
async fn serve(over: Over, address: &str) {
    let router = Server::builder().add_service(GreeterServer::new(ScriptedGreeter::new()));
    let running = over.serve_at(address, router).await;
    announce(running.address);
    std::future::pending::<()>().await;
}

/// Makes calls that the server does not answer, one after the other: a server that pings may end the
/// connection of a client that a busy machine keeps from answering.
async fn hold(over: Over, address: &str) {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut client = GreeterClient::new(over.connect(endpoint).await.unwrap());
    announce("connected");
    loop {
        let _ = say(&mut client, "hold").await;
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
