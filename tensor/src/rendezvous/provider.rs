//! The provider: the end that has the tensors.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use tonic::Code;

use super::checksum::checksum;
use super::deadlines::Deadlines;
use super::message::{Failure, Message, PeerId, TensorKey, is_name};
use super::offer_table::{OfferError, OfferTable, OfferedTensor, Reader};
use super::peer_record::{Delivered, PeerRecord, ReceivedRequest, ReceivedState};
use super::{ProviderSettings, RequestId, Sink, TensorRequest};

/// An action for the driver of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProviderAction<T> {
    /// Send a message.
    Send {
        /// The link to send on.
        peer: PeerId,
        /// The message.
        message: Message,
    },
    /// Write the tensor's bytes to the start of the sink, then call [`Provider::written`]. The handle stays with the
    /// operation until the device is done with the tensor, whatever happens to the request.
    Write {
        /// The link to write on.
        peer: PeerId,
        /// The request that the write answers.
        request_id: RequestId,
        /// The tensor.
        tensor: T,
        /// The memory to write to. Its metadata equals the tensor's. The memory is at least as long as the tensor, and not
        /// empty.
        sink: Sink,
        /// Whether [`Provider::written`] needs a checksum.
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
pub struct Provider<T> {
    settings: ProviderSettings,
    table: OfferTable<T>,
    peers: HashMap<PeerId, PeerRecord>,
    deadlines: Deadlines<Due>,
    actions: Vec<ProviderAction<T>>,
}

/// Amount of offers and requests that a provider holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Number of offers that wait for readers, or have readers that are not done.
    pub offers: usize,
    /// Bytes of the tensors of these offers.
    pub bytes: u64,
    /// Number of requests, of all peers, without a last answer.
    pub requests: usize,
}

/// The subject of a deadline.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Due {
    Request(PeerId, RequestId),
    Offer(TensorKey),
}

/// The end of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    UsedUp,
    GivenBack,
}

impl<T: Clone> Provider<T> {
    /// Makes a provider without offers.
    pub fn new(settings: ProviderSettings) -> Self {
        let table = OfferTable::new(&settings);
        Self { settings, table, peers: HashMap::new(), deadlines: Deadlines::new(), actions: Vec::new() }
    }

    /// Offers (`name`, `step`) to `readers` peers. A peer may ask before the offer or after it.
    ///
    /// # Errors
    /// [`OfferError`]. Nothing has changed then.
    pub fn offer(
        &mut self,
        name: &str,
        step: u64,
        offer: OfferedTensor<T>,
        readers: u32,
        now: Instant,
    ) -> Result<Vec<ProviderAction<T>>, OfferError> {
        if !is_name(name) {
            return Err(OfferError::Name { length: name.len() });
        }
        let key = TensorKey { name: name.into(), step };
        self.table.put(&key, offer, readers)?;
        self.deadlines.set(&Due::Offer(key.clone()), now, self.settings.offer_timeout);
        self.match_requests(&key, now);
        Ok(self.take_actions())
    }

    /// Withdraws an offer. Requests with a share keep the share. Returns the number of readers that the offer still waited
    /// for, or `None` if there is no such offer.
    pub fn withdraw(&mut self, name: &str, step: u64) -> Option<u32> {
        let key = TensorKey { name: name.into(), step };
        self.deadlines.clear(&Due::Offer(key.clone()));
        self.table.close(&key)
    }

