//! What watches a connection for as long as it lives: its TCP connection, its timers, its end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::time::sleep_until;

use super::Stage;
use super::member::Member;
use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::journal::Journal;
use crate::protocol::AbortCode;

/// Watches one connection.
#[derive(Debug)]
pub(crate) struct Supervisor {
    pub(crate) member: Member,
    /// The connection that negotiation went over. Nothing more is said on it; its end is the surest sign of the
    /// peer's.
    pub(crate) tcp: TcpStream,
    pub(crate) peer: SocketAddr,
    pub(crate) linger: Duration,
    pub(crate) counted: Counted,
    pub(crate) journal: Arc<Journal>,
}

/// Counts a connection among those in use, for as long as it lives.
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
    /// What is still on its way when the TCP connection ends may arrive for this long, since the two take different
    /// ways through a network.
    const GRACE: Duration = Duration::from_millis(200);
    const GRACE_STEP: Duration = Duration::from_millis(5);
    /// How often to look at a connection that has no timer of its own.
    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// Runs until the connection has ended.
    pub(crate) async fn run(self) {
        let mut give_up: Option<Instant> = None;
        while self.member.connection.stage() != Stage::Finished {
            if let Some(fault) = self.member.connection.lost() {
                // What was sent before has arrived already.
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

    /// Takes in what was sent before the peer left.
    async fn peer_left(&self, how: String) {
        let patience = Instant::now() + Self::GRACE;
        self.member.queue.drain();
        while !self.member.connection.peer_finished()
            && self.member.connection.fault().is_none()
            && Instant::now() < patience
        {
            tokio::time::sleep(Self::GRACE_STEP).await;
            self.member.queue.drain();
        }
        self.conclude(ConnectionFault::PeerLost(how.into()));
    }

    /// Whatever the connection still waits for will never come.
    fn conclude(&self, fault: ConnectionFault) {
        if self.member.connection.stage() != Stage::Finished {
            self.member.connection.fail(fault);
        }
    }
}
