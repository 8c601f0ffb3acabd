//! Copies of memory that another thread, another process or a device may change meanwhile.
//!
//! In Rust, a plain read or write (also that of [`std::ptr::copy_nonoverlapping`] or of a `memcpy`) of memory
//! that changes at the same time is undefined: the compiler may assume that a value stays the same between
//! two reads. These copies are therefore made in assembly. The compiler knows of such a block only that it
//! reads and writes memory. To the memory model, the block is a sequence of relaxed atomic loads and stores.
//! The bytes that arrive may be old, new or mixed. Each of them is a byte that was there at some time.
//!
//! The caller checks the copied bytes, not the shared memory.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64;

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

#[cfg(all(target_arch = "x86_64", not(miri)))]
use x86_64 as machine;

#[cfg(any(miri, not(target_arch = "x86_64")))]
use volatile as machine;

/// Copies `length` bytes. Other threads, processes and devices may read and write both ranges meanwhile.
///
/// (Processors other than x86_64 copy by volatile accesses. The compiler neither repeats nor invents such an
/// access, but the language defines a race only if no thread of this process takes part in it.)
///
/// # Safety
/// - `from` must be valid for reads of `length` bytes, and `to` for writes. Accesses of others at the same
///   time do no harm.
/// - The ranges must not overlap.
/// - No `&mut` reference to the source may exist, and no reference to the destination other than the
///   caller's. One exception: memory that its owner lends to peers (`LentRegion`) may have a `&mut` reference
///   of the owner, because the copied bytes go to a peer only.
#[inline]
pub(crate) unsafe fn copy_bytes(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the contract is the same.
    unsafe { machine::copy_bytes(from, to, length) };
}

/// Copies `length` bytes that the caller reads next: up to 16 KiB into the first-level cache. (The receiver
/// of `compare --modes rdma-zerocp` reads in this way: up to 8 KiB by one copy, and more in chunks.)
///
/// # Safety
/// Those of [`copy_bytes`].
#[inline]
pub(crate) unsafe fn copy_to_read(from: *const u8, to: *mut u8, length: usize) {
    /// Most bytes that stay in the first-level cache until they are read.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    const NEAR: usize = 16 << 10;
    // SAFETY: the contract is the same.
    unsafe {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if length <= NEAR {
            return x86_64::copy_into_cache(from, to, length);
        }
        copy_bytes(from, to, length);
    }
}

/// Asks the processor to bring `length` bytes from `from` on into its caches. This reads nothing, so any
/// address will do.
#[inline]
pub(crate) fn prefetch(from: *const u8, length: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (0..length).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the instruction has no effect but on caches, and the processor has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (from, length);
}

/// Copies `length` bytes past the caches: the processor neither reads the destination first, nor takes it
/// back from another core. When this function returns, the bytes are ordered before all later stores.
/// (Measured on an EPYC with 32 MiB of third-level cache, `memcpy` against this function: 64 MiB 4.5 ms and
/// 3.6, 1 GiB 88 ms and 57. The bench `soft_device` has 64 MiB by `Write` beside `bandwidth_of_memcpy`.)
///
/// # Safety
/// Those of [`copy_bytes`].
pub(crate) unsafe fn copy_past_caches(from: *const u8, to: *mut u8, length: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        /// Bytes of a cache line.
        const LINE: usize = 64;
        let head = to.align_offset(LINE).min(length);
        let lines = (length - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY:
        // - `head`, `lines` and `tail` are parts of the range that the caller promises, and
        // - the lines of the destination begin at a multiple of 64.
        unsafe {
            copy_bytes(from, to, head);
            x86_64::copy_lines_past_caches(from.add(head), to.add(head), lines);
            copy_bytes(from.add(tail), to.add(tail), length - tail);
        }
    }
    #[cfg(any(miri, not(target_arch = "x86_64")))]
    // SAFETY: the caller promises the conditions of `copy_bytes`.
    unsafe {
        copy_bytes(from, to, length)
    };
}

