//! Negotiation: the transport that each pair of policies gives, and the treatment of peers that misbehave.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt as _;
use tonic_rdma::unstable::wire::hello::{MAGIC, Message};
use tonic_rdma::{
    Config, Dialer, EndpointStream, Listener, Policy, Provider, RdmaError, RdmaErrorKind, ReasonCode, Verdict,
};

use support::{BlackHole, Runtime, listen};

async fn dial(listener: &Listener, config: Config) -> Result<EndpointStream, RdmaError> {
    Dialer::new(config).dial("127.0.0.1", listener.local_addr().port()).await
}

async fn raw(listener: &Listener, bytes: &[u8]) -> TcpStream {
    let mut tcp = TcpStream::connect(listener.local_addr()).await.unwrap();
    tcp.write_all(bytes).await.unwrap();
    tcp
}

/// Checks the transport for each pair of policies.
#[test]
fn each_pair_of_policies_gives_the_expected_transport() {
    use Policy::{Prefer, Require, TcpOnly};
    Runtime::Idle.run(async {
        for (client, server, expected) in [
            (Prefer, Prefer, Some(Verdict::Rdma)),
            (Require, Prefer, Some(Verdict::Rdma)),
            (Prefer, Require, Some(Verdict::Rdma)),
            (Prefer, TcpOnly, Some(Verdict::Tcp)),
            (Require, TcpOnly, None),
        ] {
            let mut listener = listen(patient().policy(server)).await;
            let dialled = dial(&listener, patient().policy(client)).await;
            match expected {
                Some(verdict) => {
                    let client_end = dialled.unwrap();
                    let server_end = listener.next().await.unwrap();
                    assert_eq!(client_end.info().verdict(), verdict, "{client:?} to {server:?}");
                    assert_eq!(server_end.info().verdict(), verdict, "{client:?} to {server:?}");
                }
                None => {
                    let error = dialled.unwrap_err();
                    assert_eq!(error.kind(), RdmaErrorKind::RdmaRequired, "{error}");
                    assert!(error.to_string().contains("tcp-only"), "{error}");
                }
            }
        }
    });
}

/// Causes that two ends in one process can have. Others are in tests of their own: with users, with network
/// namespaces, without memory.
#[test]
fn each_cause_of_tcp_has_its_code() {
    Runtime::Idle.run(async {
        let (ours, tcp) = (patient(), patient().policy(Policy::TcpOnly));
        let card = ours.clone().provider(Provider::Ibverbs).device("none0");
        let soft = ours.clone().provider(Provider::Soft);
        for (client, server, expected) in [
            (&ours, &ours, [None; 2]),
            (&ours, &tcp, [Some(ReasonCode::Policy); 2]),
            (&tcp, &ours, [Some(ReasonCode::Policy), Some(ReasonCode::StockClient)]),
            (&card, &ours, [Some(ReasonCode::NoDevice); 2]),
            (&soft, &card, [Some(ReasonCode::NoCommonDevice); 2]),
        ] {
            let mut listener = listen(server.clone()).await;
            let mut dialled = dial(&listener, client.clone()).await.unwrap();
            // A stock client has to say something first.
            dialled.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
            let accepted = listener.next().await.unwrap();
            let codes = [&dialled, &accepted].map(|end| end.info().reason_code());
            assert_eq!(codes, expected, "{}, {}", dialled.info().reason(), accepted.info().reason());
        }
    });
}

