//! One side of a message connection, with a handler that keeps what arrives and offers content.

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::endpoint::config::Config;
use crate::endpoint::messages::{
    Exposed, FetchError, MessageEndpoint, MessageHandler, MessageSettings, Negotiated, ReadSegment, Sender,
};
use crate::endpoint::negotiate::{Dialer, Listener};
use crate::endpoint::{ConnectionFault, Deferred};
use tonic_rdma_verbs::memory::Block;
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// Time after which a test has hung.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// One end: its endpoint and its handler.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) endpoint: MessageEndpoint,
    pub(super) handler: Arc<Keeper>,
}

/// A handler that keeps what arrives.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    inner: Mutex<Inner>,
    changed: Notify,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    /// Messages to send.
    queue: VecDeque<Vec<u8>>,
    /// Content to offer.
    offers: VecDeque<Offer>,
    /// Memory that the peer reads, by the number of the offer.
    offered: HashMap<u64, Vec<Source>>,
    /// Fetches to start.
    wanted: VecDeque<Wanted>,
    /// Fetches to cancel.
    cancelled: Vec<u64>,
    /// Offers are not taken.
    pub(super) holds_offers: bool,
    pub(super) messages: Vec<Bytes>,
    pub(super) landed: HashMap<u64, Option<Bytes>>,
    pub(super) refusals: Vec<String>,
    pub(super) stalls: usize,
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
enum Source {
    Copied(#[expect(dead_code, reason = "held for its drop")] Block),
    InPlace(#[expect(dead_code, reason = "held for its drop")] Exposed),
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
    fn receive(&self, mut message: Bytes, _: &mut Deferred) -> Result<bool, ConnectionFault> {
        assert_ne!(message[0], PANIC);
        let mut inner = self.inner.lock().unwrap();
        match message.get_u8() {
            PLAIN => inner.messages.push(message),
            TAKEN => {
                inner.offered.remove(&message.get_u64_le());
            }
            _ => {
                let (id, aligned_at, count) =
                    (message.get_u64_le(), message.get_u32_le(), message.get_u32_le());
                let parts = (0..count).map(|_| {
                    let (address, rkey) = (message.get_u64_le(), Rkey(message.get_u32_le()));
                    (RemoteSegment { address, rkey }, message.get_u64_le())
                });
                let parts = parts.collect();
                inner.wanted.push_back(Wanted { id, first: message, parts, aligned_at });
            }
        }
        self.changed.notify_one();
        Ok(true)
    }

    fn landed(&self, fetch: u64, memory: Option<Bytes>, _: &mut Deferred) -> Result<(), ConnectionFault> {
        let mut inner = self.inner.lock().unwrap();
        inner.landed.insert(fetch, memory);
        inner.queue.push_back([&[TAKEN][..], &fetch.to_le_bytes()].concat());
        self.changed.notify_one();
        Ok(())
    }

    fn transmit(&self, sender: &mut Sender<'_>, _: &mut Deferred) -> Result<(), ConnectionFault> {
        let mut inner = self.inner.lock().unwrap();
        let inner = &mut *inner;
        inner.cancelled.drain(..).for_each(|id| sender.cancel_fetch(id));
        while !inner.holds_offers
            && let Some(wanted) = inner.wanted.front()
        {
            let first = std::iter::once(ReadSegment::Inline(&wanted.first));
            let rest = wanted.parts.iter().map(|&(from, length)| ReadSegment::Remote { from, length });
            let segments: Vec<_> = first.chain(rest).collect();
            match sender.fetch(wanted.id, &segments, wanted.aligned_at as usize) {
                Ok(()) => {}
                Err(FetchError::NoMemory(_)) => {
                    inner.stalls += 1;
                    break;
                }
                Err(error @ FetchError::TooLong { .. }) => inner.refusals.push(error.to_string()),
            }
            inner.wanted.pop_front();
        }
        while sender.room() > 0
            && let Some(message) = inner.queue.pop_front()
        {
            // In two slices, as a session sends frames.
            let (head, body) = message.split_at(1);
            sender.send(&[IoSlice::new(head), IoSlice::new(body)])?;
        }
        while sender.room() > 0
            && let Some(offer) = inner.offers.pop_front()
        {
            let Some((parts, sources)) = sources(sender, &offer.rest) else {
                inner.offers.push_front(offer);
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
            inner.offered.insert(offer.id, sources);
            sender.send(&[IoSlice::new(&message)])?;
        }
        Ok(())
    }

    fn peer_finished(&self, _: &mut Deferred) {
        self.inner.lock().unwrap().finished = true;
        self.changed.notify_one();
    }

    fn ended(&self, fault: &ConnectionFault, _: &mut Deferred) {
        let before = self.inner.lock().unwrap().fault.replace(fault.to_string());
        assert_eq!(before, None, "the connection ended twice");
        self.changed.notify_one();
    }
}

/// Offers `content` from where it lies, or copied into blocks. `None` if there is no memory now.
#[expect(clippy::type_complexity, reason = "used once")]
fn sources(sender: &mut Sender<'_>, content: &Bytes) -> Option<(Vec<(RemoteSegment, u64)>, Vec<Source>)> {
    if let Some(exposed) = sender.expose(content) {
        return Some((vec![(exposed.remote, content.len() as u64)], vec![Source::InPlace(exposed)]));
    }
    let (mut parts, mut sources) = (Vec::new(), Vec::new());
    for chunk in content.chunks(BLOCK) {
        let mut block = sender.lease(chunk.len()).ok()?;
        block.copy_in(0, chunk).unwrap();
        parts.push((block.remote(0), chunk.len() as u64));
        sources.push(Source::Copied(block));
    }
    Some((parts, sources))
}

impl Side {
    fn new(endpoint: MessageEndpoint, settings: &MessageSettings) -> Self {
        let handler = Arc::<Keeper>::default();
        endpoint.start(Arc::clone(&handler) as Arc<dyn MessageHandler>, settings.clone());
        Self { endpoint, handler }
    }

    /// Queues a message without sending it.
    pub(super) fn queue(&self, message: &[u8]) {
        self.handler.inner.lock().unwrap().queue.push_back([&[PLAIN], message].concat());
    }

    /// Sends a message whose handler panics.
    pub(super) fn send_panic(&self) {
        self.handler.inner.lock().unwrap().queue.push_back(vec![PANIC]);
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
        self.handler.inner.lock().unwrap().offers.push_back(offer);
        self.endpoint.drive();
    }

    /// Cancels a fetch.
    pub(super) fn cancel(&self, id: u64) {
        self.handler.inner.lock().unwrap().cancelled.push(id);
        self.endpoint.drive();
    }

    /// Returns the memory that is offered and not taken.
    pub(super) fn offered(&self) -> usize {
        let inner = self.handler.inner.lock().unwrap();
        inner.offered.len() + inner.offers.len()
    }

    /// Frees the memory of an offer, although the peer has not taken it. Nothing learns of that.
    pub(super) fn free_offer(&self, id: u64) {
        let freed = self.handler.inner.lock().unwrap().offered.remove(&id);
        assert!(freed.is_some(), "offer {id} has memory");
    }

    /// Returns how many offers wait for memory.
    pub(super) fn waiting_offers(&self) -> usize {
        self.handler.inner.lock().unwrap().offers.len()
    }

    /// Calls `check` with what has arrived and what is offered, which it may change.
    pub(super) fn with<T>(&self, check: impl FnOnce(&mut Inner) -> T) -> T {
        check(&mut self.handler.inner.lock().unwrap())
    }

    /// Waits until `check` returns true.
    pub(super) async fn until(&self, what: &str, mut check: impl FnMut(&mut Inner) -> bool) {
        let wait = async {
            loop {
                let changed = self.handler.changed.notified();
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