/// Copies `length` bytes to memory that another process reads next, again and again. Its core still has the
/// lines from the last time, and a plain store takes each of them back before it writes. Between cores that are
/// far apart this takes several times as long as a copy past the caches; between near cores the reader then
/// finds the bytes in a cache that both share. So a long copy goes past the caches where trials find that plain
/// stores are slow. (Measured on EPYCs, between cores of which the host chooses the distance, by rings of 512
/// KiB: 16 KiB one after the other at 2.1 or 8.4 GB/s by plain stores, and 10.3 past the caches.)
///
/// # Safety
/// Those of [`copy_bytes`].
#[inline]
pub(crate) unsafe fn copy_for_peer(from: *const u8, to: *mut u8, length: usize) {
    const LONG: usize = 16 << 10;
    // SAFETY: the contract is the same.
    unsafe {
        if length >= LONG { copy_long_for_peer(from, to, length) } else { copy_bytes(from, to, length) }
    }
}

/// Copies as [`copy_for_peer`] does. One copy of many is a trial: one half by plain stores, the other past the
/// caches.
///
/// # Safety
/// Those of [`copy_bytes`].
unsafe fn copy_long_for_peer(from: *const u8, to: *mut u8, length: usize) {
    let mut trials = TRIALS.get();
    if trials.is_due() {
        let half = length / 2;
        let start = Instant::now();
        // SAFETY: the contract is the same, and both halves are parts of the range.
        unsafe { copy_past_caches(from, to, half) };
        let middle = Instant::now();
        // SAFETY: as above.
        unsafe { copy_bytes(from.add(half), to.add(half), length - half) };
        trials.note(middle.elapsed(), middle - start);
    } else if trials.past_caches() {
        // SAFETY: the contract is the same.
        unsafe { copy_past_caches(from, to, length) };
    } else {
        // SAFETY: the contract is the same.
        unsafe { copy_bytes(from, to, length) };
    }
    TRIALS.set(trials);
}

thread_local! {
    static TRIALS: Cell<Trials> = const { Cell::new(Trials { copies: 0, slow: 0 }) };
}

/// What a thread has found out about its long copies for peers.
#[derive(Clone, Copy, Debug)]
struct Trials {
    copies: u32,
    /// Trials in which plain stores were slow, less those in which they were not; from 0 to `Self::MOST`.
    slow: u8,
}

impl Trials {
    /// The copies from one trial to the next.
    const PERIOD: u32 = 64;
    const MOST: u8 = 4;

    /// Counts a copy. Returns whether it is to be a trial.
    fn is_due(&mut self) -> bool {
        self.copies = self.copies.wrapping_add(1);
        // The first copies of a connection touch new pages, which takes longer than the copy.
        self.copies % Self::PERIOD == Self::PERIOD / 4
    }

    /// Notes how long the same number of bytes took by plain stores and past the caches. Near cores differ by
    /// less than a third here, far cores by a factor of three to five.
    fn note(&mut self, plain: Duration, past: Duration) {
        let is_slow = plain > 2 * past;
        self.slow = if is_slow { Self::MOST.min(self.slow + 1) } else { self.slow.saturating_sub(1) };
    }

    fn past_caches(self) -> bool {
        self.slow > Self::MOST / 2
    }
}

/// Bytes of a chunk, which fit the first-level cache together with the data of the function that takes the
/// chunks.
const CHUNK: usize = 8 << 10;

/// Bytes that are copied at a time, after as many bytes of the next chunk were called into the caches.
const STEP: usize = 1 << 10;

/// Room for a chunk, aligned to a cache line.
#[repr(align(64))]
struct Chunk([MaybeUninit<u8>; CHUNK]);

