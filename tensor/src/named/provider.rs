//! The provider: the side that has the tensors. It keeps a record of each link. [`named`](super) describes
//! the protocol.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::Code;

use super::offer_table::{OfferTable, OfferedTensor};
use super::{
    Failure, Frame, PeerId, ProviderSettings, Reader, RequestId, TensorKey, TensorMemory, TensorRequest,
    check_name, checksum,
};
use crate::error::TensorError;

/// An action for the driver of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProviderAction<T> {
    /// Send a frame.
    Send {
        /// The request that the frame answers, with the link to send on.
        reader: Reader,
        /// The frame.
        frame: Frame<'static>,
    },
    /// Write the tensor's bytes to the start of the sink, and announce them: by the immediate data of the write,
    /// or by a `Written` frame behind it. Call [`Provider::written`] when the device is done, or
    /// [`Provider::write_failed`] if the write can't begin. The handle stays with the operation until the device
    /// is done with the tensor, whatever happens to the request.
    Write {
        /// The request that the write answers, with the link to write on.
        reader: Reader,
        /// The tensor.
        tensor: T,
        /// The memory to write to. Its metadata equals the tensor's. The memory is at least as long as the
        /// tensor, and not empty.
        sink: TensorMemory,
        /// Whether the announcement needs a checksum, so that it has to be a frame.
        checksum_wanted: bool,
    },
    /// An offer has ended because its readers did not come in time.
    Expired {
        /// Name of the tensor.
        name: Arc<str>,
        /// Step of the tensor.
        step: u64,
        /// Number of readers that did not come.
        readers: u32,
    },
}

/// Matches the offers of this process with the requests of its peers.
#[derive(Debug)]
pub(crate) struct Provider<T> {
    settings: ProviderSettings,
    table: OfferTable<T>,
    peers: HashMap<PeerId, PeerRecord>,
    actions: Vec<ProviderAction<T>>,
}

/// Amount of offers and requests that a provider holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OfferCounts {
    /// Number of offers that wait for readers, or have readers that are not done.
    pub offers: usize,
    /// Bytes of the tensors of these offers.
    pub bytes: u64,
    /// Number of requests, of all peers, without a last answer.
    pub requests: usize,
}

/// The end of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShareEnd {
    UsedUp,
    GivenBack,
}

impl<T: Clone> Provider<T> {
    /// Makes a provider without offers.
    pub(crate) fn new(settings: ProviderSettings) -> Self {
        let table = OfferTable::new(&settings);
        Self { settings, table, peers: HashMap::new(), actions: Vec::new() }
    }

    /// Offers (`name`, `step`) to `readers` peers. A peer may ask before the offer or after it.
    ///
    /// # Errors
    /// The offer is refused, and nothing has changed.
    pub(crate) fn offer(
        &mut self,
        name: &str,
        step: u64,
        offer: OfferedTensor<T>,
        readers: u32,
        now: Instant,
    ) -> Result<Vec<ProviderAction<T>>, TensorError> {
        check_name(name).map_err(TensorError::argument)?;
        let key = TensorKey { name: name.into(), step };
        self.table.put(&key, offer, readers, due(now, self.settings.offer_timeout))?;
        self.match_requests(&key, now);
        Ok(self.take_actions())
    }

    /// Withdraws an offer. Requests with a share keep the share. Returns the number of readers that the offer
    /// still waited for, or `None` if there is no such offer.
    pub(crate) fn withdraw(&mut self, name: &str, step: u64) -> Option<u32> {
        let key = TensorKey { name: name.into(), step };
        self.table.close(&key)
    }

    /// Handles a peer's request, the first one or the repeated one with a sink.
    pub(crate) fn handle_request(
        &mut self,
        id: PeerId,
        request: &TensorRequest<'_>,
        now: Instant,
    ) -> Vec<ProviderAction<T>> {
        let peer = self.peers.entry(id).or_insert_with(|| PeerRecord::new(&self.settings));
        let request_id = request.request_id;
        if peer.requests.contains_key(&request_id) {
            self.handle_again((id, request_id), request, now);
        } else if !peer.lapsed.contains(&request_id) {
            match peer.check_first(request, &self.settings) {
                Ok(key) => self.begin((id, request_id), key, request, now),
                Err(failure) => self.refuse((id, request_id), failure, now),
            }
        }
        self.take_actions()
    }

