//! The owner's gRPC service.

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request as HttpRequest, Response as HttpResponse};
use tokio::time::timeout;
use tokio_stream::Stream;
use tonic::body::Body;
use tonic::codegen::BoxFuture;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};
use tower::layer::Layer;
use tower::util::future::MapResponseFuture;
use tower_service::Service as TowerService;

use super::handle::{MOST_RANGES, Refusal};
use super::lease::{Caller, Fetching, Writing};
use super::owner::PoolShared;
use super::proto::buffers_server::{Buffers, BuffersServer};
use super::proto::{BufferRanges, FaultKind, FetchReply, FetchRequest, Reader, WriteReply, WriteRequest};
use tonic_rdma::RdmaRequestExt as _;
use tonic_rdma::gather::{GatherBothLayer, GatherBothService};

/// Most segments of contents in one reply. Each is two of the 256 segments that an offer may have.
const MOST_CONTENTS: usize = 120;
/// Bytes of contents in one reply over HTTP/2, which the reader gets as a whole.
const STREAMED: u64 = 1 << 20;
/// Most bytes of contents in one reply of a native call. A gRPC message has less than 4 GiB.
pub(super) const LANDED: u64 = 1 << 30;
/// Most bytes of contents in one message of a write.
pub(super) const WRITTEN: usize = 8 << 20;
/// Bytes of a message around its contents.
pub(super) const AROUND: usize = 64 << 10;
/// A write whose next message does not come within this time fails.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The service of a [`BufferPool`](super::BufferPool), for a server.
#[derive(Clone)]
pub struct BufferService {
    inner: GatherBothService<BuffersServer<Owner>>,
}

/// The methods.
struct Owner {
    pool: Arc<PoolShared>,
}

impl BufferService {
    pub(super) fn new(pool: Arc<PoolShared>) -> Self {
        let limit = WRITTEN + AROUND;
        let server = BuffersServer::new(Owner { pool }).max_decoding_message_size(limit);
        let server = server.max_encoding_message_size(usize::MAX);
        Self { inner: GatherBothLayer::new().max_decoding_message_size(limit).layer(server) }
    }
}

impl TowerService<HttpRequest<Body>> for BufferService {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = MapResponseFuture<
        BoxFuture<HttpResponse<Body>, Infallible>,
        fn(HttpResponse<Body>) -> HttpResponse<Body>,
    >;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        TowerService::<HttpRequest<Body>>::poll_ready(&mut self.inner, context)
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        self.inner.call(request)
    }
}

impl NamedService for BufferService {
    const NAME: &'static str = <BuffersServer<Owner> as NamedService>::NAME;
}

impl fmt::Debug for BufferService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferService").finish_non_exhaustive()
    }
}

#[tonic::async_trait]
impl Buffers for Owner {
    type FetchStream = Replies;

    async fn fetch(&self, request: Request<FetchRequest>) -> Result<Response<Replies>, Status> {
        let connection = request.connection();
        let address = connection.map(|info| info.peer_addr());
        let is_native = connection.is_some_and(|info| info.is_native());
        let FetchRequest { buffers, reader, reply_bytes } = request.into_inner();
        let mut ranges = 0;
        for buffer in &buffers {
            if buffer.offsets.len() != buffer.lengths.len() {
                return Err(Status::invalid_argument("as many offsets as lengths"));
            }
            ranges += buffer.offsets.len();
        }
        if ranges > MOST_RANGES || buffers.len() > MOST_RANGES {
            let reason = format!("{ranges} ranges of {} buffers; at most {MOST_RANGES}", buffers.len());
            return Err(Status::invalid_argument(reason));
        }
        let reply_bytes = if is_native { reply_bytes.clamp(STREAMED, LANDED) } else { STREAMED };
        Ok(Response::new(Replies {
            pool: Arc::clone(&self.pool),
            address,
            reader,
            buffers: buffers.into_iter().enumerate(),
            current: None,
            sent: Vec::new(),
            reply_bytes,
        }))
    }