/// Servers that are none of ours: one that answers something else, one that hangs up, one that is silent.
#[test]
fn servers_of_other_kinds_have_their_codes() {
    Runtime::Idle.run(async {
        for (answer, expected) in [
            (Some(&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..]), ReasonCode::StockServer),
            (Some(&b""[..]), ReasonCode::StockServer),
            (None, ReasonCode::Silent),
        ] {
            let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = server.local_addr().unwrap().port();
            let serve = async move {
                let mut held = Vec::new();
                loop {
                    let (mut tcp, _) = server.accept().await.unwrap();
                    match answer {
                        Some(answer) => tcp.write_all(answer).await.unwrap(),
                        None => held.push(tcp),
                    }
                }
            };
            let serving = tokio::spawn(serve);
            let short = Duration::from_millis(200);
            let config = patient().handshake_timeout(if answer.is_some() { 100 * short } else { short });
            let dialler = Dialer::new(config);
            // The second time the client remembers the server.
            for _ in 0..2 {
                let dialled = dialler.dial("127.0.0.1", port).await.unwrap();
                let info = dialled.info();
                assert_eq!(info.reason_code(), Some(expected), "{}", info.reason());
            }
            serving.abort();
        }
    });
}

#[test]
fn bytes_flow_over_tcp_after_a_fallback() {
    Runtime::Idle.run(async {
        let mut listener = listen(patient().policy(Policy::TcpOnly)).await;
        let mut client = dial(&listener, patient()).await.unwrap();
        let mut server = listener.next().await.unwrap();
        assert!(client.info().reason().contains("tcp-only"), "{}", client.info().reason());
        client.write_all(b"ping").await.unwrap();
        let mut bytes = [0; 4];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"ping");
    });
}

#[test]
fn stock_clients_are_handed_on_with_their_first_bytes() {
    Runtime::Idle.run(async {
        let mut listener = listen(patient()).await;
        for (first, reason) in [
            (&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], "without TLS"),
            (&[22, 3, 1, 0, 200, 1, 0, 0][..], "with TLS"),
        ] {
            let _client = raw(&listener, first).await;
            let mut stream = listener.next().await.unwrap();
            assert_eq!(stream.info().verdict(), Verdict::Tcp);
            assert!(stream.info().reason().contains(reason), "{}", stream.info().reason());
            let mut received = vec![0; first.len()];
            stream.read_exact(&mut received).await.unwrap();
            assert_eq!(received, first);
        }
    });
}

/// Connects one of our clients to `listener` through a relay that passes only the hello on. The client stops
/// in the middle of the negotiation, when the listener has a queue pair for it. Returns the relay's
/// connection to the listener, and a task with the client.
async fn half_negotiated(listener: &Listener) -> (TcpStream, tokio::task::JoinHandle<()>) {
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = relay.local_addr().unwrap().port();
    let client = tokio::spawn(async move {
        let dialled = Dialer::new(patient()).dial("127.0.0.1", port).await;
        panic!("a client whose hello has no answer is done: {dialled:?}");
    });
    let (mut from, _) = relay.accept().await.unwrap();
    let hello = message(&mut from).await;
    let mut to = raw(listener, &hello).await;
    // The listener has sent its hello, and now waits for the client's next message.
    message(&mut to).await;
    let keeping = tokio::spawn(async move {
        let _from = from;
        client.await.unwrap();
    });
    (to, keeping)
}

/// Reads one message of the negotiation.
async fn message(tcp: &mut TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    while !matches!(Message::decode(&received), Ok(Some(_))) {
        assert_ne!(tcp.read_buf(&mut received).await.unwrap(), 0, "closed after {received:?}");
    }
    received
}

/// Returns settings that wait for the peer's part of the negotiation for longer than any test takes.
fn patient() -> Config {
    Config::default().handshake_timeout(Duration::from_secs(600))
}

