//! Handshakes that fail: each ends with an error that gives the reason, and correct clients are still served.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::transport::{Certificate, Endpoint, Identity};
use tonic_rdma::{Dialer, RdmaConnector, Verdict};

use super::greeting::{Running, greet, greet_stock, serve};
use support::{Authority, config, within};

/// Starts a server that demands certificates, and waits for handshakes for `patience`. Returns the authority
/// for them too.
async fn guarded_for(patience: Duration) -> (Authority, Running) {
    let authority = Authority::new("authority");
    let running = serve(Some(authority.mutual_server().timeout(patience))).await;
    (authority, running)
}

/// Starts a server whose patience no handshake needs.
async fn guarded() -> (Authority, Running) {
    guarded_for(Duration::from_secs(600)).await
}

/// Checks that a client with the right certificate is served, over RDMA and over TCP.
async fn check(authority: &Authority, running: &Running) {
    let tls = || Some(authority.client_named("good"));
    let said = greet(running.address, tls()).await.unwrap();
    assert!(said.starts_with("good (spiffe://test/good) over rdma"), "{said}");
    let said = greet_stock(running.address, tls()).await.unwrap();
    assert!(said.starts_with("good (spiffe://test/good) over tcp"), "{said}");
}

#[tokio::test]
async fn the_server_refuses_wrong_certificates() {
    let (authority, running) = guarded().await;
    let other = Authority::new("another authority");
    let refused = [
        (authority.client(), "CertificateRequired"),
        (authority.client().identity(other.issue("stranger")), "UnknownCA"),
        (authority.client().identity(authority.issue_expired("former")), "CertificateExpired"),
    ];
    for (tls, expected) in refused {
        let error = greet(running.address, Some(tls.clone())).await.unwrap_err();
        assert!(error.contains(expected), "{expected} over RDMA: {error}");
        // On TCP, the reset after the alert may discard the alert, if the client had sent bytes that were not
        // read.
        greet_stock(running.address, Some(tls)).await.unwrap_err();
        check(&authority, &running).await;
    }
}

#[tokio::test]
async fn the_client_refuses_wrong_certificates() {
    let (authority, running) = guarded().await;
    let other = Authority::new("another authority");
    let stranger = other.client().identity(authority.issue("worker"));
    let error = greet(running.address, Some(stranger)).await.unwrap_err();
    assert!(error.contains("UnknownIssuer") || error.contains("BadSignature"), "{error}");
    let misnamed = authority.client_named("worker").domain_name("elsewhere.example");
    let error = greet(running.address, Some(misnamed)).await.unwrap_err();
    assert!(error.contains("elsewhere.example"), "{error}");
    let expired = serve(Some(authority.server().identity(authority.issue_expired("server")))).await;
    let error = greet(expired.address, Some(authority.client())).await.unwrap_err();
    assert!(error.contains("expired"), "{error}");
    check(&authority, &running).await;
}

#[tokio::test]
async fn connections_with_one_end_without_tls_fail() {
    let (authority, running) = guarded().await;
    let plain = serve(None).await;
    for error in [greet(running.address, None).await, greet_stock(running.address, None).await] {
        let error = error.unwrap_err();
        assert!(error.contains("connection"), "plaintext at a port with TLS: {error}");
    }
    for error in [
        greet(plain.address, Some(authority.client())).await,
        greet_stock(plain.address, Some(authority.client())).await,
    ] {
        let error = error.unwrap_err();
        assert!(error.contains("InvalidContentType"), "TLS at a port without: {error}");
    }
    check(&authority, &running).await;
    assert!(greet(plain.address, None).await.is_ok());
}

#[tokio::test]
async fn https_without_a_configuration_is_an_error() {
    let (authority, running) = guarded().await;
    let endpoint = Endpoint::from_shared(format!("https://{}", running.address)).unwrap();
    let connected = endpoint.connect_with_connector(RdmaConnector::new().config(config())).await;
    let error = connected.unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("HTTPS without TLS"), "{cause}");
    check(&authority, &running).await;
}

#[test]
fn invalid_certificates_are_errors() {
    let authority = Authority::new("authority");
    let garbage = || Identity::from_pem("no certificate", "no key");
    let endpoint = || Endpoint::from_static("https://server:1");
    let errors = [
        endpoint().tls_config(authority.client().identity(garbage())).unwrap_err(),
        tonic::transport::Server::builder().tls_config(authority.server().identity(garbage())).unwrap_err(),
        tonic::transport::Server::builder()
            .tls_config(authority.server().client_ca_root(Certificate::from_pem("no authority")))
            .unwrap_err(),
    ];
    for error in errors {
        assert!(std::error::Error::source(&error).is_some(), "{error} says no reason");
    }
}

/// A client that connects and sends nothing or half of a handshake is disconnected. Other clients are served
/// meanwhile.
#[tokio::test]
async fn clients_that_stop_in_the_handshake_are_disconnected() {
    // A busy machine may need seconds for a handshake that succeeds.
    let (authority, running) = guarded_for(Duration::from_secs(10)).await;
    let dialer = Dialer::new(config());
    // The start of a record of 512 bytes.
    let begun = [22, 3, 1, 2, 0, 1, 0, 1, 252];
    let mut over_rdma = Vec::new();
    for said in [&[][..], &begun[..1], &begun] {
        let mut stream = dialer.dial("127.0.0.1", running.address.port()).await.unwrap();
        assert_eq!(stream.info().verdict(), Verdict::Rdma, "{}", stream.info().reason());
        stream.write_all(said).await.unwrap();
        stream.flush().await.unwrap();
        over_rdma.push(stream);
    }
    let mut over_tcp = TcpStream::connect(running.address).await.unwrap();
    over_tcp.write_all(&begun).await.unwrap();
    check(&authority, &running).await;
    for mut stream in over_rdma {
        let end = within(stream.read(&mut [0; 64])).await;
        assert!(!matches!(end, Ok(1..)), "an answer: {end:?}");
    }
    let end = within(over_tcp.read(&mut [0; 64])).await;
    assert!(!matches!(end, Ok(1..)), "an answer: {end:?}");
    check(&authority, &running).await;
}

/// The server accepts the connection, and never answers the handshake.
#[tokio::test]
async fn a_client_gives_up_a_server_that_stops_in_the_handshake() {
    use tokio_stream::StreamExt as _;
    let authority = Authority::new("authority");
    let mut incoming =
        tonic_rdma::RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
    let address = incoming.local_addr();
    let silent = tokio::spawn(async move {
        let mut held = Vec::new();
        while let Some(stream) = incoming.next().await {
            held.push(stream);
        }
    });
    let error = greet(address, Some(authority.client().timeout(Duration::from_secs(1)))).await.unwrap_err();
    assert!(error.contains("handshake timeout"), "{error}");
    silent.abort();
}
