//! The making of a link: first the queue pairs here, then their connection to those of the peer.

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, OnceLock};

use tokio::sync::watch;

use crate::device::settings::Settings;
use crate::error::ChannelError;
use crate::exchange::Exchange;
use crate::link::notification::Notification;
use crate::link::polled_port::PolledPort;
use crate::link::port::Port;
use crate::link::token::Token;
use crate::link::words::{PeerWords, Words};
use crate::link::{Link, LinkId};
use crate::memory::landing::Landing;
use tonic_rdma::internal::{Provider, Reactor};
use tonic_rdma_verbs::internal::{InFlight, LocalRegistrations, RemotePlace, TransferLimits};
use tonic_rdma_verbs::memory::{Budget, Pool, PoolSettings};
use tonic_rdma_verbs::{Access, Context, ProtectionDomain, QueuePairAddress, QueuePairCapacity};

/// Queue pairs and their memory, not connected yet.
#[derive(Debug)]
pub(crate) struct Prepared {
    context: Arc<dyn Context>,
    domain: Arc<dyn ProtectionDomain>,
    words: Words,
    ports: Vec<PolledPort>,
    settings: Settings,
    landing: Arc<Landing>,
}

/// The end of the peer, as the peer describes it.
#[derive(Clone, Debug)]
pub(crate) struct PeerEnd {
    pub(crate) name: Arc<str>,
    /// The address of each queue pair, and the number of its receives.
    pub(crate) queue_pairs: Vec<(QueuePairAddress, u32)>,
    pub(crate) words: RemotePlace,
    pub(crate) places_in_order: bool,
    pub(crate) immediate: bool,
}

/// The operations that a queue pair allows the peer. The grants limit which memory the peer may touch.
const ACCESS: fn() -> Access = || Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;

impl Prepared {
    /// The number of inline bytes to ask for. A network card takes some hundred at most. The software device copies all bytes
    /// in any case.
    const INLINE: u32 = 4096 + 64;

