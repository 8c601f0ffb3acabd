//! The gRPC modes: a call for each variable and direction.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};
use tonic_rdma::gather::GatherRequests;
use tonic_rdma_commands::Failure;
use tonic_rdma_proto::parameters::parameter_server_client::ParameterServerClient;
use tonic_rdma_proto::parameters::parameter_server_server::{ParameterServer, ParameterServerServer};
use tonic_rdma_proto::parameters::{PullReply, PullRequest, PushReply, PushRequest};

use super::check::{Receipt, TensorPosition};
use super::variables::{Layout, Variables};
use crate::measure::transport::calls::CallChannel;
use crate::measure::transport::encode::Encode;
use crate::measure::transport::http2::Http2;
use crate::parameter_server::mode::TransferMode;
use crate::parameter_server::options::ProcessOptions;

/// Longest time to make a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Serves variables and takes gradients. Clones share the state.
#[derive(Clone, Debug)]
pub(crate) struct ParameterService {
    variables: Arc<Variables>,
    /// The expected gradients of the workers.
    gradients: Arc<[Layout]>,
    reduces: bool,
    receipt: Arc<Mutex<Receipt>>,
}

impl ParameterService {
    pub(crate) fn new(variables: Arc<Variables>, gradients: Arc<[Layout]>, reduces: bool) -> Self {
        let receipt = Arc::new(Mutex::new(Receipt::new(false, reduces)));
        Self { variables, gradients, reduces, receipt }
    }

    /// Returns the service as a tonic server without limits on message sizes.
    pub(crate) fn server(self) -> ParameterServerServer<Self> {
        let server = ParameterServerServer::new(self);
        server.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX)
    }

    /// Adds tensors that came through slots.
    pub(crate) fn add(&self, receipt: &Receipt) {
        lock(&self.receipt).add(receipt);
    }

    /// Returns the receipt since the last call.
    pub(crate) fn receipt(&self) -> Receipt {
        std::mem::replace(&mut *lock(&self.receipt), Receipt::new(false, self.reduces))
    }
}

#[tonic::async_trait]
impl ParameterServer for ParameterService {
    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<PullReply>, Status> {
        let PullRequest { variable, step } = request.into_inner();
        let value = self.variables.bytes(variable as usize, step);
        let value = value.ok_or_else(|| Status::not_found(format!("there is no variable {variable}")))?;
        Ok(Response::new(PullReply { value }))
    }

    async fn push(&self, request: Request<PushRequest>) -> Result<Response<PushReply>, Status> {
        let PushRequest { worker, variable, step, every_byte, gradient } = request.into_inner();
        let layout = self.gradients.get(worker as usize);
        let layout = layout.ok_or_else(|| Status::not_found(format!("there is no worker {worker}")))?;
        let mut receipt = Receipt::new(every_byte, self.reduces);
        let place = TensorPosition { layout, index: variable as usize, step };
        receipt.take(place, &gradient).map_err(|error| Status::data_loss(error.to_string()))?;
        lock(&self.receipt).add(&receipt);
        Ok(Response::new(PushReply {}))
    }
}

type Client = ParameterServerClient<GatherRequests<CallChannel>>;

/// A connection to one server.
#[derive(Clone, Debug)]
struct Connection {
    client: Client,
    /// The channel of the client, for a look at its connection.
    channel: CallChannel,
}

/// A worker's connections, one to each server.
#[derive(Clone, Debug)]
pub(crate) struct ParameterClient {
    servers: Vec<Connection>,
    worker: u32,
    inflight: usize,
}

impl ParameterClient {
    /// Connects to every server in `mode`. For RDMA this also returns the provider in use.
    pub(crate) async fn connect(
        mode: TransferMode,
        options: &ProcessOptions,
    ) -> Result<(Self, Option<String>), Failure> {
        let addresses = match mode {
            TransferMode::GrpcTcp => &options.tcp,
            TransferMode::GrpcRdma => &options.rdma,
            TransferMode::GrpcRdmaGather => &options.rdma_gather,
            TransferMode::GrpcNative => &options.native,
            TransferMode::GrpcNativeGather => &options.native_gather,
            TransferMode::RdmaCp | TransferMode::RdmaZerocp => {
                return Err(Failure::run(format!("{mode} has no calls")));
            }
        };
        if addresses.len() != options.servers {
            return Err(Failure::run(format!("the servers do not serve {mode}")));
        }
        let (mut servers, mut provider) = (Vec::new(), None);
        for address in addresses {
            let (connection, of) = Connection::open(mode, *address, options).await?;
            servers.push(connection);
            provider = provider.or(of);
        }
        Ok((Self { servers, worker: options.worker, inflight: options.inflight }, provider))
    }

