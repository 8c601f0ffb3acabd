//! Drives the state machine of [named tensors](crate::named): the device's offers, each link's requests, and
//! the memory of both.
//!
//! The two state machines return their actions in order, under a lock. One thread at a time carries the
//! actions out, without the lock ([`Outbox`]), because an action may end a link, and the state machines then
//! have to learn of the end.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::device::settings::Settings;
use crate::error::TensorError;
use crate::link::Link;
use crate::link::port::Token;
use crate::memory::{Payload, RegionCache, freeze};
use crate::named::{
    Arrival, Failure, Followed, OfferCounts, OfferedTensor, PeerId, Provider, ProviderAction,
    ProviderSettings, Reader, RequestOutcome, Requester, RequesterAction, RequesterSettings, Violation,
    checksum, verify,
};
use crate::types::{Metadata, Tensor};
use crate::wire::tensor_frame::{Announcement, Frame, RequestId, TensorMemory};
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma_verbs::memory::SharedRegion;
use tonic_rdma_verbs::unstable::{Grant, RemoteRange, Revocation, Transfer, TransferKind, lock, wake_all};

/// The named tensors of a link: the peer's requests to this device, and this device's requests to the peer.
pub(crate) struct NamedTensors {
    peer: PeerId,
    offers: Arc<NamedProvider>,
    pub(crate) requests: Arc<NamedRequester>,
}

impl NamedTensors {
    pub(crate) fn new(offers: Arc<NamedProvider>, requests: Arc<NamedRequester>) -> Self {
        let peer = PeerId(offers.next_peer.fetch_add(1, Ordering::Relaxed));
        Self { peer, offers, requests }
    }

    /// Allows answers to the requests of the peer, from now on.
    pub(crate) fn begin(&self, link: &Arc<Link>) {
        lock(&self.offers.links).insert(self.peer, Arc::downgrade(link));
    }

    /// Takes a frame of the peer. Tasks to wake are added to `wakers`.
    ///
    /// # Errors
    /// The frame breaks the protocol.
    pub(crate) fn handle(
        &self,
        link: &Arc<Link>,
        frame: Frame<'_>,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), TensorError> {
        match frame {
            Frame::Request(request) => {
                // The link may have ended: a thread may still handle a frame of it then.
                self.offers.with(|provider| match lock(&self.offers.links).contains_key(&self.peer) {
                    true => provider.handle_request(self.peer, &request, Instant::now()),
                    false => Vec::new(),
                });
            }
            Frame::Cancel { request_id } => {
                self.offers.with(|provider| provider.handle_cancel((self.peer, request_id), Instant::now()));
            }
            frame => self.requests.handle(link, frame, wakers).map_err(|error| link.violation(error))?,
        }
        Ok(())
    }

    /// Takes the immediate data of the peer's write into a sink. Tasks to wake are added to `wakers`.
    ///
    /// # Errors
    /// No request with these low bits of its number waits for a tensor.
    pub(crate) fn handle_announced(
        &self,
        link: &Arc<Link>,
        number: u32,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), TensorError> {
        let handled = self.requests.change(link, wakers, |requester| requester.handle_announced(number));
        handled.map_err(|error| link.violation(error))
    }

    /// Ends all requests: the link has ended with `fault`, and its queue pairs are gone.
    pub(crate) fn link_ended(&self, fault: &TensorError) {
        lock(&self.offers.links).remove(&self.peer);
        self.offers.with(|provider| provider.peer_gone(self.peer, Instant::now()));
        self.requests.link_ended(fault);
    }
}

