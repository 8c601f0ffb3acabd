//! A lease: the owner's side of a handle.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::handle::SECRET;
use super::proto::{Fault, FaultKind};
use super::table::Table;
use crate::error::TensorError;
use tonic_rdma_verbs::memory::{Pool, RegisteredBuf};
use tonic_rdma_verbs::unstable::lock;

/// Most readers of a lease that [`BufferLease::readers`] lists.
const LISTED: usize = 64;

/// What a lease allows, and when it ends by itself. By default it is for anyone who has the handle, for
/// reading, until its owner drops it.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LeaseOptions {
    pub(super) time_limit: Option<Duration>,
    pub(super) readers: Option<u64>,
    pub(super) names: Option<Arc<[String]>>,
    pub(super) writable: bool,
    pub(super) checksum: bool,
}

impl LeaseOptions {
    /// Makes the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the lease after `limit`. Fetches that run then fail with
    /// [`Gone`](crate::TensorErrorKind::Gone). Default: none.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// Ends the lease when the last bytes of `count` fetches were handed to the transport. A call of
    /// [`fetch_blocks`](super::RemoteBuffer::fetch_blocks) counts as one fetch. While as many fetches run as
    /// are left, others fail with [`Busy`](crate::TensorErrorKind::Busy), because one that ends before its
    /// last bytes does not count. Default: no count.
    pub fn readers(mut self, count: u64) -> Self {
        self.readers = Some(count);
        self
    }

    /// Shares the buffer with named readers alone. [`BufferPool::admit`](super::BufferPool::admit) gives a
    /// reader its secret. Default: anyone who has the handle.
    pub fn only_for(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.names = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Lets readers write the buffer ([`write_back`](super::RemoteBuffer::write_back)). Each write takes
    /// memory of the length of the buffer, because fetches that run keep the bytes that were there before.
    /// Default: no.
    pub fn writable(mut self) -> Self {
        self.writable = true;
        self
    }

    /// Puts a checksum of the bytes into the handle, which a fetch of all bytes compares. Default: no. A
    /// writable buffer has no checksum.
    pub fn checksum(mut self) -> Self {
        self.checksum = true;
        self
    }
}

/// How a lease has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Dropped,
    TimeOver,
    AllRead,
    Revoked,
}

impl Ended {
    pub(super) fn fault(self) -> Fault {
        let (kind, reason) = match self {
            Self::Dropped => (FaultKind::Gone, "its owner has dropped the lease"),
            Self::TimeOver => (FaultKind::Gone, "the time limit of the lease is over"),
            Self::AllRead => (FaultKind::Gone, "all readers of the lease have read"),
            Self::Revoked => (FaultKind::Revoked, "its owner has revoked the lease"),
        };
        Fault::new(kind, reason)
    }
}

/// Who fetches or writes.
#[derive(Clone, Debug, Default)]
pub(super) struct Caller {
    /// The name that the owner gave, once the secret was compared.
    pub(super) name: Option<Arc<str>>,
    /// The address of the connection; `None` in the owner's process, or by a foreign listener.
    pub(super) address: Option<SocketAddr>,
}

/// A lease, which the owner's handle, the pool and the fetches that run share.
pub(super) struct LeaseState {
    pub(super) id: u64,
    pub(super) token: [u8; SECRET],
    pub(super) length: u64,
    pub(super) deadline: Option<Instant>,
    pub(super) options: LeaseOptions,
    /// The leases of the pool.
    pub(super) table: Weak<Mutex<Table>>,
    pub(super) state: Mutex<Progress>,
    /// A fetch has ended, or a write, or the lease.
    pub(super) changed: Notify,
}

/// What happens with a lease.
pub(super) struct Progress {
    /// The bytes; how the lease ended once it has.
    pub(super) content: Result<Bytes, Ended>,
    pub(super) running: u64,
    pub(super) complete: u64,
    pub(super) writes: u64,
    pub(super) readers: Vec<ReaderStatus>,
    /// Ends the lease when its time is over.
    pub(super) timer: Option<AbortHandle>,
}

/// A reader of a lease, for its owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReaderStatus {
    /// The name by which the owner has [admitted](super::BufferPool::admit) the reader, if it has.
    pub name: Option<Arc<str>>,
    /// The address of the reader's connection. `None` if the reader is in the owner's process.
    pub address: Option<SocketAddr>,
    /// Fetches that run.
    pub running: u64,
    /// Fetches whose last bytes were handed to the transport.
    pub complete: u64,
    /// Bytes that were handed to the transport.
    pub bytes: u64,
}

