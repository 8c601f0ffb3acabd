//! The offers, and the requests that wait for them. An offer and a request match in either order.

use std::collections::{HashMap, VecDeque};

use tonic::Code;

use super::{Failure, PeerId, ProviderSettings, RequestId, TensorKey};
use crate::wire::tensor_frame::MAX_NAME;
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

/// An offer that the provider did not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum OfferError {
    /// No request can carry the name.
    #[error("the name of the tensor has {length} bytes, and 1 to {MAX_NAME} are allowed")]
    Name {
        /// Length of the name, in bytes.
        length: usize,
    },
    /// The number of readers is 0.
    #[error("tensor {name:?} of step {step} is offered to no reader")]
    NoReaders {
        /// Name of the tensor.
        name: String,
        /// Step of the tensor.
        step: u64,
    },
    /// A failure with the code of success.
    #[error("tensor {name:?} of step {step} is offered as failed, but with the code of success")]
    NoFailure {
        /// Name of the tensor.
        name: String,
        /// Step of the tensor.
        step: u64,
    },
    /// The tensor is on offer already.
    #[error("tensor {name:?} of step {step} is on offer already")]
    AlreadyOffered {
        /// Name of the tensor.
        name: String,
        /// Step of the tensor.
        step: u64,
    },
    /// There is no room for one more offer.
    #[error(
        "{kept} offers wait for their readers already, and no more may (max_offers): no reader asks for them"
    )]
    TooMany {
        /// Number of offers that wait.
        kept: usize,
    },
    /// There is no room for so many more bytes.
    #[error(
        "an offer of {bytes} bytes beside {kept} bytes that wait for their readers, of {limit} allowed (max_bytes)"
    )]
    TooMuch {
        /// Bytes of the new offer.
        bytes: u64,
        /// Bytes of the offers that wait.
        kept: u64,
        /// The limit.
        limit: u64,
    },
}

/// A request: its peer and its number.
pub(super) type Reader = (PeerId, RequestId);

#[derive(Debug)]
pub(super) struct OfferTable<T> {
    entries: HashMap<TensorKey, TableEntry<T>>,
    offers: usize,
    bytes: u64,
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
}

impl<T> OfferTable<T> {
    pub(super) fn new(settings: &ProviderSettings) -> Self {
        let ProviderSettings { max_offers, max_bytes, .. } = *settings;
        Self { entries: HashMap::new(), offers: 0, bytes: 0, max_offers, max_bytes }
    }

    pub(super) fn offers(&self) -> usize {
        self.offers
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn put(
        &mut self,
        key: &TensorKey,
        offer: OfferedTensor<T>,
        readers: u32,
    ) -> Result<(), OfferError> {
        let (name, step) = (key.name.to_string(), key.step);
        if self.offer(key).is_some() {
            return Err(OfferError::AlreadyOffered { name, step });
        }
        if readers == 0 {
            return Err(OfferError::NoReaders { name, step });
        }
        if matches!(&offer, OfferedTensor::Failed(failure) if failure.code == Code::Ok) {
            return Err(OfferError::NoFailure { name, step });
        }
        if self.offers >= self.max_offers {
            return Err(OfferError::TooMany { kept: self.offers });
        }
        let (bytes, kept, limit) = (offer.bytes(), self.bytes, self.max_bytes);
        self.bytes = kept.checked_add(bytes).filter(|&sum| sum <= limit).ok_or(OfferError::TooMuch {
            bytes,
            kept,
            limit,
        })?;
        self.offers += 1;
        self.entry(key).kept =
            Some(KeptOffer { offer, unused: readers, taken: 0, closed: false, served: Vec::new() });
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
            kept.closed = true;
            kept.unused = kept.taken;
        });
        Some(free)
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
