//! The pool: memory of this process that readers fetch by reference.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Instant;

use bytes::Bytes;
use http::Uri;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::sleep_until;
use xxhash_rust::xxh3::xxh3_64;

use super::handle::{Refusal, SECRET};
use super::lease::{BufferLease, Ended, LeaseOptions, LeaseState, Progress};
use super::proto::{BufferKey, FaultKind, Reader, RemoteBuffer};
use super::service::BufferService;
use super::table::{NotFound, Table};
use crate::error::{TensorError, TensorErrorKind, check_name};
use crate::types::Tensor;
use tonic_rdma_verbs::memory::{Pool, RegisteredBuf};
use tonic_rdma_verbs::unstable::{find_sendable, lock};

/// Memory that this process shares by reference. Clones are one pool. When the last clone and the last
/// [service](Self::service) are dropped, all leases end.
///
/// [The module](super) has an example.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<PoolShared>,
}

/// The settings of a [`BufferPool`].
#[derive(Clone, Debug)]
#[must_use]
pub struct BufferPoolBuilder {
    owner: String,
    memory: Option<Pool>,
    limit: u64,
}

/// The secret of a reader, by which it proves its name. The owner gives it to the reader by a way of its own.
#[derive(Clone, PartialEq, Eq)]
pub struct ReaderSecret {
    pub(super) name: Arc<str>,
    pub(super) secret: [u8; SECRET],
}

/// What a pool has shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BufferPoolStatistics {
    /// Leases that have not ended.
    pub leases: u64,
    /// Bytes of these leases.
    pub bytes: u64,
    /// Fetches that run.
    pub running: u64,
    /// Bytes that [`BufferPool::share`] had to copy, because they were not in memory that devices can read.
    pub copied_bytes: u64,
}

/// What the clones, the service and the leases of a pool share.
pub(super) struct PoolShared {
    owner: String,
    pub(super) incarnation: u64,
    pub(super) memory: Pool,
    table: Arc<Mutex<Table>>,
    /// The secrets of readers, by name.
    admitted: Mutex<HashMap<Arc<str>, [u8; SECRET]>>,
    random: Mutex<Random>,
    copied: AtomicU64,
    /// A lease was added that ends before the others.
    limited: Arc<Notify>,
    /// The task that ends leases whose time is over.
    sweeper: AbortHandle,
}

/// The pools of this process, by incarnation.
static POOLS: LazyLock<Mutex<HashMap<u64, Weak<PoolShared>>>> = LazyLock::new(Mutex::default);

impl BufferPool {
    /// Makes a pool with memory for 1 GiB. `owner` is the URI at which readers reach a server that has the
    /// pool's [service](Self::service).
    ///
    /// # Errors
    /// `owner` has no host that readers can connect to, the system has no random numbers, or the caller is outside a tokio runtime.
    pub fn new(owner: impl Into<String>) -> Result<Self, TensorError> {
        Self::builder(owner).build()
    }

    /// Returns a builder of a pool.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// use tonic_rdma_tensor::buffer::BufferPool;
    ///
    /// let pool = BufferPool::builder("http://ps0:50051").limit(8 << 30).build()?;
    /// # drop(pool);
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(owner: impl Into<String>) -> BufferPoolBuilder {
        BufferPoolBuilder { owner: owner.into(), memory: None, limit: 1 << 30 }
    }

    /// Returns the service, for [`RdmaServer::add_service`](tonic_rdma::RdmaServer::add_service) or tonic's
    /// `add_service`. A server has the service of one pool.
    pub fn service(&self) -> BufferService {
        BufferService::new(Arc::clone(&self.shared))
    }

    /// Allocates memory that [`share`](Self::share) takes without a copy. It counts against the pool's limit
    /// until its lease has ended and no fetch reads it any more.
    ///
    /// # Errors
    /// The limit is used up, or the system has no memory.
    pub fn allocate(&self, length: usize) -> Result<RegisteredBuf, TensorError> {
        self.shared.memory.allocate(length).map_err(TensorError::memory)
    }

