//! Connections to the serving process, one for each mode, and the call that is measured.

use std::io;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net as unix;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::{JoinError, JoinSet};
use tonic::transport::{Channel, Endpoint};
use tonic_rdma::gather::GatherRequests;
use tonic_rdma_proto::tensors::PushRequest;
use tonic_rdma_proto::tensors::tensors_client::TensorsClient;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::{Check, PutRequest, UsageRequest};

use super::encode::Encode;
use super::http2::Http2;
use super::mode::Mode;
use super::operations::{Operation, Push};
use super::rdma::{Rdma, Verdict};
use super::server::Addresses;
use crate::failure::Failure;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);

/// Why a call counts as an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("{}: {}", .0.code().description(), deepest(.0))]
    Status(#[from] tonic::Status),
    #[error("sent {sent} bytes and {arrived} arrived")]
    Length { sent: u64, arrived: u64 },
    #[error("byte {offset} of {sent} arrived wrong")]
    Content { offset: u64, sent: u64 },
    #[error("buffers of {sent:?} bytes were sent and of {arrived:?} arrived")]
    Buffers { sent: Vec<u64>, arrived: Vec<u64> },
    #[error("byte {offset} of buffer {buffer} arrived wrong")]
    BufferContent { buffer: u64, offset: u64 },
    #[error("{0}")]
    Crash(#[from] JoinError),
}

impl CallError {
    /// Whether what arrived was not what was sent.
    pub(crate) fn is_mismatch(&self) -> bool {
        !matches!(self, Self::Status(_) | Self::Crash(_))
    }
}

/// The cause at the bottom: what tonic says itself is seldom more than "transport error".
fn deepest(status: &tonic::Status) -> String {
    let mut message = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        message = error.to_string();
        cause = error.source();
    }
    message
}

/// A connection in one mode. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    client: TransferClient<GatherRequests<Channel>>,
    tensors: TensorsClient<GatherRequests<Channel>>,
}

impl Caller {
    /// A caller on `channel`, without limits on message sizes.
    pub(crate) fn new(channel: Channel, mode: Mode, encode: Encode) -> Self {
        let channel = encode.wrap(mode, channel);
        let client = TransferClient::new(channel.clone());
        let tensors = TensorsClient::new(channel);
        Self {
            client: client.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
            tensors: tensors.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX),
        }
    }

    /// Carries out `operation`, with up to `width` calls at once if it is a set, and says how long that took.
    pub(crate) async fn run(
        &mut self,
        operation: &Operation,
        check: Check,
        width: usize,
    ) -> Result<Duration, CallError> {
        match operation {
            Operation::Put(seed, payload) => self.put((*seed, payload.clone()), check).await,
            Operation::Push(push) => self.push(push, check).await,
            Operation::Set(set) => self.push_set(set, check, width).await,
        }
    }

    /// Sends `payload`, waits for the answer, and says how long that took.
    async fn put(&mut self, (seed, payload): (u64, Bytes), check: Check) -> Result<Duration, CallError> {
        let sent = payload.len() as u64;
        let start = Instant::now();
        let reply = self.client.put(PutRequest { seed, check: check.into(), payload }).await?;
        let elapsed = start.elapsed();
        let reply = reply.into_inner();
        match reply.first_mismatch.checked_sub(1) {
            Some(offset) => Err(CallError::Content { offset, sent }),
            None if reply.bytes != sent => Err(CallError::Length { sent, arrived: reply.bytes }),
            None => Ok(elapsed),
        }
    }

    /// The same for one message of several buffers.
    async fn push(&mut self, push: &Push, check: Check) -> Result<Duration, CallError> {
        let sent: Vec<u64> = push.buffers.iter().map(|buffer| buffer.len() as u64).collect();
        let every_byte = check == Check::All;
        let request = PushRequest { seed: push.seed, every_byte, buffers: push.buffers.clone() };
        let start = Instant::now();
        let reply = self.tensors.push(request).await?;
        let elapsed = start.elapsed();
        let reply = reply.into_inner();
        if reply.lengths != sent {
            return Err(CallError::Buffers { sent, arrived: reply.lengths });
        }
        match reply.mismatch {
            Some(wrong) => Err(CallError::BufferContent { buffer: wrong.buffer, offset: wrong.offset }),
            None => Ok(elapsed),
        }
    }

    /// A whole set, in order, with up to `width` calls in flight; the first error ends it.
    async fn push_set(
        &mut self,
        set: &Arc<[Push]>,
        check: Check,
        width: usize,
    ) -> Result<Duration, CallError> {
        let start = Instant::now();
        if width == 1 {
            for push in set.iter() {
                self.push(push, check).await?;
            }
            return Ok(start.elapsed());
        }
        let next = Arc::new(AtomicUsize::new(0));
        let mut pushers = JoinSet::new();
        for _ in 0..width.min(set.len()) {
            let (mut caller, set, next) = (self.clone(), Arc::clone(set), Arc::clone(&next));
            pushers.spawn(async move {
                while let Some(push) = set.get(next.fetch_add(1, Ordering::Relaxed)) {
                    caller.push(push, check).await?;
                }
                Ok::<_, CallError>(())
            });
        }
        while let Some(ended) = pushers.join_next().await {
            ended??;
        }
        Ok(start.elapsed())
    }

    /// CPU time that the serving process has used.
    pub(crate) async fn usage(&mut self) -> Result<Duration, CallError> {
        let reply = self.client.usage(UsageRequest {}).await?;
        Ok(Duration::from_nanos(reply.into_inner().cpu_nanos))
    }
}

