//! A link's making: queue pairs, then those of the peer, then the proof that both see one another's memory.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use tokio::sync::watch;

use super::super::device::Shared;
use super::super::exchange::Exchange;
use super::super::landing::Landing;
use super::super::{ChannelError, Settings};
use super::token::Token;
use super::words::{PeerWords, Words};
use super::{Link, LinkId, Notification, Port, Seat};
use tonic_rdma::internal::{Provider, Reactor};
use tonic_rdma_verbs::internal::{
    InFlight, KeptRegistrations, LocalRegistrations, RemotePlace, TransferLimits,
};
use tonic_rdma_verbs::memory::{MemRegion, Pool, PoolSettings};
use tonic_rdma_verbs::{Access, Context, ProtectionDomain, QueuePairAddress, QueuePairCapacity};

/// Queue pairs with their memory, not connected yet.
#[derive(Debug)]
pub(crate) struct Prepared {
    context: Arc<dyn Context>,
    domain: Arc<dyn ProtectionDomain>,
    words: Words,
    ports: Vec<Seat>,
    settings: Settings,
    landing: Arc<Landing>,
}

/// What the peer said about its end.
#[derive(Clone, Debug)]
pub(crate) struct PeerEnd {
    pub(crate) name: Arc<str>,
    /// Address and receives of each queue pair.
    pub(crate) queue_pairs: Vec<(QueuePairAddress, u32)>,
    pub(crate) words: RemotePlace,
    pub(crate) places_in_order: bool,
    pub(crate) immediate: bool,
}

/// What the peer may do to queue pairs; what it may do to memory, the grants say.
const ACCESS: fn() -> Access = || Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;

impl Prepared {
    /// Inline bytes to ask for. Beyond a few hundred a network card takes none; the software device copies either way.
    const INLINE: u32 = 4096 + 64;

    /// Creates queue pairs on the device that `provider` opens.
    pub(crate) fn new(provider: Provider, queue_pairs: u32, shared: &Shared) -> Result<Self, ChannelError> {
        let (settings, budget) = (&shared.settings, &shared.budget);
        let config = &settings.config;
        let context = provider.open(config).map_err(ChannelError::local)?;
        let attributes = context.attributes().clone();
        let queues = config.clone().completion_queues(settings.cqs as usize);
        let reactor = Reactor::current(&context, &queues).map_err(ChannelError::local)?;
        let domain = context.alloc_protection_domain().map_err(ChannelError::local)?;
        let pool_settings = PoolSettings { access: Access::LOCAL_WRITE, ..PoolSettings::default() };
        let pool = Pool::new(Arc::clone(&domain), pool_settings, Arc::clone(budget));
        let memory = MemRegion::allocate(Words::LENGTH, budget).map_err(ChannelError::memory)?.share();
        let words = Words::new(memory, &*domain)?;
        let capacity = QueuePairCapacity {
            send_requests: config.depth().min(attributes.max_work_requests),
            receive_requests: Port::RECEIVES,
            send_segments: 1,
            receive_segments: 1,
            inline: attributes.max_inline.min(Self::INLINE),
        };
        let limits = TransferLimits {
            requests: capacity.send_requests,
            message: attributes.max_message_size.min(settings.piece),
            window: settings.window,
        };
        let port = |index: u32| {
            let queue = Arc::clone(reactor.assign());
            let completions = queue.completion_queue();
            let queue_pair =
                domain.create_queue_pair(completions, completions, &capacity).map_err(ChannelError::local)?;
            queue_pair.to_init(ACCESS()).map_err(ChannelError::local)?;
            let registrations = LocalRegistrations::new(Arc::clone(&domain), Arc::clone(budget));
            let flights: InFlight<Token> = InFlight::new(queue_pair, registrations, limits);
            let made = queue.add(|key| Port::new(flights, index, key, pool.clone()).map(Arc::new));
            let (key, port) = made.map_err(ChannelError::local)??;
            let pace = reactor.pace_of_callers().map(Mutex::new);
            Ok(Seat { port, queue, key, pace, _reactor: Arc::clone(&reactor) })
        };
        let ports = (0..queue_pairs).map(port).collect::<Result<Vec<_>, ChannelError>>()?;
        let (settings, landing) = (settings.clone(), Arc::clone(&shared.landing));
        Ok(Self { context, domain, words, ports, settings, landing })
    }

