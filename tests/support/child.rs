//! Roles of a second process that connects, or is connected to.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::EndpointStream;

use super::support::{Content, Runtime, config, listen};

#[path = "peer.rs"]
mod peer;

pub(crate) use peer::{Peer, ROLE, say};

/// Seed of the content that the writing roles write.
pub(crate) const WRITTEN: u64 = 9;

/// Nothing when run as a test; in a child, its role.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (role, argument) = role.split_once(' ').unwrap_or((&role, ""));
    match role {
        "echo" => Runtime::Idle.run_for_ever(echo("127.0.0.1:0")),
        "echo-on" => Runtime::Idle.run_for_ever(echo(argument)),
        "dial" => Runtime::Idle.run_for_ever(dial(argument.to_owned())),
        "load" => Runtime::Idle.run_for_ever(load(argument.to_owned())),
        "write-and-exit" => Runtime::Idle.run_for_ever(write(argument, After::Exit)),
        "deliver-and-exit" => Runtime::Idle.run_for_ever(write(argument, After::DeliverAndExit)),
        "write-and-wait" => Runtime::Idle.run_for_ever(write(argument, After::Wait)),
        other => panic!("unknown role {other}"),
    }
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
    say(listener.local_addr().port());
    while let Some(stream) = listener.next().await {
        tokio::spawn(echo_stream(stream));
    }
}

/// Sends back what comes, until it ends.
pub(crate) async fn echo_stream(mut stream: EndpointStream) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(count) => {
                if stream.write_all(&buffer[..count]).await.is_err() || stream.flush().await.is_err() {
                    return;
                }
            }
        }
    }
}

async fn connect(address: &str) -> EndpointStream {
    let (host, port) = address.rsplit_once(':').unwrap();
    let dialer = tonic_rdma::Dialer::new(config());
    dialer.dial(host, port.parse().unwrap()).await.unwrap()
}

/// Connects once, checks that bytes come back, and says what was negotiated.
async fn dial(address: String) {
    let mut stream = connect(&address).await;
    stream.write_all(b"there and back").await.unwrap();
    stream.flush().await.unwrap();
    let mut echo = [0; 14];
    stream.read_exact(&mut echo).await.unwrap();
    assert_eq!(&echo, b"there and back");
    say(format!("{}: {}", stream.info().verdict(), stream.info().reason()));
}

/// Connects, says so, and writes as fast as it goes, for ever.
async fn load(address: String) {
    let mut stream = connect(&address).await;
    say("loading");
    let bytes = vec![3; 1 << 20];
    while stream.write_all(&bytes).await.is_ok() {}
}

/// What a writer does when it has flushed.
enum After {
    Exit,
    DeliverAndExit,
    Wait,
}

/// Takes address, length of the content and length of each piece; connects, writes that content and flushes.
#[allow(clippy::disallowed_methods, reason = "a process that ends without destructors is what is tested")]
async fn write(arguments: &str, after: After) {
    let [address, length, piece] = <[&str; 3]>::try_from(arguments.split(' ').collect::<Vec<_>>()).unwrap();
    let mut stream = connect(address).await;
    say("writing");
    let content = Content::new(WRITTEN).take(length.parse().unwrap());
    for piece in content.chunks(piece.parse().unwrap()) {
        stream.write_all(piece).await.unwrap();
        stream.flush().await.unwrap();
    }
    match after {
        // Ends the process with the stream as it is: no destructor runs.
        After::Exit => std::process::exit(0),
        After::DeliverAndExit => {
            stream.shutdown().await.unwrap();
            // The reader closes its direction when it has read all.
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
            std::future::poll_fn(|context| stream.poll_delivered(context)).await.unwrap();
            std::process::exit(0)
        }
        After::Wait => std::future::pending().await,
    }
}