/// Some peers connect first, stop at each stage of the negotiation, and keep their connections. Other peers
/// negotiate and exchange data meanwhile. A listener that negotiates with one peer after another would hang.
#[test]
fn peers_that_stop_in_the_middle_delay_no_other_peer() {
    const OF_EACH_KIND: usize = 20;
    Runtime::Idle.run(async {
        let mut listener = listen(patient()).await;
        let unfinished = [&MAGIC[..], &[3, 0, 1, 0, 200, 0, 0, 0], &[0; 100]].concat();
        let mut silent = Vec::new();
        let mut half = Vec::new();
        for _ in 0..OF_EACH_KIND {
            for bytes in [b"", &MAGIC[..5], &MAGIC, &unfinished] {
                silent.push(raw(&listener, bytes).await);
            }
            half.push(half_negotiated(&listener).await);
        }
        for _ in 0..3 {
            let mut client = dial(&listener, patient()).await.unwrap();
            let mut server = listener.next().await.unwrap();
            assert_eq!((client.info().verdict(), server.info().verdict()), (Verdict::Rdma, Verdict::Rdma));
            client.write_all(b"question").await.unwrap();
            client.flush().await.unwrap();
            let mut received = [0; 8];
            server.read_exact(&mut received).await.unwrap();
            assert_eq!(&received, b"question");
            let _stock = raw(&listener, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
            assert_eq!(listener.next().await.unwrap().info().verdict(), Verdict::Tcp);
        }
        for tcp in &silent {
            let end = tcp.try_read(&mut [0]);
            assert!(end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "it was dropped");
        }
        for (tcp, client) in &half {
            let end = tcp.try_read(&mut [0]);
            assert!(end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "it was dropped");
            assert!(!client.is_finished());
        }
    });
}

/// The listener drops each of these peers within the handshake timeout.
#[test]
fn misbehaving_peers_are_dropped() {
    Runtime::Idle.run(async {
        let mut listener = listen(Config::default().handshake_timeout(Duration::from_millis(500))).await;
        let other_version = [&MAGIC[..], &[0xff, 0x7f, 1, 0, 0, 0, 0, 0]].concat();
        let too_long = [&MAGIC[..], &[1, 0, 1, 0, 0xff, 0xff, 0xff, 0xff]].concat();
        let unknown_type = [&MAGIC[..], &[1, 0, 99, 0, 0, 0, 0, 0]].concat();
        let mut rude = Vec::new();
        for bytes in
            [&[0; 100][..], b"", &MAGIC[..5], &MAGIC, &other_version, &too_long, &unknown_type, b"hello"]
        {
            rude.push(raw(&listener, bytes).await);
        }
        // A busy machine may keep this client, too, from its part within the time. Then it tries again.
        let client = loop {
            let client = dial(&listener, patient()).await.unwrap();
            if client.info().verdict() == Verdict::Rdma {
                break client;
            }
        };
        let mut server = listener.next().await.unwrap();
        while server.info().peer_addr() != client.info().local_addr() {
            server = listener.next().await.unwrap();
        }
        assert_eq!(server.info().verdict(), Verdict::Rdma);
        for (index, mut tcp) in rude.into_iter().enumerate() {
            let mut answer = Vec::new();
            // The end may be a reset or an orderly end.
            let end = tokio::time::timeout(Duration::from_secs(60), tcp.read_to_end(&mut answer)).await;
            assert!(end.is_ok(), "peer {index} was not dropped");
        }
    });
}

#[test]
fn a_client_of_another_version_gets_the_reason() {
    Runtime::Idle.run(async {
        let listener = listen(patient()).await;
        let mut tcp = raw(&listener, &[&MAGIC[..], &[0xff, 0x7f, 1, 0, 0, 0, 0, 0]].concat()).await;
        let mut answer = Vec::new();
        let _ = tcp.read_to_end(&mut answer).await;
        assert!(String::from_utf8_lossy(&answer).contains("layout 32767"), "{answer:?}");
    });
}

/// Starts a server that answers each hello with `answer`, and echoes the bytes of a plain client.
async fn stock_server(answer: &'static [u8], silent: bool) -> (u16, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(async move {
        loop {
            let (mut tcp, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut first = [0; 8];
                tcp.read_exact(&mut first).await.unwrap();
                if first == MAGIC {
                    tcp.write_all(answer).await.unwrap();
                    if silent {
                        tokio::time::sleep(Duration::from_secs(60)).await;
                    }
                    return;
                }
                tcp.write_all(&first).await.unwrap();
            });
        }
    });
    (port, server)
}

