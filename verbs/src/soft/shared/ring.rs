//! The ring of records: one end writes records, the other side reads them. Each end writes only its own
//! memory.
//!
//! ```text
//!  a record, at a multiple of 64 bytes:
//!  word 0   tag: key + position / 64                                        written last
//!       1   lines │ flags << 16 │ kind << 24 │ bytes of payload in this record << 32
//!       2   address in the target's memory
//!       3   key of the target's memory │ immediate << 32
//!       4   bytes of the whole message
//!       5…  payload
//! ```
//! The reader knows the tag that it waits for: the key of the ring is a random number that only the two ends
//! know, and no position comes twice. So it polls one word, and a small message takes one or two cache lines,
//! and no others. Old content of the ring is a payload of other parties, or an earlier tag. It equals the
//! awaited tag with a probability of 2^-64.
//!
//! The reader gives slots back by a position, in memory of its own; the writer never trusts this position
//! beyond its own records.

use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use super::platform::{Orders, Platform, Word};

/// Words of a cache line, the unit of slots in the ring.
pub(crate) const LINE: usize = 8;
/// Bytes of a cache line.
const LINE_BYTES: u64 = 64;
/// Words of a record before its payload.
pub(crate) const HEADER: usize = 5;
/// Bytes of a record before its payload.
const HEADER_BYTES: u64 = HEADER as u64 * 8;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A message for the target's next receive.
    Send = 1,
    /// Bytes for an address in the target's memory.
    Write,
    /// A request for bytes of the target's memory.
    Read,
    /// Bytes that a request asked for.
    ReadData,
    /// No content: the rest of the ring before its end.
    Skip,
}

impl Kind {
    fn from_bits(bits: u64) -> Option<Self> {
        Some(match bits {
            1 => Self::Send,
            2 => Self::Write,
            3 => Self::Read,
            4 => Self::ReadData,
            5 => Self::Skip,
            _ => return None,
        })
    }
}

/// The properties of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u8);

impl Flags {
    /// The message has immediate data.
    pub const IMMEDIATE: Self = Self(1);
    /// The first record of a message.
    pub const FIRST: Self = Self(2);
    /// The last record of a message.
    pub const LAST: Self = Self(4);
    /// The payload is a list of segment addresses in memory of the writer, from which the target takes the
    /// bytes.
    pub const PULL: Self = Self(8);
    /// The writer waits for the end of the message. The target shows its progress at once.
    pub const AWAITED: Self = Self(16);

    const ALL: u8 = 31;

    /// Returns whether all of `other` are set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether these are the flags of a record that has a whole message.
    #[inline]
    pub fn is_whole(self) -> bool {
        const PARTS: Flags = Flags::FIRST.with(Flags::LAST).with(Flags::PULL);
        self.0 & PARTS.0 == Self::FIRST.with(Self::LAST).0
    }

    /// Returns these flags and `other`.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns these flags and, on the condition, `other`.
    #[inline]
    pub fn with_if(self, other: Self, condition: bool) -> Self {
        Self(self.0 | (other.0 * u8::from(condition)))
    }
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the record.
    pub kind: Kind,
    /// Properties of the record.
    pub flags: Flags,
    /// Bytes of payload in this record.
    pub length: u32,
    /// Immediate data.
    pub immediate: u32,
    /// Address in the target's memory.
    pub address: u64,
    /// Key of the target's memory.
    pub key: u32,
    /// Bytes of the whole message.
    pub total: u64,
}

impl Header {
    /// Makes the header of a record without payload, which names no memory.
    #[inline]
    pub(crate) fn empty(kind: Kind, flags: Flags) -> Self {
        Self { kind, flags, length: 0, immediate: 0, address: 0, key: 0, total: 0 }
    }
}

/// A record that the reader has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The header.
    pub header: Header,
    /// Index in the ring of the first word of the payload.
    pub payload: usize,
    lines: u32,
}

