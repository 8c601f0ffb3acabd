//! The server process: this binary, started again, which serves until its standard input ends.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io::{BufRead as _, BufReader, Read as _};
use std::pin::Pin;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::Full;
use tokio_stream::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::gather;
use tonic_rdma::{RdmaIncoming, RdmaServer};
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest, UsageReply, UsageRequest};
use tower_service::Service;

use super::{LENGTH, run};

/// First argument of the server process.
pub(crate) const ARGUMENT: &str = "server";

/// A handle to the server process. Dropping this ends it.
pub(crate) struct ServerProcess {
    process: Child,
    input: Option<ChildStdin>,
    pub(crate) uri: String,
}

impl ServerProcess {
    pub(crate) fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let command = command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut uri = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut uri).unwrap();
        let input = process.stdin.take();
        Self { process, input, uri: uri.trim().to_owned() }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        drop(self.input.take());
        self.process.wait().unwrap();
    }
}

/// Runs the server process.
pub(crate) fn serve() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        #[expect(clippy::disallowed_methods, reason = "the parent is gone, and nothing waits for an answer")]
        std::process::exit(0);
    });
    run(1, async {
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