/// Connects in `mode`.
pub(crate) async fn connect(
    mode: Mode,
    addresses: &Addresses,
    http2: Http2,
    encode: Encode,
    rdma: Option<&Rdma>,
) -> Result<(Caller, Option<Verdict>), Failure> {
    let (channel, verdict) = match (mode, rdma, addresses.rdma) {
        (Mode::GrpcTcp, ..) => (tcp(addresses.tcp, http2).await?, None),
        (Mode::GrpcUds, ..) => (uds(addresses, http2).await?, None),
        (Mode::GrpcRdma | Mode::GrpcRdmaGather, Some(rdma), Some(address)) => {
            let (channel, verdict) = rdma.connect(endpoint(address, http2)?).await?;
            (channel, Some(verdict))
        }
        (Mode::GrpcRdma | Mode::GrpcRdmaGather, ..) => {
            return Err(Failure::run("the server process does not listen for RDMA peers"));
        }
    };
    Ok((Caller::new(channel, mode, encode), verdict))
}

/// A TCP connection with nodelay.
pub(crate) async fn tcp(address: SocketAddr, http2: Http2) -> Result<Channel, Failure> {
    endpoint(address, http2)?.connect().await.map_err(|error| connect_error("TCP", &error))
}

async fn uds(addresses: &Addresses, http2: Http2) -> Result<Channel, Failure> {
    let name = addresses.uds.clone();
    let connector = tower::service_fn(move |_| {
        let stream = uds_stream(&name);
        async move { stream.map(TokioIo::new) }
    });
    let endpoint = endpoint(addresses.tcp, http2)?;
    endpoint.connect_with_connector(connector).await.map_err(|error| connect_error("a Unix socket", &error))
}

/// Connecting within one host does not block, so it needs no detour through the reactor.
fn uds_stream(name: &str) -> io::Result<UnixStream> {
    let stream = unix::UnixStream::connect_addr(&unix::SocketAddr::from_abstract_name(name)?)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

fn endpoint(address: SocketAddr, http2: Http2) -> Result<Endpoint, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Failure::run(format!("bad address {address}: {error}")))?;
    Ok(http2.client(endpoint.tcp_nodelay(true).connect_timeout(CONNECT)))
}

