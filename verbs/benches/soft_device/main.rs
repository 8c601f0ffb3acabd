//! The cost of the software device for each opcode: latency, message rate, bandwidth.
//!
//! ```sh
//! cargo bench --bench soft_device                              # all benches, by divan
//! cargo bench --bench soft_device -- latency Write             # benches with these words in their names
//! cargo bench --bench soft_device -- perf write 64 1000000     # one figure, as by `ucx_perftest` (`perf`)
//!
//! # The other process in namespaces of its own, as in another container:
//! SOFT_DEVICE_PEER="unshare --user --map-root-user --net --ipc --mount --pid --fork" \
//!     RDMA_SOFT_DIR=/run/rdma RDMA_SOFT_PEERS=any cargo bench --bench soft_device -- perf send 64 1000000
//! ```
//!
//! Each bench runs two processes, each on its own core if there are two cores. The other process is this
//! binary, started again (`peer`).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run panics")]
#![allow(clippy::panic, missing_docs, reason = "a bench that can't run panics, and has no public API")]

mod perf;
mod side;

use std::hint::black_box;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use tonic_rdma_commands::bench_options;
use tonic_rdma_commands::clap::{self, Parser};
use tonic_rdma_verbs::{HostMemory, WorkCompletion};

use side::{Initiator, Opcode, pin};

/// The commands beside divan's benches.
#[derive(Debug, Parser)]
enum Command {
    Perf(perf::Measurement),
    #[command(hide = true)]
    Peer {
        arguments: Vec<String>,
    },
}

fn main() {
    let first = std::env::args().skip(1).find(|word| word != "--bench");
    if !first.is_some_and(|word| ["perf", side::ARGUMENT].contains(&&*word)) {
        return divan::main();
    }
    match bench_options() {
        Command::Perf(measurement) => measurement.run(),
        Command::Peer { arguments } => side::run(&arguments),
    }
}

/// The opcodes to measure.
const OPCODES: [Opcode; 5] =
    [Opcode::Send, Opcode::SendWithImm, Opcode::Write, Opcode::WriteWithImm, Opcode::Read];

/// A round trip: the peer answers with a message of this opcode. A side notices a `Send`, `SendWithImm` or
/// `WriteWithImm` when it polls the completion queue, and a `Write` when it polls the written memory. A
/// `Read` has no answer: the initiator waits for its completion.
#[divan::bench(
    args = OPCODES,
    consts = [8, 64, 512, 4 << 10, 64 << 10],
    sample_count = 2000,
    sample_size = 64,
    max_time = 1,
)]
fn latency_round_trip<const LENGTH: usize>(bencher: Bencher<'_, '_>, opcode: Opcode) {
    let mut initiator = Initiator::for_latency(opcode, LENGTH);
    (0..1000).for_each(|_| initiator.round_trip());
    bencher.bench_local(|| initiator.round_trip());
}

/// Messages in one direction, as fast as the peer receives them. Each message is posted alone.
#[divan::bench(
    args = OPCODES,
    consts = [8, 64, 512],
    sample_count = 1000,
    sample_size = 16,
    max_time = 1,
)]
fn message_rate<const LENGTH: usize>(bencher: Bencher<'_, '_>, opcode: Opcode) {
    let mut initiator = Initiator::for_bandwidth(opcode, LENGTH);
    (0..50).for_each(|_| initiator.batch());
    bencher.counter(ItemsCount::new(initiator.batch_length())).bench_local(|| initiator.batch());
}

/// Long messages in one direction. Each message is posted alone.
#[divan::bench(
    args = OPCODES,
    consts = [4 << 10, 64 << 10, 1 << 20, 64 << 20],
    sample_count = 200,
    max_time = 1,
)]
fn bandwidth<const LENGTH: usize>(bencher: Bencher<'_, '_>, opcode: Opcode) {
    let mut initiator = Initiator::for_bandwidth(opcode, LENGTH);
    (0..3).for_each(|_| initiator.batch());
    bencher
        .counter(BytesCount::new(LENGTH as u64 * initiator.batch_length()))
        .bench_local(|| initiator.batch());
}

/// For comparison with `bandwidth`: `memcpy` copies this number of bytes from one memfd to another. Both
/// memfds were used before.
#[divan::bench(args = [4 << 10, 64 << 10, 1 << 20, 64 << 20], sample_count = 200, max_time = 1)]
fn bandwidth_of_memcpy(bencher: Bencher<'_, '_>, length: usize) {
    pin(0);
    let mut copy = perf::Memcpy::new(length);
    (0..3).for_each(|_| copy.run());
    bencher.counter(BytesCount::new(length)).bench_local(|| copy.run());
}

/// Polls an empty completion queue.
#[divan::bench(sample_count = 1000, sample_size = 100)]
fn empty_poll(bencher: Bencher<'_, '_>) {
    let initiator = Initiator::for_latency(Opcode::Send, 64);
    let mut completions = [WorkCompletion::EMPTY; 16];
    bencher.bench_local(|| black_box(initiator.side().queue.poll(&mut completions)));
}

/// Copies by the device's function (`src/copy/mod.rs`), between addresses that differ by `apart` bytes within
/// a page.
#[divan::bench(args = [0, 8, 64])]
fn copy(bencher: Bencher<'_, '_>, apart: usize) {
    pin(0);
    const SLOT: usize = 17 * 1024;
    let (from, to) = (vec![1u8; 4096 + SLOT], HostMemory::shared(2 * 4096 + SLOT, 4096).unwrap());
    let from = &from[from.as_ptr().align_offset(4096)..][..SLOT];
    bencher.counter(BytesCount::new(SLOT)).bench_local(|| to.copy_in(apart, black_box(from)));
}

/// Copies the bytes of `copy` by `memcpy`.
#[divan::bench(args = [0, 8, 64])]
fn copy_by_memcpy(bencher: Bencher<'_, '_>, apart: usize) {
    pin(0);
    const SLOT: usize = 17 * 1024;
    let (from, mut to) = (vec![1u8; 4096 + SLOT], vec![0u8; 2 * 4096 + SLOT]);
    let from = &from[from.as_ptr().align_offset(4096)..][..SLOT];
    let start = to.as_ptr().align_offset(4096) + apart;
    bencher
        .counter(BytesCount::new(SLOT))
        .bench_local(|| black_box(&mut to)[start..start + SLOT].copy_from_slice(black_box(from)));
}
