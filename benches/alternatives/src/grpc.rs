//! The modes with gRPC: the same service and the same proto by tonic and by connectrpc, over TCP, Unix sockets
//! and tonic-rdma.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use connectrpc::client::{ClientConfig, Http2Connection};
use connectrpc::{
    ConnectError, ConnectRpcService, InboundStream, Limits, Protocol, RequestContext, Response, Server,
    ServiceRequest, ServiceResult, ServiceStream,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::codegen::BoxStream;
use tonic::codegen::http::Uri;
use tonic::transport::Endpoint;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Config, Policy, RdmaChannel, RdmaConnector, RdmaIncoming, RdmaServer};
use tonic_rdma_commands::payload::content::Content;
use tonic_rdma_commands::process::{end_with_stdin, report_line};
use tonic_rdma_commands::{Context as _, Failure};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{Check, PutReply, PutRequest, UsageReply, UsageRequest};

use crate::measure::{Caller, Phase, Request, SEED, accept, first_wrong, measure};
use crate::mode::Mode;
use crate::{Cell, Job};

#[allow(unused, clippy::all, reason = "generated code")]
mod generated {
    connectrpc::include_generated!();
}
use generated::tonic_rdma::transfer::v1 as connect;

#[derive(Clone, Debug)]
struct Service;

#[tonic::async_trait]
impl Transfer for Service {
    async fn put(
        &self,
        request: tonic::Request<PutRequest>,
    ) -> Result<tonic::Response<PutReply>, tonic::Status> {
        let request = request.into_inner();
        let checks_all = request.check() == Check::All;
        let first_mismatch = first_wrong(request.seed, &request.payload, checks_all);
        Ok(tonic::Response::new(PutReply {
            bytes: request.payload.len() as u64,
            first_mismatch,
            ..PutReply::default()
        }))
    }

    // The bench calls nothing else of the service.
    async fn echo(
        &self,
        _: tonic::Request<tonic::Streaming<PutRequest>>,
    ) -> Result<tonic::Response<BoxStream<PutRequest>>, tonic::Status> {
        Err(tonic::Status::unimplemented("echo"))
    }

    async fn usage(
        &self,
        _: tonic::Request<UsageRequest>,
    ) -> Result<tonic::Response<UsageReply>, tonic::Status> {
        Err(tonic::Status::unimplemented("usage"))
    }
}

#[allow(refining_impl_trait, reason = "no code calls it by the trait")]
impl connect::Transfer for Service {
    async fn put(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, connect::PutRequest>,
    ) -> ServiceResult<connect::PutReply> {
        let checks_all = request.check == connect::Check::CHECK_ALL;
        let first_mismatch = first_wrong(request.seed, request.payload, checks_all);
        let bytes = request.payload.len() as u64;
        Response::ok(connect::PutReply { bytes, first_mismatch, ..Default::default() })
    }
    async fn echo(
        &self,
        _: RequestContext,
        _: InboundStream<connect::PutRequest>,
    ) -> ServiceResult<ServiceStream<connect::PutRequest>> {
        Err(ConnectError::unimplemented("echo"))
    }
    async fn usage(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, connect::UsageRequest>,
    ) -> ServiceResult<connect::UsageReply> {
        Err(ConnectError::unimplemented("usage"))
    }
}

/// Connections have to be over RDMA.
fn rdma() -> Result<Config, Failure> {
    Ok(Config::from_env().context("an RDMA_* variable is not accepted")?.policy(Policy::Require))
}

async fn rdma_listener() -> Result<RdmaIncoming, Failure> {
    let incoming = RdmaIncoming::builder().config(rdma()?).bind("127.0.0.1:0").await;
    incoming.context("can't listen for RDMA peers")
}

