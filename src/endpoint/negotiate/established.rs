//! This end of an RDMA connection whose queue pair is connected.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::endpoint::config::Config;
use crate::endpoint::connection::member::{Carrier, Member};
use crate::endpoint::connection::supervisor::{Counted, Supervisor};
use crate::endpoint::error::RdmaUnavailable;
use crate::endpoint::info::Telemetry;
use crate::endpoint::journal::Journal;
use crate::wire::hello::{Confirm, Message};
use tonic_rdma_verbs::{Context, QueuePair, QueuePairAddress};

/// A queue pair that is connected.
#[derive(Debug)]
pub(super) struct Established {
    pub(super) context: Arc<dyn Context>,
    pub(super) member: Member,
    pub(super) queue_pair: Arc<dyn QueuePair>,
    /// Receive buffers of this end at the start.
    pub(super) slots: u32,
    /// The connection carries the messages of native calls.
    pub(super) native: bool,
    pub(super) config: Config,
}

/// The peer's end, as its message describes it.
#[derive(Clone, Debug)]
pub(super) struct PeerEnd {
    pub(super) address: QueuePairAddress,
    pub(super) receive_slots: u32,
    pub(super) slot_size: u32,
}

impl Established {
    /// Longest time for the peer's answer over the queue pair.
    const PATIENCE: Duration = Duration::from_secs(2);
    /// Longest time that a client needs to connect its queue pair ([`QueuePair::to_rtr`]) and to check that connection.
    pub(super) const CONNECTING: Duration = Duration::from_secs(5);

    /// Returns the message with the value that this end read in the peer's memory.
    pub(super) fn confirm(&self) -> Message {
        Message::Confirm(Confirm::Connected { nonce: self.queue_pair.probe().peers })
    }

    /// Checks that the peer read the value that this end wrote, which proves that both ends reach one another's memory.
    pub(super) fn check(&self, peer: &Confirm) -> Result<(), RdmaUnavailable> {
        match peer {
            Confirm::Failed { reason } => Err(RdmaUnavailable::PeerFailed(reason.clone())),
            Confirm::Connected { nonce } if *nonce == self.queue_pair.probe().ours => Ok(()),
            Confirm::Connected { .. } => Err(RdmaUnavailable::MemoryNotShared),
        }
    }

    /// Checks that messages reach the peer and come back. Some problems of a path through a network show in no other way: a
    /// firewall, a partition key, an MTU that a switch does not have.
    pub(super) async fn check_reachable(&self) -> Result<(), RdmaUnavailable> {
        let device = || self.device().to_owned();
        match timeout(Self::PATIENCE, self.member.connection.check_reachable()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(fault)) => Err(RdmaUnavailable::Unreachable { device: device(), fault }),
            Err(_) => Err(RdmaUnavailable::NoAnswer { device: device(), timeout: Self::PATIENCE }),
        }
    }

    /// Returns the name of the device.
    pub(super) fn device(&self) -> &str {
        &self.context.attributes().name
    }

    /// Returns the counters and decisions of the connection.
    pub(super) fn telemetry(&self) -> Telemetry {
        Telemetry {
            counters: Arc::clone(&self.member.connection.counters),
            polling: Arc::clone(self.member.queue.polling()),
            chooser: self.member.connection.chooser(),
        }
    }

    /// Hands the connection over to a supervisor. The caller spawns the supervisor's task.
    pub(super) fn supervise(
        self,
        tcp: TcpStream,
        peer: SocketAddr,
        journal: Arc<Journal>,
    ) -> (Carrier, Supervisor) {
        let carrier = self.member.carrier();
        let (linger, counted) = (self.config.linger, Counted::new());
        (carrier, Supervisor { member: self.member, tcp, peer, linger, counted, journal })
    }
}
