//! This side of an RDMA connection: prepared before the peer's end is known, and established when its queue
//! pair is connected.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::calibrate::measured;
use crate::endpoint::config::Config;
use crate::endpoint::connection::{ByteStream, Connection, LinkConnection, Member, Supervisor};
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::info::{RdmaConnectInfo, Role, Telemetry, Verdict};
use crate::endpoint::journal::Journal;
use crate::endpoint::link::Link;
use crate::endpoint::link::receive::{Receives, Ring, Share};
use crate::endpoint::meeting::Meeting;
use crate::endpoint::messages::{MessageEndpoint, Messages, Negotiated};
use crate::endpoint::meters::OpenHandle;
use crate::endpoint::polling::{OwnQueue, Queue, QueueFull, Reactor};
use crate::endpoint::provider;
use crate::endpoint::reason::{RdmaUnavailable, ReasonCode};
use crate::endpoint::stream::EndpointStream;
use crate::endpoint::tuner::Chooser;
use crate::protocol;
use crate::wire::hello::{Confirm, DeviceOffer, Message};
use tonic_rdma_verbs::memory::{Budget, Pool, PoolSettings, Quota};
use tonic_rdma_verbs::unstable::{SlabRegistrations, Versions};
use tonic_rdma_verbs::{Access, Context, Probe, ProtectionDomain, QueuePair, QueuePairAddress};

/// Returns the bytes of a slab beside a ring of `ring` bytes. A short ring has a slab of its length, because all of
/// its slab counts against the budget.
fn slab_size(ring: u64) -> usize {
    let common = PoolSettings::default().slab_size;
    usize::try_from(ring).ok().filter(|&ring| (1..=common / 2).contains(&ring)).unwrap_or(common)
}

/// A queue pair with receive memory, not connected yet.
#[derive(Debug)]
pub(super) struct Prepared {
    context: Arc<dyn Context>,
    reactor: Arc<Reactor>,
    /// The queue, if the connection has one for itself.
    own: Option<Arc<OwnQueue>>,
    queue: Arc<Queue>,
    domain: Arc<dyn ProtectionDomain>,
    queue_pair: Arc<dyn QueuePair>,
    pool: Pool,
    receives: Receives,
    /// Receive buffers at the start.
    slots: u32,
    config: Config,
}

