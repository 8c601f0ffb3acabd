//! The tensors that this device offers by name and step.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::Outbox;
use crate::device::settings::Settings;
use crate::error::ChannelError;
use crate::link::Link;
use crate::link::token::Token;
use crate::memory::landing::Landing;
use crate::memory::payload::Payload;
use crate::rendezvous::{
    Failure, Held, OfferedTensor, PeerId, Provider, ProviderAction, ProviderSettings, checksum,
};
use crate::types::Tensor;
use crate::wire::tensor_frame::{RequestId, Sink, TensorRequest};
use tonic_rdma_verbs::internal::{
    CopyRange, CopyRanges, LocalMemory, RemotePlace, Transfer, TransferKind, lock,
};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// The argument of [`RdmaDevice::put`](crate::RdmaDevice::put): a tensor, or the reason why there is none.
///
/// ```
/// use tonic::Status;
/// use tonic_rdma_tensor::{Dtype, Offer, Shape, Tensor, TensorSpec};
///
/// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
/// let computed = Offer::Tensor(Tensor::copy_from(spec, &[1, 2, 3, 4])?);
/// let not_taken = Offer::Dead;
/// let failed = Offer::Failed(Status::internal("the loss is not a number"));
/// # drop((computed, not_taken, failed));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, and moved once")]
pub enum Offer {
    /// A tensor. The device sends it from registered memory ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)) without a
    /// copy. It copies a tensor in other memory, and serialises a tensor of strings or one that is not contiguous.
    Tensor(Tensor),
    /// The tensor is dead: the branch of the graph that would have computed it was not taken.
    Dead,
    /// The tensor could not be computed.
    Failed(tonic::Status),
}

/// The offers of a device, and the links to the peers that may ask for them.
pub(crate) struct Offers {
    this: Weak<Self>,
    provider: Mutex<Provider<Payload>>,
    outbox: Outbox<ProviderAction<Payload>>,
    links: Mutex<HashMap<PeerId, Weak<Link>>>,
    next_peer: AtomicU64,
    landing: Arc<Landing>,
}

impl Offers {
    /// Interval between two checks of the deadlines.
    const TICK: Duration = Duration::from_millis(250);

