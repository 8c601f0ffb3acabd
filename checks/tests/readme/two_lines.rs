//! "Two lines": a server and a client of it, in the default runtime and in the one that polls when it is idle.

use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tonic::transport::{Channel, Server};
use tonic_rdma::RdmaConnector;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use super::addresses::{self, Endpoint, RdmaIncoming};
use super::greeter::{Greets, greet_often};
use super::running::{self, Outcome, default_runtime};

#[test]
fn in_the_default_runtime() {
    running::run(default_runtime(), a_thousand_calls(default_runtime()));
}

#[test]
fn in_a_runtime_that_polls_when_idle() {
    running::run(polling_runtime().unwrap(), a_thousand_calls(polling_runtime().unwrap()));
}

async fn a_thousand_calls(servers: Runtime) -> Outcome {
    let (stop, stopped) = oneshot::channel::<()>();
    let ended = running::apart(servers, async {
        tokio::select! {
            ended = server(GreeterServer::new(Greets { name: "ps0" })) => ended,
            _ = stopped => Ok(()),
        }
    });
    addresses::ready("ps0:50051").await;
    greet_often(client().await?).await?;
    drop(stop);
    ended.await?
}

#[rustfmt::skip]
async fn server(service: GreeterServer<Greets>) -> Outcome {
    // server: ONE port. RDMA peers and stock gRPC clients both arrive here.
    let incoming = RdmaIncoming::bind("0.0.0.0:50051").await?;                 // was: TcpIncoming::bind
    Server::builder().add_service(service).serve_with_incoming(incoming).await?;
    Ok(())
}

#[rustfmt::skip]
async fn client() -> Outcome<Channel> {
    // client: RDMA where both ends can, TCP where not.
    let channel = Endpoint::from_static("http://ps0:50051")
        .connect_with_connector(RdmaConnector::new()).await?;                  // was: connect()
    Ok(channel)
}

#[rustfmt::skip]
pub(crate) fn polling_runtime() -> Outcome<Runtime> {
    let runtime = tonic_rdma::runtime::idle_polling(&mut tokio::runtime::Builder::new_current_thread())
        .enable_all().build()?;
    Ok(runtime)
}