/// Another server may have the port by now. Without a new attempt, a client that requires RDMA could not use
/// it for a minute.
#[test]
fn a_client_that_requires_rdma_asks_a_server_again() {
    Runtime::Idle.run(async {
        let (port, server) = stock_server(b"", false).await;
        let config = Config::default().policy(Policy::Require).handshake_timeout(Duration::from_secs(60));
        let dialer = Dialer::new(config.clone());
        let error = dialer.dial("127.0.0.1", port).await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::RdmaRequired, "{error}");
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        let _ours = Listener::new(TcpListener::bind(("127.0.0.1", port)).await.unwrap(), config).unwrap();
        let stream = dialer.dial("127.0.0.1", port).await.unwrap();
        assert_eq!(stream.info().verdict(), Verdict::Rdma);
    });
}

#[test]
fn stock_servers_are_dialled_anew_over_tcp_and_remembered() {
    Runtime::Idle.run(async {
        for (answer, silent) in [
            // The SETTINGS frame that an HTTP/2 server sends first.
            (&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100][..], false),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", false),
            // A TLS alert.
            (&[21, 3, 1, 0, 2, 2, 70], false),
            (b"", false),
            (b"", true),
        ] {
            let (port, server) = stock_server(answer, silent).await;
            let dialer = Dialer::new(Config::default().handshake_timeout(Duration::from_millis(300)));
            for _ in 0..2 {
                let mut stream = dialer.dial("127.0.0.1", port).await.unwrap();
                assert_eq!(stream.info().verdict(), Verdict::Tcp);
                let what = if silent { "the server was silent" } else { "does not understand our hello" };
                assert!(stream.info().reason().contains(what), "{}", stream.info().reason());
                stream.write_all(b"12345678").await.unwrap();
                let mut echo = [0; 8];
                stream.read_exact(&mut echo).await.unwrap();
                assert_eq!(&echo, b"12345678");
            }
            let strict = Dialer::new(
                Config::default().policy(Policy::Require).handshake_timeout(Duration::from_millis(300)),
            );
            let error = strict.dial("127.0.0.1", port).await.unwrap_err();
            assert_eq!(error.kind(), RdmaErrorKind::RdmaRequired, "{error}");
            server.abort();
        }
    });
}

/// A server that was stopped for a moment: the kernel takes connections to its port, and nothing is said.
#[test]
fn a_server_that_was_silent_is_asked_again_soon() {
    Runtime::Idle.run(async {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = socket.local_addr().unwrap().port();
        let dialer = Dialer::new(Config::default().handshake_timeout(Duration::from_secs(1)));
        let stream = dialer.dial("127.0.0.1", port).await.unwrap();
        let silent = "the server was silent (no complete message of the negotiation within 1s)";
        assert_eq!((stream.info().verdict(), stream.info().reason()), (Verdict::Tcp, silent));
        let mut listener = Listener::new(socket, patient()).unwrap();
        tokio::spawn(async move { while listener.next().await.is_some() {} });
        // Far less than a stock server is remembered for.
        let again = tokio::time::timeout(Duration::from_secs(30), async {
            while dialer.dial("127.0.0.1", port).await.unwrap().info().verdict() != Verdict::Rdma {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        again.await.unwrap();
    });
}

#[test]
fn a_client_gives_up_a_connection_that_takes_too_long() {
    Runtime::Idle.run(async {
        let (hole, patience) = (BlackHole::new(), Duration::from_millis(200));
        let dialer = Dialer::new(Config::default().connect_timeout(patience));
        let error = dialer.dial("127.0.0.1", hole.address.port()).await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains(&hole.address.to_string()), "{error}");
    });
}

#[test]
fn an_address_without_a_listener_is_an_error_that_names_the_address() {
    Runtime::Idle.run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let error = Dialer::new(Config::default()).dial("127.0.0.1", port).await.unwrap_err();
        assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
        let error = Dialer::new(Config::default()).dial("no-such-host.invalid", 1).await.unwrap_err();
        assert_eq!(error.kind(), RdmaErrorKind::Unreachable, "{error}");
    });
}
