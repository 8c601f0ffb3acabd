//! Places in the peer's memory: the search for a place by the peer's region table, which checks key, domain, rights and range,
//! and the copies to and from the place.
//!
//! Memory that the peer has not shared is copied by a system call, which names the peer by its process number. If the peer
//! dies between the check and the copy, and the kernel gives the number to another process of this user, the copy goes to that
//! process. No system call excludes this.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Release, SeqCst};
use std::sync::atomic::fence;

use super::connection::Connection;
use crate::soft::shared::link::Piece;
use crate::soft::shared::mapping::Mapping;
use crate::soft::system::{self, Direction};
use crate::{Access, CompletionStatus, copy_bytes, copy_past_caches};

/// Bytes of a word. A transfer that is placed in order stores its last word at once, after all its other bytes.
pub(super) const WORD: u64 = size_of::<u64>() as u64;

/// The peer's segments that a queue pair has mapped, by number.
#[derive(Debug, Default)]
pub(super) struct Segments {
    known: Vec<Known>,
    last: usize,
}

#[derive(Debug)]
struct Known {
    segment: u64,
    /// The key of the last request to the segment. The segment may be unmapped when this key is gone.
    key: u32,
    /// `None` if the peer did not share the segment: the kernel copies instead.
    mapping: Option<Arc<Mapping>>,
}

impl Segments {
    /// Bytes and segments that a queue pair keeps mapped after their keys are gone. Each tensor from one memory may have a
    /// key of its own, and mapping a segment again takes a message and a page fault for each page.
    const UNUSED: u64 = 64 << 20;
    const UNUSED_SEGMENTS: usize = 32;

    /// Adds the answer of the peer to a request for a segment. First unmaps segments whose keys are gone.
    pub(super) fn add(
        &mut self,
        connection: &Connection,
        segment: u64,
        key: u32,
        mapping: Option<Arc<Mapping>>,
    ) {
        self.unmap_unused(|key| connection.table.holds(key));
        self.known.push(Known { segment, key, mapping });
    }

    /// Unmaps segments whose keys are gone, the oldest first, until the rest is within bounds.
    fn unmap_unused(&mut self, holds: impl Fn(u32) -> bool) {
        let (mut bytes, mut segments) = (0, 0);
        for index in (0..self.known.len()).rev() {
            let known = &self.known[index];
            if holds(known.key) {
                continue;
            }
            (bytes, segments) = (bytes + known.length(), segments + 1);
            if known.mapping.is_none() || bytes > Self::UNUSED || segments > Self::UNUSED_SEGMENTS {
                self.known.remove(index);
            }
        }
    }

    fn find(&mut self, segment: u64, key: u32) -> Option<&Known> {
        if self.known.get(self.last).is_none_or(|known| known.segment != segment) {
            self.last = self.known.iter().position(|known| known.segment == segment)?;
        }
        let known = self.known.get_mut(self.last)?;
        known.key = key;
        Some(known)
    }
}

impl Known {
    fn length(&self) -> u64 {
        self.mapping.as_ref().map_or(0, |mapping| mapping.length())
    }
}

/// The reason why a place in the peer's memory can't be used.
pub(super) enum Obstacle {
    /// The key, the range or the rights are wrong.
    Access,
    /// The peer's segment must be mapped first.
    Map { segment: u64, key: u32 },
}

/// A place in the peer's memory. The place is valid until the end of the section in which it was found.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Mapped(*mut u8),
    Process(u64),
}

/// The direction and kind of a copy.
#[derive(Clone, Copy)]
pub(super) struct CopyMode {
    pub(super) direction: Direction,
    /// Whether the bytes go past the caches.
    pub(super) past_caches: bool,
}

impl CopyMode {
    /// Returns the mode for a single word.
    fn word(direction: Direction) -> Self {
        Self { direction, past_caches: false }
    }
}

