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

use super::handle::{MOST_RANGES, Refusal};
use super::lease::Caller;
use super::owner::{PoolShared, ReaderSecret};
use super::proto::buffers_client::BuffersClient;
use super::proto::{BufferKey, BufferRanges, FaultKind, FetchRequest, Reader, RemoteBuffer, WriteRequest};
use super::service::{AROUND, LANDED, WRITTEN};
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
    secret: Option<ReaderSecret>,
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
    /// Closes links that are not used. It holds the only strong reference that `runs` is of.
    sweeper: AbortHandle,
    runs: Weak<()>,
}

/// The connection to an owner.
#[derive(Clone)]
struct Link {
    channel: RdmaChannel,
    used: Instant,
    /// One reference for each call that runs, and one more.
    calls: Arc<()>,
}

/// The default clients, by runtime.
static CLIENTS: LazyLock<Mutex<HashMap<Id, BufferClient>>> = LazyLock::new(Mutex::default);

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
        if let Some(client) = clients.get(&id) {
            return client.clone();
        }
        // Clients of runtimes that have ended.
        clients.retain(|_, client| client.shared.runs.strong_count() > 0);
        let client = Self::builder().build();
        clients.insert(id, client.clone());
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
            secret: None,
            owners: None,
            #[cfg(feature = "_tls-any")]
            tls: None,
        }
    }

    /// As [`RemoteBuffer::fetch`].
    ///
    /// # Errors
    /// As there.
    pub async fn fetch(&self, buffer: &RemoteBuffer) -> Result<Bytes, TensorError> {
        let mut fetched = self.fetch_blocks(buffer, std::slice::from_ref(&(0..buffer.length))).await?;
        let bytes = fetched.pop().unwrap_or_default();
        check(buffer, &bytes)?;
        Ok(bytes)
    }

    /// As [`RemoteBuffer::fetch_tensor`].
    ///
    /// # Errors
    /// As there.
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
    /// As there.
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
        let mut rest = &mut *destination;
        let request = Wanted { key: buffer.key(), ranges: vec![range.clone()] };
        let put = |_, _, content: Bytes| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(content.len());
            now.copy_from_slice(&content);
            rest = later;
            Ok(())
        };
        self.run_one(&buffer.owner, request, put).await?;
        if range == (0..buffer.length) { check(buffer, destination) } else { Ok(()) }
    }

    /// As [`RemoteBuffer::fetch_blocks`].
    ///
    /// # Errors
    /// As there.
    pub async fn fetch_blocks(
        &self,
        buffer: &RemoteBuffer,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Bytes>, TensorError> {
        self.check_length(ranges.iter())?;
        let mut blocks: Vec<_> = ranges.iter().map(Assembly::new).collect();
        let request = Wanted { key: buffer.key(), ranges: ranges.to_vec() };
        let put = |_, block: usize, content| blocks[block].push(content);
        self.run_one(&buffer.owner, request, put).await?;
        Ok(blocks.into_iter().map(Assembly::into_bytes).collect())
    }

    /// Fetches all bytes of many buffers, by one call to each owner. The calls run at the same time. Returns
    /// a result for each buffer, in their order.
    pub async fn fetch_all(&self, buffers: &[RemoteBuffer]) -> Vec<Result<Bytes, TensorError>> {
        let mut by_owner: HashMap<&str, Vec<usize>> = HashMap::new();
        for (index, buffer) in buffers.iter().enumerate() {
            by_owner.entry(&buffer.owner).or_default().push(index);
        }
        let lost = || Err(TensorError::other("the task of the fetch was lost"));
        let mut results: Vec<_> = buffers.iter().map(|_| lost()).collect();
        let mut running = JoinSet::new();
        let parts = by_owner
            .into_values()
            .flat_map(|all| all.chunks(MOST_RANGES).map(<[usize]>::to_vec).collect::<Vec<_>>());
        for indices in parts {
            let client = self.clone();
            let buffers: Vec<_> = indices.iter().map(|&index| buffers[index].clone()).collect();
            running.spawn(async move { (indices, client.fetch_of_owner(&buffers).await) });
        }
        while let Some(ended) = running.join_next().await {
            // The tasks neither panic nor are they aborted, unless the runtime ends.
            let Ok((indices, fetched)) = ended else { continue };
            indices.into_iter().zip(fetched).for_each(|(index, bytes)| results[index] = bytes);
        }
        results
    }

    /// Fetches buffers of one owner.
    async fn fetch_of_owner(&self, buffers: &[RemoteBuffer]) -> Vec<Result<Bytes, TensorError>> {
        let all = |buffer: &RemoteBuffer| 0..buffer.length;
        let mut bytes: Vec<_> = buffers.iter().map(|buffer| Assembly::new(&all(buffer))).collect();
        let wanted = buffers.iter().map(|buffer| Wanted { key: buffer.key(), ranges: vec![all(buffer)] });
        let lengths: Vec<_> = buffers.iter().map(all).collect();
        let put = |buffer: usize, _, content| bytes[buffer].push(content);
        let owner = buffers.first().map_or("", |buffer| &buffer.owner);
        let ended = match self.check_length(lengths.iter()) {
            Ok(()) => self.run(owner, wanted.collect(), put).await,
            Err(error) => Err(error),
        };
        let ended = ended.unwrap_or_else(|error| buffers.iter().map(|_| Some(error.clone())).collect());
        let fetched = bytes.into_iter().map(Assembly::into_bytes).zip(buffers).zip(ended);
        fetched
            .map(|((bytes, buffer), error)| match error {
                Some(error) => Err(error),
                None => check(buffer, &bytes).map(|()| bytes),
            })
            .collect()
    }

    /// As [`RemoteBuffer::write_back`].
    ///
    /// # Errors
    /// As there.
    pub async fn write_back(
        &self,
        buffer: &RemoteBuffer,
        offset: u64,
        bytes: impl Into<Bytes>,
    ) -> Result<(), TensorError> {
        let (bytes, owner, key) = (bytes.into(), &buffer.owner, buffer.key());
        let length = bytes.len() as u64;
        if let Some(pool) = self.pool_here(&key) {
            let written = || {
                let caller = self.caller(&pool)?;
                let range = offset..offset.saturating_add(length);
                let mut writing = pool.find(&key)?.write(&caller, range, &pool.memory)?;
                writing.push(&bytes)?;
                writing.commit()
            };
            return written().map_err(|refusal| refusal.into_error(owner));
        }
        let link = self.shared.link(owner)?;
        let mut first = Some(WriteRequest {
            key: Some(key),
            reader: self.shared.reader(),
            offset,
            length,
            content: Bytes::new(),
        });
        let mut rest = bytes;
        let messages = std::iter::from_fn(move || {
            let mut message = match first.take() {
                Some(first) => first,
                None if rest.is_empty() => return None,
                None => WriteRequest::default(),
            };
            message.content = rest.split_to(rest.len().min(WRITTEN));
            Some(message)
        });
        let mut client = self.shared.client(&link);
        let reply = client.write(tokio_stream::iter(messages));
        // A write makes progress as a whole: the owner ends one that does not.
        let limit = self.shared.settings.timeout.saturating_add(Duration::from_millis(length >> 14));
        let reply = timeout(limit, reply).await.map_err(|_| self.late(owner))?;
        let reply = reply.map_err(|status| TensorError::of_call(owner, status))?;
        match reply.into_inner().fault {
            Some(fault) => Err(Refusal::from(fault).into_error(owner)),
            None => Ok(()),
        }
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

    fn check_length<'a>(&self, ranges: impl Iterator<Item = &'a Range<u64>>) -> Result<(), TensorError> {
        let lengths = ranges.map(|range| range.end.saturating_sub(range.start));
        let (length, most) = (lengths.fold(0, u64::saturating_add), self.shared.settings.max_fetch_bytes);
        match length <= most {
            true => Ok(()),
            false => Err(TensorError::argument(format!(
                "a fetch of {length} bytes; BufferClientBuilder::max_fetch_bytes allows {most}"
            ))),
        }
    }

    /// Fetches ranges of one buffer.
    async fn run_one(
        &self,
        owner: &str,
        wanted: Wanted,
        put: impl FnMut(usize, usize, Bytes) -> Result<(), TensorError>,
    ) -> Result<(), TensorError> {
        match self.run(owner, vec![wanted], put).await?.pop().flatten() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Fetches ranges of buffers of one owner. `put` gets the bytes, in order, with the index of the buffer
    /// and of the range. Returns the errors of single buffers.
    async fn run(
        &self,
        owner: &str,
        wanted: Vec<Wanted>,
        mut put: impl FnMut(usize, usize, Bytes) -> Result<(), TensorError>,
    ) -> Result<Vec<Option<TensorError>>, TensorError> {
        let mut ended: Vec<_> = wanted.iter().map(|_| None).collect();
        if let Some(first) = wanted.first()
            && let Some(pool) = self.pool_here(&first.key)
        {
            for (index, wanted) in wanted.into_iter().enumerate() {
                let fetched = self.fetch_here(&pool, wanted, |range, content| put(index, range, content));
                ended[index] = fetched.err().map(|refusal| refusal.into_error(owner));
            }
            return Ok(ended);
        }
        let link = self.shared.link(owner)?;
        let mut cursor = Cursor::new(&wanted);
        let request = FetchRequest {
            buffers: wanted.iter().map(Wanted::to_message).collect(),
            reader: self.shared.reader(),
            reply_bytes: self.shared.reply_bytes as u64,
        };
        let limit = self.shared.settings.timeout;
        let failed = |status| TensorError::of_call(owner, status);
        let mut client = self.shared.client(&link);
        let replies = timeout(limit, client.fetch(request)).await.map_err(|_| self.late(owner))?;
        let mut replies = replies.map_err(failed)?.into_inner();
        loop {
            let reply = timeout(limit, replies.message()).await.map_err(|_| self.late(owner))?;
            let Some(reply) = reply.map_err(failed)? else { break };
            for content in reply.contents {
                let (buffer, range) = cursor.take(content.len() as u64).map_err(|()| odd(owner))?;
                put(buffer, range, content)?;
            }
            if let Some(fault) = reply.fault {
                let index = fault.buffer as usize;
                cursor.skip(index).map_err(|()| odd(owner))?;
                ended[index] = Some(Refusal::from(fault).into_error(owner));
            }
        }
        match cursor.is_over() {
            true => Ok(ended),
            false => Err(odd(owner)),
        }
    }

    /// Fetches ranges of a buffer of this process.
    fn fetch_here(
        &self,
        pool: &PoolShared,
        wanted: Wanted,
        mut put: impl FnMut(usize, Bytes) -> Result<(), TensorError>,
    ) -> Result<(), Refusal> {
        let mut fetching = pool.find(&wanted.key)?.fetch(self.caller(pool)?)?;
        for (index, range) in wanted.ranges.into_iter().enumerate() {
            let range = fetching.lease.within(range)?;
            let content = fetching.take(range)?;
            put(index, content).map_err(|error| Refusal::new(FaultKind::Unspecified, error.reason()))?;
        }
        fetching.is_complete = true;
        Ok(())
    }

    /// Returns the pool of a handle if it is in this process.
    fn pool_here(&self, key: &BufferKey) -> Option<Arc<PoolShared>> {
        if self.shared.settings.calls_itself { None } else { PoolShared::of_process(key.incarnation) }
    }

    fn caller(&self, pool: &PoolShared) -> Result<Caller, Refusal> {
        Ok(Caller { name: pool.name(self.shared.reader().as_ref())?, address: None })
    }

    fn late(&self, owner: &str) -> TensorError {
        let limit = self.shared.settings.timeout;
        let reason = format!("the owner sent nothing for {limit:?}");
        TensorError::of_owner(TensorErrorKind::Timeout, owner, &reason)
    }
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

fn odd(owner: &str) -> TensorError {
    let reason = "the owner sent other bytes than it was asked for";
    TensorError::of_owner(TensorErrorKind::Protocol, owner, reason)
}

/// What a fetch asks for of one buffer.
struct Wanted {
    key: BufferKey,
    ranges: Vec<Range<u64>>,
}

impl Wanted {
    fn to_message(&self) -> BufferRanges {
        BufferRanges {
            key: Some(self.key.clone()),
            offsets: self.ranges.iter().map(|range| range.start).collect(),
            lengths: self.ranges.iter().map(|range| range.end.saturating_sub(range.start)).collect(),
        }
    }
}

/// Which range the next bytes of an owner belong to.
struct Cursor {
    /// The lengths that are left of ranges, with the index of buffer and range, the last one first.
    left: Vec<(usize, usize, u64)>,
}

impl Cursor {
    fn new(wanted: &[Wanted]) -> Self {
        let ranges = wanted.iter().enumerate().flat_map(|(buffer, wanted)| {
            let lengths = wanted.ranges.iter().map(|range| range.end.saturating_sub(range.start));
            lengths.enumerate().map(move |(range, length)| (buffer, range, length))
        });
        let mut left: Vec<_> = ranges.filter(|&(.., length)| length > 0).collect();
        left.reverse();
        Self { left }
    }

    /// Takes `length` bytes, and returns the buffer and the range that they belong to.
    fn take(&mut self, length: u64) -> Result<(usize, usize), ()> {
        let (buffer, range, left) = self.left.last_mut().ok_or(())?;
        let found = (*buffer, *range);
        *left = left.checked_sub(length).ok_or(())?;
        if *left == 0 {
            self.left.pop();
        }
        Ok(found)
    }

    /// Takes what is left of the buffer `index`, of which no more bytes come. All bytes of buffers before it
    /// have come.
    fn skip(&mut self, index: usize) -> Result<(), ()> {
        while let Some(&(buffer, ..)) = self.left.last()
            && buffer <= index
        {
            if buffer < index {
                return Err(());
            }
            self.left.pop();
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.left.is_empty()
    }
}

/// The bytes of a range. They are copied only if they come in more than one message.
struct Assembly {
    length: u64,
    whole: Bytes,
    parts: Vec<u8>,
}

impl Assembly {
    fn new(range: &Range<u64>) -> Self {
        let length = range.end.saturating_sub(range.start);
        Self { length, whole: Bytes::new(), parts: Vec::new() }
    }

    fn push(&mut self, content: Bytes) -> Result<(), TensorError> {
        if content.len() as u64 == self.length {
            self.whole = content;
            return Ok(());
        }
        if self.parts.is_empty() {
            // At most `max_fetch_bytes`.
            let length = usize::try_from(self.length).map_err(TensorError::memory)?;
            self.parts.try_reserve_exact(length).map_err(TensorError::memory)?;
        }
        self.parts.extend_from_slice(&content);
        Ok(())
    }

    fn into_bytes(self) -> Bytes {
        if self.parts.is_empty() { self.whole } else { self.parts.into() }
    }
}

impl ClientShared {
    /// Returns the connection to an owner, which is made if there is none.
    fn link(&self, owner: &str) -> Result<Link, TensorError> {
        let mut links = lock(&self.links);
        if let Some(link) = links.get_mut(owner) {
            link.used = Instant::now();
            return Ok(link.clone());
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
        let link = Link { channel: self.dial(owner)?, used: Instant::now(), calls: Arc::new(()) };
        links.insert(owner.into(), link.clone());
        Ok(link)
    }

    /// Makes a channel, which connects at its first call.
    fn dial(&self, owner: &str) -> Result<RdmaChannel, TensorError> {
        let no_endpoint = |error: tonic::transport::Error| {
            TensorError::caused(TensorErrorKind::InvalidArgument, &format!("the owner {owner:?}: "), error)
        };
        let endpoint = Endpoint::from_shared(owner.to_owned()).map_err(no_endpoint)?;
        let settings = &self.settings;
        if settings.owners.as_ref().is_some_and(|allows| !allows(endpoint.uri())) {
            let reason = "BufferClientBuilder::owners does not allow this owner";
            return Err(TensorError::of_owner(TensorErrorKind::NotPermitted, owner, reason));
        }
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
        builder = builder.calls(CallConfig::default().landing_budget(settings.landing_budget));
        if let Some(config) = &settings.config {
            builder = builder.config(config.clone());
        }
        Ok(builder.connect_lazy())
    }

    fn client(&self, link: &Link) -> BuffersClient<GatherBoth<RdmaChannel>> {
        let limit = self.reply_bytes + AROUND;
        let channel = GatherBoth::new(link.channel.clone()).max_decoding_message_size(limit);
        BuffersClient::new(channel).max_decoding_message_size(limit).max_encoding_message_size(usize::MAX)
    }

    fn reader(&self) -> Option<Reader> {
        self.settings.secret.as_ref().map(|ReaderSecret { name, secret }| Reader {
            name: (**name).into(),
            secret: Bytes::copy_from_slice(secret),
        })
    }

    /// Closes the connections that were not used since `before`.
    fn close_idle(&self, before: Instant) {
        let mut idle = Vec::new();
        let mut links = lock(&self.links);
        links.retain(|_, link| {
            let keep = link.used > before || !link.is_idle();
            if !keep {
                idle.push(link.clone());
            }
            keep
        });
        drop(links);
    }
}

impl Link {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.calls) == 1
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
    /// ([`CallConfig::landing_budget`]), 1 MiB to 1 PiB. A range of at most half of it lands in one segment; a
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

    /// Ends a fetch when nothing arrives for this time, and a write that takes longer, with 1 s more for each
    /// 16 MiB. Default: 10 s.
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

    /// Sets the name and the secret that an owner has given to this reader
    /// ([`BufferPool::admit`](super::BufferPool::admit)). They are sent to each owner that the client fetches
    /// from.
    pub fn secret(mut self, secret: ReaderSecret) -> Self {
        self.secret = Some(secret);
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
        let budget = usize::try_from(self.landing_budget / 2).unwrap_or(usize::MAX >> 1);
        let runs = Arc::new(());
        let shared = Arc::new_cyclic(|client: &Weak<ClientShared>| {
            let (client, held) = (client.clone(), Arc::clone(&runs));
            let sweep = async move {
                let _held = held;
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
                reply_bytes: budget.min(LANDED as usize),
                links: Mutex::default(),
                sweeper: tokio::spawn(sweep).abort_handle(),
                runs: Arc::downgrade(&runs),
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
            .field("secret", &self.secret)
            .finish_non_exhaustive()
    }
}
