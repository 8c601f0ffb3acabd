//! The membership of a connection in a completion queue.

use std::sync::Arc;

use super::Connection;
use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::polling::Queue;
use crate::endpoint::polling::Reactor;

/// A connection that is polled. Dropping this ends the connection, if it has not ended, and removes it from its queue.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) connection: Arc<Connection>,
    pub(crate) queue: Arc<Queue>,
    key: u32,
    /// Keeps the queue polled.
    reactor: Arc<Reactor>,
}

/// A connection with its queue and its reactor, for a handle that makes progress itself.
#[derive(Debug)]
pub(crate) struct Carrier {
    pub(crate) connection: Arc<Connection>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) reactor: Arc<Reactor>,
}

impl Member {
    /// Adds the connection that `make` builds. `make` gets the key that the connection's work requests have to carry. `places` is
    /// the number of requests that the connection may have posted at a time.
    pub(crate) fn new(
        reactor: Arc<Reactor>,
        queue: Arc<Queue>,
        places: u32,
        make: impl FnOnce(u32) -> Result<Arc<Connection>, ConnectionFault>,
    ) -> Result<Self, ConnectionFault> {
        let (key, connection) = queue.add(places, make).map_err(ConnectionFault::local)??;
        Ok(Self { connection, queue, key, reactor })
    }

    /// Returns the connection with its queue and its reactor.
    pub(crate) fn carrier(&self) -> Carrier {
        Carrier {
            connection: Arc::clone(&self.connection),
            queue: Arc::clone(&self.queue),
            reactor: Arc::clone(&self.reactor),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // A runtime that shuts down drops connections before they have finished. If possible, written bytes and the end of the
        // stream are still sent, so that the peer sees an orderly end.
        self.connection.detach();
        self.connection.fail(ConnectionFault::Closed);
        // Completions that are still in the queue name shared buffers, which have to be posted again.
        if self.queue.shared().is_some() {
            self.queue.drain();
        }
        self.connection.counters.publish();
        self.queue.remove(self.key, &*self.connection);
    }
}