    /// Handles the cancellation of a request. The last answer of a request with a write is under way, so nothing
    /// happens: the requester keeps a tensor that arrives late.
    pub(crate) fn handle_cancel(&mut self, reader: Reader, now: Instant) -> Vec<ProviderAction<T>> {
        if self.pending(reader).is_some() {
            self.refuse(reader, Failure::new(Code::Cancelled, "cancelled by the requester"), now);
        }
        self.take_actions()
    }

    /// Notes that the device has done a [`ProviderAction::Write`].
    pub(crate) fn written(&mut self, reader: Reader, now: Instant) -> Vec<ProviderAction<T>> {
        if self.is_writing(reader) {
            self.finish(reader, ShareEnd::UsedUp, now);
        }
        self.take_actions()
    }

    /// Notes that a [`ProviderAction::Write`] could not begin, and was not announced. The tensor stays for other
    /// readers.
    pub(crate) fn write_failed(&mut self, reader: Reader, why: &str, now: Instant) -> Vec<ProviderAction<T>> {
        if self.is_writing(reader) {
            let text = format!("the tensor could not be written: {why}");
            self.send(reader, Failure::new(Code::Internal, text).answer(reader.1));
            self.finish(reader, ShareEnd::GivenBack, now);
        }
        self.take_actions()
    }

    /// Ends the requests of a link that has ended. Their shares are for other peers.
    pub(crate) fn peer_gone(&mut self, id: PeerId, now: Instant) -> Vec<ProviderAction<T>> {
        let Some(peer) = self.peers.get(&id) else { return Vec::new() };
        for request_id in peer.requests.keys().copied().collect::<Vec<_>>() {
            self.finish((id, request_id), ShareEnd::GivenBack, now);
        }
        self.peers.remove(&id);
        self.take_actions()
    }

    /// Ends the requests and offers that have waited for too long.
    pub(crate) fn handle_timeout(&mut self, now: Instant) -> Vec<ProviderAction<T>> {
        let late = |(peer, record): (&PeerId, &PeerRecord)| {
            let requests = record.requests.iter().filter(|(_, request)| request.is_late(now));
            requests.map(|(request_id, _)| (*peer, *request_id)).collect::<Vec<_>>()
        };
        for reader in self.peers.iter().flat_map(late).collect::<Vec<_>>() {
            self.expire(reader, now);
        }
        for (TensorKey { name, step }, readers) in self.table.close_late(now) {
            self.actions.push(ProviderAction::Expired { name, step, readers });
        }
        self.take_actions()
    }

    /// Returns the amount of offers and requests that the provider holds.
    pub(crate) fn held(&self) -> OfferCounts {
        let requests = self.peers.values().map(|peer| peer.requests.len()).sum();
        OfferCounts { offers: self.table.offers, bytes: self.table.bytes, requests }
    }

    /// Accepts a request, unless its peer has had this offer. A reader that did not learn of a dead or failed
    /// tensor, because it gave up, gets this answer again.
    fn begin(&mut self, reader: Reader, key: TensorKey, request: &TensorRequest<'_>, now: Instant) {
        let before = self.peers.get(&reader.0).and_then(|peer| peer.delivered.get(&key));
        // The offer remembers its readers longer than the peer's record does.
        let served = || self.table.offer(&key).filter(|_| self.table.has_served(&key, reader.0));
        match before.cloned().or_else(|| served().map(Delivered::of)) {
            None => self.accept(reader, key, request, now),
            Some(Delivered::Tensor) => {
                let text = format!("{key} was delivered already");
                self.refuse(reader, Failure::new(Code::AlreadyExists, text), now);
            }
            Some(Delivered::Dead) => {
                self.send(reader, Frame::Dead { request_id: reader.1 });
                self.remember(reader);
            }
            Some(Delivered::Failed(failure)) => self.refuse(reader, failure, now),
        }
    }