/// Passes `length` bytes from `from` on to `then`, in consecutive chunks. Every chunk but the last has a
/// multiple of 64 bytes. The first byte of each chunk is aligned to 64 bytes.
///
/// # Safety
/// - `from` must be valid for reads of `length` bytes. Accesses of others at the same time do no harm.
/// - No `&mut` reference to the bytes may exist.
pub(crate) unsafe fn for_each_chunk(from: *const u8, length: usize, mut then: impl FnMut(&[u8])) {
    let mut chunk = Chunk([MaybeUninit::uninit(); CHUNK]);
    let mut done = 0;
    while done < length {
        let count = CHUNK.min(length - done);
        let room = chunk.0.as_mut_ptr().cast::<u8>();
        for at in (0..count).step_by(STEP) {
            let step = STEP.min(count - at);
            let start = from.wrapping_add(done + at);
            prefetch(start.wrapping_add(CHUNK), step.min(length.saturating_sub(done + at + CHUNK)));
            // SAFETY:
            // - these bytes of the source are a part of those that the caller promises, and
            // - the chunk is ours, and has room for `count` bytes.
            unsafe { copy_to_read(start, room.wrapping_add(at), step) };
        }
        // SAFETY: the copy has initialised `count` bytes of the chunk, to which no other reference exists.
        then(unsafe { std::slice::from_raw_parts(room, count) });
        done += count;
    }
}

