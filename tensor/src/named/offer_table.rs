//! The offers, and the requests that wait for them. An offer and a request match in either order.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use tonic::Code;

use super::{Failure, PeerId, ProviderSettings, Reader, TensorKey};
use crate::error::{TensorError, TensorErrorKind};
use crate::wire::tensor_metadata::WireMetadata;

/// An offer of a tensor, or of the reason why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OfferedTensor<T> {
    /// A handle of the tensor, and its metadata.
    Tensor(T, WireMetadata),
    /// The tensor is dead: the branch of the graph that would have computed it was not taken.
    Dead,
    /// The tensor could not be computed.
    Failed(Failure),
}

impl<T> OfferedTensor<T> {
    fn bytes(&self) -> u64 {
        match self {
            Self::Tensor(_, metadata) => metadata.bytes,
            Self::Dead | Self::Failed(_) => 0,
        }
    }
}

#[derive(Debug)]
pub(super) struct OfferTable<T> {
    entries: HashMap<TensorKey, TableEntry<T>>,
    /// Number of offers.
    pub(super) offers: usize,
    /// Bytes of their tensors.
    pub(super) bytes: u64,
    max_offers: usize,
    max_bytes: u64,
}

/// An entry has an offer, or requests that wait, or both.
#[derive(Debug)]
struct TableEntry<T> {
    kept: Option<KeptOffer<T>>,
    /// Requests without a share of the offer, in the order in which they came.
    waiting: VecDeque<Reader>,
}

#[derive(Debug)]
struct KeptOffer<T> {
    offer: OfferedTensor<T>,
    /// Number of shares that are not used up.
    unused: u32,
    /// Number of those shares that belong to a request.
    taken: u32,
    /// Whether no further request gets a share.
    closed: bool,
    /// Peers that have used up a share. No peer gets the share of another peer, however often it asks.
    served: Vec<PeerId>,
    /// When the offer has waited for too long.
    due: Option<Instant>,
}

impl<T> OfferTable<T> {
    pub(super) fn new(settings: &ProviderSettings) -> Self {
        let ProviderSettings { max_offers, max_bytes, .. } = *settings;
        Self { entries: HashMap::new(), offers: 0, bytes: 0, max_offers, max_bytes }
    }

    pub(super) fn put(
        &mut self,
        key: &TensorKey,
        offer: OfferedTensor<T>,
        readers: u32,
        due: Option<Instant>,
    ) -> Result<(), TensorError> {
        if self.offer(key).is_some() {
            return Err(TensorError::new(TensorErrorKind::NameTaken, format!("{key} is on offer already")));
        }
        if readers == 0 {
            return Err(TensorError::argument(format!("{key} is offered to no reader")));
        }
        if matches!(&offer, OfferedTensor::Failed(failure) if failure.code == Code::Ok) {
            let text = format!("{key} is offered as failed, but with the code of success");
            return Err(TensorError::argument(text));
        }
        if self.offers >= self.max_offers {
            let text = format!(
                "{} offers wait for their readers already, and no more may (max_offers): no reader asks for them",
                self.offers
            );
            return Err(TensorError::new(TensorErrorKind::Busy, text));
        }
        let (bytes, kept, limit) = (offer.bytes(), self.bytes, self.max_bytes);
        self.bytes = kept.checked_add(bytes).filter(|&sum| sum <= limit).ok_or_else(|| {
            let text = format!(
                "an offer of {bytes} bytes beside {kept} bytes that wait for their readers, of {limit} allowed (max_bytes)"
            );
            let never = bytes > limit;
            TensorError::new(if never { TensorErrorKind::InvalidArgument } else { TensorErrorKind::Busy }, text)
        })?;
        self.offers += 1;
        self.entry(key).kept =
            Some(KeptOffer { offer, unused: readers, taken: 0, closed: false, served: Vec::new(), due });
        Ok(())
    }

    pub(super) fn offer(&self, key: &TensorKey) -> Option<&OfferedTensor<T>> {
        self.entries.get(key)?.kept.as_ref().map(|kept| &kept.offer)
    }

    /// Adds a request that waits for a share.
    pub(super) fn wait(&mut self, key: &TensorKey, reader: Reader) {
        self.entry(key).waiting.push_back(reader);
    }

    /// Removes a request that waits.
    pub(super) fn leave(&mut self, key: &TensorKey, reader: Reader) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.waiting.retain(|waiting| *waiting != reader);
        }
        self.tidy(key);
    }

    /// Gives a share to the next request that waits, and returns the request.
    pub(super) fn share(&mut self, key: &TensorKey) -> Option<Reader> {
        let entry = self.entries.get_mut(key)?;
        let kept = entry.kept.as_mut().filter(|kept| kept.taken < kept.unused && !kept.closed)?;
        let reader = entry.waiting.pop_front()?;
        kept.taken += 1;
        Some(reader)
    }

    /// Returns whether the peer has used up a share of the offer.
    pub(super) fn has_served(&self, key: &TensorKey, peer: PeerId) -> bool {
        let kept = self.entries.get(key).and_then(|entry| entry.kept.as_ref());
        kept.is_some_and(|kept| kept.served.contains(&peer))
    }

    /// Uses up a share of `peer`.
    pub(super) fn use_up(&mut self, key: &TensorKey, peer: PeerId) {
        self.change(key, |kept| {
            kept.served.push(peer);
            kept.taken -= 1;
            kept.unused -= 1;
        });
    }

    /// Takes a share back.
    pub(super) fn give_back(&mut self, key: &TensorKey) {
        self.change(key, |kept| {
            kept.taken -= 1;
            kept.unused -= u32::from(kept.closed);
        });
    }

    /// Closes the offer: no further request gets a share, not even a share that comes back. Returns the
    /// number of shares that no request has, or `None` if there is no such offer.
    pub(super) fn close(&mut self, key: &TensorKey) -> Option<u32> {
        let kept = self.entries.get_mut(key)?.kept.as_mut()?;
        let free = kept.unused - kept.taken;
        self.change(key, |kept| {
            (kept.closed, kept.due) = (true, None);
            kept.unused = kept.taken;
        });
        Some(free)
    }

    /// Closes the offers that have waited for too long. Returns those that waited for readers, with their number.
    pub(super) fn close_late(&mut self, now: Instant) -> Vec<(TensorKey, u32)> {
        let is_late = |entry: &TableEntry<T>| entry.kept.as_ref()?.due.filter(|due| *due <= now);
        let late = self.entries.iter().filter(|(_, entry)| is_late(entry).is_some());
        let late: Vec<_> = late.map(|(key, _)| key.clone()).collect();
        let closed = late.into_iter().filter_map(|key| self.close(&key).map(|readers| (key, readers)));
        closed.filter(|(_, readers)| *readers > 0).collect()
    }

    fn entry(&mut self, key: &TensorKey) -> &mut TableEntry<T> {
        self.entries.entry(key.clone()).or_insert_with(|| TableEntry { kept: None, waiting: VecDeque::new() })
    }

    fn change(&mut self, key: &TensorKey, change: impl FnOnce(&mut KeptOffer<T>)) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        entry.kept.as_mut().map(change);
        if let Some(spent) = entry.kept.take_if(|kept| kept.unused == 0) {
            self.offers -= 1;
            self.bytes -= spent.offer.bytes();
        }
        self.tidy(key);
    }

    fn tidy(&mut self, key: &TensorKey) {
        if self.entries.get(key).is_some_and(|entry| entry.kept.is_none() && entry.waiting.is_empty()) {
            self.entries.remove(key);
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.offers == 0 && self.bytes == 0
    }
}
