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
use tonic_rdma_verbs::{Context, Probe, QueuePair, QueuePairAddress};

/// A queue pair that is connected.
#[derive(Debug)]
pub(super) struct Established {
    pub(super) context: Arc<dyn Context>,
    pub(super) member: Member,
    pub(super) queue_pair: Arc<dyn QueuePair>,
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

    /// Returns the proof that both ends reach one another's memory.
    pub(super) fn probe(&self) -> Probe {
        self.queue_pair.probe()
    }

    /// Returns whether each end may read the other's memory, so that long content needs no second copy.
    pub(super) fn shares_memory(&self) -> bool {
        self.queue_pair.reads_by_copy()
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

    /// Returns the name of the provider.
    pub(super) fn provider(&self) -> &'static str {
        self.context.attributes().provider
    }

    /// Returns the name of the device.
    pub(super) fn device(&self) -> &str {
        &self.context.attributes().name
    }

    /// Returns the queue pair's address, for the answer to an offer.
    pub(super) fn local_address(&self) -> Vec<u8> {
        self.queue_pair.local_address().as_bytes().to_vec()
    }

    /// Returns the number of receive buffers of this end at the start.
    pub(super) fn receive_slots(&self) -> u32 {
        self.slots
    }

    /// Returns the length of each receive buffer, in bytes.
    pub(super) fn slot_size(&self) -> u32 {
        self.config.slot_size
    }

    /// Returns the counters and decisions of the connection.
    pub(super) fn telemetry(&self) -> Telemetry {
        Telemetry {
            counters: Arc::clone(self.member.connection.counters()),
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