impl LeaseState {
    /// Begins a fetch.
    pub(super) fn fetch(self: &Arc<Self>, caller: Caller) -> Result<Fetching, Fault> {
        self.check(&caller)?;
        let mut state = lock(&self.state);
        let content = state.content.clone().map_err(Ended::fault)?;
        if self.options.readers.is_some_and(|most| state.complete + state.running >= most) {
            return Err(Fault::new(FaultKind::Busy, "all readers that the lease allows are reading"));
        }
        state.running += 1;
        state.reader(&caller).running += 1;
        Ok(Fetching { lease: Arc::clone(self), caller, content, bytes: 0, is_complete: false })
    }

    /// Begins to write `range`.
    pub(super) fn write(
        self: &Arc<Self>,
        caller: &Caller,
        range: Range<u64>,
        pool: &Pool,
    ) -> Result<Writing, Fault> {
        self.check(caller)?;
        if !self.options.writable {
            return Err(Fault::new(FaultKind::NotPermitted, "its lease is for reading only"));
        }
        let range = self.within(range)?;
        self.content()?;
        let buffer = pool.allocate(self.length as usize);
        let buffer = buffer.map_err(|error| Fault::new(FaultKind::NoMemory, error.to_string()))?;
        Ok(Writing { lease: Arc::clone(self), buffer, at: range.start, range })
    }

    /// Returns a range of a handle as one of the content.
    pub(super) fn within(&self, range: Range<u64>) -> Result<Range<usize>, Fault> {
        if range.start > range.end || range.end > self.length {
            let reason = format!("bytes {} to {} of {}", range.start, range.end, self.length);
            return Err(Fault::new(FaultKind::OutOfRange, reason));
        }
        // The content is in memory.
        Ok(range.start as usize..range.end as usize)
    }

    /// Returns the bytes as they are now.
    fn content(&self) -> Result<Bytes, Fault> {
        lock(&self.state).content.clone().map_err(Ended::fault)
    }

    fn check(&self, caller: &Caller) -> Result<(), Fault> {
        if let Some(names) = &self.options.names
            && !caller.name.as_ref().is_some_and(|name| names.iter().any(|other| **other == **name))
        {
            return Err(Fault::new(FaultKind::NotPermitted, "its lease is for other readers"));
        }
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            self.end(Ended::TimeOver);
        }
        Ok(())
    }

    /// Ends the lease, if it has not ended.
    pub(super) fn end(&self, ended: Ended) {
        let (content, timer) = {
            let mut state = lock(&self.state);
            if state.content.is_err() {
                return;
            }
            (std::mem::replace(&mut state.content, Err(ended)), state.timer.take())
        };
        if let Some(table) = self.table.upgrade() {
            lock(&table).end(self, ended);
        }
        if let Some(timer) = timer {
            timer.abort();
        }
        drop(content);
        self.changed.notify_waiters();
    }

    /// Waits until `is_so` returns a value. It is asked again after each change.
    async fn wait<T>(&self, mut is_so: impl FnMut(&Progress) -> Option<T>) -> T {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(value) = is_so(&lock(&self.state)) {
                return value;
            }
            changed.await;
        }
    }
}

impl fmt::Debug for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, length, options, .. } = self;
        let ended = lock(&self.state).content.as_ref().err().copied();
        f.debug_struct("BufferLease")
            .field("id", id)
            .field("length", length)
            .field("options", options)
            .field("ended", &ended)
            .finish_non_exhaustive()
    }
}

impl Progress {
    /// Returns the entry of a reader. It replaces one of [`LISTED`] others: of a reader that does not read
    /// now, or else the oldest.
    fn reader(&mut self, caller: &Caller) -> &mut ReaderStatus {
        let readers = &mut self.readers;
        let known = readers.iter().position(|it| it.address == caller.address && it.name == caller.name);
        let index = known.unwrap_or_else(|| {
            if readers.len() >= LISTED {
                readers.remove(readers.iter().position(|reader| reader.running == 0).unwrap_or(0));
            }
            let Caller { name, address } = caller.clone();
            readers.push(ReaderStatus { name, address, ..ReaderStatus::default() });
            readers.len() - 1
        });
        &mut readers[index]
    }
}

/// A fetch that runs. It keeps the bytes that were there when it began.
pub(super) struct Fetching {
    pub(super) lease: Arc<LeaseState>,
    caller: Caller,
    content: Bytes,
    bytes: u64,
    /// The fetch had all that it asked for.
    pub(super) is_complete: bool,
}

impl Fetching {
    /// Returns the bytes of `range`, unless the lease has ended.
    pub(super) fn take(&mut self, range: Range<usize>) -> Result<Bytes, Fault> {
        self.lease.content()?;
        self.bytes += range.len() as u64;
        Ok(self.content.slice(range))
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        let all_have_read = {
            let mut state = lock(&self.lease.state);
            let complete = u64::from(self.is_complete);
            state.running -= 1;
            state.complete += complete;
            let reader = state.reader(&self.caller);
            reader.running = reader.running.saturating_sub(1);
            reader.complete += complete;
            reader.bytes += self.bytes;
            self.lease.options.readers.is_some_and(|most| state.complete >= most)
        };
        if all_have_read {
            self.lease.end(Ended::AllRead);
        }
        self.lease.changed.notify_waiters();
    }
}