    /// Address and receives of each queue pair, for the peer.
    pub(crate) fn queue_pairs(&self) -> Vec<(Vec<u8>, u32)> {
        let address = |seat: &Seat| {
            let bytes = seat.port.with_queue_pair(|it| it.local_address().as_bytes().to_vec());
            (bytes.unwrap_or_default(), Port::RECEIVES)
        };
        self.ports.iter().map(address).collect()
    }

    /// Where the peer writes its words.
    pub(crate) fn words(&self) -> RemotePlace {
        self.words.place()
    }

    /// The device's name.
    pub(crate) fn device(&self) -> &str {
        &self.context.attributes().name
    }

    /// Whether this end is told of what was written by memory alone.
    pub(crate) fn places_in_order(&self) -> bool {
        let in_order = |seat: &Seat| seat.port.with_queue_pair(|it| it.places_in_order()).unwrap_or(false);
        self.settings.notification.is_none_or(|wanted| wanted == Notification::Word)
            && self.ports.iter().all(in_order)
    }

    /// Whether the device has immediate data.
    pub(crate) fn immediate(&self) -> bool {
        let wanted = self.settings.notification;
        wanted != Some(Notification::Message) && self.context.attributes().immediate
    }

    /// Connects to the peer's end. Talks to the peer's device, so it may block for as long as
    /// [`QueuePair::to_rtr`](tonic_rdma_verbs::QueuePair::to_rtr) may.
    pub(crate) fn connect(
        self,
        id: LinkId,
        peer: &PeerEnd,
        exchange: Exchange,
    ) -> Result<Arc<Link>, ChannelError> {
        let notification = self.agree(peer)?;
        if peer.queue_pairs.len() != self.ports.len() {
            let (ours, theirs) = (self.ports.len(), peer.queue_pairs.len());
            return Err(ChannelError::local(format!("{theirs} queue pairs were offered for {ours}")));
        }
        let peer_words =
            PeerWords::new(peer.words).ok_or_else(|| ChannelError::local("the peer's words are too few"))?;
        for (seat, (address, _)) in self.ports.iter().zip(&peer.queue_pairs) {
            let path = self.settings.config.path();
            let connected = seat.port.with_queue_pair(|queue_pair| {
                queue_pair.to_rtr(address, path)?;
                queue_pair.to_rts(path)
            });
            connected.transpose().map_err(ChannelError::local)?;
        }
        let attributes = self.context.attributes();
        let anchors =
            (!attributes.locks_memory).then(|| Mutex::new(KeptRegistrations::new(Arc::clone(&self.domain))));
        let link = Arc::new(Link {
            id,
            peer: Arc::clone(&peer.name),
            provider: attributes.provider,
            device: attributes.name.as_str().into(),
            notification,
            ports: self.ports,
            domain: self.domain,
            words: self.words,
            peer_words,
            ends: Mutex::default(),
            fault: OnceLock::new(),
            failed: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            landing: self.landing,
            kept: Mutex::default(),
            anchors,
            exchange,
        });
        link.exchange.begin(&link);
        for (port, (_, receives)) in link.ports().zip(&peer.queue_pairs) {
            port.belong(&link, *receives);
        }
        Ok(link)
    }

    /// How arrivals are told on this link.
    fn agree(&self, peer: &PeerEnd) -> Result<Notification, ChannelError> {
        let wanted = self.settings.notification;
        let found = if self.places_in_order() && peer.places_in_order {
            Notification::Word
        } else if self.immediate() && peer.immediate {
            Notification::Immediate
        } else {
            Notification::Message
        };
        match wanted {
            Some(Notification::Word) if found != Notification::Word => Err(ChannelError::local(format!(
                "notification by word was demanded, but {} or the peer's device does not place in order",
                self.device()
            ))),
            Some(Notification::Immediate) if found != Notification::Immediate => {
                Err(ChannelError::local(format!(
                    "notification by immediate data was demanded, but {} or the peer's device has none",
                    self.device()
                )))
            }
            _ => Ok(found),
        }
    }
}
