//! A peer's process is stopped but not dead: its sockets stay open and nothing arrives. Pings find such a
//! peer.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use support::{Child, Runtime, config, listen};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_stream::StreamExt as _;
use tonic_rdma::{Config, Dialer, EndpointStream, RdmaError, RdmaErrorKind, Verdict};

/// Time for an answer to a ping. A live peer on a busy machine answers within it.
const ANSWER: Duration = Duration::from_secs(4);

fn pinging() -> Config {
    config().ping_interval(Duration::from_millis(300)).ping_timeout(ANSWER)
}

async fn dial(peer: &Child) -> EndpointStream {
    let stream = Dialer::new(pinging()).dial("127.0.0.1", peer.word.parse().unwrap()).await.unwrap();
    assert_eq!(stream.info().verdict(), Verdict::Rdma, "{}", stream.info().reason());
    stream
}

async fn round_trip(stream: &mut EndpointStream) {
    stream.write_all(b"are you there?").await.unwrap();
    stream.flush().await.unwrap();
    let mut echo = [0; 14];
    stream.read_exact(&mut echo).await.unwrap();
    assert_eq!(&echo, b"are you there?");
}

/// Stops the process as a debugger or `docker pause` does.
fn stop(peer: &Child) {
    kill_process(Pid::from_child(&peer.process), Signal::STOP).unwrap();
}

/// Checks that this is the error of a peer that did not answer a ping.
fn check(error: &std::io::Error) {
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error:?}");
    let fault = error.get_ref().and_then(|inner| inner.downcast_ref::<RdmaError>());
    assert_eq!(fault.map(RdmaError::kind), Some(RdmaErrorKind::Timeout), "{error:?}");
    assert_eq!(error.to_string(), format!("the peer did not answer a ping within {ANSWER:?}"));
}

/// A waiting reader and a blocked writer get the error. An idle connection to a peer that answers goes on.
async fn server_hangs() {
    let (hanging, healthy) = (Child::start(&[], "echo"), Child::start(&[], "echo"));
    let (mut reader, mut writer) = (dial(&hanging).await, dial(&hanging).await);
    let mut other = dial(&healthy).await;
    for stream in [&mut reader, &mut writer, &mut other] {
        round_trip(stream).await;
    }
    stop(&hanging);
    let read = async { reader.read(&mut [0]).await.expect_err("the peer sends nothing") };
    let write = async {
        loop {
            if let Err(error) = writer.write_all(&[1; 100_000]).await {
                break error;
            }
        }
    };
    let (read, written) = tokio::join!(read, write);
    check(&read);
    check(&written);
    round_trip(&mut other).await;
}

/// Runs the runtimes in parallel, because each of them waits for [`ANSWER`].
#[test]
fn a_server_that_hangs_is_found_by_ping() {
    std::thread::scope(|scope| {
        for runtime in [Runtime::Idle, Runtime::MultiThread] {
            scope.spawn(move || runtime.run(server_hangs()));
        }
    });
}

/// The server gets the error in the middle of a client's upload.
#[test]
fn a_client_that_hangs_is_found_by_ping() {
    Runtime::Idle.run(async {
        let mut listener = listen(pinging()).await;
        let role = format!("load {}", listener.local_addr());
        let client = tokio::task::spawn_blocking(move || Child::start(&[], &role));
        let mut stream = listener.next().await.unwrap();
        let mut bytes = vec![0; 1 << 20];
        stream.read_exact(&mut bytes).await.unwrap();
        let client = client.await.unwrap();
        stop(&client);
        let error = loop {
            match stream.read(&mut bytes).await {
                Ok(count) => assert!(count > 0, "a hang must not look like an orderly end"),
                Err(error) => break error,
            }
        };
        check(&error);
    });
}
