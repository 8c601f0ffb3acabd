//! The choice of the allocator. The environment variable must decide it: the tests ask the allocator, and
//! compare the size of the C library's heap. These tests are a separate binary, because they set the global
//! allocator.
#![cfg(target_env = "gnu")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::Command;

use tonic_rdma_verbs::unstable::allocator::{Allocator, Chosen, VARIABLE, in_use};

#[global_allocator]
static ALLOCATOR: Chosen = Chosen;

/// The environment variable with the name of the allocator that a child process of this test should have.
const EXPECTED: &str = "TONIC_RDMA_ALLOCATOR_EXPECTED";

/// A number of bytes that is far larger than the other allocations of the C library and the test harness
/// meanwhile.
const BYTES: usize = 64 << 20;

/// Returns the bytes that the C library's malloc has allocated.
fn allocated_by_malloc() -> usize {
    // SAFETY:
    // - The function takes no argument, and reads counters under malloc's own locks.
    let heap = unsafe { libc::mallinfo2() };
    heap.uordblks + heap.hblkhd
}

#[test]
fn the_heap_in_use_is_the_one_that_the_environment_names() {
    for (value, expected) in [
        (None, Allocator::Mimalloc),
        (Some("mimalloc"), Allocator::Mimalloc),
        (Some("jemalloc"), Allocator::Mimalloc),
        (Some("system"), Allocator::System),
    ] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "in_a_process_of_its_own", "--ignored"]).env(EXPECTED, expected.name());
        match value {
            Some(value) => child.env(VARIABLE, value),
            None => child.env_remove(VARIABLE),
        };
        let output = child.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && printed.contains("1 passed"), "{value:?}: {printed}");
    }
}

#[test]
#[ignore = "the test above runs it"]
fn in_a_process_of_its_own() {
    let expected = std::env::var(EXPECTED).unwrap();
    assert_eq!(in_use().name(), expected);
    let large = |bytes: usize| (bytes > BYTES / 2) == (expected == "system");

    // alloc
    let before = allocated_by_malloc();
    let mut bytes: Vec<u8> = Vec::with_capacity(BYTES);
    assert!(large(allocated_by_malloc() - before), "alloc");
    // realloc keeps the content
    bytes.resize(BYTES, 7);
    bytes.reserve_exact(BYTES);
    assert!(large(allocated_by_malloc() - before - if expected == "system" { BYTES } else { 0 }), "realloc");
    assert!(bytes.iter().all(|byte| *byte == 7));
    // dealloc
    drop(bytes);
    assert!(allocated_by_malloc() < before + BYTES / 2, "dealloc");
    // alloc_zeroed
    let zeroed = vec![0_u8; BYTES];
    assert!(large(allocated_by_malloc() - before), "alloc_zeroed");
    assert!(zeroed.iter().all(|byte| *byte == 0));
    drop(zeroed);
    assert!(allocated_by_malloc() < before + BYTES / 2, "dealloc of zeroed");
}

#[test]
fn small_and_aligned_blocks_come_and_go() {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let pages: Vec<Box<Page>> = (0..64).map(|index| Box::new(Page([index; 4096]))).collect();
    for (index, page) in pages.iter().enumerate() {
        assert!(std::ptr::from_ref(&**page).addr().is_multiple_of(4096));
        assert!(page.0.iter().all(|byte| usize::from(*byte) == index));
    }
    let texts: Vec<String> = (0..10_000).map(|number: u32| number.to_string().repeat(3)).collect();
    assert_eq!(texts[9_999], "999999999999");
}
