//! Threads that poll the queues of a reactor themselves.

use std::sync::Arc;

use super::reactor::Reactor;

/// A thread polls the queues of a reactor itself, until this is dropped. Meanwhile the queues are not armed, so that arrivals and
/// completions wake no other thread, and the poll task looks once in a millisecond only.
#[derive(Debug)]
#[must_use = "the poll task takes over when this is dropped"]
pub struct OwnPolling {
    reactor: Arc<Reactor>,
}

impl OwnPolling {
    /// Begins. The thread has to poll until it drops the result, or to be content with a look in each millisecond.
    pub fn of(reactor: &Arc<Reactor>) -> Self {
        reactor.begin_own_polling();
        Self { reactor: Arc::clone(reactor) }
    }

    /// Polls every queue once. A queue that another thread is polling is left to that thread.
    pub fn poll(&self) {
        self.reactor.poll();
    }
}

impl Drop for OwnPolling {
    fn drop(&mut self) {
        self.reactor.end_own_polling();
    }
}
