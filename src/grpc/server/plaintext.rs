//! Whether a server for HTTP/2 peers takes them without TLS.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::service::Routes;
use tonic::transport::Server;

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
mod tests {
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