/// The argument of [`RdmaDevice::put`](crate::RdmaDevice::put): a tensor, or the reason why there is none.
///
/// ```
/// use tonic::Status;
/// use tonic_rdma_tensor::{Dtype, NamedOffer, Shape, Tensor, TensorSpec};
///
/// let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
/// let computed = NamedOffer::Tensor(Tensor::copy_from(spec, &[1, 2, 3, 4])?);
/// let not_taken = NamedOffer::Dead;
/// let failed = NamedOffer::Failed(Status::internal("the loss is not a number"));
/// # drop((computed, not_taken, failed));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, and moved once")]
pub enum NamedOffer {
    /// A tensor. The device sends it from registered memory
    /// ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool)) without a copy. It copies a tensor in other
    /// memory, and serialises a tensor of strings or one that is not contiguous.
    Tensor(Tensor),
    /// The tensor is dead: the branch of the graph that would have computed it was not taken.
    Dead,
    /// The tensor could not be computed.
    Failed(tonic::Status),
}

/// The offers of a device, and the links to the peers that may ask for them.
pub(crate) struct NamedProvider {
    this: Weak<Self>,
    provider: Mutex<Provider<Payload>>,
    outbox: Outbox<ProviderAction<Payload>>,
    links: Mutex<HashMap<PeerId, Weak<Link>>>,
    next_peer: AtomicU64,
    region_cache: Arc<RegionCache>,
}

impl NamedProvider {
    /// Interval between two checks of the deadlines.
    const TICK: Duration = Duration::from_millis(250);

    /// Makes a provider without offers, and spawns the task that checks the deadlines, so it needs a tokio
    /// runtime.
    pub(crate) fn new(settings: &Settings, region_cache: &Arc<RegionCache>) -> Arc<Self> {
        let timeout = Some(settings.named_tensor_timeout);
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
            region_cache: Arc::clone(region_cache),
        });
        tokio::spawn(check_deadlines(Arc::downgrade(&offers), settings.named_tensor_timeout));
        offers
    }

    pub(crate) fn put(
        &self,
        name: &str,
        step: u64,
        offer: NamedOffer,
        readers: u32,
    ) -> Result<(), TensorError> {
        let offer = match offer {
            NamedOffer::Tensor(tensor) => {
                let payload = Payload::of(&tensor)?;
                let metadata = payload.metadata;
                OfferedTensor::Tensor(payload, metadata)
            }
            NamedOffer::Dead => OfferedTensor::Dead,
            NamedOffer::Failed(status) => {
                OfferedTensor::Failed(Failure::new(status.code(), status.message()))
            }
        };
        let mut provider = lock(&self.provider);
        let actions = provider.offer(name, step, offer, readers, Instant::now());
        self.outbox.add(actions?);
        drop(provider);
        self.run();
        Ok(())
    }

    pub(crate) fn withdraw(&self, name: &str, step: u64) -> Option<u32> {
        lock(&self.provider).withdraw(name, step)
    }

    pub(crate) fn held(&self) -> OfferCounts {
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
            ProviderAction::Send { reader: (peer, request_id), frame } => {
                if let Some(link) = self.link(peer) {
                    // If the send fails, the link ends, and calls `NamedTensors::link_ended`.
                    let _ = send(&link, request_id, &frame);
                }
            }
            ProviderAction::Write { reader, tensor, sink, checksum_wanted } => {
                let checksum = checksum_wanted.then(|| checksum(tensor.as_slice()));
                if let Err(error) = self.write(reader, &tensor, &sink, checksum) {
                    let why = error.to_string();
                    let now = Instant::now();
                    let mut provider = lock(&self.provider);
                    self.outbox.add(provider.write_failed(reader, &why, now));
                }
            }
            ProviderAction::Expired { name, step, readers } => {
                tonic_rdma_verbs::unstable::throttled!(
                    warn,
                    name = &*name,
                    step,
                    readers,
                    "a tensor was not asked for in time"
                );
            }
        });
    }

    /// Writes a tensor into the requester's sink, and announces it.
    ///
    /// # Errors
    /// The write can't begin, and is not announced.
    fn write(
        &self,
        reader: Reader,
        tensor: &Payload,
        sink: &TensorMemory,
        checksum: Option<u64>,
    ) -> Result<(), TensorError> {
        let (peer, request_id) = reader;
        let Some(link) = self.link(peer) else { return Ok(()) };
        let (local, offset) = tensor.local(&self.region_cache)?;
        let length = tensor.metadata.bytes;
        let this = self.this.clone();
        let token = Token::call(move |outcome| {
            // A failed write has ended the link, and its requests with it.
            if outcome.result.is_ok()
                && let Some(offers) = this.upgrade()
            {
                offers.with(|provider| provider.written(reader, Instant::now()));
            }
        });
        let transfer = Transfer::of_range(local, offset, length, TransferKind::Write, sink.place, token);
        let port = link.port(link.port_of_request(request_id));
        let immediate = (link.announces_named && checksum.is_none()).then(|| Announcement::of(request_id));
        if !port.submit_announced(transfer, immediate)? {
            // If the send fails, the link ends, and calls `NamedTensors::link_ended`.
            let _ = port.send_frame(&Frame::Written { request_id, checksum });
        }
        Ok(())
    }

    fn link(&self, peer: PeerId) -> Option<Arc<Link>> {
        lock(&self.links).get(&peer).and_then(Weak::upgrade)
    }
}

