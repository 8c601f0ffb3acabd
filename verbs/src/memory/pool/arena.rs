//! An arena: the slabs of one purpose and their free extents. The arena is bookkeeping under the pool's lock.
//! It does not make or drop slabs, because both need system calls. The lengths of extents are size classes:
//! the powers of two from 256 bytes on, and the size halfway between each two of them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use super::shared::Slab;

/// The use of an extent. A slab serves one purpose as long as it lives, see [`memory`](crate::memory).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// An extent for the device, which may write to the extent at any time. No reference to the extent is
    /// ever made.
    Block,
    /// An extent for the application. Only the owner writes to the extent, and then freezes it.
    Buffer,
    /// An extent that READs of this process fill, and that the application then reads. Peers have no right to
    /// it.
    Landing,
    /// An extent that becomes a [`MemRegion`](crate::memory::MemRegion), which has one owner and moves into
    /// operations. Peers may get rights to exactly its bytes.
    Region,
}

/// An extent of a slab, with one holder.
#[derive(Debug)]
pub(crate) struct Extent {
    pub(crate) slab: Arc<Slab>,
    /// Key of the slab in the arena.
    key: usize,
    /// Offset of the first byte in the slab.
    pub(crate) offset: usize,
    /// Length in bytes.
    pub(crate) capacity: usize,
    /// Whether no byte of the extent was ever part of another extent, so that it holds zeros.
    pub(crate) is_new: bool,
}

/// Slabs and their free extents.
///
/// An extent that is given back goes onto the stack of its size class. The next request of that class takes
/// the extent from the stack, while the extent is still in the processor's caches. When no slab has room, the
/// extents of all stacks return to the free ranges of their slabs. There, neighbours are joined and can serve
/// any class.
#[derive(Debug)]
pub(crate) struct Arena {
    entries: slab::Slab<ArenaSlab>,
    stacks: Vec<Vec<ExtentPosition>>,
    /// Bytes of all extents on the stacks.
    stacked: usize,
    /// Keys of the free slabs that have one extent each, the one given back first in front.
    spares: Vec<usize>,
    /// Bytes of the longest extent that is cut from a common slab.
    largest: usize,
    /// Number of the current period ([`end_period`](Self::end_period)).
    period: u64,
    /// The extents that were reserved ahead, by capacity.
    reserved: HashMap<usize, Reserved>,
}

/// The free extents of one capacity that were reserved ahead. They are taken in turn, like the buffers of a
/// slot.
#[derive(Debug, Default)]
struct Reserved {
    free: VecDeque<ExtentPosition>,
    /// How many of the free ones, the first, were never in use.
    unused: usize,
}

/// A slab of the arena.
#[derive(Debug)]
struct ArenaSlab {
    slab: Arc<Slab>,
    /// Number of extents in use.
    live: usize,
    /// Bytes of the extents in use.
    used: usize,
    /// End of the bytes that were ever in use.
    touched: usize,
    /// The last period in which an extent was in use.
    last_used: u64,
    /// The free ranges; `None` for a slab of one extent, and for one of extents that were reserved ahead.
    free: Option<FreeRanges>,
    is_reserved: bool,
}

/// The position of a free extent: the key of its slab, and the offset in the slab.
#[derive(Clone, Copy, Debug)]
struct ExtentPosition {
    key: usize,
    offset: usize,
}

impl Arena {
    /// Makes an arena without slabs. Common slabs, which serve several extents, will have `slab_size` bytes
    /// at most.
    pub(crate) fn new(slab_size: usize) -> Self {
        let mut largest_class = class_of(slab_size / 2);
        if class_size(largest_class) > slab_size / 2 {
            largest_class -= 1;
        }
        Self {
            entries: slab::Slab::new(),
            stacks: vec![Vec::new(); largest_class + 1],
            stacked: 0,
            spares: Vec::new(),
            largest: class_size(largest_class),
            period: 0,
            reserved: HashMap::new(),
        }
    }

    /// Returns the capacity of an extent for `length` bytes that is reserved ahead.
    pub(crate) fn reserved_capacity(length: usize) -> usize {
        length.max(1).checked_next_multiple_of(EXTENT_ALIGNMENT).unwrap_or(usize::MAX)
    }

