//! One side of a message connection, with a handler that keeps what arrives and offers content.

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::endpoint::config::Config;
use crate::endpoint::messages::{
    Kept, LandedContent, MessageEndpoint, MessageHandler, MessageSettings, Negotiated, ReadRefused,
    ReadSegment, Sender, Wire,
};
use crate::endpoint::negotiate::{Dialer, Listener};
use crate::endpoint::{ConnectionFault, Deferred};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// Time after which a test has hung.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// One end: its endpoint, whose handler is a [`Keeper`].
#[derive(Debug)]
pub(super) struct Side {
    pub(super) endpoint: MessageEndpoint,
    /// Tells that the handler has changed.
    pub(super) changed: Arc<Notify>,
}

/// A handler that keeps what arrives.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    changed: Arc<Notify>,
    after: Deferred,
    /// Messages to send.
    queue: VecDeque<Vec<u8>>,
    /// Content to offer.
    offers: VecDeque<Offer>,
    /// Memory that the peer reads, by the number of the offer.
    offered: HashMap<u64, Vec<Kept>>,
    /// Fetches to start.
    wanted: VecDeque<Wanted>,
    /// Fetches to cancel.
    cancelled: Vec<u64>,
    /// Offers are not taken.
    pub(super) holds_offers: bool,
    pub(super) messages: Vec<Bytes>,
    pub(super) landed: HashMap<u64, Option<Bytes>>,
    pub(super) stalls: usize,
    /// How often there was no memory for an offer.
    pub(super) refused: usize,
    pub(super) finished: bool,
    pub(super) fault: Option<String>,
}

/// Content to offer: some bytes first that go in the message, and the rest, copied or in place.
#[derive(Debug)]
struct Offer {
    id: u64,
    first: Vec<u8>,
    rest: Bytes,
    aligned_at: u32,
}

#[derive(Debug)]
struct Wanted {
    id: u64,
    first: Bytes,
    parts: Vec<(RemoteSegment, u64)>,
    aligned_at: u32,
}

const PLAIN: u8 = 0;
const OFFER: u8 = 1;
const TAKEN: u8 = 2;
/// The handler panics.
const PANIC: u8 = 3;
/// Longest block of copied content.
const BLOCK: usize = 1 << 20;

impl MessageHandler for Keeper {
    fn receive(&mut self, mut message: Bytes) -> Result<bool, ConnectionFault> {
        assert_ne!(message[0], PANIC);
        match message.get_u8() {
            PLAIN => self.messages.push(message),
            TAKEN => {
                self.offered.remove(&message.get_u64_le());
            }
            _ => {
                let (id, aligned_at, count) =
                    (message.get_u64_le(), message.get_u32_le(), message.get_u32_le());
                let parts = (0..count).map(|_| {
                    let (address, rkey) = (message.get_u64_le(), Rkey(message.get_u32_le()));
                    (RemoteSegment { address, rkey }, message.get_u64_le())
                });
                let parts = parts.collect();
                self.wanted.push_back(Wanted { id, first: message, parts, aligned_at });
            }
        }
        self.changed.notify_one();
        Ok(true)
    }

    fn landed(&mut self, fetch: u64, content: Option<LandedContent>) {
        self.landed.insert(fetch, content.map(|content| content.bytes));
        self.queue.push_back([&[TAKEN][..], &fetch.to_le_bytes()].concat());
        self.changed.notify_one();
    }

    fn transmit(&mut self, sender: &mut Sender<'_>) -> Result<(), ConnectionFault> {
        self.cancelled.drain(..).for_each(|id| sender.cancel_read(id));
        while !self.holds_offers
            && let Some(wanted) = self.wanted.front()
        {
            let first = std::iter::once(ReadSegment::Inline(&wanted.first));
            let rest = wanted.parts.iter().map(|&(from, length)| ReadSegment::Remote { from, length });
            let segments: Vec<_> = first.chain(rest).collect();
            match sender.read(wanted.id, &segments, wanted.aligned_at as usize, true) {
                Ok(()) => {}
                Err(ReadRefused::Later) => {
                    self.stalls += 1;
                    break;
                }
                Err(ReadRefused::Never(reason)) => panic!("{reason}"),
            }
            self.wanted.pop_front();
        }
        while sender.room() > 0
            && let Some(message) = self.queue.pop_front()
        {
            // In two slices, as a session sends frames.
            let (head, body) = message.split_at(1);
            sender.send(&[IoSlice::new(head), IoSlice::new(body)])?;
        }
        while sender.room() > 0
            && let Some(offer) = self.offers.pop_front()
        {
            let Some((parts, sources)) = sources(sender, &offer.rest) else {
                self.offers.push_front(offer);
                self.refused += 1;
                break;
            };
            let mut message = vec![OFFER];
            message.put_u64_le(offer.id);
            message.put_u32_le(offer.aligned_at);
            message.put_u32_le(parts.len() as u32);
            for (from, length) in parts {
                message.put_u64_le(from.address);
                message.put_u32_le(from.rkey.0);
                message.put_u64_le(length);
            }
            message.extend_from_slice(&offer.first);
            self.offered.insert(offer.id, sources);
            sender.send(&[IoSlice::new(&message)])?;
        }
        Ok(())
    }

    fn peer_finished(&mut self) {
        self.finished = true;
        self.changed.notify_one();
    }

