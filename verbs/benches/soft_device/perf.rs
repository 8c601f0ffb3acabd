//! One figure for each call, measured in the way of `ucx_perftest`: many iterations between two readings of the clock.
//! `benches/compare-ucx` compares both programs.
//!
//! ```text
//!  perf WHAT LENGTH ITERATIONS
//!  latency in one direction, in ns    send  send_with_imm  write  write_with_imm      (half a round trip)
//!                                     read                                            (until its completion)
//!  time for each message, in ns       send_rate … read_rate, memcpy
//! ```

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::HostMemory;

use super::initiator::Initiator;
use super::side::{Opcode, pin};

/// Length of the longest message, in bytes.
const MAX_LENGTH: usize = 1 << 30;

/// Prints the figure that the command line asks for.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "a command's result")]
pub(crate) fn run(arguments: &[String]) -> ExitCode {
    match Measurement::parse(arguments) {
        Ok(measurement) => {
            println!("{:.1}", measurement.run());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

#[derive(Debug)]
struct Measurement {
    what: What,
    length: usize,
    iterations: u64,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Latency(Opcode),
    Rate(Opcode),
    Memcpy,
}

/// A fault of the command line.
#[derive(Debug, thiserror::Error)]
enum UsageError {
    #[error("perf takes WHAT LENGTH ITERATIONS, not {0:?}")]
    Arguments(Vec<String>),
    #[error("WHAT is memcpy, or one of {known}, with or without _rate; not {0:?}", known = Opcode::ALL.map(Opcode::name).join(", "))]
    What(String),
    #[error("LENGTH is a multiple of 8 bytes from 8 to {MAX_LENGTH}, not {0:?}")]
    Length(String),
    #[error("ITERATIONS is a number from 1 on, not {0:?}")]
    Iterations(String),
}

impl Measurement {
    fn parse(arguments: &[String]) -> Result<Self, UsageError> {
        let [what, length, iterations] = arguments else {
            return Err(UsageError::Arguments(arguments.to_vec()));
        };
        let opcode = what.strip_suffix("_rate").unwrap_or(what);
        let what = match Opcode::parse(opcode) {
            _ if what == "memcpy" => What::Memcpy,
            Some(opcode) if what.ends_with("_rate") => What::Rate(opcode),
            Some(opcode) => What::Latency(opcode),
            None => return Err(UsageError::What(what.clone())),
        };
        let length = match length.parse() {
            Ok(length) if (8..=MAX_LENGTH).contains(&length) && length.is_multiple_of(8) => length,
            _ => return Err(UsageError::Length(length.clone())),
        };
        match iterations.parse() {
            Ok(iterations) if iterations > 0 => Ok(Self { what, length, iterations }),
            _ => Err(UsageError::Iterations(iterations.clone())),
        }
    }

    /// Measures, and returns the nanoseconds of one operation.
    fn run(&self) -> f64 {
        match self.what {
            What::Latency(opcode) => latency(opcode, self.length, self.iterations),
            What::Rate(opcode) => rate(opcode, self.length, self.iterations),
            What::Memcpy => {
                pin(0);
                let mut copy = Memcpy::new(self.length);
                time(self.iterations, || copy.run())
            }
        }
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