impl Place {
    /// Finds `piece` in the peer's memory. The caller must be in a section.
    pub(super) fn find(
        connection: &Connection,
        segments: &mut Segments,
        piece: &Piece,
        access: Access,
    ) -> Result<Self, Obstacle> {
        let entry = connection.table.find(piece.key).ok_or(Obstacle::Access)?;
        if entry.domain != connection.domain || !entry.access.contains(access) {
            return Err(Obstacle::Access);
        }
        let offset = entry.offset(piece.address, piece.length).ok_or(Obstacle::Access)?;
        if entry.segment == 0 {
            return Ok(Self::Process(piece.address));
        }
        match segments.find(entry.segment, piece.key) {
            None => Err(Obstacle::Map { segment: entry.segment, key: piece.key }),
            Some(Known { mapping: None, .. }) => Ok(Self::Process(piece.address)),
            Some(Known { mapping: Some(mapping), .. }) => match mapping.range(offset, piece.length) {
                Some(place) => Ok(Self::Mapped(place.as_ptr())),
                None => Err(Obstacle::Access),
            },
        }
    }

    fn after(self, bytes: u64) -> Self {
        match self {
            Self::Mapped(place) => Self::Mapped(place.wrapping_add(bytes as usize)),
            Self::Process(address) => Self::Process(address.wrapping_add(bytes)),
        }
    }

    /// Copies between `here` and this place. Returns the number of bytes copied.
    ///
    /// # Safety
    /// - `here` must be valid for `length` bytes, for writing if the bytes come from the peer.
    /// - This place must have been found for `length` bytes, in the current section.
    pub(super) unsafe fn copy(
        self,
        connection: &Connection,
        here: *mut u8,
        length: u64,
        mode: CopyMode,
    ) -> Result<u64, CompletionStatus> {
        let bytes = length as usize;
        let CopyMode { direction, past_caches } = mode;
        match self {
            Self::Mapped(there) => {
                let (from, to) = match direction {
                    Direction::ToPeer => (here.cast_const(), there),
                    Direction::FromPeer => (there.cast_const(), here),
                };
                // SAFETY:
                // - `here` is valid by this function's contract, `there` because its mapping has these bytes; and
                // - their addresses do not overlap, because only this module maps a peer's segment.
                unsafe {
                    if past_caches { copy_past_caches(from, to, bytes) } else { copy_bytes(from, to, bytes) }
                };
                Ok(length)
            }
            Self::Process(there) => {
                // SAFETY: `here` is valid by the contract of this function.
                match unsafe {
                    system::process_copy(connection.peer.process(), here, there, bytes, direction)
                } {
                    Ok(copied) if copied > 0 => Ok(copied as u64),
                    Ok(_) => Err(CompletionStatus::RemoteOperation),
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                        Err(CompletionStatus::RetryExceeded)
                    }
                    Err(error) => {
                        crate::throttled!(warn, %error, "the kernel can't copy to or from the peer's memory");
                        Err(CompletionStatus::RemoteOperation)
                    }
                }
            }
        }
    }

    /// [Copies](Self::copy) the end of a transfer. Stores the last word at once, after all earlier stores of this thread. If
    /// the kernel copies only a part, at least the last word remains to be copied.
    ///
    /// # Safety
    /// - The conditions of [`copy`](Self::copy) hold, and `length` is at least that of a word.
    pub(super) unsafe fn copy_end(
        self,
        connection: &Connection,
        here: *mut u8,
        length: u64,
        mode: CopyMode,
    ) -> Result<u64, CompletionStatus> {
        let before = length - WORD;
        if before > 0 {
            // SAFETY: the bytes are a part of those that the caller promised.
            let copied = unsafe { self.copy(connection, here, before, mode)? };
            if copied < before {
                return Ok(copied);
            }
        }
        let (here, there) = (here.wrapping_add(before as usize), self.after(before));
        match mode.direction {
            Direction::ToPeer => {
                // SAFETY: the word is the last of the bytes that the caller promised; bytes need no alignment.
                let word = unsafe { here.cast::<[u8; WORD as usize]>().read() };
                // SAFETY: the place was found for these bytes, as the caller promised.
                unsafe { there.store(connection, word)? };
            }
            Direction::FromPeer => {
                // SAFETY: the place was found for these bytes, as the caller promised.
                let word = unsafe { there.load(connection)? };
                // SAFETY: the word may be written, as the caller promised.
                unsafe { store_word(here, word) };
            }
        }
        Ok(length)
    }

    /// Loads a word from this place.
    ///
    /// # Safety
    /// - This place must have been found for a word, in the current section.
    unsafe fn load(self, connection: &Connection) -> Result<[u8; WORD as usize], CompletionStatus> {
        if let Self::Mapped(there) = self {
            // SAFETY: the mapping has these bytes, as the caller promised; bytes need no alignment.
            return Ok(unsafe { there.cast::<[u8; WORD as usize]>().read() });
        }
        let mut word = [0; WORD as usize];
        // SAFETY: the word is ours, and the place was found for a word, as the caller promised.
        let copied =
            unsafe { self.copy(connection, word.as_mut_ptr(), WORD, CopyMode::word(Direction::FromPeer))? };
        if copied == WORD { Ok(word) } else { Err(CompletionStatus::RemoteOperation) }
    }

    /// Stores a word to this place, after all earlier stores of this thread.
    ///
    /// # Safety
    /// - This place must have been found for a word, in the current section.
    pub(super) unsafe fn store(
        self,
        connection: &Connection,
        mut word: [u8; WORD as usize],
    ) -> Result<(), CompletionStatus> {
        if let Self::Mapped(there) = self {
            // SAFETY: the mapping has these bytes, as the caller promised.
            unsafe { store_word(there, word) };
            return Ok(());
        }
        // SYNC: earlier stores, by other system calls or by this thread, come before the store of this call.
        fence(SeqCst);
        // SAFETY: the word is ours, and the place was found for a word, as the caller promised.
        let copied =
            unsafe { self.copy(connection, word.as_mut_ptr(), WORD, CopyMode::word(Direction::ToPeer))? };
        // The kernel copies an aligned word completely, because such a word does not cross a page.
        if copied == WORD { Ok(()) } else { Err(CompletionStatus::RemoteOperation) }
    }
}

