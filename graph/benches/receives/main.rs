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

mod split;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use split::Bench;
use tonic_rdma_commands::clap::{self, Parser, ValueEnum};
use tonic_rdma_commands::output::write_file;
use tonic_rdma_commands::plot::{self, Axis, Content, Plot, Scale, Series};
use tonic_rdma_commands::table::markdown;
use tonic_rdma_commands::{bench_options, statistics};
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

#[derive(Debug, Parser)]
struct Options {
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// What the nodes that need no tensor do.
    #[arg(long, value_enum, default_value = "work")]
    nodes: Nodes,
    /// The file for a plot.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Measures everything once.
    #[arg(long)]
    test: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Nodes {
    Work,
    Wait,
}

fn main() {
    let options: Options = bench_options();
    let medians = measure(if options.test { 1 } else { options.steps }, options.nodes == Nodes::Wait);
    show(&medians);
    if let Some(path) = &options.svg {
        write_file(path, &bars(&medians)).unwrap();
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
    let steps = reports.iter().flat_map(|report| &report.steps);
    let step = statistics::median(steps.map(|step| (step.ended - step.began).as_secs_f64()));
    let mean = |sum: fn(&Report) -> u64| reports.iter().map(sum).sum::<u64>() as f64 / reports.len() as f64;
    Median {
        step: Duration::from_secs_f64(step),
        ran_while_outstanding: mean(|report| report.ran_while_outstanding),
        missed: mean(|report| report.missed),
    }
}

/// Returns the time that the nodes of a step compute.
fn computing(outstanding: usize) -> Duration {
    EACH * 2 * outstanding as u32
}

fn show(medians: &Medians) {
    let headings = [
        "outstanding",
        "computing",
        "polling-async",
        "blocking",
        "callback",
        "blocking / polling-async",
        "callback / polling-async",
        "nodes that ran while a receive was outstanding (polling-async, blocking, callback)",
        "looks that found nothing",
    ];
    let milliseconds = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
    let row = |outstanding| {
        let modes = [0, 1, 2].map(|mode| medians[&(outstanding, mode)]);
        let ratio = |median: Median| format!("{:.2}×", median.step.div_duration_f64(modes[0].step));
        let mut row = vec![outstanding.to_string(), milliseconds(computing(outstanding))];
        row.extend(modes.map(|median| milliseconds(median.step)));
        row.extend([ratio(modes[1]), ratio(modes[2])]);
        row.push(modes.map(|median| format!("{:.1}", median.ran_while_outstanding)).join(", "));
        row.push(modes.map(|median| format!("{:.0}", median.missed)).join(", "));
        row
    };
    println!("{}", markdown(&headings, 0, OUTSTANDING.map(row)));
}

/// Draws bars: how many times as long as its computing each step takes.
fn bars(medians: &Medians) -> String {
    let times = |outstanding: usize, mode: usize| {
        medians[&(outstanding, mode)].step.div_duration_f64(computing(outstanding))
    };
    let series = |(mode, name): (usize, ReceiveMode)| {
        Series::new(name.to_string(), mode, OUTSTANDING.map(|outstanding| times(outstanding, mode)).to_vec())
    };
    let content = Content::Bars {
        x: "receives outstanding at once",
        groups: OUTSTANDING.map(|outstanding| outstanding.to_string()).to_vec(),
        bars: ReceiveMode::ALL.into_iter().enumerate().map(series).collect(),
    };
    let y = Axis { name: "times its computing", scale: Scale::Linear };
    plot::draw(&[Plot { title: "Time of a step (lower is better)", y, content }]).unwrap()
}