/// Ends requests and offers whose deadline has passed, and frees memory that is idle, until the device is
/// dropped. Once in each `timeout` lets the links free tensors that no request has taken.
async fn check_deadlines(offers: Weak<NamedProvider>, timeout: Duration) {
    let mut aged = Instant::now();
    loop {
        tokio::time::sleep(NamedProvider::TICK).await;
        let Some(offers) = offers.upgrade() else { return };
        let now = Instant::now();
        offers.with(|provider| provider.handle_timeout(now));
        offers.region_cache.tick();
        if now.saturating_duration_since(aged) >= timeout {
            aged = now;
            let links: Vec<_> = lock(&offers.links).values().filter_map(Weak::upgrade).collect();
            links.iter().for_each(|link| link.named.requests.age_untaken(link));
        }
    }
}

/// The result of [`Channel::request`](crate::Channel::request).
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, and moved once")]
pub enum NamedReply {
    /// The tensor.
    Tensor(Tensor),
    /// The tensor is dead: the branch of the graph that would have computed it was not taken.
    Dead,
}

/// The future of [`Channel::request`](crate::Channel::request).
#[must_use = "dropping the future cancels the request"]
pub struct NamedRequest {
    link: Arc<Link>,
    requests: Arc<NamedRequester>,
    state: RequestState,
}

#[expect(clippy::large_enum_variant, reason = "one at a time, and moved once")]
enum RequestState {
    Ended(Option<TensorError>),
    Waiting(RequestId),
    /// The tensor is here, and the peer's right to write it is being taken away.
    Revoking(RequestId, Option<Arrival<SinkMemory>>),
}

/// The answer to a request, until its future takes it, and the task that waits for it.
#[derive(Default)]
struct PendingAnswer {
    result: Option<Result<RequestOutcome<SinkMemory>, TensorError>>,
    waker: Option<Waker>,
}

/// Memory that the peer may write until its right has ended.
#[derive(Debug)]
struct SinkMemory {
    grant: Option<Grant>,
    /// The end of the right, once it is being taken away.
    revocation: Revocation,
    memory: SharedRegion,
}

impl SinkMemory {
    /// Begins to take the right of the peer away.
    fn revoke(&mut self) {
        if let Some(grant) = self.grant.take() {
            self.revocation = grant.revoke();
        }
    }

    /// Takes the right of the peer away. Ready when the peer can't write any more.
    fn poll_revoked(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.revoke();
        Pin::new(&mut self.revocation).poll(context)
    }
}

/// The requests on one link.
pub(crate) struct NamedRequester {
    requester: Mutex<Requester<SinkMemory>>,
    outbox: Outbox<RequesterAction<SinkMemory>>,
    waiting: Mutex<HashMap<RequestId, PendingAnswer>>,
    region_cache: Arc<RegionCache>,
}