    /// Makes an empty collection, and spawns the task that checks the deadlines. It needs a tokio runtime.
    pub(crate) fn new(settings: &Settings, landing: &Arc<Landing>) -> Arc<Self> {
        let timeout = Some(settings.rendezvous_timeout);
        let provider = Provider::new(ProviderSettings {
            request_timeout: timeout,
            offer_timeout: timeout,
            ..ProviderSettings::default()
        });
        let offers = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            provider: Mutex::new(provider),
            outbox: Outbox::new(),
            links: Mutex::default(),
            next_peer: AtomicU64::new(0),
            landing: Arc::clone(landing),
        });
        tokio::spawn(check_deadlines(Arc::downgrade(&offers), settings.rendezvous_timeout));
        offers
    }

    pub(crate) fn new_peer(&self) -> PeerId {
        PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn add_peer(&self, peer: PeerId, link: &Arc<Link>) {
        lock(&self.links).insert(peer, Arc::downgrade(link));
    }

    pub(crate) fn remove_peer(&self, peer: PeerId) {
        lock(&self.links).remove(&peer);
        self.with(|provider| provider.peer_gone(peer, Instant::now()));
    }

    pub(crate) fn handle_request(&self, peer: PeerId, request: &TensorRequest<'_>) {
        self.with(|provider| provider.handle_request(peer, request, Instant::now()));
    }

    pub(crate) fn handle_cancel(&self, peer: PeerId, request_id: RequestId) {
        self.with(|provider| provider.handle_cancel(peer, request_id, Instant::now()));
    }

    pub(crate) fn put(&self, name: &str, step: u64, offer: Offer, readers: u32) -> Result<(), ChannelError> {
        let offer = match offer {
            Offer::Tensor(tensor) => {
                let payload = Payload::of(&tensor)?;
                let metadata = payload.metadata;
                OfferedTensor::Tensor(payload, metadata)
            }
            Offer::Dead => OfferedTensor::Dead,
            Offer::Failed(status) => OfferedTensor::Failed(Failure::new(status.code(), status.message())),
        };
        let mut provider = lock(&self.provider);
        let actions = provider.offer(name, step, offer, readers, Instant::now());
        self.outbox.add(actions.map_err(ChannelError::local)?);
        drop(provider);
        self.run();
        Ok(())
    }

    pub(crate) fn withdraw(&self, name: &str, step: u64) -> Option<u32> {
        lock(&self.provider).withdraw(name, step)
    }

    pub(crate) fn held(&self) -> Held {
        lock(&self.provider).held()
    }

    fn with(&self, change: impl FnOnce(&mut Provider<Payload>) -> Vec<ProviderAction<Payload>>) {
        let mut provider = lock(&self.provider);
        self.outbox.add(change(&mut provider));
        drop(provider);
        self.run();
    }

    fn run(&self) {
        self.outbox.run(|action| match action {
            ProviderAction::Send { peer, message } => {
                if let Some(link) = self.link(peer) {
                    // If the send fails, the link ends, and calls `remove_peer`.
                    let _ = link.port(0).send_frame(&message.frame());
                }
            }
            ProviderAction::Write { peer, request_id, tensor, sink, checksum_wanted } => {
                let checksum = checksum_wanted.then(|| checksum(tensor.as_slice()));
                if let Err(error) = self.write(peer, request_id, &tensor, &sink, checksum) {
                    let why = error.to_string();
                    let now = Instant::now();
                    let mut provider = lock(&self.provider);
                    self.outbox.add(provider.write_failed(peer, request_id, &why, now));
                }
            }
            ProviderAction::Expired { name, step, readers } => {
                tonic_rdma_verbs::internal::throttled!(
                    warn,
                    name = &*name,
                    step,
                    readers,
                    "a tensor was not asked for in time"
                );
            }
        });
    }

    /// Writes a tensor into the requester's sink.
    fn write(
        &self,
        peer: PeerId,
        request_id: RequestId,
        tensor: &Payload,
        sink: &Sink,
        checksum: Option<u64>,
    ) -> Result<(), ChannelError> {
        let Some(link) = self.link(peer) else { return Ok(()) };
        let (local, offset) = tensor.local(&self.landing)?;
        let length = tensor.bytes();
        let start = RemoteSegment { address: sink.address, rkey: Rkey(sink.rkey) };
        let place = RemotePlace { start, length: sink.length };
        let blocks = CopyRanges::One(CopyRange { local: offset, remote: 0, length });
        let (this, landing) = (self.this.clone(), Arc::clone(&self.landing));
        let token = Token::call(move |outcome| {
            if let LocalMemory::Region(copy) = outcome.local {
                landing.put(copy);
            }
            // A failed write has ended the link, and its requests with it.
            if outcome.result.is_ok()
                && let Some(offers) = this.upgrade()
            {
                offers.with(|provider| provider.written(peer, request_id, checksum, Instant::now()));
            }
        });
        let transfer = Transfer::new(local, TransferKind::Write, blocks, place, token);
        let _ = link.port(0).submit(transfer, length, TransferKind::Write);
        Ok(())
    }

    fn link(&self, peer: PeerId) -> Option<Arc<Link>> {
        lock(&self.links).get(&peer).and_then(Weak::upgrade)
    }
}

/// Ends requests and offers whose deadline has passed, until the device is dropped. In intervals of `timeout`, the links free tensors that
/// no request has taken.
async fn check_deadlines(offers: Weak<Offers>, timeout: Duration) {
    let mut aged = Instant::now();
    loop {
        tokio::time::sleep(Offers::TICK).await;
        let Some(offers) = offers.upgrade() else { return };
        let now = Instant::now();
        if lock(&offers.provider).poll_timeout().is_some_and(|due| due <= now) {
            offers.with(|provider| provider.handle_timeout(now));
        }
        if now.saturating_duration_since(aged) >= timeout {
            aged = now;
            let links: Vec<_> = lock(&offers.links).values().filter_map(Weak::upgrade).collect();
            links.iter().for_each(Link::age_rendezvous);
        }
    }
}
