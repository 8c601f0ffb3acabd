//! One completion queue, and the connections whose queue pairs complete on it.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use slab::Slab;

use super::connection::Connection;
use super::counters::PollCounters;
use super::lock;
use super::shared_receive::SharedBuffers;
use super::work_id::{Kind, WorkId};
use crate::verbs::{CompletionQueue, Context, QueuePairNumber, VerbsError, WorkCompletion};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Queue {
    completions: Arc<dyn CompletionQueue>,
    /// Receive buffers that the connections share, on a device that lets them.
    shared: Option<Arc<SharedBuffers>>,
    connections: Mutex<Connections>,
    used: AtomicUsize,
    /// Connections that it has room for.
    limit: usize,
    batch: Mutex<Batch>,
    polling: Arc<PollCounters>,
}

#[derive(Debug, Default)]
struct Connections {
    by_key: Slab<Arc<Connection>>,
    /// Their keys, where completions of shared receives come, which carry none.
    by_number: HashMap<QueuePairNumber, u32>,
}

/// What one poll works with; kept so that polling allocates nothing.
#[derive(Debug)]
struct Batch {
    completions: [WorkCompletion; Queue::BATCH],
    wakers: Vec<Waker>,
}

/// What a poll found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Polled {
    /// Completions taken.
    pub(crate) completions: usize,
    /// Tasks woken.
    pub(crate) woken: usize,
}

impl Polled {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self { completions: self.completions + other.completions, woken: self.woken + other.woken }
    }
}

impl Queue {
    /// Completions that a queue is made for, where the device has as many.
    const CAPACITY: u32 = 1 << 20;
    /// The same where they take memory that is locked, 64 bytes each.
    const LOCKED_CAPACITY: u32 = 1 << 17;
    /// Room for a connection: it has at most some 200 completions that nobody has taken yet, those of its receive
    /// buffers, its READs, and every 64th of its sends.
    const OF_A_CONNECTION: u32 = 256;
    /// Completions taken in one poll, so that no connection keeps the others waiting for long.
    const BATCH: usize = 64;

    /// A queue of the device, as large as makes sense.
    pub(crate) fn new(context: &dyn Context, shared: Option<Arc<SharedBuffers>>) -> Result<Self, VerbsError> {
        let device = context.attributes();
        let wanted = if device.locks_memory { Self::LOCKED_CAPACITY } else { Self::CAPACITY };
        let capacity = wanted.min(device.max_completions);
        Ok(Self {
            completions: context.create_completion_queue(capacity)?,
            shared,
            connections: Mutex::default(),
            used: AtomicUsize::new(0),
            limit: (capacity / Self::OF_A_CONNECTION).max(1) as usize,
            batch: Mutex::new(Batch {
                completions: [WorkCompletion::EMPTY; Self::BATCH],
                wakers: Vec::with_capacity(2 * Self::BATCH),
            }),
            polling: Arc::default(),
        })
    }

    /// The queue itself, to create queue pairs with.
    pub(crate) fn completion_queue(&self) -> &Arc<dyn CompletionQueue> {
        &self.completions
    }

    /// The receive buffers that its connections share, if they do.
    pub(crate) fn shared(&self) -> Option<&Arc<SharedBuffers>> {
        self.shared.as_ref()
    }

    /// Adds the connection that `make` builds for the key that its work requests are to carry.
    pub(crate) fn add<E>(
        &self,
        make: impl FnOnce(u32) -> Result<Arc<Connection>, E>,
    ) -> Result<Result<(u32, Arc<Connection>), E>, QueueFull> {
        let mut connections = lock(&self.connections);
        if connections.by_key.len() >= self.limit {
            return Err(QueueFull);
        }
        let entry = connections.by_key.vacant_entry();
        let key = entry.key() as u32;
        let connection = match make(key) {
            Ok(connection) => connection,
            Err(error) => return Ok(Err(error)),
        };
        entry.insert(Arc::clone(&connection));
        if self.shared.is_some() {
            connections.by_number.insert(connection.queue_pair_number(), key);
        }
        self.used.store(connections.by_key.len(), Ordering::Relaxed);
        Ok(Ok((key, connection)))
    }

