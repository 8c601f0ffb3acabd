//! What is measured in one cell, and how payloads are made and checked.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::cores::cpu_time;
use tonic_rdma_commands::payload::content::{VARIANTS, check_all, check_stamps, variant_seed};
use tonic_rdma_commands::payload::seeded::mix;
use tonic_rdma_commands::process::report;
use tonic_rdma_commands::statistics::{median, quantile};
use tonic_rdma_commands::{Context as _, Failure};

use crate::Job;

/// The seed of all contents.
pub(crate) const SEED: u64 = 0x0a17;

/// The figures of a mode in a cell.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Figures {
    pub(crate) ops: usize,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) ops_per_s: f64,
    /// CPU time of both processes.
    pub(crate) cpu_us_per_op: f64,
}

impl Figures {
    /// Returns the medians of several rounds, and all operations.
    pub(crate) fn medians(rounds: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| median(rounds.iter().map(figure));
        Self {
            ops: rounds.iter().map(|round| round.ops).sum(),
            p50_us: of(|round| round.p50_us),
            p99_us: of(|round| round.p99_us),
            ops_per_s: of(|round| round.ops_per_s),
            cpu_us_per_op: of(|round| round.cpu_us_per_op),
        }
    }
}

/// A part of a cell's measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    end: Instant,
    /// Whether the server checks every byte, and not only stamps.
    pub(crate) checks_all: bool,
}

impl Phase {
    /// Returns whether another operation is due after `done` ones. The first is always due.
    pub(crate) fn goes_on(&self, done: usize) -> bool {
        done == 0 || Instant::now() < self.end
    }
}

/// A client that can make operations.
pub(crate) trait Caller {
    /// Makes operations for a phase. Returns how long each of them took.
    async fn run(&mut self, phase: Phase) -> Result<Vec<Duration>, Failure>;
}

/// Measures the cell of `job`: one operation with a check of every byte, then a fifth of the time to warm up,
/// then the measured time. Reports the figures, and keeps the connection until stdin ends.
pub(crate) async fn measure(job: &Job, mut caller: impl Caller) -> Result<(), Failure> {
    let phase = |length, checks_all| Phase { end: Instant::now() + length, checks_all };
    caller.run(phase(Duration::ZERO, true)).await?;
    caller.run(phase(job.duration / 5, false)).await?;
    let server = clock_getcpuclockid(Pid::from_raw(job.server)).context("the server has no clock")?;
    let used = || cpu_of(server).map(|server| server + cpu_time());
    let (begin, before) = (Instant::now(), used()?);
    let took = caller.run(phase(job.duration, false)).await?;
    let (wall, cpu) = (begin.elapsed(), used()?.saturating_sub(before));
    let micros = |duration: &Duration| duration.as_secs_f64() * 1e6;
    report(&Figures {
        ops: took.len(),
        p50_us: median(took.iter().map(micros)),
        p99_us: quantile(took.iter().map(micros), 0.99),
        ops_per_s: took.len() as f64 / wall.as_secs_f64(),
        cpu_us_per_op: micros(&cpu) / took.len() as f64,
    })?;
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).map(drop).map_err(Into::into)
}

fn cpu_of(process: ClockId) -> Result<Duration, Failure> {
    process.now().map(Duration::from).context("the clock of the server can't be read")
}

/// Returns the seed of the content of the operation at `index`.
pub(crate) fn seed_of(index: usize) -> u64 {
    variant_seed(SEED, index % VARIANTS)
}

/// Returns the offset of the first wrong byte plus one, or 0.
pub(crate) fn first_wrong(seed: u64, content: &[u8], checks_all: bool) -> u64 {
    static DRAWS: AtomicU64 = AtomicU64::new(0);
    let wrong = match checks_all {
        true => check_all(seed, content),
        false => check_stamps(seed, content, mix(DRAWS.fetch_add(1, Ordering::Relaxed))),
    };
    wrong.map_or(0, |offset| offset + 1)
}

/// Fails unless the server has got `sent` bytes, and found them right.
pub(crate) fn accept(sent: usize, bytes: u64, first_wrong: u64) -> Result<(), Failure> {
    match (bytes == sent as u64, first_wrong) {
        (true, 0) => Ok(()),
        (false, _) => Err(Failure::run(format!("{bytes} bytes arrived, and {sent} were sent"))),
        (true, wrong) => Err(Failure::run(format!("the byte at {} arrived wrong", wrong - 1))),
    }
}

/// A request, whatever the library.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) seed: u64,
    pub(crate) checks_all: bool,
    pub(crate) payload: Bytes,
}
