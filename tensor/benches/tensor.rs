//! Measures operations on tensors: the largest element, beside a plain read of the memory; packing; metadata.

use std::hint::black_box;

use divan::Bencher;
use divan::counter::BytesCount;
use tonic_rdma_tensor::unstable::tensor_metadata as wire;
use tonic_rdma_tensor::{Dtype, Metadata, Shape, Tensor, TensorMut, TensorSpec, reduce_max_f32};

/// Lengths of tensors in bytes.
const LENGTHS: [usize; 3] = [4 << 10, 1 << 20, 64 << 20];

fn main() {
    divan::main();
}

#[divan::bench(args = LENGTHS)]
fn reduce_max(bencher: Bencher<'_, '_>, length: usize) {
    let values: Vec<f32> = (0..length / 4).map(|at| at as f32).collect();
    bencher.counter(BytesCount::new(length)).bench_local(|| reduce_max_f32(black_box(&values)));
}

/// Reads every word, which is the least work.
#[divan::bench(args = LENGTHS)]
fn read(bencher: Bencher<'_, '_>, length: usize) {
    let words: Vec<u64> = (0..length as u64 / 8).collect();
    bencher.counter(BytesCount::new(length)).bench_local(|| {
        let (chunks, _) = black_box(&words[..]).as_chunks::<16>();
        let mut all = [0; 16];
        for chunk in chunks {
            for (sum, word) in all.iter_mut().zip(chunk) {
                *sum ^= word;
            }
        }
        all
    });
}

/// Packs a square tensor by columns.
#[divan::bench(args = LENGTHS)]
fn pack_transposed(bencher: Bencher<'_, '_>, length: usize) {
    let side = (length as u64 / 4).isqrt();
    let tensor = zeros(&[side, side]).transpose();
    let mut packed = vec![0; length];
    bencher.counter(BytesCount::new(length)).bench_local(|| tensor.copy_to(black_box(&mut packed)));
}

/// Encodes metadata to bytes and decodes it.
#[divan::bench]
fn metadata(bencher: Bencher<'_, '_>) {
    let metadata = zeros(&[2, 3, 4, 5]).metadata();
    bencher.bench_local(|| {
        let bytes = wire::WireMetadata::from(black_box(metadata)?).encode();
        Metadata::try_from(wire::WireMetadata::decode(&bytes).ok()?).ok()
    });
}

#[expect(clippy::expect_used, reason = "a bench stops at an error")]
fn zeros(dims: &[u64]) -> Tensor {
    let spec = Shape::new(dims).and_then(|shape| TensorSpec::new(Dtype::F32, shape)).expect("a shape");
    TensorMut::zeroed(spec).expect("memory").freeze()
}
