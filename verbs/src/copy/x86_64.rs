//! Copies in assembly, for x86_64.
//!
//! A copy of up to 64 bytes is a few instructions where it is called. A longer copy calls [`copy_long`],
//! which has two ways: vector registers of the greatest width that the processor has, or `rep movsb`. All
//! loads of a short copy come before its stores, and the two halves of a length that is no power of two
//! overlap; so no length needs a loop of bytes.

use std::arch::asm;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Length from which processors with fast `rep movsb` copy with it, in bytes. (Measured on an EPYC of family
/// 26: 4 KiB in 28 ns by either way, 64 KiB in 515 ns against 690, 64 MiB in 2.4 ms against 3.2.)
pub(super) const STRING: usize = 4096;

/// Longest copy that is inlined into its caller, in bytes.
const SHORT: usize = 64;

/// The load and the store of 16 bytes. The two forms must not be mixed in one program part: on some
/// processors a change between them takes tens of nanoseconds.
#[cfg(target_feature = "avx")]
macro_rules! move_16 {
    ($operands:literal) => {
        concat!("vmovdqu ", $operands)
    };
}
#[cfg(not(target_feature = "avx"))]
macro_rules! move_16 {
    ($operands:literal) => {
        concat!("movdqu ", $operands)
    };
}

/// Copies `length` bytes.
///
/// # Safety
/// Those of [`copy_bytes`](super::copy_bytes).
#[inline]
pub(super) unsafe fn copy_bytes(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: in each block of assembly,
    // - each access lies within the first `length` bytes of `from` or `to`, because the condition of its
    //   branch says how many bytes there are, and the caller promises these bytes; and
    // - the block changes no register beside its outputs, not the flags, and not the stack.
    unsafe {
        if length > SHORT {
            copy_long(from, to, length);
        } else if length > 32 {
            asm!(
                move_16!("{a}, [{from}]"),
                move_16!("{b}, [{from} + 16]"),
                move_16!("{c}, [{from} + {length} - 32]"),
                move_16!("{d}, [{from} + {length} - 16]"),
                move_16!("[{to}], {a}"),
                move_16!("[{to} + 16], {b}"),
                move_16!("[{to} + {length} - 32], {c}"),
                move_16!("[{to} + {length} - 16], {d}"),
                from = in(reg) from,
                to = in(reg) to,
                length = in(reg) length,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
        } else if length >= 16 {
            asm!(
                move_16!("{a}, [{from}]"),
                move_16!("{b}, [{from} + {length} - 16]"),
                move_16!("[{to}], {a}"),
                move_16!("[{to} + {length} - 16], {b}"),
                from = in(reg) from,
                to = in(reg) to,
                length = in(reg) length,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
        } else if length >= 8 {
            asm!(
                "mov {a}, [{from}]",
                "mov {b}, [{from} + {length} - 8]",
                "mov [{to}], {a}",
                "mov [{to} + {length} - 8], {b}",
                from = in(reg) from,
                to = in(reg) to,
                length = in(reg) length,
                a = out(reg) _,
                b = out(reg) _,
                options(nostack, preserves_flags),
            );
        } else if length >= 4 {
            asm!(
                "mov {a:e}, [{from}]",
                "mov {b:e}, [{from} + {length} - 4]",
                "mov [{to}], {a:e}",
                "mov [{to} + {length} - 4], {b:e}",
                from = in(reg) from,
                to = in(reg) to,
                length = in(reg) length,
                a = out(reg) _,
                b = out(reg) _,
                options(nostack, preserves_flags),
            );
        } else if length > 0 {
            // The first, the middle and the last of one to three bytes.
            asm!(
                "movzx {a:e}, byte ptr [{from}]",
                "movzx {b:e}, byte ptr [{from} + {middle}]",
                "movzx {c:e}, byte ptr [{from} + {length} - 1]",
                "mov byte ptr [{to}], {a:l}",
                "mov byte ptr [{to} + {middle}], {b:l}",
                "mov byte ptr [{to} + {length} - 1], {c:l}",
                from = in(reg) from,
                to = in(reg) to,
                length = in(reg) length,
                middle = in(reg) length / 2,
                a = out(reg) _,
                b = out(reg) _,
                c = out(reg) _,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// A copy of more than 64 bytes with vector registers.
///
/// A copy of up to 2, 4 or 8 registers loads all bytes before its first store. A longer copy stores the first
/// 4 registers, then 4 at a time at aligned addresses of the destination, and the last 4 at the end.
/// Arguments: the instructions for addresses that are aligned to nothing and to a register, the name of the
/// registers, the numbers of 8 of them, the bytes of one, and the instruction for the end.
macro_rules! copy_with_vectors {
    (
        $from:expr, $to:expr, $length:expr, $any:literal, $aligned:literal, $kind:literal,
        [$a:literal $b:literal $c:literal $d:literal $e:literal $f:literal $g:literal $h:literal],
        $width:literal, $end:literal
    ) => {
        asm!(
            concat!("cmp rdx, 2 * ", $width),
            "jbe 6f",
            concat!("cmp rdx, 4 * ", $width),
            "jbe 5f",
            concat!($any, " ", $kind, $a, ", [rsi]"),
            concat!($any, " ", $kind, $b, ", [rsi + ", $width, "]"),
            concat!($any, " ", $kind, $c, ", [rsi + 2 * ", $width, "]"),
            concat!($any, " ", $kind, $d, ", [rsi + 3 * ", $width, "]"),
            concat!($any, " ", $kind, $e, ", [rsi + rdx - 4 * ", $width, "]"),
            concat!($any, " ", $kind, $f, ", [rsi + rdx - 3 * ", $width, "]"),
            concat!($any, " ", $kind, $g, ", [rsi + rdx - 2 * ", $width, "]"),
            concat!($any, " ", $kind, $h, ", [rsi + rdx - ", $width, "]"),
            concat!($any, " [rdi], ", $kind, $a),
            concat!($any, " [rdi + ", $width, "], ", $kind, $b),
            concat!($any, " [rdi + 2 * ", $width, "], ", $kind, $c),
            concat!($any, " [rdi + 3 * ", $width, "], ", $kind, $d),
            // rax: the address of the last 4 registers.
            concat!("lea rax, [rdi + rdx - 4 * ", $width, "]"),
            concat!("cmp rdx, 8 * ", $width),
            "jbe 4f",
            // rcx: the aligned address of the next 4 registers. rsi: the distance from there to the source.
            concat!("lea rcx, [rdi + 4 * ", $width, "]"),
            concat!("and rcx, -", $width),
            "sub rsi, rdi",
            "3:",
            concat!($any, " ", $kind, $a, ", [rsi + rcx]"),
            concat!($any, " ", $kind, $b, ", [rsi + rcx + ", $width, "]"),
            concat!($any, " ", $kind, $c, ", [rsi + rcx + 2 * ", $width, "]"),
            concat!($any, " ", $kind, $d, ", [rsi + rcx + 3 * ", $width, "]"),
            concat!($aligned, " [rcx], ", $kind, $a),
            concat!($aligned, " [rcx + ", $width, "], ", $kind, $b),
            concat!($aligned, " [rcx + 2 * ", $width, "], ", $kind, $c),
            concat!($aligned, " [rcx + 3 * ", $width, "], ", $kind, $d),
            concat!("add rcx, 4 * ", $width),
            "cmp rcx, rax",
            "jb 3b",
            "4:",
            concat!($any, " [rax], ", $kind, $e),
            concat!($any, " [rax + ", $width, "], ", $kind, $f),
            concat!($any, " [rax + 2 * ", $width, "], ", $kind, $g),
            concat!($any, " [rax + 3 * ", $width, "], ", $kind, $h),
            "jmp 7f",
            "5:",
            concat!($any, " ", $kind, $a, ", [rsi]"),
            concat!($any, " ", $kind, $b, ", [rsi + ", $width, "]"),
            concat!($any, " ", $kind, $c, ", [rsi + rdx - 2 * ", $width, "]"),
            concat!($any, " ", $kind, $d, ", [rsi + rdx - ", $width, "]"),
            concat!($any, " [rdi], ", $kind, $a),
            concat!($any, " [rdi + ", $width, "], ", $kind, $b),
            concat!($any, " [rdi + rdx - 2 * ", $width, "], ", $kind, $c),
            concat!($any, " [rdi + rdx - ", $width, "], ", $kind, $d),
            "jmp 7f",
            "6:",
            concat!($any, " ", $kind, $a, ", [rsi]"),
            concat!($any, " ", $kind, $b, ", [rsi + rdx - ", $width, "]"),
            concat!($any, " [rdi], ", $kind, $a),
            concat!($any, " [rdi + rdx - ", $width, "], ", $kind, $b),
            "7:",
            $end,
            inout("rsi") $from => _,
            in("rdi") $to,
            in("rdx") $length,
            out("rax") _,
            out("rcx") _,
            // All vector registers may be changed.
            clobber_abi("sysv64"),
            options(nostack),
        )
    };
}

/// Copies `length` bytes, more than 64.
///
/// Processors with fast `rep movsb` (AMD Zen 3 and later) run it 15 to 20 times slower than usual when the
/// destination lies 1 to 15 bytes above the source within a page (measured on an EPYC: 2.4 GB/s against 48).
/// At a distance of 1 to 63 bytes the copy is therefore made with vector registers.
///
/// # Safety
/// Those of [`copy_bytes`](super::copy_bytes), and `length` must be above 64.
#[inline(never)]
unsafe fn copy_long(from: *const u8, to: *mut u8, length: usize) {
    // SYNC: nothing depends on the order. Each thread that finds no means stores the same ones.
    let means = Means(KNOWN.load(Relaxed));
    if length >= STRING && means.has(Means::STRING) {
        let distance = (to as usize).wrapping_sub(from as usize) % 4096;
        if !(1..64).contains(&distance) {
            // SAFETY: the contract is the same.
            unsafe { copy_string(from, to, length) };
            return;
        }
    }
    // SAFETY: the contract is the same.
    unsafe { copy_by_registers(means, from, to, length) };
}

/// Copies `length` bytes with registers, and so into the first-level cache, where `rep movsb` does not leave
/// them.
///
/// # Safety
/// Those of [`copy_bytes`](super::copy_bytes).
#[inline]
pub(super) unsafe fn copy_into_cache(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the contract of each function is the contract of this function.
    unsafe {
        if length > SHORT { copy_long_into_cache(from, to, length) } else { copy_bytes(from, to, length) }
    }
}

/// Copies `length` bytes, more than 64, with vector registers.
///
/// # Safety
/// Those of [`copy_long`].
#[inline(never)]
unsafe fn copy_long_into_cache(from: *const u8, to: *mut u8, length: usize) {
    // SYNC: see `copy_long`.
    let means = Means(KNOWN.load(Relaxed));
    // SAFETY: the contract is the same, and the processor has the means that were found.
    unsafe { copy_by_registers(means, from, to, length) };
}

/// Copies `length` bytes, more than 64, with the widest registers of `means`.
///
/// # Safety
/// Those of [`copy_long`], and the processor must have these means.
#[inline]
unsafe fn copy_by_registers(means: Means, from: *const u8, to: *mut u8, length: usize) {
    // SAFETY:
    // - the processor has these registers; and
    // - the contract of each function is the contract of this function.
    unsafe {
        if means.has(Means::BYTES_64) {
            copy_by_64(from, to, length);
        } else if means.has(Means::BYTES_32) {
            copy_by_32(from, to, length);
        } else if means.has(Means::BYTES_16) {
            copy_by_16(from, to, length);
        } else {
            copy_first(from, to, length);
        }
    }
}

/// Asks the processor for its means, then copies `length` bytes.
///
/// # Safety
/// Those of [`copy_long`].
#[cold]
#[inline(never)]
unsafe fn copy_first(from: *const u8, to: *mut u8, length: usize) {
    // SYNC: see `copy_long`.
    KNOWN.store(Means::detect().0, Relaxed);
    // SAFETY: the contract is the same.
    unsafe { copy_long(from, to, length) };
}

/// Copies `length` bytes with `rep movsb`.
///
/// # Safety
/// Those of [`copy_bytes`](super::copy_bytes).
#[inline]
unsafe fn copy_string(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY:
    // - the instruction reads and writes `length` bytes, which the caller promises; and
    // - the direction flag is clear, as at the beginning of every block of assembly.
    unsafe {
        asm!(
            "rep movsb",
            inout("rsi") from => _,
            inout("rdi") to => _,
            inout("rcx") length => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies `length` bytes with registers of 64 bytes.
///
/// # Safety
/// Those of [`copy_long`], and the processor must have AVX-512.
#[inline]
unsafe fn copy_by_64(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: see `copy_by_16`. The registers from 16 on need no `vzeroupper`.
    unsafe {
        copy_with_vectors!(from, to, length, "vmovdqu64", "vmovdqa64", "zmm", [16 17 18 19 20 21 22 23], 64, "");
    }
}

/// Copies `length` bytes with registers of 32 bytes.
///
/// # Safety
/// Those of [`copy_long`], and the processor must have AVX.
#[inline]
unsafe fn copy_by_32(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: see `copy_by_16`.
    unsafe {
        copy_with_vectors!(from, to, length, "vmovdqu", "vmovdqa", "ymm", [0 1 2 3 4 5 6 7], 32, "vzeroupper");
    }
}

/// Copies `length` bytes with registers of 16 bytes.
///
/// # Safety
/// Those of [`copy_long`].
#[inline]
unsafe fn copy_by_16(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY:
    // - each access lies within the first `length` bytes of `from` or `to`, which the caller promises: the
    //   block compares the length before it continues to more registers, and stores of the loop begin before
    //   the last 4 registers;
    // - the block states all registers that it changes, and the flags; and
    // - the block does not use the stack.
    unsafe {
        copy_with_vectors!(from, to, length, "movdqu", "movdqa", "xmm", [0 1 2 3 4 5 6 7], 16, "");
    }
}

/// The bits of the [`Means`] of this processor; 0 until the first long copy.
static KNOWN: AtomicU8 = AtomicU8::new(0);

/// The means to copy that a processor has: one width of vector registers, and perhaps a fast `rep movsb`.
#[derive(Clone, Copy)]
struct Means(u8);

impl Means {
    const BYTES_16: u8 = 1;
    const BYTES_32: u8 = 2;
    const BYTES_64: u8 = 4;
    /// `rep movsb` is fast.
    const STRING: u8 = 8;

    #[inline]
    fn has(self, means: u8) -> bool {
        self.0 & means != 0
    }

    /// Asks the processor. Registers of 64 bytes are used from Ice Lake and Zen 4 on (both have
    /// AVX512_VBMI2), because older processors lower their clock for them.
    fn detect() -> Self {
        let vectors = if is_x86_feature_detected!("avx512vbmi2") {
            Self::BYTES_64
        } else if is_x86_feature_detected!("avx") {
            Self::BYTES_32
        } else {
            Self::BYTES_16
        };
        let string = if is_x86_feature_detected!("ermsb") { Self::STRING } else { 0 };
        Self(vectors | string)
    }
}

/// Copies `lines` lines of 64 bytes past the caches. When this function returns, the bytes are ordered before
/// all later stores.
///
/// # Safety
/// Those of [`copy_bytes`](super::copy_bytes) for these lines, and `to` must be a multiple of 64.
pub(super) unsafe fn copy_lines_past_caches(from: *const u8, to: *mut u8, lines: usize) {
    if lines == 0 {
        return;
    }
    // SAFETY:
    // - the block reads and writes `lines` lines, which the caller promises, and `to` is aligned, as
    //   streaming stores need it;
    // - the block states all registers that it changes, and the flags; and
    // - the block does not use the stack.
    // SYNC: `sfence` orders streaming stores with later stores.
    unsafe {
        asm!(
            "2:",
            move_16!("{a}, [{from} + {at}]"),
            move_16!("{b}, [{from} + {at} + 16]"),
            move_16!("{c}, [{from} + {at} + 32]"),
            move_16!("{d}, [{from} + {at} + 48]"),
            // The stores of one line follow one another, so that the processor writes the line as a whole.
            "movntdq [{to} + {at}], {a}",
            "movntdq [{to} + {at} + 16], {b}",
            "movntdq [{to} + {at} + 32], {c}",
            "movntdq [{to} + {at} + 48], {d}",
            "add {at}, 64",
            "cmp {at}, {end}",
            "jb 2b",
            "sfence",
            from = in(reg) from,
            to = in(reg) to,
            at = inout(reg) 0_usize => _,
            end = in(reg) lines * 64,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::at_every_alignment;
    use super::*;

    #[test]
    fn every_width_of_registers() {
        at_every_alignment(SHORT + 1, copy_by_16);
        if is_x86_feature_detected!("avx") {
            at_every_alignment(SHORT + 1, copy_by_32);
        }
        if is_x86_feature_detected!("avx512f") {
            at_every_alignment(SHORT + 1, copy_by_64);
        }
    }

    #[test]
    fn into_the_cache_at_every_alignment() {
        at_every_alignment(0, copy_into_cache);
    }

    #[test]
    fn a_processor_has_one_width() {
        let Means(bits) = Means::detect();
        assert_eq!((bits & !Means::STRING).count_ones(), 1, "0 stands for means that are not known yet");
    }
}
