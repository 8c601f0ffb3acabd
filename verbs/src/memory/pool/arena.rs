//! An arena: slabs of one purpose, and the free pieces of them. Plain bookkeeping under the pool's lock; it makes and
//! drops no slab itself, since both take system calls.

use std::sync::Arc;

use super::free_ranges::FreeRanges;
use super::size_class;
use super::slab::Slab;

/// The use of a piece. A slab serves one purpose as long as it lives, see [`memory`](crate::memory).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// For the device, which may write to it at any time. No reference to it is ever made.
    Block,
    /// For the application. Its owner alone writes to it, and then freezes it.
    Buffer,
}

/// A piece of a slab, in use by one holder.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) slab: Arc<Slab>,
    /// Key of the slab in its arena.
    key: usize,
    /// First byte, from the start of the slab.
    pub(crate) offset: usize,
    /// Bytes.
    pub(crate) capacity: usize,
}

/// Slabs and their free pieces.
///
/// A piece that is given back goes onto the stack of its size class, to be taken from there while it is still in the
/// caches. When no slab has room, the stacks are emptied into the slabs' free ranges, where neighbours join to serve
/// any class.
#[derive(Debug)]
pub(crate) struct Arena {
    entries: slab::Slab<ArenaSlab>,
    stacks: Vec<Vec<PiecePlace>>,
    stacked: usize,
    /// Slabs of one piece each, that are free.
    spares: Vec<usize>,
    /// Longest piece that is cut from a common slab.
    largest: usize,
}

#[derive(Debug)]
struct ArenaSlab {
    slab: Arc<Slab>,
    /// Pieces in use.
    live: usize,
    /// Bytes of these.
    used: usize,
    /// `None` for a slab of one piece.
    free: Option<FreeRanges>,
}

#[derive(Clone, Copy, Debug)]
struct PiecePlace {
    key: usize,
    offset: usize,
}

impl Arena {
    /// An arena without slabs whose common ones will have `slab_size` bytes.
    pub(crate) fn new(slab_size: usize) -> Self {
        let mut largest_class = size_class::index(slab_size / 2);
        if size_class::size(largest_class) > slab_size / 2 {
            largest_class -= 1;
        }
        Self {
            entries: slab::Slab::new(),
            stacks: vec![Vec::new(); largest_class + 1],
            stacked: 0,
            spares: Vec::new(),
            largest: size_class::size(largest_class),
        }
    }

    /// What a piece for `length` bytes takes: a size class, or whole pages if it is to have a slab of its own.
    /// `None` if that is more than an address can count.
    pub(crate) fn capacity_for(&self, length: usize) -> Option<usize> {
        if self.is_common(length) {
            Some(size_class::size(size_class::index(length)))
        } else {
            length
                .checked_next_multiple_of(rustix::param::page_size())
                .filter(|&bytes| isize::try_from(bytes).is_ok())
        }
    }

    /// Whether a piece of `capacity` bytes shares its slab.
    pub(crate) fn is_common(&self, capacity: usize) -> bool {
        capacity <= self.largest
    }

    /// A piece that was in use before: of the class of `capacity`, or a spare slab not above half again as much, nor
    /// above `room`.
    pub(crate) fn reuse(&mut self, capacity: usize, room: u64) -> Option<Piece> {
        if self.is_common(capacity) {
            let place = self.stacks[size_class::index(capacity)].pop()?;
            self.stacked -= capacity;
            return Some(self.hold(place, capacity));
        }
        let fits =
            |bytes: usize| bytes >= capacity && bytes - capacity <= capacity / 2 && bytes as u64 <= room;
        let sizes = self.spares.iter().map(|&key| self.entries[key].slab.len()).enumerate();
        // From the back: of equal ones the last given back, which is the warmest.
        let (position, bytes) =
            sizes.rev().filter(|&(_, bytes)| fits(bytes)).min_by_key(|&(_, bytes)| bytes)?;
        let key = self.spares.remove(position);
        Some(self.hold(PiecePlace { key, offset: 0 }, bytes))
    }

