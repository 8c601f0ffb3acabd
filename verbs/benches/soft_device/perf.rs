//! One figure for each call, measured as `ucx_perftest` measures: many iterations, one look at the clock before and one
//! after. `benches/compare-ucx` sets the two side by side.
//!
//! ```text
//!  perf WHAT LENGTH ITERATIONS
//!  latency of one way, in ns          send  send_with_imm  write  write_with_imm      (half a round trip)
//!                                     read                                            (until its completion)
//!  time for each message, in ns       send_rate … read_rate, memcpy
//! ```

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::HostMemory;

use super::initiator::Initiator;
use super::side::{Opcode, pin};

/// Longest message, in bytes.
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

impl Measurement {
    fn parse(arguments: &[String]) -> Result<Self, String> {
        let [what, length, iterations] = arguments else {
            return Err(format!("perf takes WHAT LENGTH ITERATIONS, not {arguments:?}"));
        };
        let opcode = what.strip_suffix("_rate").unwrap_or(what);
        let what = match Opcode::parse(opcode) {
            _ if what == "memcpy" => What::Memcpy,
            Some(opcode) if what.ends_with("_rate") => What::Rate(opcode),
            Some(opcode) => What::Latency(opcode),
            None => {
                let known = Opcode::ALL.map(Opcode::name).join(", ");
                return Err(format!(
                    "WHAT is memcpy, or one of {known}, with or without _rate; not {what:?}"
                ));
            }
        };
        let length = match length.parse() {
            Ok(length) if (8..=MAX_LENGTH).contains(&length) && length.is_multiple_of(8) => length,
            _ => {
                return Err(format!(
                    "LENGTH is a multiple of 8 bytes from 8 to {MAX_LENGTH}, not {length:?}"
                ));
            }
        };
        match iterations.parse() {
            Ok(iterations) if iterations > 0 => Ok(Self { what, length, iterations }),
            _ => Err(format!("ITERATIONS is a number from 1 on, not {iterations:?}")),
        }
    }

    /// Nanoseconds of one.
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

/// Nanoseconds that one of so many calls takes.
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

/// What a READ or a WRITE copies, copied by `memcpy`.
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
        // SAFETY: both are as long as that, different, and no references to them exist.
        unsafe {
            std::ptr::copy_nonoverlapping(
                black_box(self.from.as_ptr().as_ptr().cast_const()),
                black_box(self.to.as_ptr().as_ptr()),
                self.length,
            );
        }
    }
}
