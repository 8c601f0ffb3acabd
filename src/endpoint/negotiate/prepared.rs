//! This end of an RDMA connection before the peer's end is known.

use std::sync::Arc;
use std::time::Instant;

use super::established::{Established, PeerEnd};
use crate::endpoint::budget::budget;
use crate::endpoint::config::Config;
use crate::endpoint::connection::member::Member;
use crate::endpoint::connection::{Connection, End, Limits, Traffic};
use crate::endpoint::error::RdmaUnavailable;
use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::link::Link;
use crate::endpoint::link::receive::{Receives, Ring, Share};
use crate::endpoint::link::shared_receive::Promise;
use crate::endpoint::polling::{Queue, Reactor};
use crate::endpoint::tuner::Chooser;
use crate::protocol;
use crate::wire::Header;
use crate::wire::hello::Offer;
use tonic_rdma_verbs::internal::SlabRegistrations;
use tonic_rdma_verbs::memory::{Block, Pool, PoolSettings, Quota};
use tonic_rdma_verbs::{Access, Context, ProtectionDomain, QueuePair};

/// A queue pair with receive memory, not connected yet.
#[derive(Debug)]
pub(super) struct Prepared {
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

/// Memory for receive buffers.
#[derive(Debug)]
enum ReceiveMemory {
    Own(Block),
    Shared(Promise),
}

impl Prepared {
    /// Creates all that a connection over the device needs.
    pub(super) fn new(context: Arc<dyn Context>, config: &Config) -> Result<Self, RdmaUnavailable> {
        let attributes = context.attributes().clone();
        let reactor = Reactor::current(&context, config)?;
        let queue = Arc::clone(reactor.assign());
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
            send_quota: rendezvous + u64::from(config.queue_depth) * u64::from(config.slot_size),
            // The peer chooses the length of its chunks.
            receive_quota: ring_bytes + rendezvous.max(Chooser::memory(&Config::default())),
            ..PoolSettings::default()
        };
        let pool = Pool::new(Arc::clone(&domain), settings, budget(attributes.locks_memory, config));
        let memory = match shared {
            Some(shared) => ReceiveMemory::Shared(shared.promise(slots).map_err(RdmaUnavailable::setup)?),
            None => ReceiveMemory::Own(pool.lease(ring_bytes as usize, Quota::Receive)?),
        };
        let capacity = Link::capacity(&attributes, config.queue_depth, slots, config.max_inline);
        let completions = queue.completion_queue();
        let queue_pair = match shared {
            Some(shared) => {
                domain.create_sharing_queue_pair(completions, completions, shared.queue(), &capacity)
            }
            None => domain.create_queue_pair(completions, completions, &capacity),
        };
        let queue_pair = queue_pair?;
        queue_pair.to_init(Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let config = config.clone();
        Ok(Self { context, reactor, queue, domain, queue_pair, pool, memory, slots, config })
    }

    /// Returns the offer for the hello.
    pub(super) fn offer(&self) -> Offer {
        let attributes = self.context.attributes();
        Offer {
            provider: attributes.provider.into(),
            device: attributes.name.clone(),
            queue_pair: self.queue_pair.local_address().as_bytes().to_vec(),
            receive_slots: self.slots,
            slot_size: self.config.slot_size,
        }
    }

    /// Connects to the peer's end. `native`: this end of the calls, if the connection carries native calls. May block for as long as [`QueuePair::to_rtr`] may, which calls the peer's device.
    pub(super) fn connect(self, peer: &PeerEnd, native: Option<End>) -> Result<Established, RdmaUnavailable> {
        /// Gathering writes up to this length costs less than a message for each.
        const COALESCE: usize = 4096;
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
        let protocol = protocol::Connection::new(settings, Instant::now()).map_err(RdmaUnavailable::setup)?;
        let room = (peer.slot_size as usize).saturating_sub(Header::LENGTH);
        let limits = Limits { coalesce: COALESCE.min(room), ping_timeout: self.config.ping_timeout };
        let chooser = Chooser::new(&self.config, &self.context);
        let queue_pair = Arc::clone(&self.queue_pair);
        let traffic = match native {
            Some(end) => Traffic::Messages { domain: Arc::clone(&self.domain), reads, end },
            None => Traffic::Bytes,
        };
        let registrations = SlabRegistrations::new(self.domain, Arc::clone(self.pool.budget()));
        let member = Member::new(self.reactor, self.queue, send_queue + reads + receives, |key| {
            let receives = match self.memory {
                ReceiveMemory::Own(block) => {
                    let ring = Ring::new(block, self.slots, self.config.slot_size as usize);
                    Receives::Own(ring.map_err(ConnectionFault::local)?)
                }
                ReceiveMemory::Shared(promise) => {
                    let most = self.config.receive_slots;
                    Receives::Shared(Share::new(promise, self.queue_pair.number(), most))
                }
            };
            let link = Link::new(self.queue_pair, key, self.pool, registrations, receives)?;
            Ok(Connection::new(link, protocol, limits, chooser, traffic))
        });
        let member = member?;
        queue_pair.to_rtr(&peer.address, &self.config.path)?;
        queue_pair.to_rts(&self.config.path)?;
        Ok(Established {
            context: self.context,
            member,
            queue_pair,
            slots: self.slots,
            native: native.is_some(),
            config: self.config,
        })
    }
}
