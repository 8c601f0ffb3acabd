//! Measures the reductions of elements, beside a loop that takes one element at a time:
//! `cargo bench -p tonic-rdma-collective --bench reduce`. Figures are bytes of one operand for each second.
//! The lengths lie in the first-level cache, in the second-level cache, and in memory.
#![allow(clippy::unwrap_used, reason = "a bench that can't run says so by stopping")]

use std::hint::black_box;

use divan::Bencher;
use divan::counter::BytesCount;
use half::{bf16, f16};
use tonic_rdma_collective::unstable::Kernel;
use tonic_rdma_collective::{Number, Reduction};

const LENGTHS: [usize; 3] = [16 << 10, 256 << 10, 64 << 20];
const TYPES: [&str; 6] = ["f32", "f64", "f16", "bf16", "i8", "i64"];

fn main() {
    divan::main();
}

#[divan::bench(types = [f32, f64, f16, bf16, i8, i16, i32, i64], args = LENGTHS)]
fn sum<T: Number>(bencher: Bencher<'_, '_>, length: usize) {
    kernel::<T>(bencher, Reduction::Sum, length);
}

#[divan::bench(types = [f32, f64, f16, bf16, i8, i16, i32, i64], args = LENGTHS)]
fn max<T: Number>(bencher: Bencher<'_, '_>, length: usize) {
    kernel::<T>(bencher, Reduction::Max, length);
}

/// The division at the end of a mean: by 3, which divides, and by 4, which multiplies.
#[divan::bench(types = [f32, f64, f16, bf16], args = [3, 4])]
fn finish<T: Number>(bencher: Bencher<'_, '_>, ranks: usize) {
    let kernel = Kernel::of(T::DTYPE, Reduction::Mean).unwrap();
    let mut into = aligned(LENGTHS[0]);
    bencher
        .counter(BytesCount::new(LENGTHS[0]))
        .bench_local(|| kernel.finish(black_box(into.bytes()), ranks));
}

/// The sum at an address that does not suit the type.
#[divan::bench(types = [f32, f64, f16])]
fn misaligned_sum<T: Number>(bencher: Bencher<'_, '_>) {
    let kernel = Kernel::of(T::DTYPE, Reduction::Sum).unwrap();
    let (mut into, mut with) = (aligned(LENGTHS[0] + 64), aligned(LENGTHS[0]));
    bencher
        .counter(BytesCount::new(LENGTHS[0]))
        .bench_local(|| kernel.reduce(black_box(&mut into.bytes()[1..=LENGTHS[0]]), black_box(with.bytes())));
}

/// The sum of one element at a time, because the compiler may not look through `black_box`.
#[divan::bench(args = TYPES)]
fn scalar_sum(bencher: Bencher<'_, '_>, name: &str) {
    match name {
        "f32" => scalar::<f32>(bencher, |one, two| one + two),
        "f64" => scalar::<f64>(bencher, |one, two| one + two),
        "f16" => scalar::<f16>(bencher, |one, two| one + two),
        "bf16" => scalar::<bf16>(bencher, |one, two| one + two),
        "i8" => scalar::<i8>(bencher, i8::wrapping_add),
        _ => scalar::<i64>(bencher, i64::wrapping_add),
    }
}

fn kernel<T: Number>(bencher: Bencher<'_, '_>, reduction: Reduction, length: usize) {
    let kernel = Kernel::of(T::DTYPE, reduction).unwrap();
    let (mut into, mut with) = (aligned(length), aligned(length));
    bencher
        .counter(BytesCount::new(length))
        .bench_local(|| kernel.reduce(black_box(into.bytes()), black_box(with.bytes())));
}

fn scalar<T: Number>(bencher: Bencher<'_, '_>, sum: impl Fn(T, T) -> T) {
    let (mut into, mut with) = (aligned(LENGTHS[0]), aligned(LENGTHS[0]));
    let (into, with) =
        (bytemuck::cast_slice_mut::<u8, T>(into.bytes()), bytemuck::cast_slice::<u8, T>(with.bytes()));
    bencher.counter(BytesCount::new(LENGTHS[0])).bench_local(|| {
        for (into, with) in into.iter_mut().zip(black_box(with)) {
            *into = black_box(sum(*into, *with));
        }
    });
}

/// Bytes from a multiple of 64 on, as registered memory has it.
struct Aligned(Vec<u8>, std::ops::Range<usize>);

fn aligned(length: usize) -> Aligned {
    let memory = vec![1_u8; length + 64];
    let begin = memory.as_ptr().align_offset(64);
    Aligned(memory, begin..begin + length)
}

impl Aligned {
    fn bytes(&mut self) -> &mut [u8] {
        &mut self.0[self.1.clone()]
    }
}