    /// Shares bytes with anyone who has the handle, until the lease is dropped. Bytes of
    /// [`allocate`](Self::allocate), and of any other
    /// [`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending), stay where they are. Others are
    /// copied into memory of the pool, once.
    ///
    /// # Errors
    /// As [`share_with`](Self::share_with).
    pub fn share(&self, bytes: impl Into<Bytes>) -> Result<(BufferLease, RemoteBuffer), TensorError> {
        self.share_with(bytes, LeaseOptions::new())
    }

    /// Shares bytes as `options` say. As [`share`](Self::share) otherwise.
    ///
    /// # Errors
    /// There is no memory for a copy ([`TensorErrorKind::NoMemory`]), the pool has more than a million leases
    /// ([`TensorErrorKind::Busy`]), or the system has no random numbers.
    pub fn share_with(
        &self,
        bytes: impl Into<Bytes>,
        options: LeaseOptions,
    ) -> Result<(BufferLease, RemoteBuffer), TensorError> {
        let shared = &self.shared;
        let content = shared.readable(bytes.into())?;
        let xxh3 = (options.checksum && !options.writable).then(|| xxh3_64(&content));
        let (token, length) = (lock(&shared.random).next()?, content.len() as u64);
        let deadline = options.time_limit.and_then(|limit| Instant::now().checked_add(limit));
        let none_left = options.readers == Some(0);
        let make = |id, generation| {
            let state =
                Progress { content: Ok(content), running: 0, complete: 0, writes: 0, readers: Vec::new() };
            Arc::new(LeaseState {
                id,
                generation,
                token,
                length,
                deadline,
                options,
                table: Arc::downgrade(&shared.table),
                state: Mutex::new(state),
                changed: Notify::new(),
            })
        };
        let mut table = lock(&shared.table);
        let state = table.insert(make).ok_or_else(|| {
            TensorError::new(TensorErrorKind::Busy, "the buffer pool has as many leases as it can")
        })?;
        if deadline.is_some() && deadline == table.first_deadline() {
            shared.limited.notify_one();
        }
        drop(table);
        if none_left {
            state.end(Ended::AllRead);
        }
        let handle = RemoteBuffer {
            owner: shared.owner.clone(),
            incarnation: shared.incarnation,
            id: state.id,
            generation: state.generation,
            length,
            token: Bytes::copy_from_slice(&token),
            dtype: String::new(),
            shape: Vec::new(),
            xxh3,
        };
        Ok((BufferLease::new(state), handle))
    }

    /// Shares a tensor, with its type and shape in the handle. One that is not contiguous is copied.
    ///
    /// # Errors
    /// As [`share_with`](Self::share_with), and the elements have a variable length.
    pub fn share_tensor(
        &self,
        tensor: &Tensor,
        options: LeaseOptions,
    ) -> Result<(BufferLease, RemoteBuffer), TensorError> {
        let bytes = match tensor.is_contiguous() {
            true => tensor.to_bytes()?,
            false => tensor.to_contiguous()?.to_bytes()?,
        };
        let (lease, mut handle) = self.share_with(bytes, options)?;
        handle.dtype = tensor.dtype().name().into();
        handle.shape = tensor.shape().dims().to_vec();
        Ok((lease, handle))
    }

    /// Admits a reader under a name, and returns the secret by which it proves the name
    /// ([`BufferClientBuilder::secret`](super::BufferClientBuilder::secret)). An earlier secret of the name is
    /// refused from now on.
    ///
    /// # Errors
    /// The name is empty or too long, or the system has no random numbers.
    pub fn admit(&self, name: &str) -> Result<ReaderSecret, TensorError> {
        let (name, secret) = (check_name(name)?, lock(&self.shared.random).next()?);
        lock(&self.shared.admitted).insert(Arc::clone(&name), secret);
        Ok(ReaderSecret { name, secret })
    }