/// A write that runs. Fetches see nothing of it before [`commit`](Self::commit).
pub(super) struct Writing {
    lease: Arc<LeaseState>,
    buffer: RegisteredBuf,
    range: Range<usize>,
    /// Where the next bytes go.
    at: usize,
}

impl Writing {
    /// Adds the next bytes, unless the lease has ended.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.lease.content()?;
        if bytes.len() > self.range.end - self.at {
            return Err(Fault::new(FaultKind::OutOfRange, "more bytes than the write was to have"));
        }
        self.buffer[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        Ok(())
    }

    /// Makes all bytes visible at once.
    pub(super) fn commit(self) -> Result<(), Fault> {
        let Self { lease, mut buffer, range, at } = self;
        if at != range.end {
            return Err(Fault::new(FaultKind::OutOfRange, "fewer bytes than the write was to have"));
        }
        let mut before = lease.content()?;
        let replaced = loop {
            // Copied without the lock. Another write may come first, and then its bytes are copied.
            buffer[..range.start].copy_from_slice(&before[..range.start]);
            buffer[range.end..].copy_from_slice(&before[range.end..]);
            let mut state = lock(&lease.state);
            let now = state.content.clone().map_err(Ended::fault)?;
            if now.as_ptr() == before.as_ptr() {
                state.writes += 1;
                break std::mem::replace(&mut state.content, Ok(buffer.freeze()));
            }
            before = now;
        };
        drop((replaced, before));
        lease.changed.notify_waiters();
        Ok(())
    }
}

/// The right of readers to a buffer, as its owner holds it. The buffer is there until the lease is dropped,
/// or ends by its [options](LeaseOptions).
#[derive(Debug)]
#[must_use = "dropping the lease ends it"]
pub struct BufferLease {
    state: Arc<LeaseState>,
    detached: bool,
}

impl BufferLease {
    pub(super) fn new(state: Arc<LeaseState>) -> Self {
        Self { state, detached: false }
    }

    /// Returns the bytes as they are now, or `None` after the lease has ended.
    pub fn bytes(&self) -> Option<Bytes> {
        self.state.content().ok()
    }

    /// Ends the lease. Later fetches fail with [`Revoked`](crate::TensorErrorKind::Revoked), and so do those
    /// that run, unless their last bytes were handed to the transport. Such bytes stay in place until the
    /// transport has sent them, or the reader's device has read them.
    pub fn revoke(&self) {
        self.state.end(Ended::Revoked);
    }

    /// Ends the lease as dropping it does, for an owner that shares it with tasks that wait for it.
    pub fn close(&self) {
        self.state.end(Ended::Dropped);
    }

    /// Leaves the lease to its time limit or its count of readers.
    ///
    /// # Errors
    /// The lease has neither, and comes back.
    pub fn detach(mut self) -> Result<(), Self> {
        let LeaseOptions { time_limit, readers, .. } = &self.state.options;
        if time_limit.is_none() && readers.is_none() {
            return Err(self);
        }
        self.detached = true;
        Ok(())
    }

    /// Returns the readers that have opened the buffer, at most 64, the first one first. Each connection is one
    /// reader.
    pub fn readers(&self) -> Vec<ReaderStatus> {
        lock(&self.state.state).readers.clone()
    }

    /// Returns the number of fetches that run: whose last bytes were not handed to the transport yet.
    pub fn running(&self) -> u64 {
        lock(&self.state.state).running
    }

    /// Returns the number of writes that readers have made.
    pub fn writes(&self) -> u64 {
        lock(&self.state.state).writes
    }

    /// Waits until readers have made more than `known` writes. Returns the number of writes.
    ///
    /// # Errors
    /// The lease has ended.
    pub async fn written(&self, known: u64) -> Result<u64, TensorError> {
        let written = self.state.wait(|state| match &state.content {
            Ok(_) => (state.writes > known).then_some(Ok(state.writes)),
            Err(ended) => Some(Err(*ended)),
        });
        written.await.map_err(|ended| ended.fault().into_error("this process"))
    }

    /// Waits until the lease has ended and no fetch runs any more. A device may still read bytes that were
    /// handed to it. They stay in place until it has read them.
    pub async fn ended(&self) {
        self.state.wait(|state| (state.content.is_err() && state.running == 0).then_some(())).await;
    }
}

impl Drop for BufferLease {
    fn drop(&mut self) {
        if !self.detached {
            self.state.end(Ended::Dropped);
        }
    }
}