impl NamedRequester {
    /// Makes the requests on a link whose requests are spread over `queue_pairs` queue pairs.
    pub(crate) fn new(settings: &Settings, region_cache: &Arc<RegionCache>, queue_pairs: u64) -> Arc<Self> {
        let requester = Requester::new(RequesterSettings {
            max_tensor_bytes: settings.max_tensor_bytes,
            validate: settings.checksums,
            queue_pairs,
            ..RequesterSettings::default()
        });
        Arc::new(Self {
            requester: Mutex::new(requester),
            outbox: Outbox::new(),
            waiting: Mutex::default(),
            region_cache: Arc::clone(region_cache),
        })
    }

    pub(crate) fn request(self: &Arc<Self>, link: &Arc<Link>, name: &str, step: u64) -> NamedRequest {
        let request = |state| NamedRequest { link: Arc::clone(link), requests: Arc::clone(self), state };
        let refused = |error| request(RequestState::Ended(Some(error)));
        if let Some(fault) = link.fault() {
            return refused(fault.clone());
        }
        let mut requester = lock(&self.requester);
        let (id, action) = match requester.request(name, step) {
            Ok(begun) => begun,
            Err(error) => return refused(error),
        };
        lock(&self.waiting).insert(id, PendingAnswer::default());
        self.outbox.add([action]);
        drop(requester);
        self.run_and_wake(link);
        request(RequestState::Waiting(id))
    }

    pub(crate) fn handle(
        &self,
        link: &Arc<Link>,
        frame: Frame<'_>,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), Violation> {
        self.change(link, wakers, |requester| match frame {
            Frame::Metadata { request_id, metadata } => requester.handle_metadata(request_id, metadata),
            Frame::Written { request_id, checksum } => requester.handle_written(request_id, checksum),
            Frame::Status { request_id, code, text } => requester.handle_status(request_id, code, &text),
            Frame::Dead { request_id } => requester.handle_dead(request_id),
            _ => Ok(Vec::new()),
        })
    }

    fn change(
        &self,
        link: &Arc<Link>,
        wakers: &mut Vec<Waker>,
        change: impl FnOnce(&mut Requester<SinkMemory>) -> Followed<SinkMemory>,
    ) -> Result<(), Violation> {
        let mut requester = lock(&self.requester);
        self.outbox.add(change(&mut requester)?);
        drop(requester);
        self.run(link, wakers);
        Ok(())
    }

    /// Frees tensors that no request has taken for a while, see [`Requester::age_untaken`].
    pub(crate) fn age_untaken(&self, link: &Arc<Link>) {
        self.with(link, Requester::age_untaken);
    }

    fn with(
        &self,
        link: &Arc<Link>,
        change: impl FnOnce(&mut Requester<SinkMemory>) -> Vec<RequesterAction<SinkMemory>>,
    ) {
        let mut requester = lock(&self.requester);
        self.outbox.add(change(&mut requester));
        drop(requester);
        self.run_and_wake(link);
    }

    /// Frees all tensors that no request has taken.
    pub(crate) fn free_untaken(&self) {
        // In a statement of its own, so that the lock is free while grants are revoked.
        let untaken = lock(&self.requester).free_untaken();
        drop(untaken);
    }

    pub(crate) fn link_ended(&self, fault: &TensorError) {
        let mut requester = lock(&self.requester);
        let actions = requester.peer_gone(&fault.to_string());
        drop(requester);
        let mut wakers = Vec::new();
        for action in actions {
            match action {
                RequesterAction::Finished { request_id, .. } => {
                    self.finish(request_id, Err(fault.clone()), &mut wakers);
                }
                RequesterAction::Free(sink) => drop(sink),
                RequesterAction::Send(..) | RequesterAction::Allocate { .. } => {}
            }
        }
        wake_all(wakers);
    }

    /// Carries out the actions, also those that other threads have added, and wakes the tasks whose requests
    /// have ended. For callers that don't poll a queue.
    fn run_and_wake(&self, link: &Arc<Link>) {
        let mut wakers = Vec::new();
        self.run(link, &mut wakers);
        wake_all(wakers);
    }