    /// Adds a slab that is cut into extents for these lengths. Only requests of these lengths get them.
    pub(crate) fn reserve(&mut self, slab: Arc<Slab>, lengths: &[usize]) {
        let key = self.insert(slab, None, true);
        let capacities = || lengths.iter().map(|length| Self::reserved_capacity(*length));
        let mut end: usize = capacities().sum();
        // The last one first, because each goes in front of those that were in use and of those after it.
        for capacity in capacities().rev() {
            end -= capacity;
            let reserved = self.reserved.entry(capacity).or_default();
            reserved.free.push_front(ExtentPosition { key, offset: end });
            reserved.unused += 1;
        }
    }

    /// Takes an extent that was reserved ahead for this length, and is free. Returns whether it was never in
    /// use, too.
    pub(crate) fn take_reserved(&mut self, length: usize) -> Option<(Extent, bool)> {
        let capacity = Self::reserved_capacity(length);
        let reserved = self.reserved.get_mut(&capacity)?;
        let position = reserved.free.pop_front()?;
        let is_unused = reserved.unused > 0;
        reserved.unused -= usize::from(is_unused);
        Some((self.hold(position, capacity), is_unused))
    }

    /// Returns whether an extent was reserved ahead.
    pub(crate) fn is_reserved(&self, extent: &Extent) -> bool {
        self.entries[extent.key].is_reserved
    }

    /// Lets the slabs that were reserved ahead go, once they have no extent in use.
    pub(crate) fn end_reservation(&mut self) {
        self.reserved.clear();
        self.entries.iter_mut().for_each(|(_, entry)| entry.is_reserved = false);
    }

    fn insert(&mut self, slab: Arc<Slab>, free: Option<FreeRanges>, is_reserved: bool) -> usize {
        let (live, used, touched, last_used) = (0, 0, 0, 0);
        self.entries.insert(ArenaSlab { slab, live, used, touched, last_used, free, is_reserved })
    }

    /// Returns the capacity of an extent for `length` bytes: a size class, or whole pages if the extent gets
    /// its own slab. Returns `None` if the capacity exceeds the address space.
    pub(crate) fn capacity_for(&self, length: usize) -> Option<usize> {
        if self.is_common(length) {
            Some(class_size(class_of(length)))
        } else {
            length
                .checked_next_multiple_of(rustix::param::page_size())
                .filter(|&bytes| isize::try_from(bytes).is_ok())
        }
    }

    /// Returns whether an extent of `capacity` bytes shares its slab with others.
    pub(crate) fn is_common(&self, capacity: usize) -> bool {
        capacity <= self.largest
    }

    /// Takes an extent that was in use before: one of the size class of `capacity`, or a spare slab. A spare
    /// slab has at most one and a half times `capacity`, and at most `room` bytes.
    pub(crate) fn reuse(&mut self, capacity: usize, room: u64) -> Option<Extent> {
        if self.is_common(capacity) {
            let position = self.stacks[class_of(capacity)].pop()?;
            self.stacked -= capacity;
            return Some(self.hold(position, capacity));
        }
        let fits =
            |bytes: usize| bytes >= capacity && bytes - capacity <= capacity / 2 && bytes as u64 <= room;
        let sizes = self.spares.iter().map(|&key| self.entries[key].slab.len()).enumerate();
        // Searches from the back: among slabs of equal size, the one given back last is most likely in the
        // caches.
        let (position, bytes) =
            sizes.rev().filter(|&(_, bytes)| fits(bytes)).min_by_key(|&(_, bytes)| bytes)?;
        let key = self.spares.remove(position);
        Some(self.hold(ExtentPosition { key, offset: 0 }, bytes))
    }

    /// Cuts a new extent from one of the slabs.
    pub(crate) fn cut(&mut self, capacity: usize) -> Option<Extent> {
        if !self.is_common(capacity) {
            return None;
        }
        if let Some(extent) = self.cut_free(capacity) {
            return Some(extent);
        }
        if self.stacked < capacity {
            return None;
        }
        self.cut_joined(capacity)
    }