/// A slot for a record.
#[derive(Debug)]
pub struct RingSlot {
    start: usize,
    lines: u32,
}

impl RingSlot {
    /// Returns the index in the ring of the first word of the payload.
    #[inline]
    pub fn payload(&self) -> usize {
        self.start + HEADER
    }

    /// Bytes of the payload that are in the cache line of the tag. The writer writes them last, so that the
    /// reader, which checks this line all the time, does not take the line away in between.
    pub const WITH_TAG: u64 = LINE_BYTES - HEADER_BYTES;
}

/// The reader's memory holds an impossible record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation;

/// The writer's private state.
#[derive(Debug)]
pub struct Writer<P, O> {
    /// Bytes written so far, in whole lines.
    head: u64,
    /// Bytes that the reader has given back so far.
    freed: u64,
    key: u64,
    /// A power of two.
    size: u64,
    marker: PhantomData<fn() -> (P, O)>,
}

/// The reader's private state.
#[derive(Debug)]
pub struct Reader<P, O> {
    position: u64,
    key: u64,
    size: u64,
    marker: PhantomData<fn() -> (P, O)>,
}

/// Returns the lines of a record with `length` bytes of payload.
fn lines_of(length: u64) -> u64 {
    (HEADER_BYTES + length).div_ceil(LINE_BYTES)
}

/// Returns the index of `position` in a ring of `size` bytes, a power of two. The processor needs no division
/// for it.
#[inline]
fn index_of(position: u64, size: u64) -> u64 {
    position & (size - 1)
}

/// Returns the tag of the record at `position`.
#[inline]
fn tag(key: u64, position: u64) -> u64 {
    key.wrapping_add(position / LINE_BYTES)
}

impl<P: Platform, O: Orders> Writer<P, O> {
    /// Makes the writer of an empty ring of `size` bytes, a power of two. `key` is random.
    pub fn new(size: u64, key: u64) -> Self {
        Self { head: 0, freed: 0, key, size, marker: PhantomData }
    }

    /// Returns the number of bytes written so far. A record ends at this position.
    #[inline]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Returns the position up to which the reader has taken the records, as far as the writer knows.
    #[inline]
    pub fn freed(&self) -> u64 {
        self.freed
    }

    /// Takes slots back, up to the position in `taken`.
    ///
    /// # Errors
    /// The position is impossible.
    #[inline]
    pub fn reclaim(&mut self, taken: &P::Word) -> Result<(), Violation> {
        // SYNC: pairs with `Reader::give_back`: the reader has loaded the content of these slots before.
        let position = taken.load(O::RECLAIM);
        if position < self.freed || position > self.head || !position.is_multiple_of(LINE_BYTES) {
            return Err(Violation);
        }
        self.freed = position;
        Ok(())
    }

    /// Returns the most bytes of payload that a record can have now; `None` if no record fits.
    #[inline]
    pub fn room(&self) -> Option<u64> {
        let free = self.size - (self.head - self.freed);
        let to_end = self.size - index_of(self.head, self.size);
        let best = if free <= to_end { free } else { to_end.max(free - to_end) };
        best.checked_sub(HEADER_BYTES)
    }

    /// Reserves the slot of a record with `length` bytes of payload; `None` if there is no room.
    #[inline]
    pub fn reserve(&mut self, ring: &[P::Word], length: u64) -> Option<RingSlot> {
        let lines = lines_of(length);
        let free = self.size - (self.head - self.freed);
        let at = index_of(self.head, self.size);
        let to_end = self.size - at;
        if lines * LINE_BYTES > to_end {
            if to_end + lines * LINE_BYTES > free {
                return None;
            }
            let skip = RingSlot { start: (at / 8) as usize, lines: (to_end / LINE_BYTES) as u32 };
            self.publish(ring, &skip, &Header::empty(Kind::Skip, Flags::default()));
        } else if lines * LINE_BYTES > free {
            return None;
        }
        Some(RingSlot { start: (index_of(self.head, self.size) / 8) as usize, lines: lines as u32 })
    }

