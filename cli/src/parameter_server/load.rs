//! The computing of a worker between its pull and its push, and the settings of the numbers of processes.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::cores::thread_cpu_time;
use tonic_rdma_commands::units::{parse_decimal, parse_number};
use tonic_rdma_commands::{Context as _, Failure, Named as _, ValueError};

/// A way to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Compute {
    /// Workers only pull and push.
    None,
    /// A wait, which takes no core: the computing is done by an accelerator.
    Wait,
    /// Arithmetic on the worker's own core, which takes this much CPU time.
    Work,
}

/// The computing of each mini-batch: its kind, batch and time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) compute: Compute,
    /// Samples of a worker's mini-batch. Nothing depends on them if workers do not compute.
    pub(crate) batch: Option<u32>,
    /// Computing time of a worker's mini-batch.
    pub(crate) time: Duration,
}

impl Load {
    /// The load of workers that only pull and push.
    pub(crate) const NONE: Self = Self { compute: Compute::None, batch: None, time: Duration::ZERO };

    /// Returns the load for people, such as `batch 32, wait`, or `None` without computing.
    pub(crate) fn label(&self) -> Option<String> {
        self.batch.map(|batch| format!("batch {batch}, {}", self.compute.name()))
    }

    /// Computes on a thread of its own, so that the runtime's thread stays free for the connections.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let time = self.time;
        let computed = match self.compute {
            Compute::None => return Ok(()),
            // Tokio's timer counts whole milliseconds, which is too coarse for the shortest times.
            Compute::Wait => tokio::task::spawn_blocking(move || std::thread::sleep(time)).await,
            Compute::Work => tokio::task::spawn_blocking(move || work(time)).await,
        };
        computed.context("the computing of a mini-batch crashed")
    }
}

/// Multiplies and adds numbers that fit into a core's cache, until this thread has used `time` of its core.
fn work(time: Duration) {
    const NUMBERS: usize = 4096;
    let begun = thread_cpu_time();
    let mut numbers = [1.0_f32; NUMBERS];
    while thread_cpu_time().saturating_sub(begun) < time {
        for number in &mut numbers {
            *number = number.mul_add(0.999, 0.001);
        }
        std::hint::black_box(&mut numbers);
    }
}

/// The least and the largest factor of computing times.
const LEAST_SCALE: f64 = 0.001;
const MOST_SCALE: f64 = 100.0;

/// The largest number of server processes: each of them holds a variable of each model.
const MAX_SERVERS: u64 = 8;

/// A number, or a multiple of the number of workers: the settings `--servers` and `--compute-scale`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OfWorkers {
    factor: f64,
    /// Whether the number of workers is a factor too.
    by_workers: bool,
}

impl OfWorkers {
    pub(crate) const ONE: Self = Self { factor: 1.0, by_workers: false };

    /// Parses a factor of computing times: `NUMBER`, `workers`, or `NUMBER*workers`.
    pub(crate) fn parse_scale(text: &str) -> Result<Self, ValueError> {
        let (number, by_workers) = match text.strip_suffix("workers") {
            Some("") => ("1", true),
            Some(number) => (number.strip_suffix('*').unwrap_or("no number"), true),
            None => (text, false),
        };
        match parse_decimal("scale", number, LEAST_SCALE..=MOST_SCALE) {
            Ok(factor) => Ok(Self { factor, by_workers }),
            Err(_) => {
                let accepted =
                    format!("numbers from {LEAST_SCALE} to {MOST_SCALE}, workers, or NUMBER*workers");
                Err(ValueError::number("scale", text, accepted))
            }
        }
    }

    /// Parses a number of servers, or `workers` for as many as workers: a machine of the paper runs one of each.
    pub(crate) fn parse_servers(text: &str) -> Result<Self, ValueError> {
        match parse_number("number of servers", text, 1..=MAX_SERVERS) {
            Ok(number) => Ok(Self { factor: number as f64, by_workers: false }),
            Err(_) if text == "workers" => Ok(Self { factor: 1.0, by_workers: true }),
            Err(_) => {
                let accepted = format!("whole numbers from 1 to {MAX_SERVERS}, or workers");
                Err(ValueError::number("number of servers", text, accepted))
            }
        }
    }

    /// Returns the value beside this number of workers.
    pub(crate) fn beside(self, workers: usize) -> f64 {
        if self.by_workers { self.factor * workers as f64 } else { self.factor }
    }
}

impl fmt::Display for OfWorkers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.by_workers { "*workers" } else { "" };
        write!(formatter, "{}{suffix}", self.factor)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::time::Instant;

    use super::*;

    #[test]
    fn names_are_distinct_and_read_back() {
        for compute in Compute::value_variants() {
            assert_eq!(Compute::from_str(compute.name(), false), Ok(*compute));
            assert_eq!(serde_json::to_value(compute).ok(), Some(compute.name().into()));
        }
    }

    #[tokio::test]
    async fn computing_takes_its_time() {
        let time = Duration::from_millis(20);
        for compute in [Compute::Wait, Compute::Work] {
            let begun = Instant::now();
            Load { compute, batch: None, time }.run().await.unwrap();
            assert!(begun.elapsed() >= time, "{compute:?}");
        }
    }

    #[test]
    fn work_takes_cpu_time() {
        let (time, before) = (Duration::from_millis(20), thread_cpu_time());
        work(time);
        assert!(thread_cpu_time().saturating_sub(before) >= time);
    }

    #[test]
    fn scales_are_read_back_and_multiply() {
        let ten = Duration::from_millis(10);
        for (text, milliseconds) in
            [("1", 10), ("0.5", 5), ("workers", 40), ("1*workers", 40), ("0.25*workers", 10)]
        {
            let scale = OfWorkers::parse_scale(text).unwrap();
            assert_eq!(ten.mul_f64(scale.beside(4)), Duration::from_millis(milliseconds), "{text}");
            assert_eq!(OfWorkers::parse_scale(&scale.to_string()), Ok(scale));
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_accepted_ones() {
        for bad in ["", "0", "-1", "101", "NaN", "inf", "x", "2workers", "*workers", "workers*2", "0*workers"]
        {
            let reason = OfWorkers::parse_scale(bad).unwrap_err().to_string();
            assert!(
                reason.contains("0.001 to 100") && reason.contains("NUMBER*workers"),
                "{bad:?}: {reason}"
            );
        }
    }

    #[test]
    fn numbers_and_workers_are_read_back() {
        for (text, beside_four) in [("1", 1.0), ("8", 8.0), ("workers", 4.0)] {
            assert_eq!(OfWorkers::parse_servers(text).unwrap().beside(4), beside_four);
        }
        for bad in ["0", "9", "", "all"] {
            let reason = OfWorkers::parse_servers(bad).unwrap_err().to_string();
            assert!(reason.contains("1 to 8, or workers"), "{reason}");
        }
    }
}