    async fn write(&self, request: Request<Streaming<WriteRequest>>) -> Result<Response<WriteReply>, Status> {
        let address = request.connection().map(|info| info.peer_addr());
        let mut messages = request.into_inner();
        let late = |_| Status::deadline_exceeded("the bytes to write did not come in time");
        let mut next = async || timeout(WRITE_TIMEOUT, messages.message()).await.map_err(late)?;
        let first = next().await?.ok_or_else(|| Status::invalid_argument("a write without a message"))?;
        let written = async {
            let mut writing = match self.begin_write(&first, address) {
                Ok(writing) => writing,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let mut message = Some(first);
            while let Some(WriteRequest { content, .. }) = message {
                if let Err(refusal) = writing.push(&content) {
                    return Ok(Err(refusal));
                }
                message = next().await?;
            }
            Ok::<_, Status>(writing.commit())
        };
        let fault = written.await?.err().map(|refusal| refusal.into_fault(0));
        Ok(Response::new(WriteReply { fault }))
    }
}

impl Owner {
    fn begin_write(&self, first: &WriteRequest, address: Option<SocketAddr>) -> Result<Writing, Refusal> {
        let key = first.key.as_ref().ok_or_else(no_key)?;
        let caller = Caller { name: self.pool.name(first.reader.as_ref())?, address };
        let end = first.offset.saturating_add(first.length);
        self.pool.find(key)?.write(&caller, first.offset..end, &self.pool.memory)
    }
}

fn no_key() -> Refusal {
    Refusal::new(FaultKind::NotPermitted, "the request names no buffer")
}

/// The replies of a fetch. Each is made when the transport asks for it.
struct Replies {
    pool: Arc<PoolShared>,
    address: Option<SocketAddr>,
    reader: Option<Reader>,
    buffers: std::iter::Enumerate<std::vec::IntoIter<BufferRanges>>,
    current: Option<Current>,
    /// Fetches whose last bytes are in the reply that the transport has. They are complete when it asks for
    /// the next one.
    sent: Vec<Fetching>,
    reply_bytes: u64,
}

/// The buffer whose ranges are sent.
struct Current {
    index: u32,
    fetching: Fetching,
    ranges: std::iter::Zip<std::vec::IntoIter<u64>, std::vec::IntoIter<u64>>,
    /// What is left of a range.
    rest: Range<usize>,
}

impl Replies {
    fn begin(&self, index: u32, buffer: BufferRanges) -> Result<Current, Refusal> {
        let name = self.pool.name(self.reader.as_ref())?;
        let lease = self.pool.find(buffer.key.as_ref().ok_or_else(no_key)?)?;
        let fetching = lease.fetch(Caller { name, address: self.address })?;
        let ranges = buffer.offsets.into_iter().zip(buffer.lengths);
        Ok(Current { index, fetching, ranges, rest: 0..0 })
    }

    /// Returns the next reply; `None` if all was sent.
    fn next_reply(&mut self) -> Option<FetchReply> {
        self.sent.drain(..).for_each(|mut fetching| fetching.is_complete = true);
        let mut reply = FetchReply::default();
        let mut room = self.reply_bytes;
        loop {
            let refused = match &mut self.current {
                None => {
                    let Some((index, buffer)) = self.buffers.next() else {
                        return (!reply.contents.is_empty()).then_some(reply);
                    };
                    // There are at most `MOST_RANGES`.
                    let index = index as u32;
                    match self.begin(index, buffer) {
                        Ok(current) => {
                            self.current = Some(current);
                            continue;
                        }
                        Err(refusal) => (index, refusal),
                    }
                }
                Some(current) => match current.next(room) {
                    Ok(Some(content)) => {
                        room -= content.len() as u64;
                        reply.contents.push(content);
                        if room == 0 || reply.contents.len() == MOST_CONTENTS {
                            return Some(reply);
                        }
                        continue;
                    }
                    Ok(None) => {
                        self.sent.extend(self.current.take().map(|current| current.fetching));
                        continue;
                    }
                    Err(refusal) => (current.index, refusal),
                },
            };
            let (index, refusal) = refused;
            self.current = None;
            reply.fault = Some(refusal.into_fault(index));
            return Some(reply);
        }
    }
}

impl Current {
    /// Returns the next bytes, at most `most`; `None` after the last range.
    fn next(&mut self, most: u64) -> Result<Option<Bytes>, Refusal> {
        while self.rest.is_empty() {
            let Some((offset, length)) = self.ranges.next() else { return Ok(None) };
            self.rest = self.fetching.lease.within(offset..offset.saturating_add(length))?;
        }
        let length = self.rest.len().min(usize::try_from(most).unwrap_or(usize::MAX));
        let taken = self.rest.start..self.rest.start + length;
        self.rest.start = taken.end;
        self.fetching.take(taken).map(Some)
    }
}

impl Stream for Replies {
    type Item = Result<FetchReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.next_reply().map(Ok))
    }
}
