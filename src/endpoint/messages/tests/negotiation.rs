//! Which connections carry messages: both sides must ask for it, and have RDMA.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;

use super::side::patient;
use crate::endpoint::config::{Config, Policy};
use crate::endpoint::info::Verdict;
use crate::endpoint::messages::Negotiated;
use crate::endpoint::negotiate::{Dialer, Listener};
use crate::endpoint::stream::EndpointStream;

async fn listener(config: Config) -> Listener {
    Listener::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), config).unwrap()
}

async fn echo(mut client: EndpointStream, mut server: EndpointStream) {
    client.write_all(b"any bytes").await.unwrap();
    client.flush().await.unwrap();
    let mut bytes = [0; 9];
    server.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"any bytes");
}

#[tokio::test]
async fn both_ends_that_ask_get_messages() {
    let mut listener = listener(patient()).await;
    listener.take_native_calls(true);
    let port = listener.local_addr().port();
    let dialer = Dialer::new(patient());
    let (client, server) =
        tokio::join!(dialer.dial_for_calls("127.0.0.1", port, None), listener.next_negotiated());
    for end in [client.unwrap(), server.unwrap()] {
        let info = end.info();
        assert!(matches!(end, Negotiated::Messages(_)) && info.is_native(), "{info:?}");
        assert_eq!(info.verdict(), Verdict::Rdma);
        assert!(info.reason().contains("native calls"), "{}", info.reason());
    }
}

#[tokio::test]
async fn a_server_without_native_calls_gets_a_byte_stream() {
    let mut listener = listener(patient()).await;
    let port = listener.local_addr().port();
    let dialer = Dialer::new(patient());
    let (client, server) = tokio::join!(dialer.dial_for_calls("127.0.0.1", port, None), listener.next());
    let (Ok(Negotiated::Stream(client)), Some(server)) = (client, server) else { panic!("no streams") };
    let info = client.info();
    assert!(!info.is_native() && info.verdict() == Verdict::Rdma, "{info:?}");
    assert!(info.reason().contains("the server takes no native calls"), "{}", info.reason());
    echo(client, server).await;
}

#[tokio::test]
async fn a_client_that_does_not_ask_gets_a_byte_stream() {
    let mut listener = listener(patient()).await;
    listener.take_native_calls(true);
    let port = listener.local_addr().port();
    let dialer = Dialer::new(patient());
    let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next_negotiated());
    let (Ok(client), Some(Negotiated::Stream(server))) = (client, server) else { panic!("no streams") };
    assert!(!client.info().is_native() && client.info().verdict() == Verdict::Rdma);
    echo(client, server).await;

    let why = Some("the endpoint uses TLS");
    let (client, server) =
        tokio::join!(dialer.dial_for_calls("127.0.0.1", port, why), listener.next_negotiated());
    let (Ok(Negotiated::Stream(client)), Some(Negotiated::Stream(server))) = (client, server) else {
        panic!("no streams")
    };
    assert!(client.info().reason().contains("because the endpoint uses TLS"), "{}", client.info().reason());
    echo(client, server).await;
}

/// Where one side may not use RDMA, both go on over TCP, and the reason says why.
#[tokio::test]
async fn without_rdma_there_is_a_byte_stream_over_tcp() {
    let tcp_only = || patient().policy(Policy::TcpOnly);
    for (ours, theirs, reason) in
        [(tcp_only(), patient(), "the policy is tcp-only"), (patient(), tcp_only(), "tcp")]
    {
        let mut listener = listener(theirs).await;
        listener.take_native_calls(true);
        let port = listener.local_addr().port();
        let dialer = Dialer::new(ours);
        // The server accepts a client that waits when the first bytes arrive.
        let talk = async {
            let Ok(Negotiated::Stream(mut client)) = dialer.dial_for_calls("127.0.0.1", port, None).await
            else {
                panic!("no stream")
            };
            client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
            client
        };
        let (client, server) = tokio::join!(talk, listener.next_negotiated());
        let Some(Negotiated::Stream(mut server)) = server else { panic!("no stream") };
        assert_eq!((client.info().verdict(), server.info().verdict()), (Verdict::Tcp, Verdict::Tcp));
        assert!(!client.info().is_native() && client.info().reason().contains(reason), "{:?}", client.info());
        let mut bytes = [0; 24];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes[..14], b"PRI * HTTP/2.0");
    }
}

/// A client may come between the moment when the port opens and the moment when the server takes its listener
/// over.
#[tokio::test]
async fn a_client_that_comes_early_gets_messages_too() {
    let mut listener = listener(patient()).await;
    let port = listener.local_addr().port();
    let dialer = Dialer::new(patient());
    let serve = async {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        listener.take_native_calls(true);
        listener.next_negotiated().await
    };
    let (client, server) = tokio::join!(dialer.dial_for_calls("127.0.0.1", port, None), serve);
    assert!(matches!((client, server), (Ok(Negotiated::Messages(_)), Some(Negotiated::Messages(_)))));
}
