//! This end's part of an RDMA connection, from the offer to the first byte.

use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::config::Config;
use super::connection::{Connection, Limits};
use super::fault::ConnectionFault;
use super::info::Live;
use super::journal::Journal;
use super::link::Link;
use super::lock;
use super::member::Member;
use super::queue::Queue;
use super::reactor::Reactor;
use super::receive::{Receives, Ring, Share};
use super::shared_receive::Promise;
use super::supervisor::{Counted, Supervisor};
use super::tuner::{Chooser, DeviceTuner};
use crate::protocol;
use crate::wire::Header;
use crate::wire::hello::Offer;
use tonic_rdma_verbs::internal::SlabRegistrations;
use tonic_rdma_verbs::memory::{Block, Budget, Pool, PoolSettings, Quota};
use tonic_rdma_verbs::{
    Access, Context, Probe, ProtectionDomain, QueuePair, QueuePairAddress, QueuePairCapacity,
};

/// A queue pair with receive memory, not connected yet.
#[derive(Debug)]
pub(crate) struct Prepared {
    context: Arc<dyn Context>,
    reactor: Arc<Reactor>,
    queue: Arc<Queue>,
    domain: Arc<dyn ProtectionDomain>,
    queue_pair: Arc<dyn QueuePair>,
    pool: Pool,
    memory: ReceiveMemory,
    /// Receive buffers at the start.
    slots: u32,
    config: Config,
}

/// Where what arrives will go.
#[derive(Debug)]
enum ReceiveMemory {
    Own(Block),
    Shared(Promise),
}

/// A queue pair that is connected.
#[derive(Debug)]
pub(crate) struct Established {
    context: Arc<dyn Context>,
    member: Member,
    queue_pair: Arc<dyn QueuePair>,
    slots: u32,
    config: Config,
}

/// What the peer said about its end.
#[derive(Clone, Debug)]
pub(crate) struct PeerEnd {
    pub(crate) address: QueuePairAddress,
    pub(crate) receive_slots: u32,
    pub(crate) slot_size: u32,
}

/// The limit on registered memory, for all connections of the process; the first connection settles it.
static BUDGET: LazyLock<Mutex<Option<Arc<Budget>>>> = LazyLock::new(Mutex::default);

pub(crate) fn budget(locks_memory: bool, config: &Config) -> Arc<Budget> {
    let mut budget = lock(&BUDGET);
    Arc::clone(budget.get_or_insert_with(|| Budget::for_process(locks_memory, config.pinned_limit)))
}

impl Prepared {
    /// READs that one connection has outstanding at most.
    const READS: u32 = 16;

    /// Creates what a connection over the device needs; the error says why there will be none.
    pub(crate) fn new(context: Arc<dyn Context>, config: &Config) -> Result<Self, String> {
        let attributes = context.attributes().clone();
        let reactor = Reactor::current(&context, config).map_err(text)?;
        let queue = Arc::clone(reactor.assign());
        let shared = queue.shared();
        let domain = match shared.and_then(|shared| shared.common_domain()) {
            Some(common) => Arc::clone(common),
            None => context.alloc_protection_domain().map_err(text)?,
        };
        let slots = if shared.is_some() { protocol::Settings::MIN_SLOTS } else { config.receive_slots };
        let ring_bytes = u64::from(slots) * u64::from(config.slot_size);
        let rendezvous = Chooser::memory(config);
        let settings = PoolSettings {
            access: Access::LOCAL_WRITE | Access::REMOTE_READ,
            send_quota: rendezvous + u64::from(config.queue_depth) * u64::from(config.slot_size),
            // How long the peer's chunks are is the peer's choice.
            receive_quota: ring_bytes + rendezvous.max(Chooser::memory(&Config::default())),
            ..PoolSettings::default()
        };
        let pool = Pool::new(Arc::clone(&domain), settings, budget(attributes.locks_memory, config));
        let memory = match shared {
            Some(shared) => ReceiveMemory::Shared(shared.promise(slots).map_err(text)?),
            None => ReceiveMemory::Own(pool.lease(ring_bytes as usize, Quota::Receive).map_err(text)?),
        };
        let reads = Self::READS.min(attributes.max_outstanding_reads).max(1);
        let capacity = QueuePairCapacity {
            send_requests: config.queue_depth.min(attributes.max_work_requests - reads) + reads,
            receive_requests: slots,
            send_segments: (Link::SLICES as u32).min(attributes.max_segments),
            receive_segments: 1,
            inline: attributes.max_inline.min(config.max_inline.unwrap_or(u32::MAX)).min(MAX_INLINE),
        };
        let completions = queue.completion_queue();
        let queue_pair = match shared {
            Some(shared) => {
                domain.create_sharing_queue_pair(completions, completions, shared.queue(), &capacity)
            }
            None => domain.create_queue_pair(completions, completions, &capacity),
        };
        let queue_pair = queue_pair.map_err(text)?;
        queue_pair.to_init(Access::LOCAL_WRITE | Access::REMOTE_READ).map_err(text)?;
        let config = config.clone();
        Ok(Self { context, reactor, queue, domain, queue_pair, pool, memory, slots, config })
    }

