//! Graceful shutdown: calls in flight finish, new calls are refused, and the port is free afterwards.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_rdma::{Config, Dialer, EndpointStream, Policy, RdmaError, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tower::service_fn;

use support::{Over, Port, Runtime, ScriptedGreeter, config, say, unchanged, until};

#[test]
fn calls_in_flight_finish_and_new_ones_are_refused() {
    let outcome = unchanged(shut_down);
    assert_eq!(outcome, ("held".into(), vec!["one".into(), "two".into()]));
}

async fn shut_down(over: Over) -> (String, Vec<String>) {
    let (port, greeter) = (Port::reserve(), ScriptedGreeter::new());
    let running = over.serve_on(&port, &greeter).await;
    let mut client = over.client(&running).await;
    let mut other = client.clone();
    let call = tokio::spawn(async move { say(&mut other, "hold").await });
    let (names, sent) = tokio::sync::mpsc::channel(1);
    let name = |name: &str| HelloRequest { name: name.into() };
    names.send(name("one")).await.unwrap();
    let sent = tokio_stream::wrappers::ReceiverStream::new(sent);
    let mut chat = client.chat(sent).await.unwrap().into_inner();
    let mut chatted = vec![chat.next().await.unwrap().unwrap().message];
    until(|| greeter.held() == 1).await;

    let server = running.shut_down();
    while over.connect(port.endpoint()).await.is_ok() {}
    // GOAWAY may still be on its way. After it the channel dials again, and fails.
    while say(&mut client, "hello").await.map_err(|status| status.code()) != Err(Code::Unavailable) {}
    assert!(!server.is_finished(), "the server did not wait for its calls");

    greeter.release(1);
    names.send(name("two")).await.unwrap();
    chatted.push(chat.next().await.unwrap().unwrap().message);
    drop(names);
    assert!(chat.next().await.is_none());
    let held = call.await.unwrap().unwrap();
    server.await.unwrap().unwrap();
    over.serve_on(&port, &greeter).await.end().await;
    (held, chatted)
}

/// A process ends after its server, so a server ends after all that it wrote has reached its clients. It knows
/// this once they have closed.
#[test]
fn the_end_of_a_server_waits_for_clients_that_may_still_read() {
    for policy in [Policy::Require, Policy::TcpOnly] {
        Runtime::MultiThread.run(wait_for_client(config().policy(policy).linger(Duration::from_secs(3600))));
    }
}

async fn wait_for_client(config: Config) {
    let incoming = RdmaIncoming::builder().config(config.clone()).bind("127.0.0.1:0").await.unwrap();
    let (address, greeter) = (incoming.local_addr(), ScriptedGreeter::new());
    let (stop, stopped) = oneshot::channel::<()>();
    let server = RdmaServer::new().add_service(GreeterServer::new(greeter.clone()));
    let mut server =
        tokio::spawn(server.serve_with_incoming_shutdown(incoming, async { drop(stopped.await) }));

    let (kept, mut streams) = mpsc::unbounded_channel();
    let connector = service_fn(move |_: Uri| {
        let (config, kept) = (config.clone(), kept.clone());
        async move {
            let stream = Dialer::new(config).dial("127.0.0.1", address.port()).await?;
            Ok::<_, RdmaError>(TokioIo::new(Unclosed { stream: Some(stream), kept }))
        }
    });
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut client = GreeterClient::new(endpoint.connect_with_connector(connector).await.unwrap());
    let call = tokio::spawn(async move { say(&mut client, "hold").await });
    until(|| greeter.held() == 1).await;
    stop.send(()).unwrap();
    greeter.release(1);
    assert_eq!(call.await.unwrap().unwrap(), "held");
    let stream = streams.recv().await.unwrap();
    let ended = timeout(Duration::from_millis(300), &mut server).await;
    assert!(ended.is_err(), "over {}, the server ended before its client", stream.info().verdict());
    drop(stream);
    server.await.unwrap().unwrap();
}

/// A stream whose owner gives it up, and which is not closed by that.
struct Unclosed {
    stream: Option<EndpointStream>,
    kept: mpsc::UnboundedSender<EndpointStream>,
}

impl Unclosed {
    fn stream(&mut self) -> Pin<&mut EndpointStream> {
        Pin::new(self.stream.as_mut().unwrap())
    }
}

impl Drop for Unclosed {
    fn drop(&mut self) {
        let _ = self.kept.send(self.stream.take().unwrap());
    }
}

impl AsyncRead for Unclosed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        AsyncRead::poll_read(self.stream(), context, buffer)
    }
}

impl AsyncWrite for Unclosed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write(self.stream(), context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_flush(self.stream(), context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
