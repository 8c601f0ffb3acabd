//! A second process: this test binary, run again in a role.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::endpoint::EndpointStream;

use super::support::{Runtime, config, listen};

const ROLE: &str = "TONIC_RDMA_TEST_ROLE";
const MARK: &str = "child says:";

/// A child process in its role; killed on drop.
pub(crate) struct Peer {
    pub(crate) process: Child,
    /// What it said first.
    pub(crate) word: String,
    /// Kept open: what else it writes must not fail.
    _output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts this binary in `role`, by way of `wrapper` (such as `ip netns exec NAME`), and waits for its word.
    pub(crate) fn start(wrapper: &[&str], role: &str) -> Self {
        let binary = std::env::current_exe().unwrap();
        let mut command = match wrapper {
            [] => Command::new(&binary),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(&binary);
                command
            }
        };
        command.args(["--exact", "child::role", "--nocapture", "--test-threads=1"]);
        let mut process =
            command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let word = output
            .by_ref()
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.split_once(MARK).map(|(_, word)| word.trim().to_owned()))
            .expect("the child ended without a word");
        Self { process, word, _output: output }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn say(word: impl std::fmt::Display) {
    println!("{MARK} {word}");
    std::io::stdout().flush().unwrap();
}

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
        other => panic!("unknown role {other}"),
    }
}

/// Echoes every connection for ever.
async fn echo(address: &str) {
    let mut listener = match address {
        "127.0.0.1:0" => listen(config()).await,
        address => {
            let socket = tokio::net::TcpListener::bind(address).await.unwrap();
            tonic_rdma::endpoint::Listener::new(socket, config()).unwrap()
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
    let dialer = tonic_rdma::endpoint::Dialer::new(config());
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
