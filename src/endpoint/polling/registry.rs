//! The reactors of this process, by runtime, device and way of polling.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::Id;

use super::reactor::Reactor;
use crate::endpoint::config::{Config, PollMode, SharedReceive};
use tonic_rdma_verbs::Context;
use tonic_rdma_verbs::internal::lock;

/// Finds reactors by runtime, device and configuration. The registry keeps no reactor alive.
#[derive(Debug, Default)]
pub(super) struct Registry {
    entries: Mutex<HashMap<Key, Weak<Reactor>>>,
    /// Counts additions, so that a reader that keeps a copy knows when the copy is out of date.
    generation: AtomicUsize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    runtime: Id,
    /// The opened device, by its address: a device may be open more than once, with other options.
    device: usize,
    mode: PollMode,
    cpus: Vec<usize>,
    spin_limit: Duration,
    queues: usize,
    /// The sharing of receive buffers, and their length.
    receives: (SharedReceive, u32),
}

impl Key {
    pub(super) fn new(runtime: Id, context: &Arc<dyn Context>, config: &Config) -> Self {
        Self {
            runtime,
            device: Arc::as_ptr(context).cast::<()>().addr(),
            mode: config.poll_mode,
            cpus: config.poll_cpus.clone(),
            spin_limit: config.spin_limit,
            queues: config.completion_queues,
            receives: (config.shared_receive, config.slot_size),
        }
    }
}

impl Registry {
    /// Returns the reactor of `key`, or makes and adds one.
    pub(super) fn get_or_add<E>(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<Arc<Reactor>, E>,
    ) -> Result<Arc<Reactor>, E> {
        let mut entries = lock(&self.entries);
        if let Some(reactor) = entries.get(&key).and_then(Weak::upgrade) {
            return Ok(reactor);
        }
        entries.retain(|_, reactor| reactor.strong_count() > 0);
        let reactor = make()?;
        entries.insert(key, Arc::downgrade(&reactor));
        self.generation.fetch_add(1, Ordering::Release);
        Ok(reactor)
    }

    /// Returns the reactors of `runtime`, and the generation of this answer.
    pub(super) fn of_runtime(&self, runtime: Id) -> (usize, Vec<Weak<Reactor>>) {
        let entries = lock(&self.entries);
        let of_runtime = entries.iter().filter(|(key, _)| key.runtime == runtime);
        (self.generation(), of_runtime.map(|(_, reactor)| reactor.clone()).collect())
    }

    /// Returns a number that changes with each addition.
    pub(super) fn generation(&self) -> usize {
        self.generation.load(Ordering::Acquire)
    }
}
