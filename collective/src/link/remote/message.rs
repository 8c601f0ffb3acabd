//! The format of a message, and of the memory in which messages lie, with the settings and counts of links.
//! All numbers are little-endian.
//!
//! ```text
//!  slot    0        8               16       24
//!          ┌────────┬───────────────┬────────┬──────────────── ─ ─
//!          │ word   │ operation 40  │ call   │ payload
//!          │        │ step 24       │        │
//!          └────────┴───────────────┴────────┴──────────────── ─ ─
//!  word    the message's number plus 1 (48 bits), the number of payload bytes (16 bits)
//! ```
//!
//! Slots are aligned to cache lines, so a message of at most 40 bytes is one cache line. The word says which
//! message is in the slot: the word of an earlier message in this slot has another number. A slot that was
//! never used holds zeros.

use std::time::Duration;

use crate::link::Tag;
use crate::plan::Hosts;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// Bytes of a message before its payload.
pub(super) const HEADER: usize = 24;
/// The most payload bytes that lie in the first line of a slot.
pub(super) const SHORT: usize = LINE - HEADER;
/// Bytes of the payload of a reference.
pub(super) const REFERENCE: usize = 24;

/// The length in the word of a reference.
const IS_REFERENCE: u64 = 0xffff;
const STEP: u64 = (1 << 24) - 1;

/// What a message begins with, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) word: u64,
    /// The operation and the step.
    pub(super) position: u64,
    pub(super) call: u64,
}

/// What a message has beside its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Bytes that lie behind the header.
    Inline { length: usize },
    /// Bytes in memory of the sender.
    Reference(ElementReference),
}

/// Bytes in memory of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ElementReference {
    /// The number of the memory.
    pub(super) number: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// Where the slots of one direction lie. Both ranks have the same layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// The number of slots, a power of two.
    pub(super) slots: u32,
    /// The largest payload of a message.
    pub(super) inline: u32,
}

impl Layout {
    /// The offset of the count of messages that were taken.
    pub(super) const TAKEN: usize = 0;
    /// The offset of the words by which two ranks set up their links.
    pub(super) const HELLO: usize = 128;
    /// The offset of the first slot. Pairs of lines are kept apart, because processors fetch lines in pairs.
    const SLOTS: usize = 256;

    /// Returns the number of bytes of one direction.
    pub(super) fn bytes(self) -> usize {
        Self::SLOTS + self.slots as usize * self.stride()
    }

    /// Returns the offset of the slot of message `number`.
    #[inline]
    pub(super) fn slot(self, number: u64) -> usize {
        Self::SLOTS + (number as usize & (self.slots as usize - 1)) * self.stride()
    }

    #[inline]
    fn stride(self) -> usize {
        (HEADER + self.inline as usize).next_multiple_of(2 * LINE)
    }
}

impl Header {
    /// Makes the header of message `number`, whose payload has `length` bytes.
    #[inline]
    pub(super) fn inline(number: u64, tag: Tag, length: usize) -> Self {
        Self::new(number, tag, length as u64)
    }

    /// Makes the header of message `number`, which is a reference.
    #[inline]
    pub(super) fn reference(number: u64, tag: Tag) -> Self {
        Self::new(number, tag, IS_REFERENCE)
    }

    #[inline]
    fn new(number: u64, tag: Tag, length: u64) -> Self {
        let position = tag.operation << 24 | (u64::from(tag.step) & STEP);
        Self { word: number.wrapping_add(1) << 16 | length, position, call: tag.call }
    }

    /// Returns the bytes in memory.
    pub(super) fn to_bytes(self) -> [u8; HEADER] {
        bytes_of([self.word, self.position, self.call])
    }

    /// Returns the header of these bytes.
    pub(super) fn from_bytes(bytes: [u8; HEADER]) -> Self {
        let [word, position, call] = words_of(bytes);
        Self { word, position, call }
    }

