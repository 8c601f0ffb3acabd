//! Measures what polling-async gains when several receives are outstanding (§4 of the paper).
//!
//! ```sh
//! cargo bench -p tonic-rdma-graph --bench receives
//! cargo bench -p tonic-rdma-graph --bench receives -- --steps 50 --nodes wait --svg receives.svg
//! ```
//!
//! Part 0 sends a number of tensors in each step, and a simulated network delivers one after the other, in an
//! order that differs from step to step and from the order of their consumers. Part 1 has a consumer for each
//! tensor, and as many nodes that need no tensor. Each of these nodes computes for as long as the network
//! takes for a tensor, or, with `--nodes wait`, waits without a core, as for an accelerator. All modes take
//! turns in one process, and the table shows medians of the time of a step of part 1. `computing` is the sum
//! of the times of its nodes: no mode is faster.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, missing_docs, reason = "the same")]

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tonic_rdma_commands::clap::{self, Parser, ValueEnum};
use tonic_rdma_commands::output::write_file;
use tonic_rdma_commands::plot::{self, Axis, Plot, Scale, Series};
use tonic_rdma_commands::table::markdown;
use tonic_rdma_commands::{bench_options, statistics};
use tonic_rdma_graph::dataflow::{Fact, Kernel, KernelError, Node, NodeId, Outlet, Role, Topology, Value};
use tonic_rdma_graph::onnx::ModelValue;
use tonic_rdma_graph::placement::{CrossingId, Part, Partition, Placements};
use tonic_rdma_graph::schedule::{Executor, ReceiveMode, RunReport, Transfers};
use tonic_rdma_tensor::Dtype;

/// Numbers of receives that are outstanding at once.
const OUTSTANDING: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// The time of each node, and the time between two arrivals.
const EACH: Duration = Duration::from_micros(500);

/// What was measured, by the number of receives and the mode.
type Medians = BTreeMap<(usize, usize), Median>;

/// A step of part 1.
#[derive(Clone, Copy, Debug)]
struct Median {
    step: Duration,
    /// Nodes that ran while a receive was outstanding, in each step.
    ran_while_outstanding: f64,
    /// Polls that found nothing, in each step.
    missed: f64,
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

fn measure(steps: u64, waits: bool) -> Medians {
    let mut medians = Medians::new();
    for outstanding in OUTSTANDING {
        let mut reports: [Vec<RunReport>; 3] = Default::default();
        let mut bench = Bench::new(outstanding, EACH, waits);
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
fn run(bench: &mut Bench, mode: ReceiveMode) -> RunReport {
    let step = bench.next_step();
    let mut second = bench.executors.pop().expect("part 1").receive(mode);
    let first = &mut bench.executors[0];
    let feed = |_, _| Err("the graph has no inputs".into());
    let report = thread::scope(|scope| {
        let sender = scope.spawn(move || first.run(step..step + 1, &mut { feed }));
        let report = second.run(step..step + 1, &mut { feed }).expect("part 1 runs");
        sender.join().expect("part 0 ends").expect("part 0 runs");
        report
    });
    bench.executors.push(second);
    report
}

fn median(reports: &[RunReport]) -> Median {
    let steps = reports.iter().flat_map(|report| &report.steps);
    let step = statistics::median(steps.map(|step| (step.ended - step.began).as_secs_f64()));
    let mean =
        |sum: fn(&RunReport) -> u64| reports.iter().map(sum).sum::<u64>() as f64 / reports.len() as f64;
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
        "polls that found nothing",
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
    let content = plot::Content::Bars {
        x: "receives outstanding at once",
        groups: OUTSTANDING.map(|outstanding| outstanding.to_string()).to_vec(),
        bars: ReceiveMode::ALL.into_iter().enumerate().map(series).collect(),
    };
    let y = Axis { name: "times its computing", scale: Scale::Linear };
    plot::draw(&[Plot { title: "Time of a step (lower is better)", y, content }]).unwrap()
}

/// The bytes of a crossing tensor.
const BYTES: u64 = 256;

type Kernels = HashMap<NodeId, Box<dyn Kernel<ModelValue>>>;

/// The executors of both parts.
struct Bench {
    executors: Vec<Executor<ModelValue>>,
    next: u64,
}

impl Bench {
    /// Makes a graph in which `outstanding` tensors go from part 0 to part 1. Each node of part 1 computes,
    /// or waits without a core, for as long as `each`.
    fn new(outstanding: usize, each: Duration, waits: bool) -> Self {
        let mut graph = Topology::new();
        let mut kernels = [Kernels::new(), Kernels::new()];
        let mut parts = Vec::new();
        let mut add = |name: String, part: usize, inputs: Vec<Outlet>, work: Duration| {
            let outputs = vec![Fact::known(Dtype::U8, &[BYTES])];
            let kind = "Bench".to_owned();
            let node = Node { name, kind, role: Role::Compute, inputs, outputs, work: 1, stays: false };
            let node = graph.add(node).expect("a node");
            parts.push(Part(part));
            kernels[part].insert(node, Box::new(move |_: u64, _: Vec<ModelValue>| compute(work, waits)));
            Outlet { node, output: 0 }
        };
        let sent: Vec<Outlet> =
            (0..outstanding).map(|at| add(format!("sent {at}"), 0, vec![], Duration::ZERO)).collect();
        for (at, outlet) in sent.into_iter().enumerate() {
            add(format!("consumer {at}"), 1, vec![outlet], each);
        }
        for at in 0..outstanding {
            add(format!("other {at}"), 1, vec![], each);
        }
        let partition = Partition::new(&graph, 2, parts).expect("a partition");
        let placements = Arc::new(Placements::new(&graph, &partition).expect("crossing tensors"));
        // All tensors are sent at once. The network delivers one after the other, in an order of its own.
        let delay = move |crossing: CrossingId, step: u64| {
            let mut order: Vec<usize> = (0..outstanding).collect();
            fastrand::Rng::with_seed(step).shuffle(&mut order);
            each * (1 + order[crossing.0] as u32)
        };
        let transfers = Transfers::delayed(&placements, 1, delay).expect("transfers");
        let graph = Arc::new(graph);
        let executors = kernels.into_iter().zip(transfers).enumerate().map(|(part, (kernels, transfers))| {
            let (graph, placements) = (Arc::clone(&graph), Arc::clone(&placements));
            Executor::new(graph, placements, Part(part), kernels, transfers).expect("an executor")
        });
        Self { executors: executors.collect(), next: 0 }
    }

    fn next_step(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }
}

fn compute(work: Duration, waits: bool) -> Result<Vec<ModelValue>, KernelError> {
    let begin = Instant::now();
    if waits && !work.is_zero() {
        thread::sleep(work);
    }
    while begin.elapsed() < work {
        std::hint::spin_loop();
    }
    let spec = Fact::known(Dtype::U8, &[BYTES]).spec().ok_or("a known shape")?;
    let seven = &mut |bytes: &mut [u8]| {
        bytes.fill(7);
        Ok(())
    };
    Ok(vec![ModelValue::filled(&spec, seven)?])
}