    /// Handles a peer's request, the first one or the repeated one with a sink.
    pub fn handle_request(
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

    /// Handles the cancellation of a request. A write that is under way goes on to its end, and the last answer then says that the
    /// request was cancelled. A request with a last answer is over, so nothing happens: the requester keeps a tensor that arrives late.
    pub fn handle_cancel(
        &mut self,
        peer: PeerId,
        request_id: RequestId,
        now: Instant,
    ) -> Vec<ProviderAction<T>> {
        let reader = (peer, request_id);
        let Some(record) = self.peers.get_mut(&peer) else { return Vec::new() };
        match record.requests.get_mut(&request_id) {
            Some(pending)
                if matches!(pending.state, ReceivedState::Waiting | ReceivedState::AwaitingSink) =>
            {
                self.refuse(reader, Failure::cancelled(), now);
            }
            Some(pending) if pending.state == ReceivedState::Writing && !pending.given_up => {
                pending.given_up = true;
                record.asked.remove(&pending.key);
                record.given_up.insert(pending.key.clone());
            }
            _ => {}
        }
        self.take_actions()
    }

    /// Notes that the device has done a [`ProviderAction::Write`]. `checksum` is the checksum of the tensor's bytes, if the
    /// action asked for a checksum.
    pub fn written(
        &mut self,
        peer: PeerId,
        request_id: RequestId,
        checksum: Option<u64>,
        now: Instant,
    ) -> Vec<ProviderAction<T>> {
        let reader = (peer, request_id);
        let Some(&mut ReceivedRequest { state, given_up, .. }) = self.pending(reader) else {
            return Vec::new();
        };
        match state {
            ReceivedState::Writing if given_up => {
                self.send(reader, Message::Status { request_id, failure: Failure::cancelled() });
                self.finish(reader, Share::GivenBack, now);
            }
            ReceivedState::Writing => self.send_written(reader, checksum, now),
            ReceivedState::Answered if given_up => self.finish(reader, Share::GivenBack, now),
            ReceivedState::Answered => self.finish(reader, Share::UsedUp, now),
            ReceivedState::Waiting | ReceivedState::AwaitingSink => {}
        }
        self.take_actions()
    }

    /// Notes that a [`ProviderAction::Write`] failed while the link goes on. The tensor stays for other readers.
    pub fn write_failed(
        &mut self,
        peer: PeerId,
        request_id: RequestId,
        why: &str,
        now: Instant,
    ) -> Vec<ProviderAction<T>> {
        let reader = (peer, request_id);
        match self.pending(reader).map(|pending| pending.state) {
            Some(ReceivedState::Writing) => {
                let text = format!("the tensor could not be written: {why}");
                self.send(reader, Message::status(request_id, Code::Internal, text));
                self.finish(reader, Share::GivenBack, now);
            }
            Some(ReceivedState::Answered) => self.finish(reader, Share::GivenBack, now),
            _ => {}
        }
        self.take_actions()
    }

    /// Ends the requests of a link that has ended. Their shares are for other peers.
    pub fn peer_gone(&mut self, id: PeerId, now: Instant) -> Vec<ProviderAction<T>> {
        let Some(peer) = self.peers.get_mut(&id) else { return Vec::new() };
        // No request of this peer takes over a share.
        peer.requests.values_mut().for_each(|pending| pending.given_up = false);
        for request_id in peer.requests.keys().copied().collect::<Vec<_>>() {
            self.finish((id, request_id), Share::GivenBack, now);
        }
        self.peers.remove(&id);
        self.take_actions()
    }

    /// Returns the time at which to call [`handle_timeout`](Self::handle_timeout) next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadlines.next()
    }

    /// Ends the requests and offers that have waited for too long.
    pub fn handle_timeout(&mut self, now: Instant) -> Vec<ProviderAction<T>> {
        while let Some(due) = self.deadlines.pop(now) {
            match due {
                Due::Request(peer, request_id) => self.expire((peer, request_id), now),
                Due::Offer(key) => {
                    let readers = self.table.close(&key).unwrap_or(0);
                    if readers > 0 {
                        let TensorKey { name, step } = key;
                        self.actions.push(ProviderAction::Expired { name, step, readers });
                    }
                }
            }
        }
        self.take_actions()
    }

    /// Returns the amount of offers and requests that the provider holds.
    pub fn held(&self) -> Held {
        let requests = self.peers.values().map(|peer| peer.requests.len()).sum();
        Held { offers: self.table.offers(), bytes: self.table.bytes(), requests }
    }