    /// Creates queue pairs on the device that `provider` opens.
    pub(crate) fn new(
        provider: Provider,
        queue_pairs: u32,
        settings: &Settings,
        budget: &Arc<Budget>,
        landing: &Arc<Landing>,
    ) -> Result<Self, ChannelError> {
        let config = &settings.config;
        let context = provider.open(config).map_err(ChannelError::local)?;
        let attributes = context.attributes().clone();
        let queues = config.clone().completion_queues(settings.completion_queues as usize);
        let reactor = Reactor::current(&context, &queues).map_err(ChannelError::local)?;
        let domain = context.alloc_protection_domain().map_err(ChannelError::local)?;
        let pool_settings = PoolSettings { access: Access::LOCAL_WRITE, ..PoolSettings::default() };
        let pool = Pool::new(Arc::clone(&domain), pool_settings, Arc::clone(budget));
        let memory = landing.allocate(Words::LENGTH)?.share();
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
            message: attributes.max_message_size.min(settings.max_request_bytes),
            window: settings.max_outstanding_bytes,
        };
        let port = |index: u32| {
            let queue = Arc::clone(reactor.assign());
            let completions = queue.completion_queue();
            let queue_pair =
                domain.create_queue_pair(completions, completions, &capacity).map_err(ChannelError::local)?;
            queue_pair.to_init(ACCESS()).map_err(ChannelError::local)?;
            let work = queue_pair.peer_work();
            let registrations = LocalRegistrations::new(Arc::clone(&domain), Arc::clone(budget));
            let flights: InFlight<Token> = InFlight::new(queue_pair, registrations, limits);
            let places = capacity.send_requests + capacity.receive_requests;
            let made = queue.add(places, |key| Port::new(flights, index, key, pool.clone()).map(Arc::new));
            let (key, port) = made.map_err(ChannelError::local)??;
            let pace = reactor.pace_of_callers().map(Mutex::new);
            let looks = AtomicU32::new(0);
            Ok(PolledPort { port, queue, work, looks, key, pace, reactor: Arc::clone(&reactor) })
        };
        let ports = (0..queue_pairs).map(port).collect::<Result<Vec<_>, ChannelError>>()?;
        let (settings, landing) = (settings.clone(), Arc::clone(landing));
        Ok(Self { context, domain, words, ports, settings, landing })
    }

    /// Returns the address of each queue pair, and the number of its receives, for the peer.
    pub(crate) fn queue_pairs(&self) -> Vec<(Vec<u8>, u32)> {
        let address = |polled: &PolledPort| {
            let bytes = polled.port.with_queue_pair(|it| it.local_address().as_bytes().to_vec());
            (bytes.unwrap_or_default(), Port::RECEIVES)
        };
        self.ports.iter().map(address).collect()
    }

    /// Returns the reactor of each queue pair.
    pub(crate) fn reactors(&self) -> impl Iterator<Item = &Arc<Reactor>> {
        self.ports.iter().map(|polled| &polled.reactor)
    }

    /// Returns the place that the peer writes its words to.
    pub(crate) fn words(&self) -> RemotePlace {
        self.words.place()
    }

    /// Returns the name of the device.
    pub(crate) fn device(&self) -> &str {
        &self.context.attributes().name
    }

    /// Returns whether this end can learn of writes from memory alone.
    pub(crate) fn places_in_order(&self) -> bool {
        let in_order =
            |polled: &PolledPort| polled.port.with_queue_pair(|it| it.places_in_order()).unwrap_or(false);
        self.settings.notification.is_none_or(|wanted| wanted == Notification::Word)
            && self.ports.iter().all(in_order)
    }

    /// Returns whether the device has immediate data.
    pub(crate) fn immediate(&self) -> bool {
        let wanted = self.settings.notification;
        wanted != Some(Notification::Message) && self.context.attributes().immediate
    }

    /// Connects to the end of the peer. This may block, as [`QueuePair::to_rtr`](tonic_rdma_verbs::QueuePair::to_rtr) does,
    /// because it needs the peer's device.
    pub(crate) fn connect(
        self,
        id: LinkId,
        peer: &PeerEnd,
        rendezvous: Exchange,
    ) -> Result<Arc<Link>, ChannelError> {
        let notification = self.agree(peer)?;
        if peer.queue_pairs.len() != self.ports.len() {
            let (ours, theirs) = (self.ports.len(), peer.queue_pairs.len());
            return Err(ChannelError::local(format!("{theirs} queue pairs were offered for {ours}")));
        }
        let peer_words =
            PeerWords::new(peer.words).ok_or_else(|| ChannelError::local("the peer's words are too few"))?;
        for (polled, (address, _)) in self.ports.iter().zip(&peer.queue_pairs) {
            let path = self.settings.config.path();
            let connected = polled.port.with_queue_pair(|queue_pair| {
                queue_pair.to_rtr(address, path)?;
                queue_pair.to_rts(path)
            });
            connected.transpose().map_err(ChannelError::local)?;
        }
        let attributes = self.context.attributes();
        let announces = |polled: &PolledPort| polled.port.with_queue_pair(|it| it.announces_writes());
        let announces_writes = self.ports.iter().all(|polled| announces(polled).unwrap_or(false));
        let link = Arc::new(Link {
            id,
            peer: Arc::clone(&peer.name),
            provider: attributes.provider,
            device: attributes.name.as_str().into(),
            notification,
            announces_writes,
            ports: self.ports,
            domain: self.domain,
            words: self.words,
            peer_words,
            pairs: Mutex::default(),
            fault: OnceLock::new(),
            failed: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            landing: self.landing,
            kept: Mutex::default(),
            rendezvous,
        });
        link.rendezvous.begin(&link);
        for (port, (_, receives)) in link.ports().zip(&peer.queue_pairs) {
            port.belong(Arc::downgrade(&link), *receives);
        }
        Ok(link)
    }

    /// Returns how the ends of this link learn of arrivals.
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