impl Prepared {
    /// Creates all that a connection over the device needs. `calls`: the client asks for native calls. `budget`:
    /// the limit on its memory, in place of that of the process.
    pub(super) fn new(
        context: Arc<dyn Context>,
        config: &Config,
        calls: bool,
        budget: Option<Arc<Budget>>,
    ) -> Result<Self, RdmaUnavailable> {
        let attributes = context.attributes().clone();
        let reactor = Reactor::current(&context, config)?;
        let capacity = |slots| Link::capacity(&attributes, config.qp_queue_depth, slots, config.max_inline);
        let own = match calls {
            true => None,
            false => reactor.own_queue(&*context, &capacity(config.receive_slots))?.map(Arc::new),
        };
        let queue = Arc::clone(own.as_ref().map_or_else(|| reactor.assign(), |own| own.queue()));
        let shared = queue.shared();
        let domain = match shared.and_then(|shared| shared.common_domain()) {
            Some(common) => Arc::clone(common),
            None => context.alloc_protection_domain()?,
        };
        let slots = if shared.is_some() { protocol::Settings::MIN_SLOTS } else { config.receive_slots };
        let ring_bytes = u64::from(slots) * u64::from(config.slot_size);
        let rendezvous = Chooser::memory(config);
        let settings = PoolSettings {
            access: Access::LOCAL_WRITE | Access::REMOTE_READ,
            send_quota: rendezvous + u64::from(config.qp_queue_depth) * u64::from(config.slot_size),
            // The peer chooses the length of its chunks.
            receive_quota: ring_bytes + rendezvous.max(Chooser::memory(&Config::default())),
            slab_size: slab_size(if shared.is_some() { 0 } else { ring_bytes }),
            ..PoolSettings::default()
        };
        let budget = budget.unwrap_or_else(|| provider::budget(attributes.locks_memory, config));
        let pool = Pool::new(Arc::clone(&domain), settings, budget);
        let capacity = capacity(slots);
        let completions = queue.completion_queue();
        let (queue_pair, receives) = match shared {
            Some(shared) => {
                let promise = shared
                    .promise(slots)
                    .map_err(|error| RdmaUnavailable::new(ReasonCode::MemoryBudget, error))?;
                let shared_queue = shared.queue();
                let queue_pair =
                    domain.create_sharing_queue_pair(completions, completions, shared_queue, &capacity)?;
                let share = Share::new(promise, queue_pair.number(), config.receive_slots);
                (queue_pair, Receives::Shared(share))
            }
            None => {
                let block = pool.lease(ring_bytes as usize, Quota::Receive)?;
                let ring = Ring::new(block, slots, config.slot_size as usize)?;
                (domain.create_queue_pair(completions, completions, &capacity)?, Receives::Own(ring))
            }
        };
        queue_pair.to_init(Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let config = config.clone();
        Ok(Self { context, reactor, own, queue, domain, queue_pair, pool, receives, slots, config })
    }

    /// Returns the offer for the hello.
    pub(super) fn offer(&self) -> DeviceOffer {
        let attributes = self.context.attributes();
        DeviceOffer {
            provider: attributes.provider.into(),
            device: attributes.name.clone(),
            queue_pair: self.queue_pair.local_address().as_bytes().to_vec(),
            receive_slots: self.slots,
            slot_size: self.config.slot_size,
        }
    }

    /// Returns this end, for a peer in this process.
    pub(super) fn end(&self) -> PeerQueuePair {
        PeerQueuePair {
            address: self.queue_pair.local_address(),
            receive_slots: self.slots,
            slot_size: self.config.slot_size,
        }
    }

    /// Connects to the peer's end. `native`: the role of this side, if the connection carries native calls.
    /// May block for as long as [`QueuePair::to_rtr`] may, which calls the peer's device.
    pub(super) fn connect(
        self,
        peer: &PeerQueuePair,
        native: Option<Role>,
    ) -> Result<Established, RdmaUnavailable> {
        let reads = Link::reads(self.context.attributes());
        let window = peer.receive_slots.max(self.config.receive_slots);
        let send_queue = (self.queue_pair.capacity().send_requests - reads).min(Link::sends_for(window));
        let receives = self.slots.max(self.queue.shared().map_or(0, |_| self.config.receive_slots));
        let settings = protocol::Settings {
            receive_slots: self.slots,
            slot_size: self.config.slot_size,
            peer_slots: peer.receive_slots,
            peer_slot_size: peer.slot_size,
            send_queue,
            max_reads: reads,
            ping_interval: Some(self.config.ping_interval),
            ping_timeout: self.config.ping_timeout,
            ..protocol::Settings::default()
        };
        let protocol = protocol::Connection::new(settings, Instant::now()).map_err(RdmaUnavailable::other)?;
        let chooser = Chooser::new(&self.config, &self.context, measured);
        let queue_pair = Arc::clone(&self.queue_pair);
        let registrations = SlabRegistrations::new(Arc::clone(&self.domain), Arc::clone(self.pool.budget()));
        let changed = self.own.as_ref().map(|own| Arc::clone(own.supervisor())).unwrap_or_default();
        let base = |key| -> Result<_, ConnectionFault> {
            let link = Link::new(self.queue_pair, key, self.pool, registrations, self.receives)?;
            Ok(LinkConnection::new(link, protocol, self.config.ping_timeout, changed))
        };
        let completions = send_queue + reads + receives;
        let (mut member, carried) = match native {
            None => {
                let completions = completions + self.context.attributes().window_requests;
                let make = |key| Ok(ByteStream::new(base(key)?, chooser.clone()));
                let (member, stream) =
                    Member::new(self.reactor, self.queue, completions, false, make).map_err(not_added)?;
                (member, Carried::Bytes(stream))
            }
            Some(role) => {
                let make =
                    |key| Messages::new(base(key)?, self.domain, reads).map_err(ConnectionFault::local);
                let calls = role == Role::Client;
                let (member, messages) =
                    Member::new(self.reactor, self.queue, completions, calls, make).map_err(not_added)?;
                (member, Carried::Messages(messages))
            }
        };
        member.own = self.own;
        queue_pair.to_rtr(&peer.address, &self.config.path)?;
        queue_pair.to_rts(&self.config.path)?;
        Ok(Established {
            context: self.context,
            member,
            queue_pair,
            carried,
            meeting: Meeting::None,
            chooser,
            slots: self.slots,
            config: self.config,
        })
    }
}

/// A queue pair that is connected.
#[derive(Debug)]
pub(super) struct Established {
    pub(super) context: Arc<dyn Context>,
    pub(super) member: Member,
    pub(super) queue_pair: Arc<dyn QueuePair>,
    /// Receive buffers of this side at the start.
    pub(super) slots: u32,
    /// The connection, as its handle needs it.
    pub(super) carried: Carried,
    /// Set where the peer may be of this process.
    pub(super) meeting: Meeting,
    chooser: Chooser,
    pub(super) config: Config,
}

/// A connection, by what it carries.
#[derive(Debug)]
pub(super) enum Carried {
    Bytes(Arc<Connection<ByteStream>>),
    /// The messages of native calls.
    Messages(Arc<Connection<Messages>>),
}

/// The peer's end, as its message describes it.
#[derive(Clone, Debug)]
pub(super) struct PeerQueuePair {
    pub(super) address: QueuePairAddress,
    pub(super) receive_slots: u32,
    pub(super) slot_size: u32,
}

impl Established {
    /// Longest time for the peer's answer over the queue pair.
    const REACH_TIMEOUT: Duration = Duration::from_secs(2);
    /// Longest time that a client needs to connect its queue pair ([`QueuePair::to_rtr`]) and to check that
    /// connection.
    pub(super) const CONNECTING: Duration = Duration::from_secs(5);