    fn accept(&mut self, reader: Reader, key: TensorKey, request: &TensorRequest<'_>, now: Instant) {
        let TensorRequest { sink, checksum_wanted, .. } = *request;
        let Some(peer) = self.peers.get_mut(&reader.0) else { return };
        peer.asked.insert(key.clone());
        let state = ReceivedState::Waiting;
        let due = due(now, self.settings.request_timeout);
        let pending = ReceivedRequest { key: key.clone(), sink, checksum_wanted, state, due };
        peer.requests.insert(reader.1, pending);
        self.table.wait(&key, reader);
        self.match_requests(&key, now);
    }

    /// Handles a request with the number of a request that has no last answer.
    fn handle_again(&mut self, reader: Reader, request: &TensorRequest<'_>, now: Instant) {
        let Some(pending) = self.peers.get_mut(&reader.0).and_then(|peer| peer.requests.get_mut(&reader.1))
        else {
            return;
        };
        match pending.check_again(request, self.table.offer(&pending.key)) {
            Ok(sink) => {
                pending.sink = Some(sink);
                self.answer(reader, now);
            }
            Err(failure) => self.refuse(reader, failure, now),
        }
    }

    /// Gives shares to the requests that wait for this tensor.
    fn match_requests(&mut self, key: &TensorKey, now: Instant) {
        while let Some(reader) = self.table.share(key) {
            self.answer(reader, now);
        }
    }

    /// Answers a request with a share.
    fn answer(&mut self, reader: Reader, now: Instant) {
        let request_id = reader.1;
        let Some(pending) = self.peers.get_mut(&reader.0).and_then(|peer| peer.requests.get_mut(&request_id))
        else {
            return;
        };
        // A request with a share keeps the offer in the table.
        let Some(offer) = self.table.offer(&pending.key) else { return };
        match (offer, pending.sink.take()) {
            (OfferedTensor::Tensor(tensor, metadata), Some(sink)) if *metadata == sink.metadata => {
                pending.state = ReceivedState::Writing;
                pending.due = None;
                let checksum_wanted = pending.checksum_wanted;
                if metadata.bytes == 0 {
                    let checksum = checksum_wanted.then(|| checksum(&[]));
                    self.send(reader, Frame::Written { request_id, checksum });
                    return self.finish(reader, ShareEnd::UsedUp, now);
                }
                let tensor = tensor.clone();
                let write = ProviderAction::Write { reader, tensor, sink, checksum_wanted };
                self.actions.push(write);
            }
            (&OfferedTensor::Tensor(_, metadata), _) => {
                pending.state = ReceivedState::AwaitingSink;
                pending.due = due(now, self.settings.request_timeout);
                self.send(reader, Frame::Metadata { request_id, metadata });
            }
            (OfferedTensor::Failed(failure), _) => {
                let frame = failure.clone().answer(request_id);
                self.send(reader, frame);
                self.finish(reader, ShareEnd::UsedUp, now);
            }
            (OfferedTensor::Dead, _) => {
                self.send(reader, Frame::Dead { request_id });
                self.finish(reader, ShareEnd::UsedUp, now);
            }
        }
    }

    fn expire(&mut self, reader: Reader, now: Instant) {
        // A share that came back meanwhile may have gone to this request.
        let Some(pending) = self.pending(reader).filter(|pending| pending.is_late(now)) else { return };
        let text = match pending.state {
            ReceivedState::Waiting => format!("{} was not offered in time", pending.key),
            _ => format!("no sink for {} came in time", pending.key),
        };
        self.refuse(reader, Failure::new(Code::DeadlineExceeded, text), now);
    }

    /// Answers with a status. It also ends a pending request of this number, because the peer can't tell the
    /// two apart. A request whose tensor is being written has its last answer already.
    fn refuse(&mut self, reader: Reader, failure: Failure, now: Instant) {
        if self.is_writing(reader) {
            return;
        }
        self.send(reader, failure.answer(reader.1));
        match self.pending(reader) {
            Some(_) => self.finish(reader, ShareEnd::GivenBack, now),
            None => self.remember(reader),
        }
    }

