//! The reader's side: fetches bytes of handles, over one connection to each owner.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Uri;
use tokio::runtime::{Handle, Id};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{interval, timeout};
#[cfg(feature = "_tls-any")]
use tonic::transport::ClientTlsConfig;
use tonic::transport::Endpoint;
use xxhash_rust::xxh3::xxh3_64;

use super::handle::{MOST_RANGES, SECRET};
use super::lease::Caller;
use super::owner::{PoolShared, ReaderSecret};
use super::proto::buffers_client::BuffersClient;
use super::proto::{BufferRanges, Fault, FetchReply, FetchRequest, Reader, RemoteBuffer, WriteRequest};
use super::service::{AROUND, LANDED, STREAMED, WRITTEN};
use crate::error::{TensorError, TensorErrorKind};
use crate::types::Tensor;
use tonic_rdma::gather::GatherBoth;
use tonic_rdma::{CallConfig, Config, RdmaChannel, RdmaConnectInfo};
use tonic_rdma_verbs::unstable::lock;

/// Most owners that a client is connected to.
const MOST_OWNERS: usize = 1024;

/// Fetches the bytes of handles. Clones are one client.
///
/// A client has one connection to each owner, which it makes when a handle of this owner is fetched first,
/// and closes when it was not used for a time.
#[derive(Clone, Debug)]
pub struct BufferClient {
    shared: Arc<ClientShared>,
}

/// The settings of a [`BufferClient`].
#[must_use]
pub struct BufferClientBuilder {
    config: Option<Config>,
    landing_budget: u64,
    idle: Duration,
    timeout: Duration,
    max_fetch_bytes: u64,
    calls_itself: bool,
    secrets: HashMap<Arc<str>, ReaderSecret>,
    owners: Option<Box<AllowedOwners>>,
    #[cfg(feature = "_tls-any")]
    tls: Option<ClientTlsConfig>,
}

/// Which owners a client may connect to.
type AllowedOwners = dyn Fn(&Uri) -> bool + Send + Sync;

/// An owner that a client is connected to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OwnerStatus {
    /// The URI of the owner.
    pub owner: Arc<str>,
    /// What was negotiated for the connection, and why. `None` before the first one.
    pub connection: Option<RdmaConnectInfo>,
}

/// What the clones of a client share.
struct ClientShared {
    settings: BufferClientBuilder,
    /// The longest reply that lands.
    reply_bytes: usize,
    links: Mutex<HashMap<Arc<str>, Link>>,
    /// Closes links that are not used.
    sweeper: AbortHandle,
}

/// The connection to an owner.
struct Link {
    /// Each call that runs has it, too.
    channel: Arc<RdmaChannel>,
    used: Instant,
}

/// The default clients, by runtime.
static CLIENTS: LazyLock<Mutex<HashMap<Id, Weak<ClientShared>>>> = LazyLock::new(Mutex::default);

impl RemoteBuffer {
    /// Fetches all bytes, with the default client of this runtime ([`BufferClient::of_runtime`]).
    ///
    /// # Errors
    /// See [the table](crate::buffer#how-long-a-handle-is-valid). The buffer is also longer than the client accepts
    /// ([`BufferClientBuilder::max_fetch_bytes`]), or its checksum is wrong ([`TensorErrorKind::Protocol`]).
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn fetch(&self) -> Result<Bytes, TensorError> {
        BufferClient::of_runtime().fetch(self).await
    }

    /// Fetches all bytes as the tensor that was shared.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), and the handle names no type and shape, or others than its length.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn fetch_tensor(&self) -> Result<Tensor, TensorError> {
        BufferClient::of_runtime().fetch_tensor(self).await
    }

    /// Fetches `range`, in bytes, into `destination`, which has its length: a [`MemRegion`](crate::MemRegion),
    /// or any other memory.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), and the lengths differ. `destination` has parts of the bytes then.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn fetch_into(&self, destination: &mut [u8], range: Range<u64>) -> Result<(), TensorError> {
        BufferClient::of_runtime().fetch_into(self, destination, range).await
    }

    /// Fetches many ranges, in bytes, by one call.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn fetch_blocks(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, TensorError> {
        BufferClient::of_runtime().fetch_blocks(self, ranges).await
    }

    /// Writes `bytes` into the owner's buffer, from `offset` on. Later fetches see all of them; fetches that
    /// run see none.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), and the lease is not [writable](super::LeaseOptions::writable). After
    /// [`TensorErrorKind::PeerLost`] and [`TensorErrorKind::Timeout`], the bytes may have been written.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn write_back(&self, offset: u64, bytes: impl Into<Bytes>) -> Result<(), TensorError> {
        BufferClient::of_runtime().write_back(self, offset, bytes).await
    }
}