    /// What the hello says of it.
    pub(crate) fn offer(&self) -> Offer {
        let attributes = self.context.attributes();
        Offer {
            provider: attributes.provider.into(),
            device: attributes.name.clone(),
            queue_pair: self.queue_pair.local_address().as_bytes().to_vec(),
            receive_slots: self.slots,
            slot_size: self.config.slot_size,
        }
    }

    /// Connects to the peer's end. Talks to the peer's device, so it may block for as long as
    /// [`QueuePair::to_rtr`] may.
    pub(crate) fn connect(self, peer: &PeerEnd) -> Result<Established, String> {
        let reads = Self::READS.min(self.context.attributes().max_outstanding_reads).max(1);
        let settings = protocol::Settings {
            receive_slots: self.slots,
            slot_size: self.config.slot_size,
            peer_slots: peer.receive_slots,
            peer_slot_size: peer.slot_size,
            send_queue: self.queue_pair.capacity().send_requests - reads,
            max_reads: reads,
            ping_interval: Some(self.config.ping_interval),
            ping_timeout: self.config.ping_timeout,
            ..protocol::Settings::default()
        };
        let protocol = protocol::Connection::new(settings, Instant::now()).map_err(text)?;
        let limits = self.limits(peer);
        let chooser = Chooser::new(&self.config, || DeviceTuner::of(&self.context, &self.config));
        let queue_pair = Arc::clone(&self.queue_pair);
        let registrations = SlabRegistrations::new(self.domain, Arc::clone(self.pool.budget()));
        let member = Member::new(self.reactor, self.queue, |key| {
            let receives = match self.memory {
                ReceiveMemory::Own(block) => {
                    let ring = Ring::new(block, self.slots, self.config.slot_size as usize);
                    Receives::Own(ring.map_err(|error| ConnectionFault::Local(error.to_string().into()))?)
                }
                ReceiveMemory::Shared(promise) => {
                    let most = self.config.receive_slots;
                    Receives::Shared(Share::new(promise, self.queue_pair.number(), most))
                }
            };
            let link = Link::new(self.queue_pair, key, self.pool, registrations, receives)?;
            Ok(Connection::new(link, protocol, limits, chooser))
        });
        let member = member.map_err(text)?;
        queue_pair.to_rtr(&peer.address, &self.config.path).map_err(text)?;
        queue_pair.to_rts(&self.config.path).map_err(text)?;
        let (slots, config) = (self.slots, self.config);
        Ok(Established { context: self.context, member, queue_pair, slots, config })
    }

    fn limits(&self, peer: &PeerEnd) -> Limits {
        /// Gathering up to here costs less than a message of its own.
        const COALESCE: usize = 4096;
        let room = (peer.slot_size as usize).saturating_sub(Header::LENGTH);
        Limits { coalesce: COALESCE.min(room), ping_timeout: self.config.ping_timeout }
    }
}

/// Inline bytes to ask for: a full receive buffer.
const MAX_INLINE: u32 = 64 * 1024 + 512;

impl Established {
    /// How long the peer may take to answer over the queue pair.
    const PATIENCE: Duration = Duration::from_secs(2);
    /// What a client may need to connect its queue pair ([`QueuePair::to_rtr`]) and to find out whether that works.
    pub(crate) const CONNECTING: Duration = Duration::from_secs(4);

    /// Evidence that both ends see one another's memory.
    pub(crate) fn probe(&self) -> Probe {
        self.queue_pair.probe()
    }

    /// Finds out whether messages get through to the peer and back. What is wrong with a path through a network shows in
    /// no other way: a firewall, a partition key, an MTU that a switch does not have.
    pub(crate) async fn reach(&self) -> Result<(), String> {
        let unreachable = |why: String| {
            format!(
                "the server can't be reached over {}: {why} (RoCE needs UDP port 4791, and equal partition keys)",
                self.device()
            )
        };
        match timeout(Self::PATIENCE, self.member.connection.reach()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(fault)) => Err(unreachable(fault.to_string())),
            Err(_) => Err(unreachable(format!("no answer within {} s", Self::PATIENCE.as_secs()))),
        }
    }

    pub(crate) fn provider(&self) -> &'static str {
        self.context.attributes().provider
    }

    pub(crate) fn device(&self) -> &str {
        &self.context.attributes().name
    }

    /// What [`offer`](Prepared::offer) said, for an answer.
    pub(crate) fn local_address(&self) -> Vec<u8> {
        self.queue_pair.local_address().as_bytes().to_vec()
    }

    /// Receive buffers of this end at the start.
    pub(crate) fn receive_slots(&self) -> u32 {
        self.slots
    }

    /// Length of each, in bytes.
    pub(crate) fn slot_size(&self) -> u32 {
        self.config.slot_size
    }

    pub(crate) fn live(&self) -> Live {
        Live {
            counters: Arc::clone(self.member.connection.counters()),
            polling: Arc::clone(self.member.queue.polling()),
            explained: self.member.connection.explained(),
        }
    }

    /// Hands the connection over to a supervisor, which the caller spawns.
    pub(crate) fn supervise(
        self,
        tcp: TcpStream,
        peer: SocketAddr,
        journal: Arc<Journal>,
    ) -> (Arc<Connection>, Supervisor) {
        let connection = Arc::clone(&self.member.connection);
        let (linger, counted) = (self.config.linger, Counted::new());
        (connection, Supervisor { member: self.member, tcp, peer, linger, counted, journal })
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