    /// Ends a request.
    fn finish(&mut self, reader: Reader, share: ShareEnd, now: Instant) {
        let (id, request_id) = reader;
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(request) = peer.requests.remove(&request_id) else { return };
        let ReceivedRequest { key, state, .. } = request;
        peer.asked.remove(&key);
        peer.finished.insert(request_id, ());
        match (share, state) {
            (ShareEnd::UsedUp, _) => {
                let answer = self.table.offer(&key).map_or(Delivered::Tensor, Delivered::of);
                peer.delivered.insert(key.clone(), answer);
                self.table.use_up(&key, id);
            }
            (ShareEnd::GivenBack, ReceivedState::Waiting) => self.table.leave(&key, reader),
            (ShareEnd::GivenBack, _) => {
                if state == ReceivedState::AwaitingSink {
                    peer.lapsed.insert(request_id, ());
                }
                self.table.give_back(&key);
                self.match_requests(&key, now);
            }
        }
    }

    fn remember(&mut self, reader: Reader) {
        if let Entry::Occupied(mut peer) = self.peers.entry(reader.0) {
            peer.get_mut().finished.insert(reader.1, ());
        }
    }

    fn pending(&mut self, reader: Reader) -> Option<&mut ReceivedRequest> {
        self.peers.get_mut(&reader.0)?.requests.get_mut(&reader.1)
    }

    fn is_writing(&mut self, reader: Reader) -> bool {
        self.pending(reader).is_some_and(|pending| pending.state == ReceivedState::Writing)
    }

    fn send(&mut self, reader: Reader, frame: Frame<'static>) {
        self.actions.push(ProviderAction::Send { reader, frame });
    }

    fn take_actions(&mut self) -> Vec<ProviderAction<T>> {
        std::mem::take(&mut self.actions)
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let is_idle = |peer: &PeerRecord| peer.requests.is_empty() && peer.asked.is_empty();
        self.table.is_empty() && self.peers.values().all(is_idle)
    }
}

/// The record of one link.
#[derive(Debug)]
struct PeerRecord {
    requests: BTreeMap<RequestId, ReceivedRequest>,
    /// The tensors that the peer's requests ask for. A peer can't have two requests for one tensor at a time.
    asked: HashSet<TensorKey>,
    /// Answers that used up a share, for requests that come again when the tensor is not on offer any more.
    delivered: RecentMap<TensorKey, Delivered>,
    /// Requests that have their last answer.
    finished: RecentSet<RequestId>,
    /// Requests that ended here while they waited for a sink. The peer may have asked again before it learnt
    /// that.
    lapsed: RecentSet<RequestId>,
}

/// A request without a last answer, or with a write that is under way.
#[derive(Debug)]
struct ReceivedRequest {
    key: TensorKey,
    sink: Option<TensorMemory>,
    checksum_wanted: bool,
    state: ReceivedState,
    /// When the request has waited for too long.
    due: Option<Instant>,
}

/// The last answer to a request that used up a share.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Delivered {
    Tensor,
    Dead,
    Failed(Failure),
}

impl Delivered {
    /// Returns the answer that uses up a share of `offer`.
    fn of<T>(offer: &OfferedTensor<T>) -> Self {
        match offer {
            OfferedTensor::Tensor(..) => Self::Tensor,
            OfferedTensor::Dead => Self::Dead,
            OfferedTensor::Failed(failure) => Self::Failed(failure.clone()),
        }
    }
}

/// The event that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReceivedState {
    /// An offer. In all other states the request has a share of an offer.
    Waiting,
    /// The peer, which has to ask again with a sink.
    AwaitingSink,
    /// The device. The write announces itself, which is the last answer.
    Writing,
}

impl PeerRecord {
    fn new(settings: &ProviderSettings) -> Self {
        Self {
            requests: BTreeMap::new(),
            asked: HashSet::new(),
            delivered: RecentMap::new(settings.max_remembered),
            finished: RecentSet::new(settings.max_remembered),
            lapsed: RecentSet::new(settings.max_remembered),
        }
    }

    /// Checks a request whose number is new, and returns the tensor that it asks for.
    fn check_first(
        &self,
        request: &TensorRequest<'_>,
        settings: &ProviderSettings,
    ) -> Result<TensorKey, Failure> {
        let TensorRequest { request_id, ref name, step, .. } = *request;
        if self.finished.contains(&request_id) {
            return Err(Failure::new(Code::AlreadyExists, format!("{request_id} was answered before")));
        }
        let invalid = |text| Failure::new(Code::InvalidArgument, text);
        check_name(name).map_err(invalid)?;
        let key = TensorKey { name: (&**name).into(), step };
        if let Some(sink) = &request.sink {
            check_sink(sink).map_err(|fault| invalid(format!("{key}: {fault}")))?;
        }
        if self.requests.len() >= settings.max_requests_per_peer {
            let text =
                format!("{} requests of this peer are pending already, and no more may", self.requests.len());
            return Err(Failure::new(Code::ResourceExhausted, text));
        }
        if self.asked.contains(&key) {
            return Err(Failure::new(
                Code::AlreadyExists,
                format!("{key} is asked for already, and that request is pending"),
            ));
        }
        Ok(key)
    }
}

