//! A connection's place in a completion queue.

use std::sync::Arc;

use super::Connection;
use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::polling::Queue;
use crate::endpoint::polling::Reactor;

/// A connection that takes part in polling. Dropping it ends the connection, if it has not ended, and takes it out.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) connection: Arc<Connection>,
    pub(crate) queue: Arc<Queue>,
    key: u32,
    /// Held so that the queue is polled.
    _reactor: Arc<Reactor>,
}

impl Member {
    /// Adds the connection that `make` builds; it is given the key that its work requests are to carry.
    pub(crate) fn new(
        reactor: Arc<Reactor>,
        queue: Arc<Queue>,
        make: impl FnOnce(u32) -> Result<Arc<Connection>, ConnectionFault>,
    ) -> Result<Self, ConnectionFault> {
        let (key, connection) = queue.add(make).map_err(ConnectionFault::local)??;
        Ok(Self { connection, queue, key, _reactor: reactor })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // A runtime that shuts down drops connections unfinished: nobody would watch them any more. What can still be said
        // is said, so that the peer knows that this is no accident.
        self.connection.detach();
        self.connection.fail(ConnectionFault::Closed);
        // What has come into buffers that others share comes back with its completion.
        if self.queue.shared().is_some() {
            self.queue.drain();
        }
        self.connection.publish_counters();
        self.queue.remove(self.key, &*self.connection);
    }
}
