//! A global allocator that counts. A test binary installs it by `#[global_allocator]`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, Ordering};

/// The system's allocator, which counts what it does.
#[derive(Debug)]
pub struct Counting;

/// What is allocated and not freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The number of blocks.
    pub blocks: isize,
    /// Their length in bytes.
    pub bytes: isize,
}

static BLOCKS: AtomicIsize = AtomicIsize::new(0);
static BYTES: AtomicIsize = AtomicIsize::new(0);

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static OF_THREAD: Cell<Held> = const { Cell::new(Held { blocks: 0, bytes: 0 }) };
}

/// Returns how often this thread has allocated or reallocated.
pub fn allocations_of_this_thread() -> u64 {
    ALLOCATIONS.get()
}

/// Returns what this thread has allocated less what it has freed. This is what its data holds, as long as no
/// other thread frees parts of the data.
pub fn held_by_this_thread() -> Held {
    OF_THREAD.get()
}

/// Returns what the process has allocated and not freed.
pub fn held_by_this_process() -> Held {
    Held { blocks: BLOCKS.load(Ordering::Relaxed), bytes: BYTES.load(Ordering::Relaxed) }
}

fn count(allocations: u64, blocks: isize, bytes: isize) {
    BLOCKS.fetch_add(blocks, Ordering::Relaxed);
    BYTES.fetch_add(bytes, Ordering::Relaxed);
    // A thread that ends may allocate after the drop of its counters.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + allocations));
    let add = |held: Held| Held { blocks: held.blocks + blocks, bytes: held.bytes + bytes };
    let _ = OF_THREAD.try_with(|held| held.set(add(held.get())));
}

// SAFETY: every call is passed unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, 1, layout.size() as isize);
        // SAFETY: the caller keeps this method's contract, which is also the contract of the system's method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(1, 1, layout.size() as isize);
        // SAFETY: the caller keeps this method's contract, which is also the contract of the system's method.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(1, 0, size as isize - layout.size() as isize);
        // SAFETY: the caller keeps this method's contract, which is also the contract of the system's method.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(0, -1, -(layout.size() as isize));
        // SAFETY: the caller keeps this method's contract, which is also the contract of the system's method.
        unsafe { System.dealloc(block, layout) }
    }
}