/// Copies by volatile accesses, for processors without a copy in assembly, and for interpreters of Rust.
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
mod volatile {
    /// Copies `length` bytes: words of 8 bytes where both ranges are aligned alike, otherwise single bytes.
    ///
    /// # Safety
    /// Those of [`copy_bytes`](super::copy_bytes).
    pub(super) unsafe fn copy_bytes(from: *const u8, to: *mut u8, length: usize) {
        const WORD: usize = size_of::<u64>();
        let alike = (from as usize).wrapping_sub(to as usize).is_multiple_of(WORD);
        let head = if alike { (to as usize).wrapping_neg() % WORD } else { length }.min(length);
        let words = (length - head) / WORD;
        let tail = head + words * WORD;
        // SAFETY:
        // - all accesses lie within the first `length` bytes of `from` or `to`, which the caller promises;
        //   and
        // - words are aligned in both ranges, because both have the same distance to the next multiple of 8.
        unsafe {
            for at in (0..head).chain(tail..length) {
                to.add(at).write_volatile(from.add(at).read_volatile());
            }
            for word in 0..words {
                let at = head + word * WORD;
                to.add(at).cast::<u64>().write_volatile(from.add(at).cast::<u64>().read_volatile());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize);

    fn content(length: u32) -> Vec<u8> {
        (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect()
    }

    /// Checks copies of all lengths from `least` on, around each border, from and to addresses of different
    /// alignment.
    pub(super) fn at_every_alignment(least: usize, copy: Copy) {
        let source = content(6000);
        let mut target = vec![0; 6000];
        let around = |border: usize| border - 2..border + 3;
        let lengths = (0..300).chain(around(512)).chain(around(768)).chain(around(1024)).chain(around(4096));
        let lengths: Vec<_> = lengths.chain([2000, 3333, 5000]).filter(|length| *length >= least).collect();
        for from in [0, 1, 7, 8, 15, 16, 31, 33, 63, 64] {
            for to in [0, 1, 7, 8, 16, 32, 47, 63, 64, 65] {
                for &length in &lengths {
                    // SAFETY: both ranges lie in their vectors, which are different ones.
                    unsafe { copy(source.as_ptr().add(from), target.as_mut_ptr().add(to), length) };
                    assert_eq!(target[to..to + length], source[from..from + length], "{from} {to} {length}");
                    let mut outside = target[..to].iter().chain(&target[to + length..]);
                    assert!(outside.all(|byte| *byte == 0), "{from} {to} {length}");
                    target[to..to + length].fill(0);
                }
            }
        }
    }

    #[test]
    fn every_length_and_alignment() {
        at_every_alignment(0, copy_bytes);
    }

    #[test]
    fn volatile_at_every_alignment() {
        at_every_alignment(0, volatile::copy_bytes);
    }

    #[test]
    fn to_read_at_every_alignment() {
        at_every_alignment(0, copy_to_read);
    }

    #[test]
    fn past_the_caches_at_every_alignment() {
        at_every_alignment(0, copy_past_caches);
    }

    #[test]
    fn for_peers_around_the_change_of_means() {
        let source = content(40_000);
        // By plain stores, past the caches, and in trials.
        for slow in [0, Trials::MOST] {
            for copies in [0, Trials::PERIOD / 4 - 1] {
                for (from, to, length) in [(0, 0, 16_383), (1, 63, 16_384), (63, 1, 16_385), (7, 9, 32_775)] {
                    TRIALS.set(Trials { copies, slow });
                    let mut target = vec![0; 40_000];
                    // SAFETY: both ranges lie in their vectors, which are different ones.
                    unsafe { copy_for_peer(source.as_ptr().add(from), target.as_mut_ptr().add(to), length) };
                    assert_eq!(target[to..to + length], source[from..from + length]);
                    assert!(target[..to].iter().chain(&target[to + length..]).all(|byte| *byte == 0));
                }
            }
        }
    }

    #[test]
    fn long_copies_go_past_the_caches_while_most_trials_find_plain_stores_slow() {
        let mut trials = Trials { copies: 0, slow: 0 };
        let (fast, slow) = (Duration::from_nanos(2500), Duration::from_nanos(7800));
        let past = Duration::from_nanos(1600);
        let due = (0..10 * Trials::PERIOD).filter(|_| trials.is_due()).count();
        assert_eq!(due, 10);
        trials.note(slow, past);
        assert!(!trials.past_caches(), "one trial was interrupted");
        (0..10).for_each(|_| trials.note(slow, past));
        assert!(trials.past_caches());
        trials.note(fast, past);
        assert!(trials.past_caches(), "one trial was interrupted in the other half");
        (0..10).for_each(|_| trials.note(fast, past));
        assert!(!trials.past_caches(), "the host moved the cores");
    }

    #[test]
    fn every_distance_and_length_around_the_change_of_means() {
        const BORDER: usize = 4096;
        let source = content(16384);
        for distance in [0, 1, 15, 16, 63, 64, 4095] {
            for length in [0, 1, BORDER - 1, BORDER, BORDER + 1, 3 * BORDER + 5] {
                let mut target = vec![0; 16384 + 2 * 4096];
                let aligned = target.as_ptr().align_offset(4096);
                let start = (aligned + source.as_ptr() as usize % 4096 + distance) % 4096;
                // SAFETY: both ranges lie in their vectors, which are different ones.
                unsafe { copy_bytes(source.as_ptr(), target.as_mut_ptr().add(start), length) };
                assert_eq!(target[start..start + length], source[..length]);
                assert!(target[start + length..].iter().all(|byte| *byte == 0));
            }
        }
    }

    /// A copy of memory that another thread changes: each byte is old or new.
    #[test]
    fn bytes_of_a_racing_copy_are_old_or_new() {
        use std::sync::atomic::{AtomicBool, Ordering};
        struct SharedPointer(*mut u8);
        // SAFETY: the threads of this test reach the memory by racing-safe copies only.
        unsafe impl Sync for SharedPointer {}
        impl SharedPointer {
            fn start(&self) -> *mut u8 {
                self.0
            }
        }
        const LENGTH: usize = 10_000;
        let mut memory = vec![1_u8; LENGTH];
        let shared = SharedPointer(memory.as_mut_ptr());
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let contents = [[1_u8; LENGTH], [2; LENGTH]];
                let mut round = 0;
                while !ended.load(Ordering::Relaxed) {
                    let length = [LENGTH, 60, 200, 3000][round % 4];
                    // SAFETY: the memory has this length, and lives until the threads have ended.
                    unsafe { copy_bytes(contents[round / 4 % 2].as_ptr(), shared.start(), length) };
                    round += 1;
                }
            });
            let mut seen = vec![0; LENGTH];
            for round in 0..2000 {
                let length = [LENGTH, 60, 200, 3000][round % 4];
                let copy: Copy = if round % 3 == 0 { copy_past_caches } else { copy_bytes };
                seen[..length].fill(0);
                // SAFETY: the memory has this length, and lives until the threads have ended.
                unsafe { copy(shared.start(), seen.as_mut_ptr(), length) };
                assert!(seen[..length].iter().all(|byte| [1, 2].contains(byte)));
            }
            ended.store(true, Ordering::Relaxed);
        });
    }
}
