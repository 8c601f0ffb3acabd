//! A peer is killed under load. The surviving process gets the error soon, and its connections to other peers
//! go on.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::{Config, Dialer, EndpointStream, Verdict};

use support::{Child, Runtime, config, descriptors_and_mappings, echo_stream, listen, settled};

/// The time within which a death is noticed, even on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// Returns settings without pings, so that nothing but the end of the peer's process shows that it has died.
fn without_pings() -> Config {
    const NEVER: Duration = Duration::from_secs(3600);
    config().ping_interval(NEVER).ping_timeout(NEVER)
}

async fn dial(port: &str) -> EndpointStream {
    let stream = Dialer::new(without_pings()).dial("127.0.0.1", port.parse().unwrap()).await.unwrap();
    assert_eq!(stream.info().verdict(), Verdict::Rdma, "{}", stream.info().reason());
    stream
}

/// Sends `length` bytes and reads them back.
async fn round_trip(stream: &mut EndpointStream, length: usize) -> std::io::Result<()> {
    let (bytes, mut echo) = (vec![6; length], vec![0; length]);
    let (mut read, mut write) = tokio::io::split(stream);
    tokio::try_join!(
        async {
            write.write_all(&bytes).await?;
            write.flush().await
        },
        async { read.read_exact(&mut echo).await.map(|_| ()) }
    )?;
    assert!(echo == bytes);
    Ok(())
}

#[test]
fn a_killed_server_is_noticed_under_load_and_others_go_on() {
    super::alone(Runtime::Idle, async {
        let (mut doomed, healthy) = (Child::start(&[], "echo"), Child::start(&[], "echo"));
        let before = descriptors_and_mappings();
        for length in [100, 40_000, 2_000_000] {
            let mut other = dial(&healthy.word).await;
            let mut streams = Vec::new();
            for _ in 0..3 {
                streams.push(dial(&doomed.word).await);
            }
            let busy: Vec<_> = streams
                .into_iter()
                .map(|mut stream| {
                    tokio::spawn(async move {
                        loop {
                            if let Err(error) = round_trip(&mut stream, length).await {
                                return (Instant::now(), error);
                            }
                        }
                    })
                })
                .collect();
            tokio::time::sleep(Duration::from_millis(100)).await;
            doomed.process.kill().unwrap();
            doomed.process.wait().unwrap();
            let killed = Instant::now();
            for task in busy {
                let (noticed, error) = task.await.unwrap();
                assert!(
                    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted),
                    "{error:?}"
                );
                let after = noticed.saturating_duration_since(killed);
                assert!(after < SOON, "{after:?} after the kill: {error}");
            }
            round_trip(&mut other, length).await.unwrap();
            doomed = Child::start(&[], "echo");
        }
        drop((doomed, healthy));
        settled(before).await;
    });
}

#[test]
fn an_idle_reader_notices_a_killed_peer() {
    for runtime in Runtime::ALL {
        super::alone(runtime, async {
            let mut peer = Child::start(&[], "echo");
            let mut stream = dial(&peer.word).await;
            round_trip(&mut stream, 10).await.unwrap();
            let reading = tokio::spawn(async move { stream.read(&mut [0; 10]).await });
            tokio::time::sleep(Duration::from_millis(50)).await;
            peer.process.kill().unwrap();
            let end = tokio::time::timeout(SOON, reading).await.expect("not noticed in time").unwrap();
            assert!(end.is_err(), "a death is no orderly end: {end:?}");
        });
    }
}

#[test]
fn a_killed_client_is_noticed_under_load_and_others_go_on() {
    super::alone(Runtime::Idle, async {
        let before = descriptors_and_mappings();
        let mut listener = listen(without_pings()).await;
        let address = listener.local_addr();
        let mut doomed = tokio::task::spawn_blocking(move || Child::start(&[], &format!("load {address}")));
        let mut loaded = listener.next().await.unwrap();
        let mut doomed = (&mut doomed).await.unwrap();
        let (client, server) = tokio::join!(dial_at(address.port()), listener.next());
        let (mut client, server) = (client, server.unwrap());
        let echo = tokio::spawn(echo_stream(server));

        let draining = tokio::spawn(async move {
            let mut buffer = vec![0; 1 << 16];
            loop {
                match loaded.read(&mut buffer).await {
                    Ok(0) => panic!("a death is no orderly end"),
                    Ok(count) => assert!(buffer[..count].iter().all(|byte| *byte == 3)),
                    Err(error) => return (Instant::now(), error),
                }
            }
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        round_trip(&mut client, 1000).await.unwrap();
        doomed.process.kill().unwrap();
        doomed.process.wait().unwrap();
        let killed = Instant::now();
        let (noticed, error) = draining.await.unwrap();
        let after = noticed.saturating_duration_since(killed);
        assert!(after < SOON, "{after:?} after the kill: {error}");
        round_trip(&mut client, 100_000).await.unwrap();
        drop((client, listener, doomed));
        echo.await.unwrap();
        settled(before).await;
    });
}

async fn dial_at(port: u16) -> EndpointStream {
    dial(&port.to_string()).await
}
