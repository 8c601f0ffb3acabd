//! A global allocator that is mimalloc or the system's. An environment variable decides when the process
//! first allocates.
//!
//! The speed of a large message depends on the allocator more than on the transport, so `tonic-rdma compare`
//! measures with both. One program contains both allocators. A process keeps its first choice, and must
//! restart to use the other one.
//!
//! This module makes the choice and forwards every call. It never allocates memory itself.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::CStr;
use std::sync::OnceLock;

use mimalloc::MiMalloc;

/// The environment variable that names the allocator: `system` or `mimalloc`. Without the variable, and with
/// any other value, the allocator is mimalloc.
pub const VARIABLE: &str = "TONIC_RDMA_ALLOCATOR";

/// An allocator to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocator {
    /// mimalloc.
    Mimalloc,
    /// The C library's malloc, which is the default of Rust programs.
    System,
}

impl Allocator {
    /// Returns the value of [`VARIABLE`] that chooses this allocator.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mimalloc => "mimalloc",
            Self::System => "system",
        }
    }
}

/// Returns the allocator of this process, if [`Chosen`] is its global allocator. The first call decides by the
/// environment, without an allocation. The decision never changes, so that memory returns to the allocator
/// that it came from.
#[inline]
pub fn in_use() -> Allocator {
    static CHOICE: OnceLock<Allocator> = OnceLock::new();
    *CHOICE.get_or_init(|| if asks_for_system() { Allocator::System } else { Allocator::Mimalloc })
}

/// Returns whether the environment names the system's allocator.
fn asks_for_system() -> bool {
    // SAFETY:
    // - The name ends with a zero byte: `CStr`.
    // - The environment does not change meanwhile: the first allocation happens before `main`, when there is
    //   one thread, and the lints of this workspace forbid `set_var` and `remove_var`.
    let value = unsafe { libc::getenv(c"TONIC_RDMA_ALLOCATOR".as_ptr()) };
    if value.is_null() {
        return false;
    }
    // SAFETY:
    // - The value is not null, as checked above.
    // - The value ends with a zero byte, as getenv promises.
    // - The value does not change while it is read, because the environment does not change, as explained
    //   above.
    unsafe { CStr::from_ptr(value) }.to_bytes() == b"system"
}

/// The global allocator, which forwards to the chosen allocator.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chosen;

// SAFETY:
// - Every method forwards to an allocator that keeps the contract of `GlobalAlloc`, and returns its result.
// - Memory returns to the allocator that it came from, because the result of `in_use` never changes.
// - No method unwinds: neither allocator unwinds, and `in_use` only reads an atomic or calls getenv.
unsafe impl GlobalAlloc for Chosen {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match in_use() {
            // SAFETY:
            // - The layout is not of size zero, as the caller promises.
            Allocator::Mimalloc => unsafe { MiMalloc.alloc(layout) },
            // SAFETY:
            // - The layout is not of size zero, as the caller promises.
            Allocator::System => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        match in_use() {
            // SAFETY:
            // - The pointer came from mimalloc: the caller got it from `Chosen`, whose choice never changes.
            // - The layout is that of the allocation, as the caller promises.
            Allocator::Mimalloc => unsafe { MiMalloc.dealloc(pointer, layout) },
            // SAFETY:
            // - The pointer came from the system's allocator: the caller got it from `Chosen`, whose choice
            //   never changes.
            // - The layout is that of the allocation, as the caller promises.
            Allocator::System => unsafe { System.dealloc(pointer, layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match in_use() {
            // SAFETY:
            // - The layout is not of size zero, as the caller promises.
            Allocator::Mimalloc => unsafe { MiMalloc.alloc_zeroed(layout) },
            // SAFETY:
            // - The layout is not of size zero, as the caller promises.
            Allocator::System => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match in_use() {
            // SAFETY:
            // - The pointer came from mimalloc: the caller got it from `Chosen`, whose choice never changes.
            // - The layout is that of the allocation, as the caller promises.
            // - The size is not zero and does not overflow when rounded up to the alignment, as the caller
            //   promises.
            Allocator::Mimalloc => unsafe { MiMalloc.realloc(pointer, layout, size) },
            // SAFETY:
            // - The pointer came from the system's allocator: the caller got it from `Chosen`, whose choice
            //   never changes.
            // - The layout is that of the allocation, as the caller promises.
            // - The size is not zero and does not overflow when rounded up to the alignment, as the caller
            //   promises.
            Allocator::System => unsafe { System.realloc(pointer, layout, size) },
        }
    }
}