impl BufferClient {
    /// Returns the default client of this runtime, which the methods of [`RemoteBuffer`] use. It has default
    /// settings, and ends with the runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn of_runtime() -> Self {
        let mut clients = lock(&CLIENTS);
        let id = Handle::current().id();
        if let Some(shared) = clients.get(&id).and_then(Weak::upgrade) {
            return Self { shared };
        }
        // Clients of runtimes that have ended.
        clients.retain(|_, client| client.strong_count() > 0);
        let client = Self::builder().build();
        clients.insert(id, Arc::downgrade(&client.shared));
        // The runtime keeps the client.
        let kept = client.clone();
        tokio::spawn(async move {
            let _kept = kept;
            std::future::pending::<()>().await;
        });
        client
    }

    /// Returns a builder of a client.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use std::time::Duration;
    /// use tonic_rdma_tensor::buffer::BufferClient;
    ///
    /// let client = BufferClient::builder()
    ///     .timeout(Duration::from_secs(2))
    ///     .owners(|uri| uri.host().is_some_and(|host| host.ends_with(".cluster.local")))
    ///     .build();
    /// # drop(client);
    /// # }
    /// ```
    pub fn builder() -> BufferClientBuilder {
        BufferClientBuilder {
            config: None,
            landing_budget: 256 << 20,
            idle: Duration::from_secs(60),
            timeout: Duration::from_secs(10),
            max_fetch_bytes: 4 << 30,
            calls_itself: false,
            secrets: HashMap::new(),
            owners: None,
            #[cfg(feature = "_tls-any")]
            tls: None,
        }
    }

    /// As [`RemoteBuffer::fetch`].
    ///
    /// # Errors
    /// As [`RemoteBuffer::fetch`].
    pub async fn fetch(&self, buffer: &RemoteBuffer) -> Result<Bytes, TensorError> {
        let mut fetched = self.fetch_blocks(buffer, std::slice::from_ref(&(0..buffer.length))).await?;
        let bytes = fetched.pop().unwrap_or_default();
        check(buffer, &bytes)?;
        Ok(bytes)
    }

    /// As [`RemoteBuffer::fetch_tensor`].
    ///
    /// # Errors
    /// As [`RemoteBuffer::fetch_tensor`].
    pub async fn fetch_tensor(&self, buffer: &RemoteBuffer) -> Result<Tensor, TensorError> {
        let spec = buffer.spec()?.ok_or_else(|| TensorError::argument("the handle names no tensor"))?;
        let bytes = self.fetch(buffer).await?;
        match (bytes.as_ptr().addr()).is_multiple_of(spec.dtype().align()) {
            true => Tensor::from_bytes(spec, bytes),
            false => Tensor::copy_from(spec, &bytes),
        }
    }

    /// As [`RemoteBuffer::fetch_into`].
    ///
    /// # Errors
    /// As [`RemoteBuffer::fetch_into`].
    pub async fn fetch_into(
        &self,
        buffer: &RemoteBuffer,
        destination: &mut [u8],
        range: Range<u64>,
    ) -> Result<(), TensorError> {
        if destination.len() as u64 != range.end.saturating_sub(range.start) {
            let reason = format!("bytes {} to {} into {} bytes", range.start, range.end, destination.len());
            return Err(TensorError::argument(reason));
        }
        let is_whole = range == (0..buffer.length);
        self.run_one(buffer, vec![Part::new(0, range, Sink::Slice(destination))]).await?;
        if is_whole { check(buffer, destination) } else { Ok(()) }
    }

    /// As [`RemoteBuffer::fetch_blocks`].
    ///
    /// # Errors
    /// As [`RemoteBuffer::fetch_blocks`].
    pub async fn fetch_blocks(
        &self,
        buffer: &RemoteBuffer,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Bytes>, TensorError> {
        let parts = ranges.iter().map(|range| Part::new(0, range.clone(), Sink::Bytes(Vec::new())));
        let fetched = self.run_one(buffer, parts.collect()).await?;
        Ok(fetched.into_iter().map(Part::into_bytes).collect())
    }

    /// Fetches all bytes of many buffers, by one call to each owner. The calls run at the same time. Returns
    /// a result for each buffer, in their order.
    pub async fn fetch_all(&self, buffers: &[RemoteBuffer]) -> Vec<Result<Bytes, TensorError>> {
        let mut by_owner: HashMap<_, Vec<usize>> = HashMap::new();
        for (index, buffer) in buffers.iter().enumerate() {
            by_owner.entry((&*buffer.owner, buffer.generation)).or_default().push(index);
        }
        let lost = || Err(TensorError::other("the task of the fetch was lost"));
        let mut results: Vec<_> = buffers.iter().map(|_| lost()).collect();
        let mut running = JoinSet::new();
        for indices in by_owner.values().flat_map(|all| all.chunks(MOST_RANGES)) {
            let (client, indices) = (self.clone(), indices.to_vec());
            let buffers: Vec<_> = indices.iter().map(|&index| buffers[index].clone()).collect();
            running.spawn(async move { (indices, client.fetch_of_owner(&buffers).await) });
        }
        while let Some(ended) = running.join_next().await {
            let Ok((indices, fetched)) = ended else { continue };
            indices.into_iter().zip(fetched).for_each(|(index, bytes)| results[index] = bytes);
        }
        results
    }

    /// Fetches buffers of one owner.
    async fn fetch_of_owner(&self, buffers: &[RemoteBuffer]) -> Vec<Result<Bytes, TensorError>> {
        let parts = buffers.iter().enumerate();
        let parts = parts.map(|(index, it)| Part::new(index, 0..it.length, Sink::Bytes(Vec::new())));
        let mut parts: Vec<_> = parts.collect();
        let ended = self.run(buffers, &mut parts).await;
        let fetched = parts.into_iter().map(Part::into_bytes).zip(buffers).zip(ended);
        fetched
            .map(|((bytes, buffer), ended)| ended.and_then(|()| check(buffer, &bytes)).map(|()| bytes))
            .collect()
    }

    /// As [`RemoteBuffer::write_back`].
    ///
    /// # Errors
    /// As [`RemoteBuffer::write_back`].
    pub async fn write_back(
        &self,
        buffer: &RemoteBuffer,
        offset: u64,
        bytes: impl Into<Bytes>,
    ) -> Result<(), TensorError> {
        let (bytes, owner, key) = (bytes.into(), &*buffer.owner, buffer.key());
        let length = bytes.len() as u64;
        if let Some(pool) = self.pool_here(buffer) {
            let write = || {
                let range = offset..offset.saturating_add(length);
                let mut writing = pool.find(&key)?.write(&self.caller(&pool, owner), range, &pool.memory)?;
                writing.push(&bytes)?;
                writing.commit()
            };
            return write().map_err(|fault: Fault| fault.into_error(owner));
        }
        let link = self.shared.link(owner)?;
        let (key, reader) = (Some(key), self.shared.reader(owner));
        let first = WriteRequest { key, reader, offset, length, content: Bytes::new() };
        let contents = (0..bytes.len()).step_by(WRITTEN).map(move |start| WriteRequest {
            content: bytes.slice(start..bytes.len().min(start + WRITTEN)),
            ..WriteRequest::default()
        });
        let mut client = self.shared.client(&link);
        let reply = client.write(tokio_stream::iter(std::iter::once(first).chain(contents)));
        let limit = self.shared.limit(length);
        let reply = timeout(limit, reply).await.map_err(|_| timed_out(owner, limit))?;
        let reply = reply.map_err(|status| TensorError::of_call(owner, status))?;
        reply.into_inner().fault.map_or(Ok(()), |fault| Err(fault.into_error(owner)))
    }

    /// Returns the owners that the client is connected to, and what carries each connection.
    pub fn owners(&self) -> Vec<OwnerStatus> {
        let links = lock(&self.shared.links);
        let status = |(owner, link): (&Arc<str>, &Link)| OwnerStatus {
            owner: Arc::clone(owner),
            connection: link.channel.last_connection(),
        };
        links.iter().map(status).collect()
    }

    /// Fetches parts of one buffer.
    async fn run_one<'a>(
        &self,
        buffer: &RemoteBuffer,
        mut parts: Vec<Part<'a>>,
    ) -> Result<Vec<Part<'a>>, TensorError> {
        self.run(std::slice::from_ref(buffer), &mut parts).await.remove(0).map(|()| parts)
    }

    /// Fetches parts of buffers of one owner, which are in the order of the buffers. Returns a result for each
    /// buffer.
    async fn run(&self, buffers: &[RemoteBuffer], parts: &mut [Part<'_>]) -> Vec<Result<(), TensorError>> {
        let mut ended = vec![Ok(()); buffers.len()];
        match self.try_run(buffers, parts, &mut ended).await {
            Ok(()) => ended,
            Err(error) => vec![Err(error); buffers.len()],
        }
    }

    /// Fetches parts of buffers of one owner, and notes the errors of single buffers.
    async fn try_run(
        &self,
        buffers: &[RemoteBuffer],
        parts: &mut [Part<'_>],
        ended: &mut [Result<(), TensorError>],
    ) -> Result<(), TensorError> {
        self.check_parts(buffers, parts)?;
        let Some(first) = buffers.first().filter(|_| !parts.is_empty()) else { return Ok(()) };
        if let Some(pool) = self.pool_here(first) {
            for parts in parts.chunk_by_mut(|one, other| one.buffer == other.buffer) {
                let index = parts.first().map_or(0, |part| part.buffer);
                ended[index] = self.fetch_here(&pool, &buffers[index], parts);
            }
            return Ok(());
        }
        let owner = &first.owner;
        let link = self.shared.link(owner)?;
        let mut ranges: Vec<_> = buffers
            .iter()
            .map(|buffer| BufferRanges { key: Some(buffer.key()), ..BufferRanges::default() })
            .collect();
        for part in &*parts {
            ranges[part.buffer].offsets.push(part.range.start);
            ranges[part.buffer].lengths.push(part.left);
        }
        let reply_bytes = self.shared.reply_bytes as u64;
        let request = FetchRequest { buffers: ranges, reader: self.shared.reader(owner), reply_bytes };
        let failed = |status| TensorError::of_call(owner, status);
        let mut at = 0;
        let length = parts.iter().map(|part| part.left).fold(0, u64::saturating_add);
        let limit = self.shared.limit(reply_bytes.min(length));
        let mut client = self.shared.client(&link);
        let replies = timeout(limit, client.fetch(request)).await.map_err(|_| timed_out(owner, limit))?;
        let mut replies = replies.map_err(failed)?.into_inner();
        loop {
            let reply = timeout(limit, replies.message()).await.map_err(|_| timed_out(owner, limit))?;
            let Some(FetchReply { contents, fault }) = reply.map_err(failed)? else { break };
            if contents.is_empty() && fault.is_none() {
                return Err(wrong_bytes(owner));
            }
            for content in contents {
                let part = next_part(parts, &mut at).ok_or_else(|| wrong_bytes(owner))?;
                if content.is_empty() || content.len() as u64 > part.left {
                    return Err(wrong_bytes(owner));
                }
                part.push(content)?;
            }
            if let Some(fault) = fault {
                let index = fault.buffer as usize;
                let result = ended.get_mut(index).filter(|result| result.is_ok());
                *result.ok_or_else(|| wrong_bytes(owner))? = Err(fault.into_error(owner));
                // All bytes of buffers before it have come, and no more bytes of it come.
                while let Some(part) = next_part(parts, &mut at).filter(|part| part.buffer <= index) {
                    if part.buffer < index {
                        return Err(wrong_bytes(owner));
                    }
                    part.left = 0;
                }
            }
        }
        if next_part(parts, &mut at).is_some() { Err(wrong_bytes(owner)) } else { Ok(()) }
    }

    /// Refuses what no owner grants, and what the settings don't allow.
    fn check_parts(&self, buffers: &[RemoteBuffer], parts: &[Part<'_>]) -> Result<(), TensorError> {
        if parts.len() > MOST_RANGES {
            let reason = format!("a fetch of {} ranges; at most {MOST_RANGES}", parts.len());
            return Err(TensorError::argument(reason));
        }
        if let Some(Part { range, .. }) = parts.iter().find(|part| part.range.start > part.range.end) {
            return Err(TensorError::argument(format!("bytes {} to {}", range.start, range.end)));
        }
        if let Some(buffer) = buffers.iter().find(|buffer| buffer.token.len() != SECRET) {
            let reason = format!("a handle with a token of {} bytes, not {SECRET}", buffer.token.len());
            return Err(TensorError::argument(reason));
        }
        let length = parts.iter().map(|part| part.left).fold(0, u64::saturating_add);
        let most = self.shared.settings.max_fetch_bytes;
        match length <= most {
            true => Ok(()),
            false => Err(TensorError::argument(format!(
                "a fetch of {length} bytes; BufferClientBuilder::max_fetch_bytes allows {most}"
            ))),
        }
    }

    /// Fetches parts of a buffer of this process.
    fn fetch_here(
        &self,
        pool: &PoolShared,
        buffer: &RemoteBuffer,
        parts: &mut [Part<'_>],
    ) -> Result<(), TensorError> {
        let refused = |fault: Fault| fault.into_error(&buffer.owner);
        let lease = pool.find(&buffer.key()).map_err(refused)?;
        let mut fetching = lease.fetch(self.caller(pool, &buffer.owner)).map_err(refused)?;
        for part in parts {
            let range = lease.within(part.range.clone()).map_err(refused)?;
            part.push(fetching.take(range).map_err(refused)?)?;
        }
        fetching.is_complete = true;
        Ok(())
    }

    /// Returns the pool of a handle if it is in this process.
    fn pool_here(&self, buffer: &RemoteBuffer) -> Option<Arc<PoolShared>> {
        if self.shared.settings.calls_itself { None } else { PoolShared::of_process(buffer.generation) }
    }

    fn caller(&self, pool: &PoolShared, owner: &str) -> Caller {
        Caller { name: pool.name(self.shared.reader(owner).as_ref()), address: None }
    }
}

/// Returns the next part of which bytes are left, from the one at `at` on.
fn next_part<'p, 'a>(parts: &'p mut [Part<'a>], at: &mut usize) -> Option<&'p mut Part<'a>> {
    *at += parts.get(*at..)?.iter().position(|part| part.left > 0)?;
    parts.get_mut(*at)
}

/// Compares the checksum of a whole buffer, if its handle has one.
fn check(buffer: &RemoteBuffer, bytes: &[u8]) -> Result<(), TensorError> {
    match buffer.xxh3 {
        Some(sum) if sum != xxh3_64(bytes) => Err(TensorError::of_owner(
            TensorErrorKind::Protocol,
            &buffer.owner,
            "the bytes have another checksum than the handle",
        )),
        _ => Ok(()),
    }
}

fn wrong_bytes(owner: &str) -> TensorError {
    let reason = "the owner sent other bytes than it was asked for";
    TensorError::of_owner(TensorErrorKind::Protocol, owner, reason)
}

fn timed_out(owner: &str, limit: Duration) -> TensorError {
    TensorError::of_owner(TensorErrorKind::Timeout, owner, &format!("no answer within {limit:?}"))
}

/// A range that is fetched.
struct Part<'a> {
    /// The index of its buffer.
    buffer: usize,
    range: Range<u64>,
    /// Bytes that have not arrived.
    left: u64,
    sink: Sink<'a>,
}

/// Where the bytes of a range go.
enum Sink<'a> {
    Slice(&'a mut [u8]),
    /// Bytes that have arrived, until all have.
    Bytes(Vec<u8>),
    Whole(Bytes),
}

impl<'a> Part<'a> {
    fn new(buffer: usize, range: Range<u64>, sink: Sink<'a>) -> Self {
        Self { buffer, left: range.end.saturating_sub(range.start), range, sink }
    }

    /// Adds the next bytes, which are not more than are left. They are copied unless they are all of the
    /// range.
    fn push(&mut self, content: Bytes) -> Result<(), TensorError> {
        let (length, left) = (content.len(), self.left);
        self.left -= length as u64;
        match &mut self.sink {
            Sink::Slice(rest) => {
                let (now, later) = std::mem::take(rest).split_at_mut(length);
                now.copy_from_slice(&content);
                *rest = later;
            }
            Sink::Bytes(parts) if parts.is_empty() && length as u64 == left => {
                self.sink = Sink::Whole(content);
            }
            Sink::Bytes(parts) => {
                if parts.is_empty() {
                    // At most `max_fetch_bytes`.
                    let length = usize::try_from(left).map_err(TensorError::memory)?;
                    parts.try_reserve_exact(length).map_err(TensorError::memory)?;
                }
                parts.extend_from_slice(&content);
            }
            Sink::Whole(_) => {}
        }
        Ok(())
    }

    fn into_bytes(self) -> Bytes {
        match self.sink {
            Sink::Slice(_) => Bytes::new(),
            Sink::Bytes(parts) => parts.into(),
            Sink::Whole(bytes) => bytes,
        }
    }
}

impl ClientShared {
    /// Returns the connection to an owner, which is made if there is none.
    fn link(&self, owner: &str) -> Result<Arc<RdmaChannel>, TensorError> {
        if let Some(allows) = &self.settings.owners
            && !owner.parse().is_ok_and(|uri| allows(&uri))
        {
            let reason = "BufferClientBuilder::owners does not allow this owner";
            return Err(TensorError::of_owner(TensorErrorKind::NotPermitted, owner, reason));
        }
        let mut links = lock(&self.links);
        if let Some(link) = links.get_mut(owner) {
            link.used = Instant::now();
            return Ok(Arc::clone(&link.channel));
        }
        if links.len() >= MOST_OWNERS {
            let idle = links.iter().filter(|(_, link)| link.is_idle());
            let oldest = idle.min_by_key(|(_, link)| link.used).map(|(owner, _)| Arc::clone(owner));
            let oldest = oldest.ok_or_else(|| {
                let reason = format!("fetches from {MOST_OWNERS} owners run already");
                TensorError::new(TensorErrorKind::Busy, reason)
            })?;
            links.remove(&oldest);
        }
        let channel = Arc::new(self.dial(owner)?);
        links.insert(owner.into(), Link { channel: Arc::clone(&channel), used: Instant::now() });
        Ok(channel)
    }

    /// Makes a channel, which connects at its first call.
    fn dial(&self, owner: &str) -> Result<RdmaChannel, TensorError> {
        let no_endpoint = |error: tonic::transport::Error| {
            TensorError::caused(TensorErrorKind::InvalidArgument, &format!("the owner {owner:?}: "), error)
        };
        let endpoint = Endpoint::from_shared(owner.to_owned()).map_err(no_endpoint)?;
        let settings = &self.settings;
        let endpoint = endpoint
            .connect_timeout(settings.timeout)
            .initial_stream_window_size(8 << 20)
            .initial_connection_window_size(32 << 20);
        #[cfg(feature = "_tls-any")]
        let endpoint = match &settings.tls {
            Some(tls) => endpoint.tls_config(tls.clone()).map_err(no_endpoint)?,
            None => endpoint,
        };
        let mut builder = RdmaChannel::builder(endpoint);
        builder = builder.calls(CallConfig::default().connection_limit(settings.landing_budget));
        if let Some(config) = &settings.config {
            builder = builder.config(config.clone());
        }
        Ok(builder.connect_lazy())
    }

    fn client(&self, channel: &RdmaChannel) -> BuffersClient<GatherBoth<RdmaChannel>> {
        let limit = self.reply_bytes + AROUND;
        let channel = GatherBoth::new(channel.clone()).max_decoding_message_size(limit);
        BuffersClient::new(channel).max_decoding_message_size(limit).max_encoding_message_size(usize::MAX)
    }

    /// Returns the name and the secret that an owner has given to this reader.
    fn reader(&self, owner: &str) -> Option<Reader> {
        let ReaderSecret { name, secret, .. } = self.settings.secrets.get(owner)?;
        Some(Reader { name: (**name).into(), secret: Bytes::copy_from_slice(secret) })
    }

    /// Returns the longest wait for a message of `bytes`.
    fn limit(&self, bytes: u64) -> Duration {
        self.settings.timeout.saturating_add(Duration::from_millis(bytes >> 14))
    }

    /// Closes the connections that were not used since `before`.
    fn close_idle(&self, before: Instant) {
        let is_over = |link: &Link| link.used <= before && link.is_idle();
        let closed: Vec<_> = lock(&self.links).extract_if(|_, link| is_over(link)).collect();
        drop(closed);
    }
}

impl Link {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.channel) == 1
    }
}

