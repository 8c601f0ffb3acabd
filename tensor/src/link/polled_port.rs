//! A port, and the queue whose poller takes its completions.

use std::sync::{Arc, Mutex};

use crate::link::port::Port;
use tonic_rdma::internal::{Pace, Queue, Reactor};

/// A port in its queue. The port leaves the queue when this is dropped.
#[derive(Debug)]
pub(crate) struct PolledPort {
    pub(crate) port: Arc<Port>,
    pub(crate) queue: Arc<Queue>,
    /// The number of the port in the queue.
    pub(crate) key: u32,
    /// The time for which a future looks at a word itself before its thread sleeps. Only one future at a time does so.
    pub(crate) pace: Option<Mutex<Pace>>,
    /// The queue is polled as long as this is held.
    pub(crate) _reactor: Arc<Reactor>,
}

impl Drop for PolledPort {
    fn drop(&mut self) {
        self.queue.remove(self.key, &*self.port);
    }
}