    fn run(&self, link: &Arc<Link>, wakers: &mut Vec<Waker>) {
        self.outbox.run(|action| match action {
            RequesterAction::Send(request_id, frame) => {
                // If the send fails, the link ends, and calls `link_ended`.
                let _ = send(link, request_id, &frame);
            }
            RequesterAction::Allocate { request_id, metadata } => {
                let made = self.sink(link, metadata, link.port_of_request(request_id));
                let mut requester = lock(&self.requester);
                self.outbox.add(match made {
                    Ok((sink, place)) => requester.sink_ready(request_id, sink, place),
                    Err(error) => {
                        let failure = Failure::new(tonic::Code::ResourceExhausted, error.to_string());
                        requester.sink_failed(request_id, failure)
                    }
                });
            }
            RequesterAction::Free(sink) => drop(sink),
            RequesterAction::Finished { request_id, result } => self.finish(request_id, Ok(result), wakers),
        });
    }

    /// Makes a sink for a tensor, which the peer may write.
    fn sink(
        &self,
        link: &Link,
        metadata: WireMetadata,
        port: u32,
    ) -> Result<(SinkMemory, RemoteRange), TensorError> {
        Metadata::try_from(metadata)?;
        let (grant, memory) = link.grant_sink(metadata.bytes, port)?;
        let place = grant.range();
        Ok((SinkMemory { grant: Some(grant), revocation: Revocation::default(), memory }, place))
    }

    /// Makes the result for the program.
    fn result(
        &self,
        link: &Link,
        request_id: RequestId,
        answer: RequestOutcome<SinkMemory>,
    ) -> Result<NamedReply, TensorError> {
        match answer {
            RequestOutcome::Dead => Ok(NamedReply::Dead),
            RequestOutcome::Failed(failure) => {
                Err(TensorError::refused(&link.peer, failure.code, &failure.text))
            }
            RequestOutcome::Arrived(Arrival { metadata, sink, checksum, .. }) => {
                // The peer's right to write has ended, so the bytes do not change any more. Otherwise the right
                // would hold another reference to the memory.
                drop(sink.grant);
                let bytes = match sink.memory.try_into_region() {
                    Ok(region) => freeze(region, metadata.bytes),
                    // The peer keeps its right to write to this memory, so the program gets a copy.
                    Err(open) if open.stays_open() => self.region_cache.copy_out_of(&open, metadata.bytes)?,
                    Err(_) => return Err(TensorError::other("another reference to the sink is left")),
                };
                if let Some(expected) = checksum {
                    verify(request_id, &bytes, expected)?;
                }
                let metadata = Metadata::try_from(metadata)?;
                Tensor::deserialize(&metadata, bytes).map(NamedReply::Tensor)
            }
        }
    }

    fn finish(
        &self,
        id: RequestId,
        result: Result<RequestOutcome<SinkMemory>, TensorError>,
        wakers: &mut Vec<Waker>,
    ) {
        let mut waiting = lock(&self.waiting);
        if let Some(pending) = waiting.get_mut(&id) {
            pending.result = Some(result);
            wakers.extend(pending.waker.take());
            return;
        }
        drop(waiting);
        // The future was dropped meanwhile. The right ends now, so that the memory is free when others need it.
        if let Ok(RequestOutcome::Arrived(mut arrival)) = result {
            arrival.sink.revoke();
            let mut requester = lock(&self.requester);
            self.outbox.add(requester.not_taken(arrival));
        }
    }

    /// Takes the answer to a request. Without one, the task is woken when there is one.
    fn poll_answer(
        &self,
        id: RequestId,
        context: &Context<'_>,
    ) -> Option<Result<RequestOutcome<SinkMemory>, TensorError>> {
        let mut waiting = lock(&self.waiting);
        let pending = waiting.get_mut(&id)?;
        let Some(result) = pending.result.take() else {
            pending.waker = Some(context.waker().clone());
            return None;
        };
        waiting.remove(&id);
        Some(result)
    }

