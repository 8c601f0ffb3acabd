//! The segment of a queue pair's end. Its owner writes it. The one peer maps it only for reading.
//!
//! ```text
//!  word 0  nonce · RNR timer · key      written before the state is Ready
//!       8  attention · state            Waiting → Ready → Ended
//!      10  failure · its position       the record of the peer that this side refused
//!      16  taken                        the position in the peer's ring up to which this side has carried out the records
//!      24  posted                       the number of receives posted so far
//!      64  ring                         the records for the peer
//! ```
//! A peer may write anything to its own segment at any time. This side uses no value of it as an index
//! without a check, and loads each value once.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::attention::Attention;
use super::mapping::Mapping;
use super::platform::{Native, Orders, Platform, Shipping, Word, fence_of};
use crate::CompletionStatus;

const NONCE: usize = 0;
const RNR_TIMER: usize = 1;
const KEY: usize = 2;
const ATTENTION: usize = 8;
const STATE: usize = 9;
const TAKEN: usize = 16;
const POSTED: usize = 24;
const FAILURE: usize = 10;
const FAILED_AT: usize = 11;
const RING: usize = 64;

/// The ring of records, with the atomics of the standard library and the shipping orderings.
pub(crate) type Writer = super::ring::Writer<Native, Shipping>;
/// The reader of such a ring.
pub(crate) type Reader = super::ring::Reader<Native, Shipping>;

/// A segment of an end: our own, or the peer's.
#[derive(Debug)]
pub(crate) struct PairEnd {
    mapping: Mapping,
    /// The words of the mapping before the ring, and those of the ring. They are kept here because each
    /// message needs several of them.
    head: NonNull<[AtomicU64; RING]>,
    ring: NonNull<[AtomicU64]>,
}

// SAFETY: the memory is reached only through atomics and raw copies, which are sound from any thread.
unsafe impl Send for PairEnd {}
// SAFETY: as above.
unsafe impl Sync for PairEnd {}

/// Returns whether a ring may have this number of bytes.
pub(crate) fn is_ring(bytes: u64) -> bool {
    const { assert!(RING.is_multiple_of(8)) };
    (PairEnd::SMALLEST_RING..=PairEnd::LARGEST_RING).contains(&bytes) && bytes.is_power_of_two()
}

impl PairEnd {
    pub(crate) const SMALLEST_RING: u64 = 16 << 10;
    pub(crate) const LARGEST_RING: u64 = 1 << 20;

    /// Returns the bytes of the ring of a queue pair that sends messages of up to `inline` bytes: four such
    /// messages, and more.
    pub(crate) fn ring_for(inline: u32) -> u64 {
        const SMALL: u64 = 256 << 10;
        const LARGE: u64 = 512 << 10;
        (4 * u64::from(inline)).next_power_of_two().clamp(SMALL, LARGE)
    }

    /// Creates our own end, with a ring of `ring` bytes. `nonce` and `key` are random.
    pub(crate) fn create(ring: u64, nonce: u64, key: u64) -> io::Result<(Self, OwnedFd)> {
        let (mapping, fd) = Mapping::create(RING * 8 + ring as usize)?;
        let end = Self::of(mapping)?;
        end.word(NONCE).store(nonce, Release);
        end.word(KEY).store(key, Release);
        Attention::DEVICE.add::<Native>(end.attention_word());
        Ok((end, fd))
    }

    /// Maps the peer's end for reading.
    pub(crate) fn import(fd: &impl AsFd, ring: u64) -> io::Result<Self> {
        let length = (RING * 8) as u64 + ring;
        Self::of(Mapping::import(fd, length)?)
    }

    fn of(mapping: Mapping) -> io::Result<Self> {
        let (head, ring) = mapping
            .words()
            .split_first_chunk()
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a segment without a ring"))?;
        let (head, ring) = (NonNull::from(head), NonNull::from(ring));
        Ok(Self { mapping, head, ring })
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: these words are part of the mapping, which lives as long as `self`.
        unsafe { &self.head.as_ref()[index] }
    }

    /// Returns the words of the ring.
    #[inline]
    pub(crate) fn ring(&self) -> &[AtomicU64] {
        // SAFETY: as above.
        unsafe { self.ring.as_ref() }
    }

    /// Returns the bytes of the ring.
    #[inline]
    pub(crate) fn ring_bytes(&self) -> u64 {
        self.ring.len() as u64 * 8
    }

    /// Returns the address of the payload of `length` bytes that begins at word `index` of the ring; `None`
    /// if the payload does not lie in the ring.
    #[inline]
    pub(crate) fn payload(&self, index: usize, length: u64) -> Option<*mut u8> {
        let offset = ((RING + index) * 8) as u64;
        self.mapping.range(offset, length).map(|start| start.as_ptr())
    }

    /// Has the processor load the line at word `index` of the ring, if the ring has it, without waiting for
    /// it.
    #[inline]
    pub(crate) fn prefetch(&self, index: usize) {
        if let Some(word) = self.ring().get(index) {
            crate::prefetch(word.as_ptr().cast(), 1);
        }
    }

    pub(crate) fn nonce(&self) -> u64 {
        self.word(NONCE).load(Acquire)
    }

    /// Returns the key of the ring. A peer that shows a wrong key only loses its own
    /// records.
    pub(crate) fn key(&self) -> u64 {
        self.word(KEY).load(Acquire)
    }