/// Stores a word at once if `to` is aligned, and otherwise as bytes. `to` may be misaligned, because a peer may state a wrong
/// start of its memory.
///
/// # Safety
/// - `to` must be valid for writing a word.
unsafe fn store_word(to: *mut u8, word: [u8; WORD as usize]) {
    let aligned = to.cast::<AtomicU64>();
    if aligned.is_aligned() {
        // SAFETY:
        // - `to` is valid by this function's contract, and aligned; and
        // - an atomic may be changed at any time, also by other processes.
        let place = unsafe { &*aligned };
        // SYNC: pairs with `HostMemory::load_u64`: a thread that sees the word also sees all earlier stores.
        place.store(u64::from_ne_bytes(word), Release);
    } else {
        // SAFETY: `to` is valid by the contract of this function; `word` is ours.
        unsafe { copy_bytes(word.as_ptr(), to, word.len()) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::soft::shared::mapping::Writers;

    #[test]
    fn a_word_is_stored_at_any_alignment() {
        let mut words = [u64::MAX; 3];
        for offset in 0..=16 {
            words.fill(u64::MAX);
            // SAFETY: eight bytes from `offset` on lie within the array.
            unsafe {
                store_word(words.as_mut_ptr().cast::<u8>().wrapping_add(offset), [1, 2, 3, 4, 5, 6, 7, 8])
            };
            let mut expected = [u8::MAX; 24];
            expected[offset..offset + 8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
            let found: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(found, expected);
        }
    }

    fn segments(lengths: &[usize]) -> Segments {
        let known = lengths.iter().zip(1..).map(|(&length, number)| {
            let mapping = Mapping::create(length, Writers::All).unwrap().0;
            Known { segment: number, key: number as u32, mapping: Some(Arc::new(mapping)) }
        });
        Segments { known: known.collect(), last: 0 }
    }

    fn left(segments: &Segments) -> Vec<u64> {
        segments.known.iter().map(|known| known.segment).collect()
    }

    #[test]
    fn memory_that_gets_a_new_key_each_time_stays_mapped() {
        let mut segments = segments(&[4 << 20; 3]);
        segments.unmap_unused(|_| false);
        assert_eq!(left(&segments), [1, 2, 3]);
        assert!(segments.find(2, 77).is_some_and(|known| known.key == 77));
    }

    #[test]
    fn segments_without_a_key_are_bounded() {
        let mut many = segments(&[4096; 40]);
        many.unmap_unused(|key| key == 1);
        assert_eq!(left(&many), [1].into_iter().chain(9..=40).collect::<Vec<u64>>());
        let mut large = segments(&[30 << 20, 50 << 20, 30 << 20, 30 << 20]);
        large.unmap_unused(|key| key == 2);
        assert_eq!(left(&large), [2, 3, 4]);
        let mut refused = segments(&[4096]);
        refused.known[0].mapping = None;
        refused.unmap_unused(|_| false);
        assert!(refused.known.is_empty(), "the peer is asked again");
    }
}