    /// Publishes the record at `slot`, whose payload the caller has written.
    #[inline]
    pub fn publish(&mut self, ring: &[P::Word], slot: &RingSlot, header: &Header) {
        let words = &ring[slot.start..slot.start + HEADER];
        let shape = u64::from(slot.lines)
            | u64::from(header.flags.0) << 16
            | (header.kind as u64) << 24
            | u64::from(header.length) << 32;
        words[4].store(header.total, Relaxed);
        words[3].store(u64::from(header.key) | u64::from(header.immediate) << 32, Relaxed);
        words[2].store(header.address, Relaxed);
        words[1].store(shape, Relaxed);
        // SYNC: pairs with `Reader::peek`: a reader that sees the tag sees the record.
        words[0].store(tag(self.key, self.head), O::PUBLISH);
        self.head += u64::from(slot.lines) * LINE_BYTES;
    }
}

impl<P: Platform, O: Orders> Reader<P, O> {
    /// Makes the reader of an empty ring of `size` bytes, a power of two. `key` is the writer's.
    pub fn new(size: u64, key: u64) -> Self {
        Self { position: 0, key, size, marker: PhantomData }
    }

    /// Returns the position up to which records were taken.
    #[inline]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the index of the word that has the next record's tag, and the tag.
    #[inline]
    pub fn next(&self) -> (usize, u64) {
        ((index_of(self.position, self.size) / 8) as usize, tag(self.key, self.position))
    }

    /// Returns the next record, if it has come.
    ///
    /// # Errors
    /// The content is not that of a record.
    #[inline]
    pub fn peek(&mut self, ring: &[P::Word]) -> Result<Option<Record>, Violation> {
        loop {
            let (start, tag) = self.next();
            // SYNC: pairs with `Writer::publish`.
            if ring[start].load(O::OBSERVE) != tag {
                return Ok(None);
            }
            let record = Self::decode(ring, start)?;
            if record.header.kind != Kind::Skip {
                return Ok(Some(record));
            }
            self.advance(&record);
        }
    }

    /// Decodes the record at word `start`. All values may be arbitrary.
    #[inline]
    fn decode(ring: &[P::Word], start: usize) -> Result<Record, Violation> {
        let words = &ring[start..start + HEADER];
        let [shape, address, keys, total] = [1, 2, 3, 4].map(|index| words[index].load(Relaxed));
        let (lines, flags, length) = (shape as u16, (shape >> 16) as u8, (shape >> 32) as u32);
        let kind = Kind::from_bits(shape >> 24 & 0xff).ok_or(Violation)?;
        let end = start + lines as usize * LINE;
        if end > ring.len() || flags & !Flags::ALL != 0 || lines_of(length.into()) > u64::from(lines) {
            return Err(Violation);
        }
        // A skip continues to the end of the ring, and does not begin at its beginning. So a peer can't keep
        // a reader busy.
        if kind == Kind::Skip && (start == 0 || end != ring.len()) {
            return Err(Violation);
        }
        let header = Header {
            kind,
            flags: Flags(flags),
            length,
            immediate: (keys >> 32) as u32,
            address,
            key: keys as u32,
            total,
        };
        Ok(Record { header, payload: start + HEADER, lines: lines.into() })
    }

    /// Continues to the record after `record`.
    #[inline]
    pub fn advance(&mut self, record: &Record) {
        self.position += u64::from(record.lines) * LINE_BYTES;
    }

    /// Gives the slots of all taken records back, by a store to `taken`, a word of the reader's own memory.
    #[inline]
    pub fn give_back(&self, taken: &P::Word) {
        // SYNC: pairs with `Writer::reclaim`.
        taken.store(self.position, O::GIVE_BACK);
    }
}