    /// Returns the owner's `min_rnr_timer`.
    pub(crate) fn rnr_timer(&self) -> u8 {
        self.word(RNR_TIMER).load(Relaxed) as u8
    }

    pub(crate) fn set_rnr_timer(&self, code: u8) {
        self.word(RNR_TIMER).store(u64::from(code), Relaxed);
    }

    /// Returns the word of the owner's attention.
    #[inline]
    pub(crate) fn attention_word(&self) -> &AtomicU64 {
        self.word(ATTENTION)
    }

    #[inline]
    pub(crate) fn state(&self) -> EndState {
        EndState::of::<Native, Shipping>(self.word(STATE))
    }

    /// Moves the state forward, never back. Called by the owner, which may use memory again afterwards that
    /// the peer was reading.
    pub(crate) fn advance(&self, state: EndState) {
        state.show::<Native, Shipping>(self.word(STATE));
    }

    /// Returns the word with the position up to which the owner has carried out the peer's records.
    #[inline]
    pub(crate) fn taken_word(&self) -> &AtomicU64 {
        self.word(TAKEN)
    }

    /// Returns the number of receives that the owner has posted so far. The number wraps. No other value
    /// belongs to it: the receives are private to the owner.
    #[inline]
    pub(crate) fn posted(&self) -> u32 {
        self.word(POSTED).load(Relaxed) as u32
    }

    /// Returns the word with the number of receives that the owner has posted so far.
    #[inline]
    pub(crate) fn posted_word(&self) -> &AtomicU64 {
        self.word(POSTED)
    }

    /// Reports that the owner refused a record of the peer. Called by the owner, once, before the state is
    /// Ended.
    pub(crate) fn report(&self, failure: Failure) {
        failure.show::<Native, Shipping>([self.word(FAILURE), self.word(FAILED_AT)]);
    }

    /// Returns the record that the owner refused.
    #[inline]
    pub(crate) fn failure(&self) -> Option<Failure> {
        Failure::of::<Native, Shipping>([self.word(FAILURE), self.word(FAILED_AT)])
    }

    /// Returns all words of the segment, which a hostile owner can write.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }

    /// Index of the first word that the owner writes while the connection is in use.
    #[cfg(any(test, fuzzing))]
    pub(crate) const FIRST_CHANGING: usize = ATTENTION;

    /// Index of the first word of the ring.
    #[cfg(any(test, fuzzing))]
    pub(crate) const FIRST_OF_RING: usize = RING;
}

/// The state that an end shows to its peer. An end goes through the states in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EndState {
    /// The owner is not connected yet. The peer tries again later.
    Waiting,
    /// The owner takes records.
    Ready,
    /// The owner is in Error, or gone. Its memory may not be read any more, except for this segment.
    Ended,
}

impl EndState {
    /// Returns the state in `word`, which may have any value.
    #[inline]
    pub fn of<P: Platform, O: Orders>(word: &P::Word) -> Self {
        // SYNC: pairs with `show`: a peer that sees the state sees what the owner stored before.
        match word.load(O::CHECK) {
            0 => Self::Waiting,
            1 => Self::Ready,
            _ => Self::Ended,
        }
    }

    /// Moves the state in `word` forward to this one, never back. Called by the owner.
    pub fn show<P: Platform, O: Orders>(self, word: &P::Word) {
        word.raise(self as u64, O::SHOW);
        // SYNC: pairs with the fence of `unless_revoked`: a peer that has read what the owner stores from now
        // on sees the state.
        fence_of::<P>(O::REVOKE_FENCE);
    }
}

/// Calls `is_valid`, which checks whether memory that this thread has read was revoked meanwhile: whether a
/// key has become invalid, or an end has ended.
#[inline]
pub fn unless_revoked<P: Platform, O: Orders>(is_valid: impl FnOnce() -> bool) -> bool {
    // SYNC: pairs with the fence after the store that revokes memory: if this thread has read what the owner
    // stored afterwards, it sees that the memory was revoked.
    fence_of::<P>(O::CHECK_FENCE);
    is_valid()
}

/// The record that an end refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The position in the ring up to which the records before the refused one reach.
    pub at: u64,
    /// The status of the request.
    pub status: CompletionStatus,
}

impl Failure {
    /// Shows the failure in two words. Called by the owner, once, before the state is
    /// [`Ended`](EndState::Ended).
    pub fn show<P: Platform, O: Orders>(self, [code, at]: [&P::Word; 2]) {
        let number = match self.status {
            CompletionStatus::RemoteInvalidRequest => 1,
            CompletionStatus::RemoteAccess => 2,
            _ => 3,
        };
        at.store(self.at, Relaxed);
        // SYNC: pairs with `of`: a peer that sees the code sees the position.
        code.store(number, O::SHOW);
    }

    /// Returns the failure in two words, which may have any value.
    #[inline]
    pub fn of<P: Platform, O: Orders>([code, at]: [&P::Word; 2]) -> Option<Self> {
        let status = match code.load(O::CHECK) {
            0 => return None,
            1 => CompletionStatus::RemoteInvalidRequest,
            2 => CompletionStatus::RemoteAccess,
            _ => CompletionStatus::RemoteOperation,
        };
        Some(Self { at: at.load(Relaxed), status })
    }
}