/// Listens, reports the address, and serves until stdin ends.
pub(crate) async fn serve(job: &Job) -> Result<(), Failure> {
    end_with_stdin(|| ())?;
    let path = &job.address;
    let unix =
        || UnixListener::bind(path).map(UnixListenerStream::new).context("can't listen on a Unix socket");
    let tonic = TransferServer::new(Service).max_decoding_message_size(usize::MAX);
    let router = tonic::transport::Server::builder().add_service(tonic.clone());
    let limits = Limits::default().with_max_request_body_size(usize::MAX).with_max_message_size(usize::MAX);
    let connect = ConnectRpcService::new(connect::TransferServer::new(Service)).with_limits(limits);
    let served: Result<(), BoxError> = match job.mode {
        Mode::GrpcTcp => {
            let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).context("can't listen on TCP")?;
            report_line(incoming.local_addr()?)?;
            router.serve_with_incoming(incoming.with_nodelay(Some(true))).await.map_err(Into::into)
        }
        Mode::GrpcUds => {
            let incoming = unix()?;
            report_line(path)?;
            router.serve_with_incoming(incoming).await.map_err(Into::into)
        }
        Mode::GrpcRdma => {
            let incoming = rdma_listener().await?;
            report_line(incoming.local_addr())?;
            router.serve_with_incoming(incoming).await.map_err(Into::into)
        }
        Mode::GrpcNative => {
            let incoming = rdma_listener().await?;
            report_line(incoming.local_addr())?;
            let server = RdmaServer::new().config(rdma()?).add_service(tonic);
            server.serve_with_incoming(incoming).await.map_err(Into::into)
        }
        Mode::ConnectrpcTcp => {
            let server = Server::bind("127.0.0.1:0").await.context("can't listen on TCP")?;
            report_line(server.local_addr()?)?;
            server.serve_with_service(connect).await
        }
        Mode::ConnectrpcUds => {
            let incoming = unix()?;
            report_line(path)?;
            serve_connect(connect, incoming).await
        }
        Mode::ConnectrpcRdma => {
            let incoming = rdma_listener().await?;
            report_line(incoming.local_addr())?;
            serve_connect(connect, incoming).await
        }
        Mode::Iceoryx2 | Mode::Iceoryx2InPlace | Mode::RdmaZerocp => Err("no gRPC".into()),
    };
    served.context("the server failed")
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Serves connectrpc on any connections, with the settings of its own server.
async fn serve_connect<IO>(
    service: ConnectRpcService<connect::TransferServer<Service>>,
    mut incoming: impl Stream<Item = io::Result<IO>> + Unpin,
) -> Result<(), BoxError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    while let Some(connection) = incoming.next().await {
        let (connection, service) = (TokioIo::new(connection?), TowerToHyperService::new(service.clone()));
        tokio::spawn(async move {
            let mut server = Builder::new(TokioExecutor::new());
            server.http2().adaptive_window(true);
            // An error of one connection reaches its client.
            let _ = server.serve_connection(connection, service).await;
        });
    }
    Ok(())
}

/// Connects, and measures.
pub(crate) async fn call(job: &Job) -> Result<(), Failure> {
    let (address, failed) = (&job.address, "can't connect");
    let endpoint = |scheme: &str| Endpoint::from_shared(format!("{scheme}{address}")).context("no address");
    let uri = |text: &str| text.parse::<Uri>().context("no address");
    let http = format!("http://{address}");
    match job.mode {
        Mode::GrpcTcp => by_tonic(job, endpoint("http://")?.connect().await.context(failed)?).await,
        Mode::GrpcUds => by_tonic(job, endpoint("unix:")?.connect().await.context(failed)?).await,
        Mode::GrpcRdma => {
            let connector = RdmaConnector::new().config(rdma()?);
            by_tonic(job, endpoint("http://")?.connect_with_connector(connector).await.context(failed)?).await
        }
        Mode::GrpcNative => {
            let channel = RdmaChannel::builder(endpoint("http://")?).config(rdma()?);
            by_tonic(job, channel.connect().await.context(failed)?).await
        }
        Mode::ConnectrpcTcp => {
            by_connect(job, Http2Connection::connect_plaintext(uri(&http)?).await.context(failed)?).await
        }
        Mode::ConnectrpcUds => {
            let connection = Http2Connection::connect_unix(address, uri("http://localhost")?).await;
            by_connect(job, connection.context(failed)?).await
        }
        Mode::ConnectrpcRdma => {
            let connector = RdmaConnector::new().config(rdma()?);
            let connection = Http2Connection::connect_with_connector(connector, uri(&http)?).await;
            by_connect(job, connection.context(failed)?).await
        }
        Mode::Iceoryx2 | Mode::Iceoryx2InPlace | Mode::RdmaZerocp => Err("no gRPC".into()),
    }
}

