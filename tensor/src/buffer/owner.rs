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
use tokio::sync::{Notify, Semaphore};
use tokio::time::sleep_until;
use xxhash_rust::xxh3::xxh3_64;

use super::handle::SECRET;
use super::lease::{BufferLease, Ended, LeaseOptions, LeaseState, Progress};
use super::proto::{BufferKey, Fault, FaultKind, Reader, RemoteBuffer};
use super::service::BufferService;
use super::table::{MOST, Table};
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
    limit: u64,
}

/// The secret of a reader, by which it proves its name to one owner. The owner gives it to the reader by a way
/// of its own.
#[derive(Clone, PartialEq, Eq)]
pub struct ReaderSecret {
    pub(super) owner: Arc<str>,
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
    /// Bytes that [`BufferPool::share`] had to copy, because they were not in memory that devices can read.
    pub copied_bytes: u64,
}

/// What the clones, the service and the leases of a pool share.
pub(super) struct PoolShared {
    owner: Arc<str>,
    pub(super) generation: u64,
    pub(super) memory: Pool,
    table: Arc<Mutex<Table>>,
    /// The secrets of readers, by name.
    admitted: Mutex<HashMap<Arc<str>, [u8; SECRET]>>,
    copied: AtomicU64,
    /// Ends leases whose time is over.
    runtime: Handle,
    /// The tasks that do so, at most.
    timers: Arc<Semaphore>,
}

/// The pools of this process, by generation.
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
        BufferPoolBuilder { owner: owner.into(), limit: 1 << 30 }
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
        let (token, length) = (random()?, content.len() as u64);
        let deadline = options.time_limit.and_then(|limit| Instant::now().checked_add(limit));
        let none_left = options.readers == Some(0);
        let make = |id| {
            let state = Progress {
                content: Ok(content),
                running: 0,
                complete: 0,
                writes: 0,
                readers: Vec::new(),
                timer: None,
            };
            Arc::new(LeaseState {
                id,
                token,
                length,
                deadline,
                options,
                table: Arc::downgrade(&shared.table),
                state: Mutex::new(state),
                changed: Notify::new(),
            })
        };
        let too_many =
            || TensorError::new(TensorErrorKind::Busy, "the buffer pool has as many leases as it can");
        let state = lock(&shared.table).insert(make).ok_or_else(too_many)?;
        if let Some(deadline) = deadline {
            // A runtime that stands still ends no task, so the tasks are bounded as well as the leases.
            let Ok(permit) = Arc::clone(&shared.timers).try_acquire_owned() else {
                state.end(Ended::Dropped);
                return Err(too_many());
            };
            let lease = Arc::downgrade(&state);
            let ends = async move {
                let _permit = permit;
                sleep_until(deadline.into()).await;
                if let Some(lease) = lease.upgrade() {
                    lease.end(Ended::TimeOver);
                }
            };
            lock(&state.state).timer = Some(shared.runtime.spawn(ends).abort_handle());
        }
        if none_left {
            state.end(Ended::AllRead);
        }
        let handle = RemoteBuffer {
            owner: (*shared.owner).into(),
            generation: shared.generation,
            id: state.id,
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
        let (name, secret) = (check_name(name)?, random()?);
        lock(&self.shared.admitted).insert(Arc::clone(&name), secret);
        Ok(ReaderSecret { owner: Arc::clone(&self.shared.owner), name, secret })
    }

    /// Admits the reader of this name no longer.
    pub fn dismiss(&self, name: &str) {
        lock(&self.shared.admitted).remove(name);
    }

    /// Ends all leases, as dropping the pool does, also while fetches or a [service](Self::service) keep it.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Returns what the pool has shared.
    pub fn statistics(&self) -> BufferPoolStatistics {
        let (table, copied) = (lock(&self.shared.table), &self.shared.copied);
        let copied_bytes = copied.load(Ordering::Relaxed);
        BufferPoolStatistics { leases: table.count() as u64, bytes: table.bytes, copied_bytes }
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

    /// Makes the pool.
    ///
    /// Tasks in this runtime end leases whose time is over. When the runtime has ended, such a lease ends at the
    /// next fetch.
    ///
    /// # Errors
    /// As [`BufferPool::new`].
    pub fn build(self) -> Result<BufferPool, TensorError> {
        let Self { owner, limit } = self;
        check_owner(&owner)?;
        let runtime = Handle::try_current().map_err(TensorError::local)?;
        let generation = u64::from_ne_bytes(random()?);
        let shared = Arc::new(PoolShared {
            owner: owner.into(),
            generation,
            memory: Pool::for_sending(limit),
            table: Arc::default(),
            admitted: Mutex::default(),
            copied: AtomicU64::new(0),
            runtime,
            timers: Arc::new(Semaphore::new(MOST)),
        });
        lock(&POOLS).insert(generation, Arc::downgrade(&shared));
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
                "the owner's address {owner:?} needs a scheme and a host that readers can connect to, such as http://ps0:50051"
            ),
        )),
    }
}

impl PoolShared {
    /// Returns the pool of this process that has made a handle.
    pub(super) fn of_process(generation: u64) -> Option<Arc<Self>> {
        lock(&POOLS).get(&generation)?.upgrade()
    }

    fn close(&self) {
        let leases: Vec<_> = lock(&self.table).all().cloned().collect();
        leases.iter().for_each(|lease| lease.end(Ended::Dropped));
    }

    /// Returns the lease of a handle, if its token is right.
    pub(super) fn find(&self, key: &BufferKey) -> Result<Arc<LeaseState>, Fault> {
        if key.generation != self.generation {
            let reason = "the handle is of another process or pool that had this address before";
            return Err(Fault::new(FaultKind::Restarted, reason));
        }
        let lease = lock(&self.table).find(key.id)?;
        match is_equal(&lease.token, &key.token) {
            true => Ok(lease),
            false => Err(Fault::new(FaultKind::NotPermitted, "the token of the handle is wrong")),
        }
    }

    /// Returns the name of a reader, if it proves one.
    pub(super) fn name(&self, reader: Option<&Reader>) -> Option<Arc<str>> {
        let admitted = lock(&self.admitted);
        let (name, secret) = admitted.get_key_value(&*reader?.name)?;
        is_equal(secret, &reader?.secret).then(|| Arc::clone(name))
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
        lock(&POOLS).remove(&self.generation);
        self.close();
    }
}

/// Compares a secret without telling by the time how much of it was right.
fn is_equal(secret: &[u8; SECRET], other: &[u8]) -> bool {
    other.len() == SECRET
        && secret.iter().zip(other).fold(0, |found, (one, other)| found | (one ^ other)) == 0
}

impl ReaderSecret {
    /// Makes a secret from the owner's URI, the name, and the bytes of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// The name is empty or too long, or there are not 16 bytes.
    pub fn new(owner: &str, name: &str, secret: &[u8]) -> Result<Self, TensorError> {
        let secret = secret.try_into().map_err(|_| {
            TensorError::argument(format!("a secret of {} bytes; it has {SECRET}", secret.len()))
        })?;
        Ok(Self { owner: owner.into(), name: check_name(name)?, secret })
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
        write!(f, "ReaderSecret({:?} at {})", self.name, self.owner)
    }
}

/// Returns random bytes of the system.
fn random<const N: usize>() -> Result<[u8; N], TensorError> {
    let mut bytes = [0; N];
    // The kernel gives up to 256 bytes whole.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| TensorError::caused(TensorErrorKind::Other, "no random numbers: ", error))?;
    Ok(bytes)
}