fn connect_error(what: &str, error: &tonic::transport::Error) -> Failure {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    Failure::run(format!("can't connect to the server process over {what}: {error}{cause}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use tonic::transport::Server;

    use super::super::content::{Content, Payloads};
    use super::super::server::{Service, tcp_listener};
    use super::*;

    /// The address of a service of this process.
    fn serve() -> SocketAddr {
        let incoming = tcp_listener().unwrap();
        let address = incoming.local_addr().unwrap();
        let service = Service::default();
        let server = Server::builder().add_service(service.clone().transfer()).add_service(service.tensors());
        tokio::spawn(server.serve_with_incoming(incoming));
        address
    }

    #[tokio::test]
    async fn a_wrong_byte_is_an_error_and_names_its_place() {
        let address = serve();
        for encode in [Encode::Copy, Encode::Gather] {
            let mut caller = Caller::new(tcp(address, Http2::Default).await.unwrap(), Mode::GrpcTcp, encode);

            let (seed, payload) = Payloads::new(100_000, 3).take(0);
            for check in [Check::All, Check::Stamps] {
                caller.put((seed, payload.clone()), check).await.unwrap();
            }
            let mut wrong = payload.to_vec();
            wrong[70_001] ^= 4;
            let error = caller.put((seed, wrong.into()), Check::All).await.unwrap_err();
            assert!(matches!(error, CallError::Content { offset: 70_001, sent: 100_000 }), "{error}");
            let error = caller.put((seed + 1, payload), Check::Stamps).await.unwrap_err();
            assert!(matches!(error, CallError::Content { offset: 0, .. }), "{error}");
            assert!(caller.usage().await.unwrap() > Duration::ZERO);
        }
    }

    fn message(content: &mut Content, lengths: &[usize]) -> Push {
        let seed = content.seed();
        Push { seed, buffers: lengths.iter().map(|len| content.cut(*len)).collect() }
    }

    #[tokio::test]
    async fn buffers_in_another_order_are_an_error_that_says_so() {
        let address = serve();
        for encode in [Encode::Copy, Encode::Gather] {
            let mut caller = Caller::new(tcp(address, Http2::Default).await.unwrap(), Mode::GrpcTcp, encode);
            let push = message(&mut Content::new(300_000, 9), &[10, 100_000, 10_240, 100_000, 10]);
            for check in [Check::All, Check::Stamps] {
                caller.run(&Operation::Push(push.clone()), check, 1).await.unwrap();
                let mut swapped = push.clone();
                swapped.buffers.swap(1, 3);
                let error = caller.run(&Operation::Push(swapped), check, 1).await.unwrap_err();
                assert!(matches!(error, CallError::BufferContent { buffer: 1, offset: 0 }), "{error}");
            }
            let mut wrong = push.clone();
            let mut bytes = wrong.buffers[3].to_vec();
            bytes[99_999] ^= 1;
            wrong.buffers[3] = bytes.into();
            let error = caller.run(&Operation::Push(wrong), Check::Stamps, 1).await.unwrap_err();
            assert!(matches!(error, CallError::BufferContent { buffer: 3, offset: 99_999 }), "{error}");
            assert!(error.is_mismatch());
        }
    }

    #[tokio::test]
    async fn one_wrong_message_spoils_a_set_however_it_is_pushed() {
        let mut caller =
            Caller::new(tcp(serve(), Http2::Default).await.unwrap(), Mode::GrpcTcp, Encode::Copy);
        let mut content = Content::new(100_000, 2);
        let set: Vec<Push> = (1..20).map(|index| message(&mut content, &[index * 100])).collect();
        let mut spoilt = set.clone();
        spoilt[7].seed += 1;
        for width in [1, 4, 100] {
            caller.run(&Operation::Set(set.clone().into()), Check::All, width).await.unwrap();
            let error =
                caller.run(&Operation::Set(spoilt.clone().into()), Check::All, width).await.unwrap_err();
            assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 0 }), "{error}");
        }
    }
}