async fn by_tonic<S>(job: &Job, channel: S) -> Result<(), Failure>
where
    S: tonic::client::GrpcService<tonic::body::Body> + Clone + Send + Sync + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    S::ResponseBody: tonic::codegen::Body<Data = Bytes> + Send + 'static,
    <S::ResponseBody as tonic::codegen::Body>::Error: Into<BoxError> + Send,
{
    let client = TransferClient::new(channel);
    let put = move |request: Request| {
        let mut client = client.clone();
        let check = if request.checks_all { Check::All } else { Check::Stamps };
        let request = PutRequest { seed: request.seed, check: check.into(), payload: request.payload };
        async move {
            let reply = client.put(request).await.context("the call failed")?.into_inner();
            Ok((reply.bytes, reply.first_mismatch))
        }
    };
    measure(job, Calls::new(job, put)?).await
}

async fn by_connect(job: &Job, connection: Http2Connection) -> Result<(), Failure> {
    let config = ClientConfig::new(Uri::from_static("http://localhost")).with_protocol(Protocol::Grpc);
    let client = Arc::new(connect::TransferClient::new(connection.shared(1024), config));
    let put = move |request: Request| {
        let client = Arc::clone(&client);
        let check = if request.checks_all { connect::Check::CHECK_ALL } else { connect::Check::CHECK_STAMPS };
        let Request { seed, payload, .. } = request;
        let request = connect::PutRequest { seed, check: check.into(), payload, ..Default::default() };
        async move {
            let reply = client.put(request).await.context("the call failed")?;
            Ok((reply.view().bytes, reply.view().first_mismatch))
        }
    };
    measure(job, Calls::new(job, put)?).await
}

/// Calls in flight, each made by a task of its own, one after the other.
struct Calls<F> {
    put: F,
    content: Content,
    bytes: usize,
    inflight: usize,
    next: Arc<AtomicUsize>,
}

impl<F> Calls<F> {
    fn new(job: &Job, put: F) -> Result<Self, Failure> {
        let Cell { bytes, inflight } = job.cell;
        let content = Content::new(bytes, SEED).context("there is no memory")?;
        Ok(Self { put, content, bytes, inflight, next: Arc::default() })
    }
}

impl<F, R> Caller for Calls<F>
where
    F: Fn(Request) -> R + Clone + Send + 'static,
    R: Future<Output = Result<(u64, u64), Failure>> + Send + 'static,
{
    async fn run(&mut self, phase: Phase) -> Result<Vec<Duration>, Failure> {
        let mut tasks = JoinSet::new();
        for _ in 0..self.inflight {
            let (put, content, next, bytes) =
                (self.put.clone(), self.content.clone(), Arc::clone(&self.next), self.bytes);
            tasks.spawn(async move {
                let mut took = Vec::new();
                while phase.goes_on(took.len()) {
                    let mut payload = content.variant(next.fetch_add(1, Ordering::Relaxed));
                    let (seed, checks_all) = (payload.seed(), phase.checks_all);
                    let request = Request { seed, checks_all, payload: payload.cut(bytes) };
                    let begin = Instant::now();
                    let (arrived, first_wrong) = put(request).await?;
                    took.push(begin.elapsed());
                    accept(bytes, arrived, first_wrong)?;
                }
                Ok::<_, Failure>(took)
            });
        }
        let mut all = Vec::new();
        while let Some(took) = tasks.join_next().await {
            all.extend(took.context("a task crashed")??);
        }
        Ok(all)
    }
}