impl ReceivedRequest {
    fn is_late(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// Checks a repeated request against the offer, and returns its sink.
    fn check_again<T>(
        &self,
        request: &TensorRequest<'_>,
        offer: Option<&OfferedTensor<T>>,
    ) -> Result<TensorMemory, Failure> {
        let (id, key) = (request.request_id, &self.key);
        let invalid = |text: String| Failure::new(Code::InvalidArgument, text);
        if self.state != ReceivedState::AwaitingSink {
            return Err(Failure::new(
                Code::AlreadyExists,
                format!("{id} is in use for {key}, and is pending"),
            ));
        }
        if (&*key.name, key.step) != (&*request.name, request.step) {
            return Err(invalid(format!("{id} was for {key}, and asks again for another tensor")));
        }
        let Some(sink) = request.sink else {
            return Err(invalid(format!("{id} asks again without a sink for {key}")));
        };
        check_sink(&sink).map_err(|fault| invalid(format!("{key}: {fault}")))?;
        match offer {
            Some(OfferedTensor::Tensor(_, metadata)) if *metadata == sink.metadata => Ok(sink),
            _ => Err(invalid(format!(
                "the sink for {key} is not made for the metadata that the provider sent"
            ))),
        }
    }
}

/// Checks that the sink is at least as long as its metadata states, and does not end beyond the address
/// space. The device checks the right to the memory.
fn check_sink(sink: &TensorMemory) -> Result<(), String> {
    let (bytes, address, length) = (sink.metadata.bytes, sink.place.start.address, sink.place.length);
    if length < bytes {
        return Err(format!("a sink of {length} bytes for a tensor of {bytes}"));
    }
    if address.checked_add(length).is_none() {
        return Err(format!("a sink of {length} bytes at {address:#x}, which is beyond all addresses"));
    }
    Ok(())
}

/// Returns the time after `timeout`. `None` without a timeout, and beyond all times.
fn due(now: Instant, timeout: Option<Duration>) -> Option<Instant> {
    now.checked_add(timeout?)
}

/// A map that forgets its oldest item when it is full.
#[derive(Debug)]
struct RecentMap<K, V> {
    capacity: usize,
    order: VecDeque<K>,
    map: HashMap<K, V>,
}

/// A set that forgets its oldest item when it is full.
type RecentSet<K> = RecentMap<K, ()>;

impl<K: Clone + Eq + Hash, V> RecentMap<K, V> {
    fn new(capacity: usize) -> Self {
        Self { capacity, order: VecDeque::new(), map: HashMap::new() }
    }

    /// Adds an item. An item that is there already keeps its value.
    fn insert(&mut self, item: K, value: V) {
        let Entry::Vacant(entry) = self.map.entry(item.clone()) else { return };
        if self.capacity == 0 {
            return;
        }
        entry.insert(value);
        if self.order.len() == self.capacity
            && let Some(oldest) = self.order.pop_front()
        {
            self.map.remove(&oldest);
        }
        self.order.push_back(item);
    }

    fn get(&self, item: &K) -> Option<&V> {
        self.map.get(item)
    }

    fn contains(&self, item: &K) -> bool {
        self.map.contains_key(item)
    }
}

#[cfg(test)]
mod recent_set_tests {
    use super::*;

    #[test]
    fn forgets_the_oldest() {
        let mut recent = RecentSet::new(2);
        for what in [1, 2, 2, 1, 3] {
            recent.insert(what, ());
        }
        assert_eq!([1, 2, 3].map(|what| recent.contains(&what)), [false, true, true]);
        assert_eq!((recent.order.len(), recent.map.len()), (2, 2));
        let mut nothing = RecentSet::new(0);
        nothing.insert(1, ());
        assert!(!nothing.contains(&1));
    }
}
