//! An allocator that counts, for each thread by itself.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Allocations that this thread has made, reallocations included.
pub(crate) fn of_this_thread() -> u64 {
    COUNT.get()
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct Counting;

fn count() {
    // A thread that ends may allocate when its counter has gone.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps to this method's contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps to this method's contract, which is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps to this method's contract, which is the same.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to this method's contract, which is the same.
        unsafe { System.dealloc(block, layout) }
    }
}

#[test]
fn allocations_are_counted() {
    let before = of_this_thread();
    let mut vector = std::hint::black_box(vec![1_u8; 100]);
    vector.reserve(100_000);
    drop(std::hint::black_box(vector));
    assert_eq!(of_this_thread() - before, 2);
}