    /// Returns the message with the value that this side read in the peer's memory.
    pub(super) fn confirm(&self) -> Message {
        Message::Confirm(Confirm::Connected { nonce: self.probe().peers })
    }

    /// Returns the evidence that both sides share memory.
    pub(super) fn probe(&self) -> Probe {
        self.queue_pair.local().map(|local| local.probe()).unwrap_or_default()
    }

    /// Checks that the peer read the value that this side wrote, which proves that both sides reach one
    /// another's memory.
    pub(super) fn check(&self, peer: &Confirm) -> Result<(), RdmaUnavailable> {
        match peer {
            Confirm::Failed { reason } => Err(RdmaUnavailable::of_peer("the peer can't", reason)),
            Confirm::Connected { nonce } if *nonce == self.probe().ours => Ok(()),
            Confirm::Connected { .. } => Err(RdmaUnavailable::new(
                ReasonCode::Unreachable,
                "the peer read something else than was written here: memory is not shared",
            )),
        }
    }

    /// Checks that messages reach the peer and come back. Some problems of a path through a network show in
    /// no other way: a firewall, a partition key, an MTU that a switch does not have.
    pub(super) async fn check_reachable(&self) -> Result<(), RdmaUnavailable> {
        let failed = match timeout(Self::REACH_TIMEOUT, self.member.check_reachable()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(fault)) => fault.to_string(),
            Err(_) => format!("no answer within {} s", Self::REACH_TIMEOUT.as_secs()),
        };
        let reason = format!(
            "the server can't be reached over {}: {failed} (RoCE needs UDP port 4791, and equal partition keys)",
            self.device()
        );
        Err(RdmaUnavailable::new(ReasonCode::Unreachable, reason))
    }

    /// Returns the name of the device.
    pub(super) fn device(&self) -> &str {
        &self.context.attributes().name
    }

    /// Returns the counters and decisions of the connection.
    pub(super) fn telemetry(&self) -> Telemetry {
        Telemetry {
            counters: Arc::clone(&self.member.connection.counters),
            polling: Arc::clone(&self.member.queue.polling),
            chooser: self.chooser.clone(),
        }
    }

    /// Returns whether the connection carries native calls.
    pub(super) fn is_native(&self) -> bool {
        matches!(self.carried, Carried::Messages(_))
    }

    /// Hands the connection over to a supervisor, whose task the caller spawns. Returns its handle.
    pub(super) fn supervise(
        self,
        tcp: TcpStream,
        info: RdmaConnectInfo,
        journal: Arc<Journal>,
    ) -> (Negotiated, Supervisor) {
        let peer = info.peer_addr();
        let opened = journal.opened(Verdict::Rdma, self.is_native());
        let handle = OpenHandle(Arc::downgrade(&opened));
        let negotiated = match self.carried {
            Carried::Bytes(stream) => {
                Negotiated::Stream(EndpointStream::rdma(stream, self.member.own.clone(), info, handle))
            }
            Carried::Messages(messages) => {
                let (member, config) = (&self.member, &self.config);
                let meeting = self.meeting;
                Negotiated::Messages(MessageEndpoint::new(messages, member, info, meeting, config, handle))
            }
        };
        let linger = self.config.linger;
        (negotiated, Supervisor { member: self.member, tcp, peer, linger, _opened: opened, journal })
    }
}

/// Returns the reason for a connection that could not be added to its queue.
fn not_added(fault: ConnectionFault) -> RdmaUnavailable {
    match &fault {
        ConnectionFault::Local(error) if error.is::<QueueFull>() => {
            RdmaUnavailable::new(ReasonCode::Busy, fault)
        }
        _ => fault.into(),
    }
}

/// Returns the reason for a peer that speaks no version of the protocol that this end `speaks`.
pub(super) fn other_version(version: u8, speaks: Versions) -> RdmaUnavailable {
    let reason = format!("the peer speaks version {version} of the protocol, this end {speaks}");
    RdmaUnavailable::new(ReasonCode::Version, reason)
}

/// Returns the reason for a peer whose address is longer than any provider's.
pub(super) fn bad_address() -> RdmaUnavailable {
    RdmaUnavailable::new(ReasonCode::Protocol, "the peer's queue pair address is too long")
}

/// Runs `work`, which calls devices and may block for a moment, on a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RdmaUnavailable> + Send + 'static,
) -> Result<T, RdmaUnavailable> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(RdmaUnavailable::other(error)))
}