    /// Accepts a request, unless its peer has had this offer. A reader that did not learn of a dead or failed tensor, because it gave up,
    /// gets this answer again.
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
                self.send(reader, Message::Dead { request_id: reader.1 });
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
        let pending = ReceivedRequest { key: key.clone(), sink, checksum_wanted, state, given_up: false };
        peer.requests.insert(reader.1, pending);
        let is_first = !peer.given_up.contains(&key);
        self.deadlines.set(&Due::Request(reader.0, reader.1), now, self.settings.request_timeout);
        if is_first {
            self.table.wait(&key, reader);
            self.match_requests(&key, now);
        }
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
        let (peer, request_id) = reader;
        let Some(pending) = self.peers.get_mut(&peer).and_then(|peer| peer.requests.get_mut(&request_id))
        else {
            return;
        };
        // A request with a share keeps the offer in the table.
        let Some(offer) = self.table.offer(&pending.key) else { return };
        let due = Due::Request(peer, request_id);
        match (offer, pending.sink.take()) {
            (OfferedTensor::Tensor(tensor, metadata), Some(sink)) if *metadata == sink.metadata => {
                pending.state = ReceivedState::Writing;
                self.deadlines.clear(&due);
                if metadata.bytes == 0 {
                    return self.send_written(reader, Some(checksum(&[])), now);
                }
                let (tensor, checksum_wanted) = (tensor.clone(), pending.checksum_wanted);
                let write = ProviderAction::Write { peer, request_id, tensor, sink, checksum_wanted };
                self.actions.push(write);
            }
            (&OfferedTensor::Tensor(_, metadata), _) => {
                pending.state = ReceivedState::AwaitingSink;
                self.deadlines.set(&due, now, self.settings.request_timeout);
                self.send(reader, Message::Metadata { request_id, metadata });
            }
            (OfferedTensor::Failed(failure), _) => {
                pending.state = ReceivedState::Answered;
                let failure = failure.clone();
                self.send(reader, Message::Status { request_id, failure });
                self.finish(reader, Share::UsedUp, now);
            }
            (OfferedTensor::Dead, _) => {
                pending.state = ReceivedState::Answered;
                self.send(reader, Message::Dead { request_id });
                self.finish(reader, Share::UsedUp, now);
            }
        }
    }

    fn send_written(&mut self, reader: Reader, checksum: Option<u64>, now: Instant) {
        let wanted = self.pending(reader).is_some_and(|pending| pending.checksum_wanted);
        let message = match (wanted, checksum) {
            (true, None) => Message::status(reader.1, Code::Internal, "no checksum was computed"),
            (true, Some(_)) => Message::Written { request_id: reader.1, checksum },
            (false, _) => Message::Written { request_id: reader.1, checksum: None },
        };
        self.send(reader, message);
        self.finish(reader, Share::UsedUp, now);
    }

    fn expire(&mut self, reader: Reader, now: Instant) {
        let Some(pending) = self.pending(reader) else { return };
        let text = match pending.state {
            ReceivedState::Waiting => format!("{} was not offered in time", pending.key),
            _ => format!("no sink for {} came in time", pending.key),
        };
        self.refuse(reader, Failure::new(Code::DeadlineExceeded, text), now);
    }

    /// Answers with a status. It also ends a pending request of this number, because the peer can't tell the two apart.
    fn refuse(&mut self, reader: Reader, failure: Failure, now: Instant) {
        self.send(reader, Message::Status { request_id: reader.1, failure });
        match self.pending(reader) {
            Some(pending) if matches!(pending.state, ReceivedState::Writing | ReceivedState::Answered) => {
                pending.state = ReceivedState::Answered;
            }
            Some(_) => self.finish(reader, Share::GivenBack, now),
            None => self.remember(reader),
        }
    }

    /// Ends a request.
    fn finish(&mut self, reader: Reader, share: Share, now: Instant) {
        let (id, request_id) = reader;
        self.deadlines.clear(&Due::Request(id, request_id));
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(request) = peer.requests.remove(&request_id) else { return };
        let ReceivedRequest { key, state, given_up, .. } = request;
        let keys = if given_up { &mut peer.given_up } else { &mut peer.asked };
        keys.remove(&key);
        peer.finished.insert(request_id, ());
        match (state, share) {
            (ReceivedState::Waiting, _) => self.table.leave(&key, reader),
            (_, Share::UsedUp) => {
                let answer = self.table.offer(&key).map_or(Delivered::Tensor, Delivered::of);
                peer.delivered.insert(key.clone(), answer);
                self.table.use_up(&key, id);
            }
            (_, Share::GivenBack) => {
                if state == ReceivedState::AwaitingSink {
                    peer.lapsed.insert(request_id, ());
                }
                let again = peer.waiting(&key).filter(|_| given_up);
                self.table.give_back(&key);
                if let Some(request_id) = again {
                    self.table.wait(&key, (id, request_id));
                }
                self.match_requests(&key, now);
            }
        }
        if self.table.offer(&key).is_none() {
            self.deadlines.clear(&Due::Offer(key));
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

    fn send(&mut self, reader: Reader, message: Message) {
        self.actions.push(ProviderAction::Send { peer: reader.0, message });
    }

    fn take_actions(&mut self) -> Vec<ProviderAction<T>> {
        std::mem::take(&mut self.actions)
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let is_idle =
            |peer: &PeerRecord| peer.requests.is_empty() && peer.asked.is_empty() && peer.given_up.is_empty();
        self.table.is_empty() && self.deadlines.is_empty() && self.peers.values().all(is_idle)
    }
}