    /// Returns the tag. `operation` is the operation of the message before it.
    #[inline]
    pub(super) fn tag(self, operation: u64) -> Tag {
        Tag {
            operation: nearest(self.position >> 24, operation),
            step: (self.position & STEP) as u32,
            call: self.call,
        }
    }

    /// Returns the length of the payload in bytes, or `None` for a reference.
    #[inline]
    pub(super) fn length(self) -> Option<usize> {
        let length = self.word & 0xffff;
        (length != IS_REFERENCE).then_some(length as usize)
    }
}

impl ElementReference {
    /// Returns the payload of a message.
    #[inline]
    pub(super) fn to_bytes(self) -> [u8; REFERENCE] {
        bytes_of([self.number, self.offset, self.length])
    }

    /// Returns the reference of a payload.
    #[inline]
    pub(super) fn from_bytes(bytes: [u8; REFERENCE]) -> Self {
        let [number, offset, length] = words_of(bytes);
        Self { number, offset, length }
    }
}

#[inline]
fn bytes_of(words: [u64; 3]) -> [u8; 24] {
    bytemuck::cast(words.map(u64::to_le))
}

#[inline]
fn words_of(bytes: [u8; 24]) -> [u64; 3] {
    bytemuck::pod_read_unaligned::<[u64; 3]>(&bytes).map(u64::from_le)
}

/// Whether the expected message is in a slot, by the slot's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    Arrived,
    NotYet,
    /// The word belongs to no message that may be in the slot.
    Wrong,
}

/// Compares the word of a slot with message `number`. `slots` is the number of slots.
#[inline]
pub(super) fn slot_state(word: u64, number: u64, slots: u32) -> SlotState {
    const NUMBER: u64 = u64::MAX >> 16;
    let found = word >> 16;
    if found == number.wrapping_add(1) & NUMBER {
        return SlotState::Arrived;
    }
    let earlier = number.checked_sub(u64::from(slots)).map_or(0, |earlier| (earlier + 1) & NUMBER);
    if found == earlier { SlotState::NotYet } else { SlotState::Wrong }
}

/// Returns the number nearest to `before` whose low 40 bits are `low`.
#[inline]
fn nearest(low: u64, before: u64) -> u64 {
    // The difference as a signed number of 40 bits.
    let distance = (low.wrapping_sub(before) << 24).cast_signed() >> 24;
    before.wrapping_add_signed(distance)
}

/// Settings of all links of a rank. The numbers must be equal on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct LinkSettings {
    /// The first part of the names of the regions. Each set of links of a device has another.
    pub(crate) names: String,
    /// Whether messages go by views, where both ranks see the memory of the other. Not in tests of what
    /// happens elsewhere.
    pub(crate) views: bool,
    /// The number of messages that one rank may send to another before the other takes one: a power of two,
    /// at least 2.
    pub(crate) slots: u32,
    /// The largest inline message in bytes, from 24 to 32 KiB. Writes may have a lower limit, that of their
    /// device.
    pub(crate) inline: u32,
    /// The most bytes that one call of `receive` gives: a multiple of 64.
    pub(crate) chunk: usize,
    /// The number of READs of one message that are under way at once.
    pub(crate) reads: usize,
    /// The number of regions of a peer that stay attached.
    pub(crate) attached: usize,
    /// How long the set-up, or the attachment of a region, may take.
    pub(crate) limit: Duration,
    /// On which host each rank is, for the counters.
    pub(crate) hosts: Hosts,
}

impl Default for LinkSettings {
    fn default() -> Self {
        Self {
            names: "tonic-rdma-collective/links".into(),
            views: true,
            slots: 8,
            // Up to here, a copy is faster than a reference also for registered memory, although the sender
            // copies: the receiver has to wait for each cache line of a reference, and the sender for the
            // receiver. An all-reduce of 2 ranks by halving-doubling with messages of 8 KiB took 3.5 µs with
            // copies and 4.4 µs with references, and with messages of 16 KiB 5.1 and 5.7 µs. To compare,
            // change this number and run
            // `tonic-rdma-allreduce --ranks 2 --sizes 4KiB,8KiB,16KiB,32KiB --algorithm halving-doubling`.
            inline: 16 << 10,
            chunk: 256 << 10,
            reads: 3,
            attached: 64,
            limit: Duration::from_secs(10),
            hosts: Hosts::default(),
        }
    }
}