impl Drop for ClientShared {
    fn drop(&mut self) {
        self.sweeper.abort();
    }
}

impl fmt::Debug for ClientShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owners: Vec<_> = lock(&self.links).keys().cloned().collect();
        f.debug_struct("ClientShared")
            .field("settings", &self.settings)
            .field("owners", &owners)
            .finish_non_exhaustive()
    }
}

impl BufferClientBuilder {
    /// Sets the configuration of connections. Default: [`Config::from_env`].
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Sets the most bytes of registered memory that fetches from one owner land in
    /// ([`CallConfig::connection_limit`]), 1 MiB to 1 PiB. A range of at most half of it lands in one segment; a
    /// longer one is put together by a copy. Default: 256 MiB.
    pub fn landing_budget(mut self, bytes: u64) -> Self {
        self.landing_budget = bytes;
        self
    }

    /// Closes a connection that was not used for this time. Default: 60 s.
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = idle;
        self
    }

    /// Ends a fetch when no message of the owner arrives for this time, and a write that takes longer; both with
    /// 1 s more for each 16 MiB of the message or the write. Default: 10 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the most bytes that one fetch may return. Default: 4 GiB.
    pub fn max_fetch_bytes(mut self, bytes: u64) -> Self {
        self.max_fetch_bytes = bytes;
        self
    }

    /// Calls the owner also if it is this process. For tests and measurements, because such a fetch is slower.
    pub fn calls_itself(mut self) -> Self {
        self.calls_itself = true;
        self
    }

    /// Adds the name and the secret that an owner has given to this reader
    /// ([`BufferPool::admit`](super::BufferPool::admit)). They are sent to this owner alone.
    pub fn secret(mut self, secret: ReaderSecret) -> Self {
        self.secrets.insert(Arc::clone(&secret.owner), secret);
        self
    }

    /// Sets which owners the client may connect to, by their URI. Default: all.
    pub fn owners(mut self, allows: impl Fn(&Uri) -> bool + Send + Sync + 'static) -> Self {
        self.owners = Some(Box::new(allows));
        self
    }

    /// Sets TLS for owners whose URI begins with `https`.
    #[cfg(feature = "_tls-any")]
    pub fn client_tls(mut self, tls: ClientTlsConfig) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Makes the client. It belongs to this runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn build(self) -> BufferClient {
        let idle = self.idle.max(Duration::from_millis(10));
        let landed = usize::try_from(self.landing_budget / 2).unwrap_or(usize::MAX);
        let shared = Arc::new_cyclic(|client: &Weak<ClientShared>| {
            let client = client.clone();
            let sweep = async move {
                let mut ticks = interval(idle);
                loop {
                    ticks.tick().await;
                    if let Some(client) = client.upgrade()
                        && let Some(before) = Instant::now().checked_sub(idle)
                    {
                        client.close_idle(before);
                    }
                }
            };
            ClientShared {
                settings: self,
                reply_bytes: landed.clamp(STREAMED as usize, LANDED as usize),
                links: Mutex::default(),
                sweeper: tokio::spawn(sweep).abort_handle(),
            }
        });
        BufferClient { shared }
    }
}

impl fmt::Debug for BufferClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferClientBuilder")
            .field("config", &self.config)
            .field("landing_budget", &self.landing_budget)
            .field("idle", &self.idle)
            .field("timeout", &self.timeout)
            .field("max_fetch_bytes", &self.max_fetch_bytes)
            .field("calls_itself", &self.calls_itself)
            .field("secrets", &self.secrets.values())
            .finish_non_exhaustive()
    }
}
