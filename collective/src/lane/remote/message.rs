//! The format of a message, and of the memory in which messages lie. All numbers are little-endian.
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
//! Slots are aligned to cache lines, so a message of at most 40 bytes is one cache line. The word says which message is in the
//! slot: the word of an earlier message in this slot has another number. A slot that was never used holds zeros.

use crate::lane::Tag;

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
/// The largest payload of a message.
pub(super) const MOST_INLINE: usize = 32 << 10;
const STEP: u64 = (1 << 24) - 1;

/// The first line of a slot.
pub(super) type Line = [u8; LINE];

/// What a message has beside its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Bytes that lie behind the header.
    Inline { length: usize },
    /// Bytes in memory of the sender.
    Reference(Reference),
}

/// Bytes in memory of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reference {
    /// The number of the memory.
    pub(super) number: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// The arrangement of the slots of one direction. Both ends have the same.
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
    /// The offset of the words by which two ranks set up their lanes.
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

/// Makes the first line of message `number`, with the first bytes of its payload. Returns the line and its word.
#[inline]
pub(super) fn inline_line(number: u64, tag: Tag, payload: &[u8]) -> (Line, u64) {
    let word = word_of(number, payload.len() as u64);
    let mut line = line_of(word, tag);
    let first = payload.len().min(SHORT);
    line[HEADER..HEADER + first].copy_from_slice(&payload[..first]);
    (line, word)
}

/// Makes the line of a reference. Returns the line and its word.
pub(super) fn reference_line(number: u64, tag: Tag, reference: Reference) -> (Line, u64) {
    let word = word_of(number, IS_REFERENCE);
    let mut line = line_of(word, tag);
    let Reference { number, offset, length } = reference;
    for (at, value) in [number, offset, length].into_iter().enumerate() {
        line[HEADER + 8 * at..HEADER + 8 * (at + 1)].copy_from_slice(&value.to_le_bytes());
    }
    (line, word)
}

#[inline]
fn line_of(word: u64, tag: Tag) -> Line {
    let mut line = [0; LINE];
    line[..8].copy_from_slice(&word.to_le_bytes());
    let place = tag.operation << 24 | (u64::from(tag.step) & STEP);
    line[8..16].copy_from_slice(&place.to_le_bytes());
    line[16..24].copy_from_slice(&tag.call.to_le_bytes());
    line
}

#[inline]
fn word_of(number: u64, length: u64) -> u64 {
    number.wrapping_add(1) << 16 | length
}

/// What the word of a slot says about the message that is expected there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Arrived,
    NotYet,
    /// The word belongs to no message that may be in the slot.
    Wrong,
}

/// Compares the word of a slot with message `number`. `slots` is the number of slots.
#[inline]
pub(super) fn look(word: u64, number: u64, slots: u32) -> Look {
    const NUMBER: u64 = u64::MAX >> 16;
    let found = word >> 16;
    if found == number.wrapping_add(1) & NUMBER {
        return Look::Arrived;
    }
    let earlier = number.checked_sub(u64::from(slots)).map_or(0, |earlier| (earlier + 1) & NUMBER);
    if found == earlier { Look::NotYet } else { Look::Wrong }
}

/// Reads the first line of a message. `word` is its word, `operation` is the operation of the message before it, and `inline` is
/// the largest payload of a message.
///
/// # Errors
/// The length of the payload exceeds `inline`.
#[inline]
pub(super) fn decode(word: u64, line: &Line, operation: u64, inline: u32) -> Result<(Tag, Content), u64> {
    let place = field(line, 8);
    let tag = Tag {
        operation: nearest(place >> 24, operation),
        step: (place & STEP) as u32,
        call: field(line, 16),
    };
    let length = word & 0xffff;
    if length == IS_REFERENCE {
        let reference = Reference {
            number: field(line, HEADER),
            offset: field(line, HEADER + 8),
            length: field(line, HEADER + 16),
        };
        return Ok((tag, Content::Reference(reference)));
    }
    if length > u64::from(inline) {
        return Err(length);
    }
    Ok((tag, Content::Inline { length: length as usize }))
}

#[inline]
fn field(line: &Line, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&line[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// Returns the number nearest to `before` whose low 40 bits are `low`.
#[inline]
fn nearest(low: u64, before: u64) -> u64 {
    // The difference as a signed number of 40 bits.
    let distance = (low.wrapping_sub(before) << 24).cast_signed() >> 24;
    before.wrapping_add_signed(distance)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAG: Tag = Tag { operation: 77, step: 5, call: u64::MAX - 3 };

    #[test]
    fn a_message_decodes_to_what_was_sent() {
        for length in [0, 1, 39, 40, 41, 8192] {
            let payload: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let (line, word) = inline_line(9, TAG, &payload);
            assert_eq!(look(word, 9, 8), Look::Arrived);
            assert_eq!(decode(word, &line, 70, 8192), Ok((TAG, Content::Inline { length })));
            let first = length.min(SHORT);
            assert_eq!(line[HEADER..HEADER + first], payload[..first]);
        }
        let reference = Reference { number: 1 << 60, offset: 3, length: u64::MAX };
        let (line, word) = reference_line(0, TAG, reference);
        assert_eq!(decode(word, &line, 0, 64), Ok((TAG, Content::Reference(reference))));
    }

    #[test]
    fn a_length_above_the_limit_is_refused() {
        let (line, word) = inline_line(0, TAG, &[0; 100]);
        assert_eq!(decode(word, &line, 0, 99), Err(100));
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
        let word = |number| inline_line(number, TAG, &[]).1;
        assert_eq!(look(0, 3, 8), Look::NotYet);
        assert_eq!(look(0, 11, 8), Look::Wrong);
        assert_eq!(look(word(3), 11, 8), Look::NotYet);
        assert_eq!(look(word(11), 11, 8), Look::Arrived);
        assert_eq!(look(word(19), 11, 8), Look::Wrong);
        assert_eq!(look(word(10), 11, 8), Look::Wrong);
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
