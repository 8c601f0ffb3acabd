//! One figure for each call, measured in the way of `ucx_perftest`: many iterations between two readings of
//! the clock. `benches/compare-ucx` compares both programs.
//!
//! ```text
//!  perf WHAT LENGTH ITERATIONS
//!  latency in one direction, in ns    send  send_with_imm  write  write_with_imm      (half a round trip)
//!                                     read                                            (until its completion)
//!  time for each message, in ns       send_rate … read_rate, memcpy
//! ```

use std::hint::black_box;
use std::time::{Duration, Instant};

use tonic_rdma_commands::clap::{self, Args};
use tonic_rdma_commands::{ValueError, parse_name};
use tonic_rdma_verbs::HostMemory;

use super::side::{Initiator, Opcode, pin};

/// Length of the longest message, in bytes.
const MAX_LENGTH: usize = 1 << 30;

/// One figure, measured as by `ucx_perftest`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Measurement {
    /// memcpy, or an opcode, for its latency, or an opcode with _rate
    #[arg(value_parser = What::parse)]
    what: What,
    /// Bytes of a message: a multiple of 8
    #[arg(value_parser = parse_length)]
    length: usize,
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    iterations: u64,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Latency(Opcode),
    Rate(Opcode),
    Memcpy,
}

impl What {
    fn parse(text: &str) -> Result<Self, ValueError> {
        match text.strip_suffix("_rate") {
            _ if text == "memcpy" => Ok(Self::Memcpy),
            Some(opcode) => parse_name("opcode", opcode).map(Self::Rate),
            None => parse_name("opcode", text).map(Self::Latency),
        }
    }
}

fn parse_length(text: &str) -> Result<usize, ValueError> {
    let length =
        text.parse().ok().filter(|length| (8..=MAX_LENGTH).contains(length) && length.is_multiple_of(8));
    length.ok_or_else(|| ValueError::number("length", text, format!("multiples of 8 from 8 to {MAX_LENGTH}")))
}

impl Measurement {
    /// Prints the nanoseconds of one operation.
    #[allow(clippy::print_stdout, reason = "a command's result")]
    pub(crate) fn run(&self) {
        let nanos = match self.what {
            What::Latency(opcode) => latency(opcode, self.length, self.iterations),
            What::Rate(opcode) => rate(opcode, self.length, self.iterations),
            What::Memcpy => {
                pin(0);
                let mut copy = Memcpy::new(self.length);
                time(self.iterations, || copy.run())
            }
        };
        println!("{nanos:.1}");
    }
}

fn latency(opcode: Opcode, length: usize, iterations: u64) -> f64 {
    let mut initiator = Initiator::for_latency(opcode, length);
    let ways = if opcode == Opcode::Read { 1.0 } else { 2.0 };
    time(iterations, || initiator.round_trip()) / ways
}

fn rate(opcode: Opcode, length: usize, iterations: u64) -> f64 {
    let mut initiator = Initiator::for_bandwidth(opcode, length);
    let batch = initiator.batch_length();
    let batches = iterations.div_ceil(batch);
    warm_up(batches, || initiator.batch());
    initiator.drain();
    let start = Instant::now();
    (0..batches).for_each(|_| initiator.batch());
    initiator.drain();
    each(start.elapsed(), batches * batch)
}

/// Measures `iterations` calls, and returns the nanoseconds of one.
fn time(iterations: u64, mut call: impl FnMut()) -> f64 {
    warm_up(iterations, &mut call);
    let start = Instant::now();
    (0..iterations).for_each(|_| call());
    each(start.elapsed(), iterations)
}

fn warm_up(iterations: u64, mut call: impl FnMut()) {
    (0..(iterations / 10).clamp(1, 10_000)).for_each(|_| call());
}

fn each(all: Duration, count: u64) -> f64 {
    all.as_secs_f64() * 1e9 / count as f64
}

/// A copy by `memcpy`, for comparison with a READ or a WRITE of this length.
pub(crate) struct Memcpy {
    from: HostMemory,
    to: HostMemory,
    length: usize,
}

impl Memcpy {
    pub(crate) fn new(length: usize) -> Self {
        let memory = |byte: u8| {
            let memory = HostMemory::shared(length, 4096).unwrap();
            memory.copy_in(0, &vec![byte; length]).unwrap();
            memory
        };
        Self { from: memory(1), to: memory(2), length }
    }

    pub(crate) fn run(&mut self) {
        // SAFETY: both memories have this length and are distinct, and there is no reference to them.
        unsafe {
            std::ptr::copy_nonoverlapping(
                black_box(self.from.as_ptr().as_ptr().cast_const()),
                black_box(self.to.as_ptr().as_ptr()),
                self.length,
            );
        }
    }
}
