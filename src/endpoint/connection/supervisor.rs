//! The task that watches a connection (its TCP connection, its timers, its end), and the connection's membership in a completion queue.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::time::{sleep_until, timeout};

use super::{Connection, Stage};
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::journal::Journal;
use crate::endpoint::polling::{Queue, Reactor};
use crate::protocol::AbortCode;

/// Watches one connection.
#[derive(Debug)]
pub(crate) struct Supervisor {
    pub(crate) member: Member,
    /// The TCP connection of the negotiation. It stays open and silent; its end is the surest sign that the peer is gone.
    pub(crate) tcp: TcpStream,
    pub(crate) peer: SocketAddr,
    pub(crate) linger: Duration,
    pub(crate) counted: Counted,
    pub(crate) journal: Arc<Journal>,
}

/// Counts a connection in the metric of connections in use, until dropped.
#[derive(Debug)]
pub(crate) struct Counted(());

impl Counted {
    pub(crate) fn new() -> Self {
        metrics::gauge!("tonic_rdma_connections").increment(1.0);
        Self(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        metrics::gauge!("tonic_rdma_connections").decrement(1.0);
    }
}

impl Supervisor {
    /// Time for messages that are still in the network when the TCP connection ends, because RDMA and TCP may take different
    /// paths.
    const GRACE: Duration = Duration::from_millis(200);
    /// Longest wait of a connection without a timer.
    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// Runs until the connection has ended.
    pub(crate) async fn run(self) {
        let mut give_up: Option<Instant> = None;
        while self.member.connection.stage() != Stage::Finished {
            if let Some(fault) = self.member.connection.lost() {
                // All messages that the peer sent before have arrived already.
                self.member.queue.drain();
                self.conclude(fault);
                break;
            }
            if self.member.connection.stage() == Stage::Lingering {
                give_up.get_or_insert_with(|| Instant::now() + self.linger);
            }
            let due = self.member.connection.deadline().unwrap_or_else(|| Instant::now() + Self::DAY);
            let due = give_up.map_or(due, |give_up| due.min(give_up));
            tokio::select! {
                biased;
                () = self.member.connection.changed.notified() => {}
                end = self.tcp_ended() => {
                    self.peer_left(end).await;
                    break;
                }
                () = sleep_until(due.into()) => {
                    let now = Instant::now();
                    if give_up.is_some_and(|give_up| now >= give_up) {
                        self.member.connection.abort(AbortCode::CLOSED, ConnectionFault::Closed);
                    } else {
                        self.member.connection.handle_timeout(now);
                    }
                }
            }
        }
        self.journal.ended(self.peer, &self.member.connection.ending());
        drop(self.counted);
    }

    /// Waits for the end of the TCP connection; returns the reason.
    async fn tcp_ended(&self) -> String {
        loop {
            if let Err(error) = self.tcp.readable().await {
                return error.to_string();
            }
            match self.tcp.try_read(&mut [0; 64]) {
                Ok(0) => return "its TCP connection ended".into(),
                Ok(_) => return "it spoke on the TCP connection after negotiation".into(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Takes the messages that the peer sent before it left, then ends the connection.
    async fn peer_left(&self, how: String) {
        self.member.queue.drain();
        let connection = &self.member.connection;
        let over = async {
            while !connection.peer_finished() && connection.fault().is_none() {
                connection.changed.notified().await;
            }
        };
        // After the time is over, the connection ends in any case.
        let _ = timeout(Self::GRACE, over).await;
        self.member.queue.drain();
        self.conclude(ConnectionFault::PeerLost(how.into()));
    }

    /// Ends the connection with `fault`, unless it has finished.
    fn conclude(&self, fault: ConnectionFault) {
        if self.member.connection.stage() != Stage::Finished {
            self.member.connection.fail(fault);
        }
    }
}

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