    fn ended(&mut self, fault: &ConnectionFault) {
        let before = self.fault.replace(fault.to_string());
        assert_eq!(before, None, "the connection ended twice");
        self.changed.notify_one();
    }

    fn after(&mut self) -> &mut Deferred {
        &mut self.after
    }
}

/// Offers `content` from where it lies, or copied into blocks. `None` if there is no memory now.
#[expect(clippy::type_complexity, reason = "used once")]
fn sources(sender: &mut Sender<'_>, content: &Bytes) -> Option<(Vec<(RemoteSegment, u64)>, Vec<Kept>)> {
    if let Some((from, kept)) = sender.expose(content) {
        return Some((vec![(from, content.len() as u64)], vec![kept]));
    }
    let (mut parts, mut sources) = (Vec::new(), Vec::new());
    for chunk in content.chunks(BLOCK) {
        let (from, kept) = sender.copy(chunk)?;
        parts.push((from, chunk.len() as u64));
        sources.push(kept);
    }
    Some((parts, sources))
}

impl Side {
    fn new(endpoint: MessageEndpoint, settings: &MessageSettings) -> Self {
        let handler = Keeper::default();
        let changed = Arc::clone(&handler.changed);
        endpoint.start(handler, settings);
        Self { endpoint, changed }
    }

    /// Queues a message without sending it.
    pub(super) fn queue(&self, message: &[u8]) {
        self.with(|it| it.queue.push_back([&[PLAIN], message].concat()));
    }

    /// Sends a message whose handler panics.
    pub(super) fn send_panic(&self) {
        self.with(|it| it.queue.push_back(vec![PANIC]));
        self.endpoint.drive();
    }

    /// Sends a message.
    pub(super) fn send(&self, message: &[u8]) {
        self.queue(message);
        self.endpoint.drive();
    }

    /// Offers `first`, in the message, and `rest`, to be fetched.
    pub(super) fn offer(&self, id: u64, first: &[u8], rest: Bytes, aligned_at: u32) {
        let offer = Offer { id, first: first.to_vec(), rest, aligned_at };
        self.with(|it| it.offers.push_back(offer));
        self.endpoint.drive();
    }

    /// Cancels a fetch.
    pub(super) fn cancel(&self, id: u64) {
        self.with(|it| it.cancelled.push(id));
        self.endpoint.drive();
    }

    /// Returns the memory that is offered and not taken.
    pub(super) fn offered(&self) -> usize {
        self.with(|it| it.offered.len() + it.offers.len())
    }

    /// Frees the memory of an offer, although the peer has not taken it. Nothing learns of that.
    pub(super) fn free_offer(&self, id: u64) {
        let freed = self.with(|it| it.offered.remove(&id));
        assert!(freed.is_some(), "offer {id} has memory");
    }

    /// Returns how many offers wait for memory.
    pub(super) fn waiting_offers(&self) -> usize {
        self.with(|it| it.offers.len())
    }

    /// Calls `check` with what has arrived and what is offered, which it may change.
    pub(super) fn with<T>(&self, check: impl FnOnce(&mut Keeper) -> T) -> T {
        self.endpoint.update(|keeper| (check(keeper), false))
    }

    /// Waits until `check` returns true.
    pub(super) async fn until(&self, what: &str, mut check: impl FnMut(&mut Keeper) -> bool) {
        let wait = async {
            loop {
                let changed = self.changed.notified();
                if self.with(&mut check) {
                    return;
                }
                // Some of what tests check makes no notice.
                let _ = tokio::time::timeout(Duration::from_millis(2), changed).await;
            }
        };
        if tokio::time::timeout(TIMEOUT, wait).await.is_err() {
            panic!(
                "waited in vain until {what}: {:?}",
                self.with(|inner| format!("{inner:?}").chars().take(2000).collect::<String>())
            );
        }
    }
}

/// The settings of most tests.
pub(super) fn settings() -> MessageSettings {
    MessageSettings { landing_budget: 256 << 20, expose: true }
}

/// Connects two sides within this process.
pub(super) async fn pair(config: &Config, settings: &MessageSettings) -> (Side, Side) {
    let (client, server) = endpoints(config).await;
    (Side::new(client, settings), Side::new(server, settings))
}

/// Returns the default settings. Each side waits for the other's part of the negotiation for as long as a
/// busy machine may need.
pub(super) fn patient() -> Config {
    Config::default().handshake_timeout(TIMEOUT)
}

/// Connects two sides without handlers.
pub(super) async fn endpoints(config: &Config) -> (MessageEndpoint, MessageEndpoint) {
    let config = config.clone().handshake_timeout(TIMEOUT);
    let mut listener =
        Listener::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), config.clone()).unwrap();
    listener.take_native_calls(true);
    let port = listener.local_addr().port();
    let dialer = Dialer::new(config);
    let (client, server) =
        tokio::join!(dialer.dial_for_calls("127.0.0.1", port, None), listener.next_negotiated());
    match (client.unwrap(), server.unwrap()) {
        (Negotiated::Messages(client), Negotiated::Messages(server)) => (client, server),
        other => panic!("{other:?}"),
    }
}

/// Makes a side of an endpoint.
pub(super) fn side(endpoint: MessageEndpoint) -> Side {
    Side::new(endpoint, &settings())
}

/// Returns `length` bytes that are different at each offset and for each seed.
pub(super) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let word = |index: u64| (index ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..length.div_ceil(8) as u64).flat_map(word).take(length).collect()
}
