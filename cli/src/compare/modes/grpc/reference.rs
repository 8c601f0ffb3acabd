//! The modes by reference: the client shares each payload, a call carries the handle, and the receiver fetches
//! the bytes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_rdma::Policy;
use tonic_rdma_commands::payload::content::Content;
use tonic_rdma_commands::{Context as _, Failure};
use tonic_rdma_proto::reference::PutRequest;
use tonic_rdma_proto::reference::reference_client::ReferenceClient;
use tonic_rdma_proto::reference::reference_server::Reference;
use tonic_rdma_proto::tensors::exchange_server::Exchange as _;
use tonic_rdma_proto::tensors::{PushReply, PushRequest};
use tonic_rdma_proto::transfer::Check;
use tonic_rdma_tensor::TensorError;
use tonic_rdma_tensor::buffer::{BufferClient, BufferClientBuilder, BufferPool, RemoteBuffer};

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::service::TransferService;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::CallPayload;
use crate::compare::plan::MAX_BYTES;
use crate::compare::server::Servers;
use crate::measure::settings::Http2;
use crate::measure::transport::{EncodingChannel, LOCALHOST, Rdma, tcp_listener};

/// The owner of payloads: a pool in this process, and a server at which receivers fetch from it. Clones share
/// both.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pool: BufferPool,
    client: ReferenceClient<EncodingChannel>,
    _server: Arc<Servers>,
}

impl Owner {
    /// Listens on a port of its own. Handles go to the receiver by `channel`.
    pub(crate) async fn listen(
        mode: Mode,
        channel: EncodingChannel,
        http2: Http2,
        rdma: Option<&Rdma>,
    ) -> Result<Self, Failure> {
        let pool = |address| {
            let pool = BufferPool::builder(format!("http://{address}")).limit(MAX_BYTES).build();
            pool.context("can't make a pool of buffers")
        };
        let mut servers = Servers::new();
        let pool = match rdma.filter(|_| mode.uses_rdma()) {
            Some(rdma) => {
                let (incoming, address) = rdma.bind(LOCALHOST, Policy::Require).await?;
                let pool = pool(address)?;
                let server = rdma.server(http2).add_service(pool.service());
                servers.spawn(async { Ok(server.serve_with_incoming(incoming).await?) });
                pool
            }
            None => {
                let incoming = tcp_listener(LOCALHOST)?;
                let pool = pool(incoming.local_addr().context("can't listen on TCP")?)?;
                let server = http2.server(Server::builder()).add_service(pool.service());
                servers.spawn(async { Ok(server.serve_with_incoming(incoming).await?) });
                pool
            }
        };
        Ok(Self { pool, client: ReferenceClient::new(channel), _server: Arc::new(servers) })
    }

    /// Copies `content` to memory of the pool.
    pub(crate) fn copy(&self, content: &Content) -> Result<Content, CallError> {
        let mut memory = self.pool.allocate(content.all().len())?;
        memory.copy_from_slice(content.all());
        Ok(Content::over(memory.freeze(), content.seed()))
    }

    /// Shares `buffers`, the memory of `call`, calls the receiver, and ends the leases. Returns the reply, and
    /// the time that all this took.
    pub(crate) async fn put(
        &mut self,
        call: &CallPayload,
        buffers: Vec<Bytes>,
        check: Check,
    ) -> Result<(PushReply, Duration), CallError> {
        let start = Instant::now();
        let shared: Result<Vec<_>, _> = buffers.into_iter().map(|buffer| self.pool.share(buffer)).collect();
        let (leases, buffers): (Vec<_>, _) = shared?.into_iter().unzip();
        let request = PutRequest { seed: call.seed, every_byte: check == Check::All, buffers };
        let reply = self.client.put(request).await?.into_inner();
        drop(leases);
        Ok((reply, start.elapsed()))
    }
}

/// Fetches payloads in the receiver's process. Clones share the connections.
#[derive(Clone, Debug)]
pub(crate) struct Fetches {
    client: BufferClient,
    /// Whether a device must read the bytes.
    native: bool,
}

impl Fetches {
    /// Makes a client of `settings` for owners on this host, and payloads of up to `longest` bytes.
    pub(crate) fn new(settings: BufferClientBuilder, native: bool, longest: Option<usize>) -> Self {
        let settings = settings.owners(|uri| uri.host() == Some(&LOCALHOST.to_string()));
        let most = longest.map_or(u64::MAX, |longest| longest as u64);
        Self { client: settings.max_fetch_bytes(most).build(), native }
    }

    async fn fetch(&self, buffers: &[RemoteBuffer]) -> Result<Vec<Bytes>, TensorError> {
        match buffers {
            [buffer] => Ok(vec![self.client.fetch(buffer).await?]),
            buffers => self.client.fetch_all(buffers).await.into_iter().collect(),
        }
    }

    /// Fails if bytes were fetched by another path than the mode measures.
    pub(crate) fn check_native(&self) -> Result<(), Status> {
        let owners = self.client.owners();
        let connections = owners.iter().filter_map(|owner| owner.connection.as_ref());
        match connections.into_iter().find(|connection| connection.is_native() != self.native) {
            Some(other) => Err(Status::failed_precondition(format!(
                "payloads were fetched by another path: {}",
                other.reason()
            ))),
            None => Ok(()),
        }
    }
}

#[tonic::async_trait]
impl Reference for TransferService {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PushReply>, Status> {
        let PutRequest { seed, every_byte, buffers } = request.into_inner();
        let fetches =
            self.fetches.as_ref().ok_or_else(|| Status::unimplemented("this port fetches nothing"))?;
        let fetched = fetches.fetch(&buffers).await;
        let buffers = fetched.map_err(|error| Status::unavailable(error.to_string()))?;
        self.push(Request::new(PushRequest { seed, every_byte, buffers })).await
    }
}