    /// Joins the extents on the stacks with the free ranges beside them, then cuts a new extent. This takes
    /// time for each free extent, and the stacks are empty afterwards. Nothing is joined if no slab has
    /// enough free bytes.
    pub(crate) fn cut_joined(&mut self, capacity: usize) -> Option<Extent> {
        let may_have = |entry: &ArenaSlab| entry.free.is_some() && entry.slab.len() - entry.used >= capacity;
        if !self.is_common(capacity) || !self.entries.iter().any(|(_, entry)| may_have(entry)) {
            return None;
        }
        self.empty_stacks();
        self.cut_free(capacity)
    }

    /// Adds a slab of at least `capacity` bytes, and returns its first extent.
    pub(crate) fn add(&mut self, slab: Arc<Slab>, capacity: usize) -> Extent {
        let (mut offset, mut free) = (0, None);
        if self.is_common(capacity) {
            let mut ranges = FreeRanges::new(slab.len());
            offset = ranges.take(capacity).unwrap_or(0);
            free = Some(ranges);
        }
        let key = self.insert(slab, free, false);
        self.hold(ExtentPosition { key, offset }, capacity)
    }

    /// Takes an extent back. Returns true if the slab has left the arena, because `keep` is false and this
    /// was its last extent. Then `extent` holds the last reference to the slab, and the caller must release
    /// the lock before it drops `extent`.
    pub(crate) fn give_back(&mut self, extent: &Extent, keep: bool) -> bool {
        let entry = &mut self.entries[extent.key];
        entry.live -= 1;
        entry.used -= extent.capacity;
        entry.last_used = self.period;
        if !keep && entry.live == 0 {
            self.entries.remove(extent.key);
            self.forget_removed();
            return true;
        }
        let position = ExtentPosition { key: extent.key, offset: extent.offset };
        if entry.is_reserved {
            self.reserved.entry(extent.capacity).or_default().free.push_back(position);
        } else if entry.free.is_some() {
            self.stacks[class_of(extent.capacity)].push(position);
            self.stacked += extent.capacity;
        } else if entry.live == 0 {
            self.spares.push(extent.key);
        }
        false
    }

    /// Removes all slabs without an extent in use.
    pub(crate) fn remove_idle(&mut self) -> Vec<Arc<Slab>> {
        self.remove(|_| true)
    }

    /// Ends a period. Removes the slabs that had no extent in use in all of it.
    pub(crate) fn end_period(&mut self) -> Vec<Arc<Slab>> {
        let ended = self.period;
        self.period += 1;
        self.remove(|entry| entry.last_used < ended)
    }

    /// Removes spare slabs, the one given back first before all others, until they have `most` bytes at most.
    pub(crate) fn remove_spares(&mut self, most: u64) -> Vec<Arc<Slab>> {
        let length = |key: usize| self.entries[key].slab.len() as u64;
        let mut bytes: u64 = self.spares.iter().map(|&key| length(key)).sum();
        let mut count = 0;
        while bytes > most && count < self.spares.len() {
            bytes -= length(self.spares[count]);
            count += 1;
        }
        self.spares.drain(..count).map(|key| self.entries.remove(key).slab).collect()
    }

    /// Removes those slabs without an extent in use that `goes` chooses.
    fn remove(&mut self, goes: impl Fn(&ArenaSlab) -> bool) -> Vec<Arc<Slab>> {
        let mut removed = Vec::new();
        self.entries.retain(|_, entry| {
            let stays = entry.live > 0 || entry.is_reserved || !goes(entry);
            if !stays {
                removed.push(Arc::clone(&entry.slab));
            }
            stays
        });
        if !removed.is_empty() {
            self.forget_removed();
        }
        removed
    }

    /// Returns the number of slabs.
    pub(crate) fn slabs(&self) -> usize {
        self.entries.len()
    }

    fn hold(&mut self, position: ExtentPosition, capacity: usize) -> Extent {
        let entry = &mut self.entries[position.key];
        entry.live += 1;
        entry.used += capacity;
        entry.last_used = self.period;
        let is_new = position.offset >= entry.touched;
        entry.touched = entry.touched.max(position.offset + capacity);
        let ExtentPosition { key, offset } = position;
        Extent { slab: Arc::clone(&entry.slab), key, offset, capacity, is_new }
    }

    fn cut_free(&mut self, capacity: usize) -> Option<Extent> {
        let position = self.entries.iter_mut().find_map(|(key, entry)| {
            let offset = entry.free.as_mut()?.take(capacity)?;
            Some(ExtentPosition { key, offset })
        })?;
        Some(self.hold(position, capacity))
    }