    /// Admits the reader of this name no longer.
    pub fn dismiss(&self, name: &str) {
        lock(&self.shared.admitted).remove(name);
    }

    /// Returns what the pool has shared.
    pub fn statistics(&self) -> BufferPoolStatistics {
        let copied_bytes = self.shared.copied.load(Ordering::Relaxed);
        let mut found = BufferPoolStatistics { copied_bytes, ..BufferPoolStatistics::default() };
        for lease in lock(&self.shared.table).leases() {
            found.leases += 1;
            found.bytes += lease.length;
            found.running += lock(&lease.state).running;
        }
        found
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("owner", &self.shared.owner)
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}

impl BufferPoolBuilder {
    /// Sets the most bytes of the pool's memory, for [`BufferPool::allocate`], copies and writes. Default:
    /// 1 GiB.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Takes memory from `pool`, which is a [`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending),
    /// instead of making one.
    pub fn memory(mut self, pool: Pool) -> Self {
        self.memory = Some(pool);
        self
    }

    /// Makes the pool.
    ///
    /// # Errors
    /// As [`BufferPool::new`].
    pub fn build(self) -> Result<BufferPool, TensorError> {
        let Self { owner, memory, limit } = self;
        check_owner(&owner)?;
        let runtime = Handle::try_current().map_err(TensorError::local)?;
        let mut random = Random::default();
        let incarnation = u64::from_ne_bytes(random.next::<8>()?);
        let limited = Arc::new(Notify::new());
        let shared = Arc::new_cyclic(|pool| PoolShared {
            owner,
            incarnation,
            memory: memory.unwrap_or_else(|| Pool::for_sending(limit)),
            table: Arc::default(),
            admitted: Mutex::default(),
            random: Mutex::new(random),
            copied: AtomicU64::new(0),
            limited: Arc::clone(&limited),
            sweeper: runtime.spawn(sweep(pool.clone(), limited)).abort_handle(),
        });
        lock(&POOLS).insert(incarnation, Arc::downgrade(&shared));
        Ok(BufferPool { shared })
    }
}

/// Refuses addresses that no reader can connect to.
fn check_owner(owner: &str) -> Result<(), TensorError> {
    let uri: Uri = owner.parse().map_err(|error| {
        TensorError::setting(&format!("the owner's address {owner:?} is no URI: "), error)
    })?;
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let is_any = host.parse().is_ok_and(|address: IpAddr| address.is_unspecified());
    match uri.scheme().is_none() || host.is_empty() || is_any || uri.port_u16() == Some(0) {
        false => Ok(()),
        true => Err(TensorError::new(
            TensorErrorKind::InvalidSetting,
            format!(
                "the owner's address {owner:?} takes a scheme and a host to connect to: http://ps0:50051"
            ),
        )),
    }
}

/// Ends leases of a pool when their time is over.
async fn sweep(pool: Weak<PoolShared>, limited: Arc<Notify>) {
    let mut next = None;
    loop {
        match next {
            None => limited.notified().await,
            Some(next) => tokio::select! {
                () = sleep_until(Instant::into(next)) => {}
                () = limited.notified() => {}
            },
        }
        let Some(pool) = pool.upgrade() else { return };
        next = loop {
            let overdue = lock(&pool.table).overdue(Instant::now());
            match overdue {
                Ok(lease) => lease.end(Ended::TimeOver),
                Err(next) => break next,
            }
        };
    }
}

impl PoolShared {
    /// Returns the pool of this process that has made a handle.
    pub(super) fn of_process(incarnation: u64) -> Option<Arc<Self>> {
        lock(&POOLS).get(&incarnation)?.upgrade()
    }

