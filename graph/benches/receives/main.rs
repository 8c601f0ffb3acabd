//! Measures what polling-async gains when several receives are outstanding (§4 of the paper).
//!
//! ```sh
//! cargo bench -p tonic-rdma-graph --bench receives
//! cargo bench -p tonic-rdma-graph --bench receives -- --steps 50 --nodes wait --svg receives.svg
//! ```
//!
//! Part 0 sends a number of tensors in each step, and a simulated network delivers one after the other, in an order that differs from
//! step to step and from the order of their consumers. Part 1 has a consumer for each tensor, and as many nodes that need no tensor.
//! Each of these nodes computes for as long as the network takes for a tensor, or, with `--nodes wait`, waits without a core, as for an
//! accelerator. All modes run in turns in one process, and the table shows
//! medians of the time of a step of part 1. `computing` is the sum of the times of its nodes: no mode is faster.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, missing_docs, reason = "the same")]

mod figure;
mod split;

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use split::Bench;
use tonic_rdma_graph::schedule::{ReceiveMode, Report, Work};

/// Numbers of receives that are outstanding at once.
const OUTSTANDING: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// The time of each node, and the time between two arrivals.
const EACH: Duration = Duration::from_micros(500);

/// What was measured, by the number of receives and the mode.
pub(crate) type Medians = BTreeMap<(usize, usize), Median>;

/// A step of part 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Median {
    pub(crate) step: Duration,
    /// Nodes that ran while a receive was outstanding, in each step.
    pub(crate) ran_while_outstanding: f64,
    /// Looks that found nothing, in each step.
    pub(crate) missed: f64,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        Some(arguments.get(at + 1).unwrap_or_else(|| panic!("{name} needs a value")).clone())
    };
    let is_test = arguments.iter().any(|argument| argument == "--test");
    let steps = value("--steps").map_or(20, |steps| steps.parse().expect("--steps: a number"));
    let is_wait = match value("--nodes").as_deref() {
        None | Some("work") => false,
        Some("wait") => true,
        Some(other) => panic!("--nodes: work or wait, not {other}"),
    };
    let steps = if is_test { 1 } else { steps };
    assert!(steps > 0, "--steps: at least 1");
    let medians = measure(steps, is_wait);
    show(&medians);
    if let Some(path) = value("--svg") {
        std::fs::write(&path, figure::bars(&medians)).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

fn measure(steps: u64, is_wait: bool) -> Medians {
    let mut medians = Medians::new();
    for outstanding in OUTSTANDING {
        let mut reports: [Vec<Report>; 3] = Default::default();
        let mut bench = Bench::new(outstanding, EACH, is_wait);
        // The first round warms up, and is not counted.
        for round in 0..=steps {
            for (mode, reports) in ReceiveMode::ALL.into_iter().zip(&mut reports) {
                let report = run(&mut bench, mode);
                if round > 0 {
                    reports.push(report);
                }
            }
        }
        for (mode, reports) in reports.iter().enumerate() {
            medians.insert((outstanding, mode), median(reports));
        }
    }
    medians
}

/// Runs one step of both parts.
fn run(bench: &mut Bench, mode: ReceiveMode) -> Report {
    let step = bench.next_step();
    let [first, second] = &mut bench.executors;
    let feed = |_, _| Err("the graph has no inputs".into());
    thread::scope(|scope| {
        let sender = scope.spawn(move || first.run(step..step + 1, Work::Compute, &mut { feed }));
        second.settings_mut().receive = mode;
        let report = second.run(step..step + 1, Work::Compute, &mut { feed }).expect("part 1 runs");
        sender.join().expect("part 0 ends").expect("part 0 runs");
        report
    })
}

fn median(reports: &[Report]) -> Median {
    let mut steps: Vec<Duration> =
        reports.iter().flat_map(|report| &report.steps).map(|step| step.ended - step.began).collect();
    steps.sort_unstable();
    let mean = |sum: fn(&Report) -> u64| reports.iter().map(sum).sum::<u64>() as f64 / reports.len() as f64;
    Median {
        step: steps[steps.len() / 2],
        ran_while_outstanding: mean(|report| report.ran_while_outstanding),
        missed: mean(|report| report.missed),
    }
}

fn show(medians: &Medians) {
    println!(
        "| outstanding | computing | polling-async | blocking | callback | blocking / polling-async | callback / polling-async | nodes \
         that ran while a receive was outstanding (polling-async, blocking, callback) | looks that found nothing |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for outstanding in OUTSTANDING {
        let [polling, blocking, callback] = [0, 1, 2].map(|mode| medians[&(outstanding, mode)]);
        let computing = EACH * 2 * outstanding as u32;
        let milliseconds = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
        let ratio = |median: Median| format!("{:.2}×", median.step.div_duration_f64(polling.step));
        println!(
            "| {outstanding} | {} | {} | {} | {} | {} | {} | {:.1}, {:.1}, {:.1} | {:.0}, {:.0}, {:.0} |",
            milliseconds(computing),
            milliseconds(polling.step),
            milliseconds(blocking.step),
            milliseconds(callback.step),
            ratio(blocking),
            ratio(callback),
            polling.ran_while_outstanding,
            blocking.ran_while_outstanding,
            callback.ran_while_outstanding,
            polling.missed,
            blocking.missed,
            callback.missed,
        );
    }
}
