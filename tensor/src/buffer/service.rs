//! The owner's gRPC service.

use std::convert::Infallible;
use std::fmt;
use std::iter::Zip;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::vec::IntoIter;

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

use super::handle::MOST_RANGES;
use super::lease::{Caller, Fetching, Writing};
use super::owner::PoolShared;
use super::proto::buffers_server::{Buffers, BuffersServer};
use super::proto::{BufferRanges, Fault, FaultKind, FetchReply, FetchRequest, WriteReply, WriteRequest};
use tonic_rdma::RdmaRequestExt as _;
use tonic_rdma::gather::{GatherBothLayer, GatherBothService};

/// Most contents in one reply. Each is two of the 128 parts that a native message may have without a copy.
const MOST_CONTENTS: usize = 60;
/// Bytes of contents in one reply over HTTP/2, which the reader gets as a whole.
pub(super) const STREAMED: u64 = 1 << 20;
/// Most bytes of contents in one reply of a native call. A gRPC message has less than 4 GiB.
pub(super) const LANDED: u64 = 1 << 30;
/// Most bytes of contents in one message of a write.
pub(super) const WRITTEN: usize = 8 << 20;
/// Bytes of a message around its contents.
pub(super) const AROUND: usize = 64 << 10;
/// The time of a write, besides a millisecond for each 16 KiB. The memory that it takes is free then.
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
        let caller = Caller { name: self.pool.name(reader.as_ref()), address };
        Ok(Response::new(Replies {
            pool: Arc::clone(&self.pool),
            caller,
            buffers: buffers.into_iter(),
            begun: 0,
            current: None,
            reply_bytes,
            yields: false,
        }))
    }

    async fn write(&self, request: Request<Streaming<WriteRequest>>) -> Result<Response<WriteReply>, Status> {
        let address = request.connection().map(|info| info.peer_addr());
        let mut messages = request.into_inner();
        let late = |_| Status::deadline_exceeded("the bytes to write did not come in time");
        let first = timeout(WRITE_TIMEOUT, messages.message()).await.map_err(late)??;
        let first = first.ok_or_else(|| Status::invalid_argument("a write without a message"))?;
        let limit = WRITE_TIMEOUT.saturating_add(Duration::from_millis(first.length >> 14));
        let write = async {
            let mut writing = match self.begin_write(&first, address) {
                Ok(writing) => writing,
                Err(fault) => return Ok(Err(fault)),
            };
            let mut content = first.content;
            loop {
                if let Err(fault) = writing.push(&content) {
                    return Ok(Err(fault));
                }
                match messages.message().await? {
                    Some(message) => content = message.content,
                    None => return Ok::<_, Status>(writing.commit()),
                }
            }
        };
        let fault = timeout(limit, write).await.map_err(late)??.err();
        Ok(Response::new(WriteReply { fault }))
    }
}

impl Owner {
    fn begin_write(&self, first: &WriteRequest, address: Option<SocketAddr>) -> Result<Writing, Fault> {
        let caller = Caller { name: self.pool.name(first.reader.as_ref()), address };
        let range = first.offset..first.offset.saturating_add(first.length);
        self.pool.find(first.key.as_ref().ok_or_else(no_key)?)?.write(&caller, range, &self.pool.memory)
    }
}

fn no_key() -> Fault {
    Fault::new(FaultKind::NotPermitted, "the request names no buffer")
}

/// The replies of a fetch. Each is made when the transport has taken the one before it.
struct Replies {
    pool: Arc<PoolShared>,
    caller: Caller,
    buffers: IntoIter<BufferRanges>,
    /// The number of buffers that were begun: at most `MOST_RANGES`.
    begun: u32,
    current: Option<Current>,
    reply_bytes: u64,
    /// There are more replies than the one that tonic has. tonic asks for messages until it has encoded some
    /// bytes, and large contents count as none, so it has to be told to send what it has.
    yields: bool,
}

/// The buffer whose ranges are sent.
struct Current {
    fetching: Fetching,
    ranges: Zip<IntoIter<u64>, IntoIter<u64>>,
    /// What is left of a range.
    rest: Range<usize>,
}

impl Replies {
    /// Adds the next bytes to a reply.
    fn fill(&mut self, contents: &mut Vec<Bytes>) -> Result<(), Fault> {
        let mut room = self.reply_bytes;
        loop {
            let mut current = match self.current.take() {
                Some(current) => current,
                None => {
                    let Some(BufferRanges { key, offsets, lengths }) = self.buffers.next() else {
                        return Ok(());
                    };
                    self.begun += 1;
                    let lease = self.pool.find(&key.ok_or_else(no_key)?)?;
                    let fetching = lease.fetch(self.caller.clone())?;
                    Current { fetching, ranges: offsets.into_iter().zip(lengths), rest: 0..0 }
                }
            };
            if !current.fill(contents, &mut room, self.reply_bytes)? {
                self.current = Some(current);
                return Ok(());
            }
            current.fetching.is_complete = true;
        }
    }
}

impl Current {
    /// Adds the next bytes to a reply that has `room`. Returns whether these were the last ones of the buffer.
    fn fill(&mut self, contents: &mut Vec<Bytes>, room: &mut u64, most: u64) -> Result<bool, Fault> {
        loop {
            while self.rest.is_empty() {
                let Some((offset, length)) = self.ranges.next() else { return Ok(true) };
                self.rest = self.fetching.lease.within(offset..offset.saturating_add(length))?;
            }
            let length = self.rest.len() as u64;
            // A range that fits into one reply is not cut, because the reader would have to copy it.
            if contents.len() == MOST_CONTENTS || *room == 0 || (length > *room && length <= most) {
                return Ok(false);
            }
            let taken = self.rest.start..self.rest.start + length.min(*room) as usize;
            self.rest.start = taken.end;
            *room -= taken.len() as u64;
            contents.push(self.fetching.take(taken)?);
        }
    }
}

impl Stream for Replies {
    type Item = Result<FetchReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if std::mem::take(&mut self.yields) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut reply = FetchReply::default();
        if let Err(fault) = self.fill(&mut reply.contents) {
            reply.fault = Some(Fault { buffer: self.begun - 1, ..fault });
        }
        self.yields = self.current.is_some() || self.buffers.len() > 0;
        let is_empty = reply.contents.is_empty() && reply.fault.is_none();
        Poll::Ready((!is_empty).then_some(Ok(reply)))
    }
}
