//! An allocator that counts the allocations of each thread. The tests in `main.rs` read the count for each
//! message.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Returns the allocations of this thread, with reallocations.
pub(crate) fn of_this_thread() -> u64 {
    COUNT.get()
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct Counting;

fn count() {
    // A thread that ends may allocate after the drop of its counter.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is passed unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps this method's contract, which is also the contract of the system's method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps this method's contract, which is also the contract of the system's method.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps this method's contract, which is also the contract of the system's method.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps this method's contract, which is also the contract of the system's method.
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