    /// Fails if the mode makes native calls and its connection carries HTTP/2.
    pub(crate) fn check_native(&self) -> Result<(), Failure> {
        for server in &self.servers {
            server.channel.check_native()?;
        }
        Ok(())
    }

    /// Pulls every variable once. `layouts` has one for each server.
    pub(crate) async fn pull(
        &self,
        layouts: &[Layout],
        step: u64,
        receipt: &Arc<Mutex<Receipt>>,
    ) -> Result<(), Failure> {
        self.each(layouts.iter().map(Layout::len).sum(), |mut client, index| {
            let (layout, receipt) = (layouts[index % layouts.len()].clone(), Arc::clone(receipt));
            async move {
                let reply = client.pull(PullRequest { variable: index as u32, step }).await;
                let value = reply.map_err(|status| failure("pull", index, &status))?.into_inner().value;
                lock(&receipt).take(TensorPosition { layout: &layout, index, step }, &value)
            }
        })
        .await
    }

    /// Pushes every gradient once. `gradients` has the tensors for each server.
    pub(crate) async fn push(
        &self,
        gradients: &[Arc<Variables>],
        step: u64,
        every_byte: bool,
    ) -> Result<(), Failure> {
        let worker = self.worker;
        self.each(gradients.iter().map(|of| of.layout().len()).sum(), |mut client, index| {
            let gradient = gradients[index % gradients.len()].bytes(index, step).unwrap_or_default();
            let request = PushRequest { worker, variable: index as u32, step, every_byte, gradient };
            async move {
                let reply = client.push(request).await;
                reply.map(drop).map_err(|status| failure("push", index, &status))
            }
        })
        .await
    }

    /// Makes a call for each of `count` variables, in order, with some of the calls in flight at once.
    async fn each<F>(&self, count: usize, call: impl Fn(Client, usize) -> F) -> Result<(), Failure>
    where
        F: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let mut calls = JoinSet::new();
        for index in 0..count {
            if calls.len() >= self.inflight {
                ended(calls.join_next().await)?;
            }
            let server = &self.servers[index % self.servers.len()];
            calls.spawn(call(server.client.clone(), index));
        }
        while !calls.is_empty() {
            ended(calls.join_next().await)?;
        }
        Ok(())
    }
}

impl Connection {
    /// Opens a connection in `mode`. For RDMA this also returns the provider in use.
    async fn open(
        mode: TransferMode,
        address: SocketAddr,
        options: &ProcessOptions,
    ) -> Result<(Self, Option<String>), Failure> {
        let endpoint = endpoint(address, options.http2)?;
        let (channel, provider): (CallChannel, _) = match mode {
            TransferMode::GrpcTcp => {
                let channel = endpoint.connect().await;
                let channel =
                    channel.map_err(|error| Failure::run("can't connect over TCP").because(error))?;
                (channel.into(), None)
            }
            TransferMode::GrpcRdma | TransferMode::GrpcRdmaGather => {
                let (channel, verdict) = options.rdma()?.connect(endpoint).await?;
                (channel.into(), Some(verdict.provider))
            }
            TransferMode::GrpcNative => {
                let (channel, verdict) = options.rdma()?.connect_native(endpoint).await?;
                (channel.into(), Some(verdict.provider))
            }
            TransferMode::GrpcNativeGather => {
                let (channel, verdict) = options.rdma()?.connect_native(endpoint).await?;
                (CallChannel::gathering(channel), Some(verdict.provider))
            }
            TransferMode::RdmaCp | TransferMode::RdmaZerocp => {
                return Err(Failure::run(format!("{mode} has no calls")));
            }
        };
        let encode = match mode {
            TransferMode::GrpcRdmaGather => Encode::Gather,
            // The channel of native calls sends by reference itself.
            _ => Encode::Copy,
        };
        let client = ParameterServerClient::new(encode.wrap(channel.clone()));
        let client = client.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX);
        Ok((Self { client, channel }, provider))
    }
}

fn ended(call: Option<Result<Result<(), Failure>, tokio::task::JoinError>>) -> Result<(), Failure> {
    match call {
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(Failure::run("a call crashed").because(error)),
        None => Ok(()),
    }
}

fn endpoint(address: SocketAddr, http2: Http2) -> Result<Endpoint, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Failure::run(format!("bad address {address}")).because(error))?;
    Ok(http2.client(endpoint.tcp_nodelay(true).connect_timeout(CONNECT)))
}

fn failure(what: &str, index: usize, status: &Status) -> Failure {
    Failure::run(format!("can't {what} variable {index}: {:?}: {}", status.code(), status.message()))
}

pub(crate) fn lock(receipt: &Mutex<Receipt>) -> MutexGuard<'_, Receipt> {
    receipt.lock().unwrap_or_else(PoisonError::into_inner)
}
