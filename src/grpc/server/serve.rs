//! Serving: native connections here, all others by tonic's server, with the same service.

use std::future::{Future, pending};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::transport::Server;

use super::connection::{self, Shared};
use super::error::ServeError;
use super::routes::GrpcService;
use crate::endpoint::{EndpointStream, Listener, Negotiated};
use crate::grpc::calls::CallConfig;
use crate::transport::{RdmaIncoming, remote_addresses};

/// Most connections that wait for tonic's server.
const WAITING: usize = 64;

/// Serves the connections of `incoming` with `service` until `signal` is ready. Without a signal, connections outlive this future, as
/// with tonic.
pub(super) async fn serve(
    incoming: RdmaIncoming,
    http2: Server,
    service: impl GrpcService,
    limits: CallConfig,
    signal: Option<impl Future<Output = ()>>,
) -> Result<(), ServeError> {
    let grace = limits.shutdown_grace;
    let shared = Arc::new(Shared::new(limits));
    let plaintext = is_plaintext(http2.clone()).await;
    let (streams, received) = mpsc::channel(WAITING);
    let received = ReceiverStream::new(received).map(Ok::<EndpointStream, io::Error>);
    let (server, service_of_http2) = (http2.layer(remote_addresses()), service.clone());
    let (graceful, (stopping, stop)) = (signal.is_some(), watch::channel(()));
    let mut tonic = pin!(async {
        if graceful {
            // The end of the stream begins the shutdown.
            server.serve_with_incoming_shutdown(service_of_http2, received, pending()).await
        } else {
            server.serve_with_incoming(service_of_http2, received).await
        }
    });
    let take = move |negotiated| match negotiated {
        Negotiated::Stream(stream) => Some(stream),
        Negotiated::Messages(endpoint) => {
            connection::serve(endpoint, service.clone(), &shared, graceful.then(|| stop.clone()));
            None
        }
    };
    let listener = incoming.into_listener();
    listener.take_native_calls(plaintext);
    tokio::select! {
        ended = &mut tonic => return Ok(ended?),
        () = accept(listener, take, streams, signal) => {}
    }
    if !graceful {
        return Ok(tonic.await?);
    }
    // Native connections have the receivers, and drop them when they have ended.
    let _ = stopping.send(());
    let drained = async { tokio::join!(tonic, stopping.closed()).0 };
    match tokio::time::timeout(grace, drained).await {
        Ok(ended) => Ok(ended?),
        Err(_) => {
            tracing::debug!(?grace, "the server ends although connections are left");
            Ok(())
        }
    }
}

/// Gives connections to `take` until `signal` is ready, and what it returns to `streams`. Then the port is closed.
async fn accept(
    mut listener: Listener,
    take: impl Fn(Negotiated) -> Option<EndpointStream>,
    streams: mpsc::Sender<EndpointStream>,
    signal: Option<impl Future<Output = ()>>,
) {
    let mut signal = pin!(async {
        match signal {
            Some(signal) => signal.await,
            None => pending().await,
        }
    });
    loop {
        let next = tokio::select! {
            () = &mut signal => return,
            next = listener.next_negotiated() => next,
        };
        let Some(negotiated) = next else { return };
        if let Some(stream) = take(negotiated)
            && streams.send(stream).await.is_err()
        {
            return;
        }
    }
}

/// What a client sends first: the preface, and SETTINGS without a value (RFC 9113, 3.4).
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Length of a frame's header.
const HEADER: usize = 9;
/// Type of the frame SETTINGS, which a server sends first.
const SETTINGS: u8 = 4;
/// Longest wait for the answer, which comes from this process.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes that the answer may have until it is read.
const BUFFER: usize = 4096;

/// Returns whether `server` answers HTTP/2 without TLS. tonic does not tell, so this function says hello to a copy of the server, in
/// memory. Each answer but that of plain HTTP/2 counts as TLS.
pub(super) async fn is_plaintext(server: Server) -> bool {
    let (mut client, connection) = tokio::io::duplex(BUFFER);
    let mut server = server;
    let serve = server.add_routes(Routes::default());
    let asked = async {
        serve.serve_with_incoming(tokio_stream::once(Ok::<_, std::io::Error>(connection))).await.ok()?;
        client.write_all(HELLO).await.ok()?;
        let mut header = [0; HEADER];
        client.read_exact(&mut header).await.ok()?;
        Some(header[3] == SETTINGS && header[4..] == [0; 5])
    };
    tokio::time::timeout(PATIENCE, asked).await.ok().flatten().unwrap_or(false)
}

#[cfg(test)]
mod plaintext_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[tokio::test]
    async fn a_server_without_tls_is_found() {
        assert!(is_plaintext(Server::builder()).await);
        assert!(is_plaintext(Server::builder().accept_http1(true)).await);
    }

    #[cfg(feature = "_tls-any")]
    #[tokio::test]
    async fn a_server_with_tls_is_found() {
        use tonic::transport::ServerTlsConfig;

        let identity = support::Authority::new("test").issue("server");
        let server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity)).unwrap();
        assert!(!is_plaintext(server).await);
    }
}
