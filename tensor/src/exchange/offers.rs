//! What this device offers by name and step.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::super::landing::Landing;
use super::super::link::Link;
use super::super::link::token::Token;
use super::super::payload::Payload;
use super::super::rendezvous::{
    Failure, Offer as Offered, PeerId, Provider, ProviderAction, ProviderSettings, checksum,
};
use super::super::types::Tensor;
use super::super::{ChannelError, RdmaDevice, Settings, lock};
use super::Outbox;
use crate::wire::tensor_frame::{Request, RequestId, Sink};
use tonic_rdma_verbs::internal::{CopyRange, CopyRanges, LocalMemory, RemotePlace, Transfer, TransferKind};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// What [`RdmaDevice::put`] offers under a name and step.
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
    /// A tensor. From registered memory ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)) it goes as it is; one that lies elsewhere
    /// is copied for the device, and one that is not contiguous, or has strings, is serialised.
    Tensor(Tensor),
    /// Dead: the branch of the graph that would have computed it was not taken.
    Dead,
    /// It could not be computed.
    Failed(tonic::Status),
}

impl RdmaDevice {
    /// Offers (`name`, `step`) to the first `readers` peers that ask for it, or have asked
    /// ([`Channel::request`](super::super::Channel::request)). It stays until they have it, or until
    /// [`Settings::rendezvous_timeout`] is over.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{Dtype, Offer, RdmaDevice, Shape, Tensor, TensorSpec};
    /// # let device = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
    /// let tensor = Tensor::copy_from(spec, &[1, 2, 3, 4])?;
    /// device.put("loss", 17, Offer::Tensor(tensor), 2)?; // two workers ask for it
    /// assert_eq!(device.held().bytes, 4);
    /// assert_eq!(device.withdraw("loss", 17), Some(2)); // neither has
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Name and step are on offer already, the limit on offers or their bytes is reached, or the name is empty or too long.
    pub fn put(&self, name: &str, step: u64, offer: Offer, readers: u32) -> Result<(), ChannelError> {
        let offered = match offer {
            Offer::Tensor(tensor) => {
                let payload = Payload::of(&tensor)?;
                let metadata = payload.metadata();
                Offered::Tensor(payload, metadata)
            }
            Offer::Dead => Offered::Dead,
            Offer::Failed(status) => Offered::Failed(Failure::new(status.code(), status.message())),
        };
        self.shared.offers.put(name, step, offered, readers)
    }

    /// Takes an offer back. Returns how many readers it still waited for, or `None` if it was not on offer. Readers that are
    /// being served still get it.
    pub fn withdraw(&self, name: &str, step: u64) -> Option<u32> {
        lock(&self.shared.offers.provider).withdraw(name, step)
    }

    /// Returns how many offers there are, how many bytes they have, and how many requests wait for one.
    pub fn held(&self) -> super::super::rendezvous::Held {
        lock(&self.shared.offers.provider).held()
    }
}

/// See the module's documentation.
pub(crate) struct Offers {
    me: Weak<Self>,
    provider: Mutex<Provider<Payload>>,
    outbox: Outbox<ProviderAction<Payload>>,
    links: Mutex<HashMap<PeerId, Weak<Link>>>,
    next_peer: AtomicU64,
    landing: Arc<Landing>,
}

impl Offers {
    /// How often it is looked what has waited for too long.
    const TICK: Duration = Duration::from_millis(250);

    /// Must be called within a runtime.
    pub(crate) fn new(settings: &Settings, landing: &Arc<Landing>) -> Arc<Self> {
        let timeout = Some(settings.rendezvous_timeout);
        let provider = Provider::new(ProviderSettings {
            request_timeout: timeout,
            offer_timeout: timeout,
            ..ProviderSettings::default()
        });
        let offers = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            provider: Mutex::new(provider),
            outbox: Outbox::new(),
            links: Mutex::default(),
            next_peer: AtomicU64::new(0),
            landing: Arc::clone(landing),
        });
        tokio::spawn(watch_the_clock(Arc::downgrade(&offers)));
        offers
    }

    pub(super) fn new_peer(&self) -> PeerId {
        PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn add_peer(&self, peer: PeerId, link: &Arc<Link>) {
        lock(&self.links).insert(peer, Arc::downgrade(link));
    }

    pub(super) fn remove_peer(&self, peer: PeerId) {
        lock(&self.links).remove(&peer);
        self.with(|provider| provider.peer_gone(peer, Instant::now()));
    }

    pub(super) fn handle_request(&self, peer: PeerId, request: &Request<'_>) {
        self.with(|provider| provider.handle_request(peer, request, Instant::now()));
    }

    pub(super) fn handle_cancel(&self, peer: PeerId, request_id: RequestId) {
        self.with(|provider| provider.handle_cancel(peer, request_id, Instant::now()));
    }

    fn put(&self, name: &str, step: u64, offer: Offered<Payload>, readers: u32) -> Result<(), ChannelError> {
        let mut provider = lock(&self.provider);
        let actions = provider.offer(name, step, offer, readers, Instant::now());
        self.outbox.add(actions.map_err(ChannelError::local)?);
        drop(provider);
        self.run();
        Ok(())
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
                    // If that fails the link does, which comes back as `remove_peer`.
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

    /// Writes a tensor into the sink of whoever asked for it.
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
        let (me, landing) = (self.me.clone(), Arc::clone(&self.landing));
        let token = Token::call(move |outcome| {
            if let LocalMemory::Region(copy) = outcome.local {
                landing.put(copy);
            }
            // What failed has ended the link, and its requests with it.
            if outcome.result.is_ok()
                && let Some(offers) = me.upgrade()
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

/// Ends what has waited for too long, for as long as there is a device.
async fn watch_the_clock(offers: Weak<Offers>) {
    loop {
        tokio::time::sleep(Offers::TICK).await;
        let Some(offers) = offers.upgrade() else { return };
        let now = Instant::now();
        if lock(&offers.provider).poll_timeout().is_some_and(|due| due <= now) {
            offers.with(|provider| provider.handle_timeout(now));
        }
    }
}

impl fmt::Debug for Offers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offers").finish_non_exhaustive()
    }
}