    fn forget_removed(&mut self) {
        let entries = &self.entries;
        self.spares.retain(|&key| entries.contains(key));
        self.stacked = 0;
        for (index, stack) in self.stacks.iter_mut().enumerate() {
            stack.retain(|position| entries.contains(position.key));
            self.stacked += stack.len() * class_size(index);
        }
    }

    fn empty_stacks(&mut self) {
        for (index, stack) in self.stacks.iter_mut().enumerate() {
            for position in stack.drain(..) {
                if let Some(free) = &mut self.entries[position.key].free {
                    free.give(position.offset, class_size(index));
                }
            }
        }
        self.stacked = 0;
    }
}

/// Lengths of the free ranges, by offset. Neighbours are always joined.
#[derive(Debug)]
struct FreeRanges {
    free: BTreeMap<usize, usize>,
}

impl FreeRanges {
    /// Makes the free ranges of a slab of `length` bytes, all of them free.
    fn new(length: usize) -> Self {
        Self { free: BTreeMap::from([(0, length)]) }
    }

    /// Cuts `length` bytes from the first range that is long enough, and returns their offset.
    fn take(&mut self, length: usize) -> Option<usize> {
        let (&offset, &available) = self.free.iter().find(|&(_, &available)| available >= length)?;
        self.free.remove(&offset);
        if available > length {
            self.free.insert(offset + length, available - length);
        }
        Some(offset)
    }

    /// Returns a range that [`take`](Self::take) has cut.
    fn give(&mut self, offset: usize, length: usize) {
        let (mut start, mut end) = (offset, offset + length);
        if let Some((&before, &bytes)) = self.free.range(..offset).next_back() {
            debug_assert!(before + bytes <= offset, "given back twice");
            if before + bytes == offset {
                start = before;
            }
        }
        if let Some(bytes) = self.free.remove(&end) {
            end += bytes;
        }
        self.free.insert(start, end - start);
    }
}

/// The alignment of every extent.
pub(crate) const EXTENT_ALIGNMENT: usize = 128;

/// Size of the smallest class, 0, in bytes.
const SMALLEST: usize = 256;

/// Returns the smallest class that holds `length` bytes.
fn class_of(length: usize) -> usize {
    if length <= SMALLEST {
        return 0;
    }
    let power = length.next_power_of_two();
    let doublings = (power.trailing_zeros() - SMALLEST.trailing_zeros()) as usize;
    if length <= power / 4 * 3 { 2 * doublings - 1 } else { 2 * doublings }
}

/// Returns the bytes of an extent of class `index`: a multiple of 128.
fn class_size(index: usize) -> usize {
    let power = SMALLEST << (index / 2);
    if index.is_multiple_of(2) { power } else { power / 2 * 3 }
}

#[cfg(test)]
mod free_ranges_tests {
    use super::*;

    #[test]
    fn takes_the_first_range_that_fits() {
        let mut ranges = FreeRanges::new(100);
        assert_eq!(ranges.take(60), Some(0));
        assert_eq!(ranges.take(60), None);
        assert_eq!(ranges.take(40), Some(60));
        assert_eq!(ranges.take(1), None);
    }

    #[test]
    fn joins_neighbours_on_either_side() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut ranges = FreeRanges::new(90);
            let offsets = [(); 3].map(|()| ranges.take(30).expect("room for three"));
            for which in order {
                ranges.give(offsets[which], 30);
            }
            assert_eq!(ranges.free, BTreeMap::from([(0, 90)]), "given back in order {order:?}");
        }
    }
}

#[cfg(test)]
mod size_class_tests {
    use super::*;

    #[test]
    fn sizes_go_up_by_at_most_a_half() {
        let sizes: Vec<_> = (0..7).map(class_size).collect();
        assert_eq!(sizes, [256, 384, 512, 768, 1024, 1536, 2048]);
    }

    #[test]
    fn a_length_gets_the_smallest_class_that_holds_it() {
        for length in 0..70_000 {
            let class = class_of(length);
            assert!(class_size(class) >= length, "{length} in class {class}");
            assert!(class == 0 || class_size(class - 1) < length, "{length} in class {class}");
        }
    }
}