    /// Takes a connection out. Completions that still come for it are dropped.
    pub(crate) fn remove(&self, key: u32, connection: &Connection) {
        let mut connections = lock(&self.connections);
        let found = connections.by_key.get(key as usize);
        let ours = found.is_some_and(|entry| std::ptr::eq(&**entry, connection));
        let removed = ours.then(|| connections.by_key.remove(key as usize));
        if ours {
            connections.by_number.remove(&connection.queue_pair_number());
        }
        self.used.store(connections.by_key.len(), Ordering::Relaxed);
        // Dropping the connection destroys its queue pair: not under the lock.
        drop(connections);
        drop(removed);
    }

    /// Whether no connection uses it.
    pub(crate) fn is_unused(&self) -> bool {
        self.used.load(Ordering::Relaxed) == 0
    }

    /// Hands completions that have come to their connections and wakes tasks. Does nothing if somebody else is in the
    /// middle of it.
    pub(crate) fn poll(&self) -> Polled {
        self.batch.try_lock().map_or_else(|_| Polled::default(), |mut batch| self.poll_with(&mut batch))
    }

    /// Polls until nothing comes any more, waiting for whoever is in the middle of it.
    pub(crate) fn drain(&self) {
        /// A peer that sends as fast as we take must not keep us here.
        const ROUNDS: usize = 1024;
        let mut batch = lock(&self.batch);
        for _ in 0..ROUNDS {
            if self.poll_with(&mut batch).completions == 0 {
                break;
            }
        }
    }

    fn poll_with(&self, batch: &mut Batch) -> Polled {
        self.polling.polls.add(1);
        let count = self.completions.poll(&mut batch.completions);
        if count == 0 {
            return Polled::default();
        }
        let mut rest = &batch.completions[..count];
        while let Some(first) = rest.first() {
            let same = |completion: &&WorkCompletion| completion.queue_pair == first.queue_pair;
            let (group, others) = rest.split_at(rest.iter().take_while(same).count());
            match self.connection(first) {
                Some(connection) => connection.handle_completions(group, &mut batch.wakers),
                None => self.give_back(group),
            }
            rest = others;
        }
        let woken = batch.wakers.len();
        batch.wakers.drain(..).for_each(Waker::wake);
        Polled { completions: count, woken }
    }

    /// The connection that a completion is for, if it is still there.
    fn connection(&self, completion: &WorkCompletion) -> Option<Arc<Connection>> {
        let connections = lock(&self.connections);
        let id = WorkId::from_bits(completion.wr_id);
        let key = match id.kind {
            Kind::SharedReceive => *connections.by_number.get(&completion.queue_pair)?,
            Kind::Receive | Kind::Send | Kind::Read => id.connection,
        };
        // A key may have been given to another connection since; the queue pair tells.
        let found = connections.by_key.get(key as usize);
        found.filter(|it| it.queue_pair_number() == completion.queue_pair).cloned()
    }

    /// Posts shared buffers that messages for a connection which is gone came into.
    fn give_back(&self, completions: &[WorkCompletion]) {
        let Some(shared) = &self.shared else { return };
        for id in completions.iter().map(|completion| WorkId::from_bits(completion.wr_id)) {
            if id.kind == Kind::SharedReceive
                && let Err(reason) = shared.post(id.value)
            {
                tracing::warn!(slot = id.value, %reason, "a shared receive buffer is lost");
            }
        }
    }

    /// Ends the connections whose queue pairs the device has given up, with its reason.
    pub(crate) fn fail_with_device(&self) {
        let connections: Vec<_> =
            lock(&self.connections).by_key.iter().map(|(_, it)| Arc::clone(it)).collect();
        connections.iter().for_each(|connection| connection.fail_with_device());
    }

    /// Asks for an event with the next completion.
    pub(crate) fn arm(&self) {
        self.polling.sleeps.add(1);
        if let Err(error) = self.completions.arm() {
            tracing::error!(%error, "a completion queue can't be armed; its connections may stall");
        }
    }

    /// Takes [`arm`](Self::arm) back.
    pub(crate) fn disarm(&self) {
        self.completions.disarm();
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.completions.event_fd()
    }

    pub(crate) fn acknowledge_events(&self) {
        self.completions.acknowledge_events();
    }

    /// How it has been polled.
    pub(crate) fn polling(&self) -> &Arc<PollCounters> {
        &self.polling
    }
}

/// As many connections as the completion queue can serve.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the completion queue serves as many connections as it can; RDMA_CQS adds queues")]
pub(crate) struct QueueFull;