impl LinkSettings {
    /// Returns the arrangement of slots.
    pub(super) fn layout(&self) -> Layout {
        Layout { slots: self.slots, inline: self.inline }
    }
}

/// Counts of all links of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LinkCounters {
    /// Messages sent.
    pub(crate) sent: u64,
    /// Messages taken.
    pub(crate) taken: u64,
    /// Bytes sent inline.
    pub(crate) inline_bytes: u64,
    /// Bytes that peers were asked to read.
    pub(crate) referenced_bytes: u64,
    /// Bytes read from memory of peers.
    pub(crate) read_bytes: u64,
    /// Bytes received, inline or read.
    pub(crate) received_bytes: u64,
    /// Bytes sent to ranks of other hosts, inline or to be read.
    pub(crate) across_bytes: u64,
    /// Bytes copied by this rank on their way: into a message, or out of memory into which they were read.
    /// Bytes that the receiver moves straight from the memory of the sender to their place are not in this
    /// count.
    pub(crate) copied_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAG: Tag = Tag { operation: 77, step: 5, call: u64::MAX - 3 };

    #[test]
    fn a_header_says_what_was_sent() {
        for length in [0, 1, 39, 40, 41, 8192, 32 << 10] {
            let header = Header::inline(9, TAG, length);
            assert_eq!(slot_state(header.word, 9, 8), SlotState::Arrived);
            assert_eq!((header.tag(70), header.length()), (TAG, Some(length)));
            assert_eq!(Header::from_bytes(header.to_bytes()), header);
        }
        let header = Header::reference(0, TAG);
        assert_eq!(
            (header.tag(77), header.length(), slot_state(header.word, 0, 8)),
            (TAG, None, SlotState::Arrived)
        );
        assert_eq!(header.to_bytes()[..8], [0xff, 0xff, 1, 0, 0, 0, 0, 0]);
        let reference = ElementReference { number: 1 << 60, offset: 3, length: u64::MAX };
        assert_eq!(ElementReference::from_bytes(reference.to_bytes()), reference);
        assert_eq!(reference.to_bytes()[8], 3);
    }

    #[test]
    fn an_operation_far_in_the_life_of_a_group_is_restored() {
        for operation in [0_u64, 1, (1 << 40) - 1, 1 << 40, 5 << 40 | 9] {
            for before in [operation, operation.saturating_sub(3), operation + 1000] {
                assert_eq!(nearest(operation & ((1 << 40) - 1), before), operation, "{operation} {before}");
            }
        }
    }

    #[test]
    fn only_the_message_of_the_lap_before_may_be_in_a_slot_that_waits() {
        let word = |number| Header::inline(number, TAG, 0).word;
        assert_eq!(slot_state(0, 3, 8), SlotState::NotYet);
        assert_eq!(slot_state(0, 11, 8), SlotState::Wrong);
        assert_eq!(slot_state(word(3), 11, 8), SlotState::NotYet);
        assert_eq!(slot_state(word(11), 11, 8), SlotState::Arrived);
        assert_eq!(slot_state(word(19), 11, 8), SlotState::Wrong);
        assert_eq!(slot_state(word(10), 11, 8), SlotState::Wrong);
    }

    #[test]
    fn slots_share_no_pair_of_cache_lines() {
        let layout = Layout { slots: 4, inline: 100 };
        assert_eq!(layout.slot(1) - layout.slot(0), 128);
        assert_eq!((layout.slot(4), layout.slot(0) % 128), (layout.slot(0), 0));
        assert!(layout.slot(3) + HEADER + 100 <= layout.bytes());
        assert_eq!(Layout { inline: 105, ..layout }.slot(1) - layout.slot(0), 256);
    }
}