    /// Keeps a tensor that has arrived for the next request, because the future of its own is dropped.
    fn put_back(&self, link: &Arc<Link>, arrival: Arrival<SinkMemory>) {
        self.with(link, |requester| requester.not_taken(arrival));
    }

    /// Withdraws a request whose future is dropped. A tensor that has arrived is for the next request.
    fn cancel(&self, link: &Arc<Link>, id: RequestId) {
        let pending = lock(&self.waiting).remove(&id);
        match pending.map(|pending| pending.result) {
            Some(Some(Ok(RequestOutcome::Arrived(mut arrival)))) => {
                arrival.sink.revoke();
                self.put_back(link, arrival);
            }
            Some(None) => self.with(link, |requester| requester.cancel(id)),
            Some(Some(_)) | None => {}
        }
    }
}

impl Future for NamedRequest {
    type Output = Result<NamedReply, TensorError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            match &mut this.state {
                RequestState::Ended(error) => match error.take() {
                    Some(error) => return Poll::Ready(Err(error)),
                    None => return Poll::Pending,
                },
                RequestState::Waiting(id) => {
                    let id = *id;
                    let Some(result) = this.requests.poll_answer(id, context) else { return Poll::Pending };
                    match result {
                        Ok(RequestOutcome::Arrived(arrival)) => {
                            this.state = RequestState::Revoking(id, Some(arrival));
                        }
                        result => {
                            return Poll::Ready(
                                result.and_then(|result| this.requests.result(&this.link, id, result)),
                            );
                        }
                    }
                }
                RequestState::Revoking(id, arrival) => {
                    let Some(mut arrived) = arrival.take() else { return Poll::Pending };
                    if arrived.sink.poll_revoked(context).is_pending() {
                        *arrival = Some(arrived);
                        return Poll::Pending;
                    }
                    let answer = RequestOutcome::Arrived(arrived);
                    return Poll::Ready(this.requests.result(&this.link, *id, answer));
                }
            }
        }
    }
}

impl Drop for NamedRequest {
    fn drop(&mut self) {
        match &mut self.state {
            RequestState::Waiting(id) => self.requests.cancel(&self.link, *id),
            RequestState::Revoking(_, arrival) => {
                if let Some(arrival) = arrival.take() {
                    self.requests.put_back(&self.link, arrival);
                }
            }
            RequestState::Ended(_) => {}
        }
    }
}

impl fmt::Debug for NamedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedRequest").field("link", &self.link).finish_non_exhaustive()
    }
}

/// Sends a frame by the queue pair of its request. If this fails, the link has ended.
fn send(link: &Link, request_id: RequestId, frame: &Frame<'_>) -> Result<(), TensorError> {
    link.port(link.port_of_request(request_id)).send_frame(frame)
}

/// Actions that wait to be carried out, in order.
struct Outbox<A> {
    state: Mutex<ActionQueue<A>>,
}

struct ActionQueue<A> {
    actions: VecDeque<A>,
    busy: bool,
}

impl<A> Outbox<A> {
    fn new() -> Self {
        Self { state: Mutex::new(ActionQueue { actions: VecDeque::new(), busy: false }) }
    }

    /// Adds actions. The caller holds the lock of the state machine that made them, so that their order is
    /// right.
    fn add(&self, actions: impl IntoIterator<Item = A>) {
        lock(&self.state).actions.extend(actions);
    }

    /// Carries out all actions, and the actions that these add. If another thread does so already, this call
    /// returns at once, and the other thread carries these actions out.
    fn run(&self, mut carry_out: impl FnMut(A)) {
        {
            let mut state = lock(&self.state);
            if std::mem::replace(&mut state.busy, true) {
                return;
            }
        }
        loop {
            let mut state = lock(&self.state);
            let Some(action) = state.actions.pop_front() else {
                state.busy = false;
                return;
            };
            drop(state);
            carry_out(action);
        }
    }
}