    /// A new piece off one of the slabs there are.
    pub(crate) fn cut(&mut self, capacity: usize) -> Option<Piece> {
        if !self.is_common(capacity) {
            return None;
        }
        if let Some(piece) = self.cut_free(capacity) {
            return Some(piece);
        }
        if self.stacked < capacity {
            return None;
        }
        self.cut_joined(capacity)
    }

    /// Cuts a new piece after joining what was given back with what is free beside it: takes time for each free piece, and
    /// pieces of small classes are not at hand any more. Joins nothing where no slab has as many free bytes.
    pub(crate) fn cut_joined(&mut self, capacity: usize) -> Option<Piece> {
        let may_have = |entry: &ArenaSlab| entry.free.is_some() && entry.slab.len() - entry.used >= capacity;
        if !self.is_common(capacity) || !self.entries.iter().any(|(_, entry)| may_have(entry)) {
            return None;
        }
        self.empty_stacks();
        self.cut_free(capacity)
    }

    /// Adds a slab of at least `capacity` bytes, and holds a first piece of it.
    pub(crate) fn add(&mut self, slab: Arc<Slab>, capacity: usize) -> Piece {
        let (mut offset, mut free) = (0, None);
        if self.is_common(capacity) {
            let mut extents = FreeRanges::new(slab.len());
            offset = extents.take(capacity).unwrap_or(0);
            free = Some(extents);
        }
        let key = self.entries.insert(ArenaSlab { slab, live: 0, used: 0, free });
        self.hold(PiecePlace { key, offset }, capacity)
    }

    /// Takes a piece back. If it is not to be kept, the slab leaves the arena with its last piece, which the result
    /// says; `piece` then holds the last reference, for the caller to drop after the lock.
    pub(crate) fn give_back(&mut self, piece: &Piece, keep: bool) -> bool {
        let entry = &mut self.entries[piece.key];
        entry.live -= 1;
        entry.used -= piece.capacity;
        if !keep && entry.live == 0 {
            self.entries.remove(piece.key);
            self.forget_removed();
            return true;
        }
        if entry.free.is_some() {
            self.stacks[size_class::index(piece.capacity)]
                .push(PiecePlace { key: piece.key, offset: piece.offset });
            self.stacked += piece.capacity;
        } else {
            self.spares.push(piece.key);
        }
        false
    }

    /// Removes all slabs that no piece is in use of.
    pub(crate) fn remove_idle(&mut self) -> Vec<Arc<Slab>> {
        let mut removed = Vec::new();
        self.entries.retain(|_, entry| {
            if entry.live == 0 {
                removed.push(Arc::clone(&entry.slab));
            }
            entry.live > 0
        });
        if !removed.is_empty() {
            self.forget_removed();
        }
        removed
    }

    /// Number of slabs.
    pub(crate) fn slabs(&self) -> usize {
        self.entries.len()
    }

    fn hold(&mut self, place: PiecePlace, capacity: usize) -> Piece {
        let entry = &mut self.entries[place.key];
        entry.live += 1;
        entry.used += capacity;
        Piece { slab: Arc::clone(&entry.slab), key: place.key, offset: place.offset, capacity }
    }

    fn cut_free(&mut self, capacity: usize) -> Option<Piece> {
        let place = self.entries.iter_mut().find_map(|(key, entry)| {
            let offset = entry.free.as_mut()?.take(capacity)?;
            Some(PiecePlace { key, offset })
        })?;
        Some(self.hold(place, capacity))
    }

    fn forget_removed(&mut self) {
        let entries = &self.entries;
        self.spares.retain(|&key| entries.contains(key));
        self.stacked = 0;
        for (index, stack) in self.stacks.iter_mut().enumerate() {
            stack.retain(|place| entries.contains(place.key));
            self.stacked += stack.len() * size_class::size(index);
        }
    }

    fn empty_stacks(&mut self) {
        for (index, stack) in self.stacks.iter_mut().enumerate() {
            for place in stack.drain(..) {
                if let Some(free) = &mut self.entries[place.key].free {
                    free.give(place.offset, size_class::size(index));
                }
            }
        }
        self.stacked = 0;
    }
}
