//! The servers that the channel calls.

use std::future::Future;
use std::net::SocketAddr;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic_rdma::{CallConfig, RdmaChannel, RdmaIncoming, RdmaServer, Verdict};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Runtime, ScriptedGreeter, config};

/// The kind of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Takes calls without HTTP/2.
    Native,
    /// tonic's server over RDMA.
    Http2,
    /// tonic's server over TCP.
    Stock,
}

/// A running server.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) kind: Kind,
    pub(crate) address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Native, Self::Http2, Self::Stock];

    pub(crate) fn named(name: &str) -> Self {
        Self::ALL.into_iter().find(|kind| format!("{kind:?}") == name).expect("a kind of server")
    }

    pub(crate) async fn serve(self, greeter: &ScriptedGreeter) -> Running {
        self.serve_at("127.0.0.1:0", greeter, CallConfig::default()).await
    }

    pub(crate) async fn serve_at(
        self,
        address: &str,
        greeter: &ScriptedGreeter,
        calls: CallConfig,
    ) -> Running {
        let service = GreeterServer::new(greeter.clone());
        let (stop, stopped) = oneshot::channel::<()>();
        let signal = async {
            // If the handle was dropped, the server runs on.
            if stopped.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        if self == Self::Stock {
            let incoming = TcpIncoming::bind(address.parse().unwrap()).unwrap();
            let address = incoming.local_addr().unwrap();
            let serve = Server::builder().add_service(service).serve_with_incoming_shutdown(incoming, signal);
            let server = tokio::spawn(async { serve.await.unwrap() });
            return Running { kind: self, address, stop, server };
        }
        let incoming = RdmaIncoming::builder().config(config()).bind(address).await.unwrap();
        let address = incoming.local_addr();
        let server = if self == Self::Native {
            let server = RdmaServer::new().calls(calls).add_service(service);
            tokio::spawn(async { server.serve_with_incoming_shutdown(incoming, signal).await.unwrap() })
        } else {
            let server = Server::builder().add_service(service);
            tokio::spawn(async { server.serve_with_incoming_shutdown(incoming, signal).await.unwrap() })
        };
        Running { kind: self, address, stop, server }
    }
}

impl Running {
    pub(crate) fn endpoint(&self) -> Endpoint {
        endpoint(self.address)
    }

    /// Connects, and checks what carries the calls.
    pub(crate) async fn channel(&self) -> RdmaChannel {
        let channel = RdmaChannel::builder(self.endpoint()).config(config()).connect().await.unwrap();
        check(&channel, self.kind);
        channel
    }

    pub(crate) async fn client(&self) -> GreeterClient<RdmaChannel> {
        GreeterClient::new(self.channel().await)
    }

    /// Begins a graceful shutdown. The server has ended when the returned task has.
    pub(crate) fn shut_down(self) -> JoinHandle<()> {
        self.stop.send(()).unwrap();
        self.server
    }

    /// Shuts down gracefully, and waits for the end.
    pub(crate) async fn end(self) {
        self.shut_down().await.unwrap();
    }
}

pub(crate) fn endpoint(address: SocketAddr) -> Endpoint {
    Endpoint::from_shared(format!("http://{address}")).unwrap()
}

/// Checks that the last connection of `channel` is the one that a server of this kind makes.
pub(crate) fn check(channel: &RdmaChannel, kind: Kind) {
    let info = channel.last_connection().unwrap();
    let (verdict, native) = match kind {
        Kind::Native => (Verdict::Rdma, true),
        Kind::Http2 => (Verdict::Rdma, false),
        Kind::Stock => (Verdict::Tcp, false),
    };
    assert_eq!((info.verdict(), info.is_native()), (verdict, native), "{}", info.reason());
}

/// Runs a test with each kind of server in each kind of runtime.
pub(crate) fn everywhere<F: Future<Output = ()>>(test: impl Fn(Kind) -> F) {
    for runtime in Runtime::ALL {
        for kind in Kind::ALL {
            println!("{kind:?} {runtime:?}");
            runtime.run(test(kind));
        }
    }
}
