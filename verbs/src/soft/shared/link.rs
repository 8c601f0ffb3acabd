//! The link segment of a queue pair: created by its owner, mapped by the owner and its one peer.
//!
//! ```text
//!  word 0  nonce · RNR timer       written by the owner before the state is Ready
//!      16  state                   Waiting → Ready → Ended; written by the owner, and by the peer to report an error
//!      32  section                 odd while the owner is in the middle of an operation on the peer's memory
//!      48  the peer waits          set by a peer that found no receive, or no link that is Ready; cleared by the owner
//!                                  when it rings the peer
//!      64  receive slots           a power of two of them, one for each outstanding receive
//!
//!  slot:  posted │ done │ length │ immediate │ (address, length, key) × segments, padded to a cache line
//!         owner  │ ──────── peer ─────────── │ owner
//! ```
//! The upper half of `posted` and `done` contains the number of the receive, so the sides need no shared cursor. A receive and
//! its delivery are in one cache line, and each side knows the next number from its private count. No number from the link is
//! used as an index, and an impossible number of segments or kind of delivery is a violation.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use super::mapping::{Mapping, Writers};
use crate::LocalSegment;

const NONCE: usize = 0;
const RNR_TIMER: usize = 1;
const STATE: usize = 16;
const SECTION: usize = 32;
const WAITING: usize = 48;
const SLOTS: usize = 64;
/// Words of a slot before its segments: posted, done, length, immediate.
const SLOT_HEADER: usize = 4;
const SEGMENT: usize = 3;

/// The number of receives that a link holds, and the number of segments of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) receives: u32,
    pub(crate) segments: u32,
}

impl Shape {
    fn slots(self) -> usize {
        (self.receives.max(1) as usize).next_power_of_two()
    }

    fn stride(self) -> usize {
        (SLOT_HEADER + SEGMENT * self.segments as usize).next_multiple_of(8)
    }

    /// Returns the length of the segment in bytes.
    pub(crate) fn length(self) -> usize {
        (SLOTS + self.slots() * self.stride()) * 8
    }
}

/// The state that a link's owner shows to its peer. A link goes through the states in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LinkState {
    /// The owner is not connected yet. The peer tries again later.
    Waiting,
    /// The owner takes messages.
    Ready,
    /// The owner is in Error, or gone.
    Ended,
}

/// A message that was put into a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    pub(crate) kind: DeliveryKind,
    pub(crate) length: u64,
    pub(crate) immediate: Option<u32>,
}

/// The result of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeliveryKind {
    Send,
    Write,
    /// Longer than the receive.
    TooLong,
    /// The receive named memory that may not be written.
    Protection,
}

/// The content that the owner finds in the slot of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivered {
    NotYet,
    Message(Delivery),
    /// Content that no well-behaved peer writes.
    Violation,
}

/// A piece of a receive's memory, as the owner of the receive published it. The values must be checked, because they are data
/// of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) key: u32,
}

/// A link segment: our own, or the peer's.
#[derive(Debug)]
pub(crate) struct Link {
    mapping: Mapping,
    mask: usize,
    stride: usize,
    segments: u32,
}

impl Link {
    /// Creates our own link.
    pub(crate) fn create(shape: Shape, nonce: u64) -> io::Result<(Self, OwnedFd)> {
        let (mapping, fd) = Mapping::create(shape.length(), Writers::All)?;
        let link = Self::over(mapping, shape);
        link.word(NONCE).store(nonce, Release);
        Ok((link, fd))
    }

    /// Maps the peer's link.
    pub(crate) fn import(fd: &OwnedFd, shape: Shape) -> io::Result<Self> {
        Ok(Self::over(Mapping::import(fd, shape.length() as u64, Writers::All)?, shape))
    }

    fn over(mapping: Mapping, shape: Shape) -> Self {
        Self { mapping, mask: shape.slots() - 1, stride: shape.stride(), segments: shape.segments }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.mapping.words()[index]
    }

    fn slot(&self, number: u32) -> &[AtomicU64] {
        let start = SLOTS + (number as usize & self.mask) * self.stride;
        &self.mapping.words()[start..start + self.stride]
    }

    pub(crate) fn nonce(&self) -> u64 {
        self.word(NONCE).load(Acquire)
    }

    /// Returns the owner's `min_rnr_timer`.
    pub(crate) fn rnr_timer(&self) -> u8 {
        self.word(RNR_TIMER).load(Relaxed) as u8
    }

    pub(crate) fn set_rnr_timer(&self, code: u8) {
        self.word(RNR_TIMER).store(u64::from(code), Relaxed);
    }

    pub(crate) fn state(&self) -> LinkState {
        match self.word(STATE).load(SeqCst) {
            0 => LinkState::Waiting,
            1 => LinkState::Ready,
            _ => LinkState::Ended,
        }
    }

    /// Moves the state forward, never back.
    pub(crate) fn advance(&self, state: LinkState) {
        // SYNC: SeqCst, pairs with `enter`: either a peer sees this state in its section, or `section` sees the peer's
        // section.
        self.word(STATE).fetch_max(state as u64, SeqCst);
    }

    /// Begins a section, in which the owner may access the peer's memory. `count` is the private counter of the owner; the peer
    /// could write to the counter in the link. Called by the owner.
    pub(crate) fn enter<'a>(&'a self, count: &'a AtomicU64) -> Section<'a> {
        let number = count.load(Relaxed).wrapping_add(1) | 1;
        count.store(number, Relaxed);
        // SYNC: SeqCst, before all checks of keys and states within the section. A thread that invalidates a key or a state
        // after such a check finds the section, here or in `count`, and waits for its end.
        self.word(SECTION).swap(number, SeqCst);
        fence(SeqCst);
        Section { link: self, count, number }
    }

