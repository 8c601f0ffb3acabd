//! The server process: this binary, started again, which serves until its standard input ends.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use tokio_stream::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::gather;
use tonic_rdma::{RdmaIncoming, RdmaServer};
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest, UsageReply, UsageRequest};
use tower_service::Service;

use super::{LENGTH, run};

/// Starts the server process. Returns it, and its URI. Dropping it ends it.
pub(crate) fn start(core: Option<usize>) -> (Child, String) {
    let mut command = process::again().unwrap();
    command.arg("server").args(core.map(|core| format!("--core={core}")));
    Child::ready("the server", command, Duration::from_secs(60)).unwrap()
}

/// Runs the server process.
pub(crate) fn serve(core: Option<usize>) {
    process::end_with_stdin(|| {}).unwrap();
    run(core, async {
        let (uri, server) = bind().await;
        println!("{uri}");
        server.await;
    });
}

/// Returns the address of a new server, and the future that serves.
pub(crate) async fn bind() -> (String, impl Future<Output = ()> + Send) {
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("http://{}", incoming.local_addr());
    let server = RdmaServer::new().layer(gather::both_layer().max_decoding_message_size(usize::MAX));
    let transfer = TransferServer::new(Answers).max_decoding_message_size(usize::MAX);
    let server = server.add_service(Answers).add_service(transfer).serve_with_incoming(incoming);
    (uri, async { server.await.unwrap() })
}

/// Answers each call at once.
#[derive(Clone, Copy, Debug)]
struct Answers;

impl NamedService for Answers {
    const NAME: &'static str = "native.Plain";
}

impl Service<http::Request<Body>> for Answers {
    type Response = http::Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        ready(Ok(http::Response::new(Full::new(Bytes::from_static(&[7; LENGTH])))))
    }
}

#[tonic::async_trait]
impl Transfer for Answers {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let bytes = request.get_ref().payload.len() as u64;
        Ok(Response::new(PutReply { bytes, ..PutReply::default() }))
    }

    type EchoStream = Pin<Box<dyn Stream<Item = Result<PutRequest, Status>> + Send>>;

    /// Sends the first message again and again.
    async fn echo(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<Self::EchoStream>, Status> {
        let first = request.into_inner().next().await.ok_or(Status::invalid_argument("no message"))??;
        Ok(Response::new(Box::pin(tokio_stream::iter(std::iter::repeat_with(move || Ok(first.clone()))))))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<UsageReply>, Status> {
        Err(Status::unimplemented("not here"))
    }
}
