//! Connected byte streams.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;
use tonic_rdma::{Config, Dialer, EndpointStream, Listener, Verdict};

/// Returns the default settings, changed by the environment: with `RDMA_DEVICE` set the tests run on that
/// device. Each end waits for the other's part of the negotiation for half the time of a test, because a busy
/// machine may need longer than users wait.
pub fn config() -> Config {
    Config::from_env().unwrap().handshake_timeout(Duration::from_secs(60))
}

/// Listens on a free port of this machine.
pub async fn listen(config: Config) -> Listener {
    Listener::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), config).unwrap()
}

/// Connects over RDMA and returns both ends: client, server.
pub async fn pair(config: Config) -> (EndpointStream, EndpointStream) {
    let mut listener = listen(config.clone()).await;
    let dialer = Dialer::new(config);
    let port = listener.local_addr().port();
    let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
    let (client, server) = (client.unwrap(), server.unwrap());
    assert_eq!(client.info().verdict(), Verdict::Rdma, "{}", client.info().reason());
    assert_eq!(server.info().verdict(), Verdict::Rdma, "{}", server.info().reason());
    (client, server)
}

/// Sends back what arrives, until the stream ends.
pub async fn echo_stream(mut stream: EndpointStream) {
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
