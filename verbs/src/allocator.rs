//! An allocator that is mimalloc or the system's, as the environment says when the process first allocates.
//!
//! A large message depends on the allocator more than on the transport, so `tonic-rdma compare` measures with either. One
//! program has both: a process keeps the one that it began with, and takes the other only by starting anew.
//!
//! This owns the choice and forwards every call; it allocates nothing itself.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering};

use mimalloc::MiMalloc;

/// The environment variable that names the allocator: `system` or `mimalloc`. Without it, and with any other value, it is
/// mimalloc.
pub const VARIABLE: &str = "TONIC_RDMA_ALLOCATOR";

/// [`VARIABLE`] as C reads it.
const VARIABLE_C: &CStr = c"TONIC_RDMA_ALLOCATOR";

/// The allocators that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocator {
    /// mimalloc.
    Mimalloc,
    /// The C library's malloc, which every Rust program has that names no other.
    System,
}

impl Allocator {
    /// The value of [`VARIABLE`] that chooses it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mimalloc => "mimalloc",
            Self::System => "system",
        }
    }
}

/// The allocator that this process has, if [`Chosen`] is its global allocator.
pub fn in_use() -> Allocator {
    match CHOICE.load(Ordering::Relaxed) {
        UNDECIDED => decide(),
        SYSTEM => Allocator::System,
        _ => Allocator::Mimalloc,
    }
}

/// Not decided yet; and the two decisions.
const UNDECIDED: u8 = 0;
const MIMALLOC: u8 = 1;
const SYSTEM: u8 = 2;

/// Changes once at most, so that what one allocator gave is given back to the same one. It guards no other memory: relaxed.
static CHOICE: AtomicU8 = AtomicU8::new(UNDECIDED);

/// Reads the environment, without allocating. Where two threads come here at once, the first decides for both.
#[cold]
fn decide() -> Allocator {
    let wanted = if asks_for_system() { SYSTEM } else { MIMALLOC };
    let decided = match CHOICE.compare_exchange(UNDECIDED, wanted, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => wanted,
        Err(earlier) => earlier,
    };
    if decided == SYSTEM { Allocator::System } else { Allocator::Mimalloc }
}

fn asks_for_system() -> bool {
    // SAFETY:
    // - The name ends with a zero byte: `CStr`.
    // - The environment stays as it is meanwhile: the first allocation comes before `main`, when there is one thread, and
    //   this workspace's lints forbid `set_var` and `remove_var`.
    let value = unsafe { libc::getenv(VARIABLE_C.as_ptr()) };
    if value.is_null() {
        return false;
    }
    // SAFETY:
    // - It is not null: looked at above.
    // - It ends with a zero byte, as getenv promises.
    // - It stays as it is while it is read, as the environment stays as it is: see above.
    unsafe { CStr::from_ptr(value) }.to_bytes() == b"system"
}

/// The global allocator: whichever of the two was chosen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chosen;

// SAFETY:
// - Every method forwards to an allocator that keeps the contract of `GlobalAlloc`, and passes on what it returns.
// - Memory goes back to the allocator that it came from: `in_use` never changes once it has answered.
// - No method unwinds: neither allocator's does, and `in_use` reads an atomic or calls getenv.
unsafe impl GlobalAlloc for Chosen {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match in_use() {
            // SAFETY:
            // - The layout is not of size zero: our caller's duty, which is the same.
            Allocator::Mimalloc => unsafe { MiMalloc.alloc(layout) },
            // SAFETY:
            // - The layout is not of size zero: our caller's duty, which is the same.
            Allocator::System => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        match in_use() {
            // SAFETY:
            // - The pointer came from mimalloc: our caller has it from `Chosen`, whose choice never changes.
            // - The layout is the one it was allocated with: our caller's duty.
            Allocator::Mimalloc => unsafe { MiMalloc.dealloc(pointer, layout) },
            // SAFETY:
            // - The pointer came from the system's: our caller has it from `Chosen`, whose choice never changes.
            // - The layout is the one it was allocated with: our caller's duty.
            Allocator::System => unsafe { System.dealloc(pointer, layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match in_use() {
            // SAFETY:
            // - The layout is not of size zero: our caller's duty, which is the same.
            Allocator::Mimalloc => unsafe { MiMalloc.alloc_zeroed(layout) },
            // SAFETY:
            // - The layout is not of size zero: our caller's duty, which is the same.
            Allocator::System => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match in_use() {
            // SAFETY:
            // - The pointer came from mimalloc: our caller has it from `Chosen`, whose choice never changes.
            // - The layout is the one it was allocated with: our caller's duty.
            // - The size is not zero and does not overflow when rounded up to the alignment: our caller's duty.
            Allocator::Mimalloc => unsafe { MiMalloc.realloc(pointer, layout, size) },
            // SAFETY:
            // - The pointer came from the system's: our caller has it from `Chosen`, whose choice never changes.
            // - The layout is the one it was allocated with: our caller's duty.
            // - The size is not zero and does not overflow when rounded up to the alignment: our caller's duty.
            Allocator::System => unsafe { System.realloc(pointer, layout, size) },
        }
    }
}