    /// Returns the section word, which is odd in the middle of a section.
    pub(crate) fn section(&self) -> u64 {
        fence(SeqCst);
        self.word(SECTION).load(SeqCst)
    }

    /// Asks the owner for a ring. Called by a peer that must wait; the peer must look once more afterwards.
    pub(crate) fn set_waiting(&self) {
        // SYNC: Dekker's algorithm with `take_waiting`: the peer sets the flag, then looks for a receive; the owner publishes
        // a receive, then looks for the flag.
        self.word(WAITING).swap(1, SeqCst);
        fence(SeqCst);
    }

    /// Returns whether the peer has asked for a ring, and clears the flag. Called by the owner.
    pub(crate) fn take_waiting(&self) -> bool {
        fence(SeqCst);
        self.word(WAITING).load(SeqCst) != 0 && self.word(WAITING).swap(0, SeqCst) != 0
    }

    /// Publishes receive `number`, whose slot must be free. Called by the owner.
    pub(crate) fn publish(&self, number: u32, segments: &[LocalSegment]) {
        let slot = self.slot(number);
        for (segment, words) in segments.iter().zip(slot[SLOT_HEADER..].chunks_exact(SEGMENT)) {
            words[0].store(segment.address(), Relaxed);
            words[1].store(segment.length(), Relaxed);
            words[2].store(u64::from(segment.lkey().0), Relaxed);
        }
        // SYNC: pairs with `posted`: a reader that sees the number sees the segments.
        slot[0].store(tag(number) | segments.len() as u64, Release);
    }

    /// Returns the number of segments of receive `number`, if this receive is posted. Fails if there are too many segments.
    /// Called by the peer.
    pub(crate) fn posted(&self, number: u32) -> Result<Option<u32>, Violation> {
        let posted = self.slot(number)[0].load(Acquire);
        if posted & !0xffff_ffff != tag(number) {
            return Ok(None);
        }
        let segments = posted as u32;
        if segments > self.segments { Err(Violation) } else { Ok(Some(segments)) }
    }

    /// Returns segment `index` of a receive that is [`posted`](Self::posted). Called by the peer.
    pub(crate) fn piece(&self, number: u32, index: u32) -> Piece {
        let at = SLOT_HEADER + SEGMENT * index.min(self.segments.saturating_sub(1)) as usize;
        let words = &self.slot(number)[at..at + SEGMENT];
        Piece {
            address: words[0].load(Relaxed),
            length: words[1].load(Relaxed),
            key: words[2].load(Relaxed) as u32,
        }
    }

    /// Reports that receive `number` is done. Called by the peer.
    pub(crate) fn deliver(&self, number: u32, delivery: &Delivery) {
        let slot = self.slot(number);
        slot[2].store(delivery.length, Relaxed);
        let (flag, immediate) = match delivery.immediate {
            Some(immediate) => (0x100, immediate),
            None => (0, 0),
        };
        slot[3].store(u64::from(immediate), Relaxed);
        let kind = match delivery.kind {
            DeliveryKind::Send => 0,
            DeliveryKind::Write => 1,
            DeliveryKind::TooLong => 2,
            DeliveryKind::Protection => 3,
        };
        // SYNC: pairs with `delivered`: a reader that sees the number sees the message and its length.
        slot[1].store(tag(number) | flag | kind, Release);
    }

    /// Returns the content of the slot of receive `number`. Called by the owner.
    pub(crate) fn delivered(&self, number: u32) -> Delivered {
        let slot = self.slot(number);
        let done = slot[1].load(Acquire);
        if done & !0xffff_ffff != tag(number) {
            return Delivered::NotYet;
        }
        let kind = match done & 0xff {
            0 => DeliveryKind::Send,
            1 => DeliveryKind::Write,
            2 => DeliveryKind::TooLong,
            3 => DeliveryKind::Protection,
            _ => return Delivered::Violation,
        };
        let immediate = (done & 0x100 != 0).then(|| slot[3].load(Relaxed) as u32);
        Delivered::Message(Delivery { kind, length: slot[2].load(Relaxed), immediate })
    }

    /// Overwrites all words from the state on, as a hostile peer could do.
    #[cfg(test)]
    pub(crate) fn scribble(&self, value: impl Fn(usize) -> u64) {
        for (index, word) in self.mapping.words().iter().enumerate().skip(STATE) {
            word.store(value(index), Relaxed);
        }
    }
}

/// A section of the owner. Dropping it ends the section.
#[derive(Debug)]
pub(crate) struct Section<'a> {
    link: &'a Link,
    count: &'a AtomicU64,
    number: u64,
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        // SYNC: Release, so that all reads and writes of the section are done before another thread sees its end.
        let next = self.number.wrapping_add(1);
        self.count.store(next, Release);
        self.link.word(SECTION).store(next, Release);
    }
}

/// The peer's link holds an impossible value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation;

/// Returns the tag of receive `number`, for the upper half of a word. Receive numbers wrap. The tag 0, which an unused slot
/// holds, belongs to the last number before the wrap only, and all slots are used before that number.
fn tag(number: u32) -> u64 {
    u64::from(number.wrapping_add(1)) << 32
}

#[cfg(test)]
mod tests;