    /// Returns the lease of a handle, if its token is right.
    pub(super) fn find(&self, key: &BufferKey) -> Result<Arc<LeaseState>, Refusal> {
        if key.incarnation != self.incarnation {
            let reason = "the handle is of another process or pool that had this address before";
            return Err(Refusal::new(FaultKind::Restarted, reason));
        }
        let lease = match lock(&self.table).find(key.id, key.generation) {
            Ok(lease) => Arc::clone(lease),
            Err(NotFound::Ended(ended)) => return Err(ended.refusal()),
            Err(NotFound::Unknown) => {
                return Err(Refusal::new(FaultKind::Gone, "its lease ended long ago"));
            }
        };
        match is_equal(&lease.token, &key.token) {
            true => Ok(lease),
            false => Err(Refusal::new(FaultKind::NotPermitted, "the token of the handle is wrong")),
        }
    }

    /// Returns the name that a reader has proved, if it gives one.
    pub(super) fn name(&self, reader: Option<&Reader>) -> Result<Option<Arc<str>>, Refusal> {
        let Some(reader) = reader.filter(|reader| !reader.name.is_empty()) else { return Ok(None) };
        let admitted = lock(&self.admitted);
        match admitted.get_key_value(&*reader.name) {
            Some((name, secret)) if is_equal(secret, &reader.secret) => Ok(Some(Arc::clone(name))),
            _ => Err(Refusal::new(
                FaultKind::NotPermitted,
                format!("the owner has not admitted a reader {:?} with this secret", reader.name),
            )),
        }
    }

    /// Returns `bytes` in memory that devices can read.
    fn readable(&self, bytes: Bytes) -> Result<Bytes, TensorError> {
        if bytes.is_empty() || find_sendable(&bytes).is_some() {
            return Ok(bytes);
        }
        let mut copy = self.memory.allocate(bytes.len()).map_err(TensorError::memory)?;
        copy.copy_from_slice(&bytes);
        self.copied.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(copy.freeze())
    }
}

impl Drop for PoolShared {
    fn drop(&mut self) {
        lock(&POOLS).remove(&self.incarnation);
        self.sweeper.abort();
        let leases: Vec<_> = lock(&self.table).leases().cloned().collect();
        leases.iter().for_each(|lease| lease.end(Ended::Dropped));
    }
}

/// Compares a secret without telling by the time how much of it was right.
fn is_equal(secret: &[u8; SECRET], other: &[u8]) -> bool {
    other.len() == SECRET
        && secret.iter().zip(other).fold(0, |found, (one, other)| found | (one ^ other)) == 0
}

impl ReaderSecret {
    /// Makes a secret of its name and of the bytes of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// The name is empty or too long, or there are not 16 bytes.
    pub fn new(name: &str, secret: &[u8]) -> Result<Self, TensorError> {
        let secret = secret.try_into().map_err(|_| {
            TensorError::argument(format!("a secret of {} bytes; it has {SECRET}", secret.len()))
        })?;
        Ok(Self { name: check_name(name)?, secret })
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the bytes of the secret.
    pub fn to_bytes(&self) -> [u8; SECRET] {
        self.secret
    }
}

impl fmt::Debug for ReaderSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReaderSecret({:?})", self.name)
    }
}

/// Random numbers of the system, many by one call.
struct Random {
    bytes: [u8; 256],
    used: usize,
}

impl Default for Random {
    fn default() -> Self {
        Self { bytes: [0; 256], used: 256 }
    }
}

impl Random {
    fn next<const N: usize>(&mut self) -> Result<[u8; N], TensorError> {
        if self.used + N > self.bytes.len() {
            let flags = rustix::rand::GetRandomFlags::empty();
            // The kernel gives up to 256 bytes whole.
            rustix::rand::getrandom(&mut self.bytes, flags)
                .map_err(|error| TensorError::caused(TensorErrorKind::Other, "no random numbers: ", error))?;
            self.used = 0;
        }
        let mut taken = [0; N];
        let source = &mut self.bytes[self.used..self.used + N];
        taken.copy_from_slice(source);
        source.fill(0);
        self.used += N;
        Ok(taken)
    }
}
