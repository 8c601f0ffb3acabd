//! The coordinator: it starts or reaches the parts, has them run trials in each mode, and compares everything
//! with the unsplit model.

mod parts;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use self::parts::{Parts, only};
use crate::control::{
    Checked, Described, Differs, Expected, Job, Order, Report, SentCounts, Trial, digest,
    lengths as lengths_of, loader, within,
};
use crate::options::RunOptions;
use crate::output::{ModeRow, Results};
use tonic_rdma_commands::process::Child;
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::{Context as _, Failure, output};
use tonic_rdma_graph::dataflow::{Outlet, Role};
use tonic_rdma_graph::explain::{Explanation, SenderReport};
use tonic_rdma_graph::onnx::{self, Model, ModelValue};
use tonic_rdma_graph::placement::{Partition, Placements};
use tonic_rdma_graph::schedule::ReceiveMode;
use tonic_rdma_graph::transfer::TransferMode;
use tonic_rdma_graph::{GraphError, GraphErrorKind};

/// The number of parts if the command line has none.
const DEFAULT_PARTS: usize = 2;
/// The size of the chunks in which a model goes to the parts.
const CHUNK: usize = 1 << 20;

/// Runs a model in parts, shows what was found, and fails if a check did not hold.
pub(crate) fn run(options: &RunOptions) -> Result<(), Failure> {
    let parts = number_of_parts(options)?;
    output::check_files(&[("--json", options.json.as_deref()), ("--plot", options.plot.as_deref())])?;
    if options.nodes {
        return nodes(options);
    }
    if options.threads > 1 && options.receive == ReceiveMode::Blocking {
        let threads = options.threads;
        return Err(Failure::usage(format!(
            "--threads {threads} and --receive blocking contradict one another: blocking runs nodes in order, in 1 thread"
        )));
    }
    let plan = Arc::new(Plan::new(options, parts)?);
    let parts = plan.placements.partition().count();
    let (children, addresses) = match &options.hosts {
        // A model that can't be split needs the first host alone.
        Some(hosts) => (Vec::new(), hosts.0[..parts].to_vec()),
        None => parts::start(parts)?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.context("can't start threads")?;
    let outcome = runtime.block_on(coordinate(options, &plan, children, &addresses));
    // A run of the unsplit model may still be under way if a part has failed. It is not needed then.
    runtime.shutdown_background();
    let (results, differences) = outcome?;
    results.show(options.explain, options.json.as_deref(), options.plot.as_deref())?;
    verdict(&results, &differences)
}

/// Shows the nodes of the model, as `--cut` and `--assign` name them.
fn nodes(options: &RunOptions) -> Result<(), Failure> {
    let (_, model) = load(options)?;
    let mut text = String::new();
    for (_, node) in model.topology().nodes().filter(|(_, node)| node.role != Role::Constant) {
        let outputs: Vec<String> = node.outputs.iter().map(ToString::to_string).collect();
        text.push_str(&format!("{}  {}  {}\n", node.name, node.kind, outputs.join(", ")));
    }
    output::print(&text, None)
}

fn number_of_parts(options: &RunOptions) -> Result<usize, Failure> {
    let cuts = options.cut.as_ref().map(|cuts| cuts.0.len());
    let parts = options.parts.map(|parts| parts as usize);
    if let (Some(parts), Some(cuts)) = (parts, cuts)
        && parts != cuts + 1
    {
        return Err(Failure::usage(format!(
            "--parts {parts} and the {cuts} nodes of --cut contradict one another: {cuts} cuts make {} parts",
            cuts + 1
        )));
    }
    let asked = cuts.map(|cuts| cuts + 1).or(parts);
    match (asked, &options.hosts) {
        (Some(parts), Some(hosts)) if hosts.0.len() != parts => Err(Failure::usage(format!(
            "--hosts names {} hosts for {parts} parts: name one for each part",
            hosts.0.len()
        ))),
        (None, Some(hosts)) => Ok(hosts.0.len()),
        (parts, _) => Ok(parts.unwrap_or(DEFAULT_PARTS)),
    }
}

async fn coordinate(
    options: &RunOptions,
    plan: &Arc<Plan>,
    children: Vec<Child>,
    addresses: &[String],
) -> Result<(Results, Vec<String>), Failure> {
    let mut parts = Parts::open(children, addresses, options.timeout).await?;
    for part in 0..parts.len() {
        for start in (0..plan.file.len()).step_by(CHUNK) {
            let chunk = plan.file.slice(start..plan.file.len().min(start + CHUNK));
            parts.send(part, &Order::Model, chunk).await?;
        }
        parts.send(part, &Order::Load(plan.job(options, part)), Bytes::new()).await?;
    }
    // The parts load the model while this process runs it.
    let reference = {
        let (plan, seed, lengths) = (Arc::clone(plan), options.seed, options.lengths.0.clone());
        tokio::task::spawn_blocking(move || Reference::compute(&plan, seed, &lengths))
    };
    let ports = parts.collect_reports("loaded the model", only!(Report::Loaded { port } => port)).await?;
    let peers = addresses.iter().zip(ports).map(|(address, port)| with_port(address, port)).collect();
    parts.send_all(&Order::Connect { peers }).await?;
    let connected = only!(Report::Connected { static_addresses } => static_addresses);
    let addresses = parts.collect_reports("connected", connected).await?.iter().sum();
    let reference = reference.await.context("the unsplit model")??;
    for part in 0..parts.len() {
        parts.send(part, &Order::Expect(reference.expected(plan, part)?), Bytes::new()).await?;
    }
    parts.collect_reports("took what it has to check", only!(Report::Ready => ())).await?;
    let mut rounds = Rounds::new(options, plan, &reference);
    rounds.run(&mut parts).await?;
    parts.send_all(&Order::Describe).await?;
    let described =
        parts.collect_reports("described its tensors", only!(Report::Tensors(tensors) => tensors)).await?;
    let differences = std::mem::take(&mut rounds.differences);
    let modes = rounds.rows(&described);
    Ok((results(options, plan, &reference, addresses, &described, modes), differences))
}

/// Gathers the results of a run. `static_addresses` is the number of addresses of static slots that were
/// distributed.
fn results(
    options: &RunOptions,
    plan: &Plan,
    reference: &Reference,
    static_addresses: usize,
    described: &[Described],
    modes: Vec<ModeRow>,
) -> Results {
    let (crossings, partition) = (plan.placements.crossings(), plan.placements.partition());
    let reports: Vec<SenderReport> = described.iter().flat_map(|part| part.tensors.iter().copied()).collect();
    let mut explanation = Explanation::new(plan.model.topology(), &plan.placements, &reports);
    for (tensor, crossing) in explanation.tensors.iter_mut().zip(crossings) {
        tensor.bytes = Some(reference.bytes(crossing.outlet));
    }
    let nodes_of = |part| partition.parts().iter().filter(|owner| owner.0 == part).count();
    Results {
        model: plan.name.clone(),
        parts: partition.count(),
        parts_asked: plan.parts_asked,
        micro_batches: options.micro_batches,
        receive: options.receive,
        nodes: (0..partition.count()).map(nodes_of).collect(),
        bytes: crossings.iter().map(|crossing| reference.bytes(crossing.outlet)).sum(),
        static_addresses,
        memory: described.iter().map(|part| part.memory).collect(),
        explanation,
        modes,
    }
}

/// Returns the address with another port.
fn with_port(address: &str, port: u16) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    format!("{host}:{port}")
}

/// Fails if a check did not hold.
fn verdict(results: &Results, differences: &[String]) -> Result<(), Failure> {
    let errors: u64 = results.modes.iter().map(|mode| mode.errors).sum();
    let first = differences.first().map(|first| format!("; {first}"));
    if errors == 0 && first.is_none() {
        return Ok(());
    }
    Err(Failure::run(format!("{errors} tensors differ from the unsplit model{}", first.unwrap_or_default())))
}

/// The number of sets of inputs of a model without symbolic dimensions.
const INPUTS: u64 = 3;

/// What is known before any process starts: the model, its split, and what crosses.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) name: String,
    pub(crate) file: Bytes,
    pub(crate) model: Model,
    pub(crate) placements: Placements,
    pub(crate) parts_asked: usize,
    pub(crate) modes: Vec<TransferMode>,
    /// The number of sets of inputs. Micro-batches take them in turn.
    pub(crate) sets: u64,
}

impl Plan {
    /// Loads the model, and splits it.
    pub(crate) fn new(options: &RunOptions, parts: usize) -> Result<Self, Failure> {
        let (file, model) = load(options)?;
        let path = options.model.as_deref().unwrap_or(Path::new(""));
        let name = path.file_name().map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy());
        let partition = split(options, parts, &model)?;
        let placements =
            Placements::new(model.topology(), &partition).map_err(|error| Failure::refused(&error))?;
        let modes: Vec<TransferMode> =
            options.mode.as_ref().map_or_else(|| TransferMode::ALL.to_vec(), |modes| modes.0.clone());
        let placements = within(placements, options.memory, options.micro_batches as usize, &modes)
            .map_err(|error| Failure::usage(format!("--{error}")))?;
        let sets = if model.symbols().is_empty() { INPUTS } else { options.lengths.0.len() as u64 };
        let (name, file) = (name.into_owned(), file.into());
        Ok(Self { name, file, model, placements, parts_asked: parts, modes, sets })
    }

    /// Returns what a part has to know.
    pub(crate) fn job(&self, options: &RunOptions, part: usize) -> Job {
        let partition = self.placements.partition();
        Job {
            part,
            parts: partition.count(),
            model: self.name.clone(),
            symbols: options.symbols.clone(),
            lengths: options.lengths.0.clone(),
            sets: self.sets,
            seed: options.seed,
            assignment: partition.parts().iter().map(|part| part.0).collect(),
            modes: self.modes.clone(),
            receive: options.receive,
            window: options.micro_batches as usize,
            memory: options.memory,
            threads: options.threads as usize,
            limit_ms: options.timeout.as_millis().try_into().unwrap_or(u64::MAX),
        }
    }
}

/// Reads the file of the model, and loads the model.
pub(crate) fn load(options: &RunOptions) -> Result<(Vec<u8>, Model), Failure> {
    let path = options.model.as_deref().unwrap_or(Path::new(""));
    let loader = loader(&options.symbols, options.seed)?;
    let file = std::fs::read(path).map_err(|error| {
        let path = path.display();
        Failure::usage(format!("can't read the model {path}: {error}; graph/prepare-models installs models"))
    })?;
    // The parts may run on other hosts, so their model needs no other file.
    let file = onnx::self_contained(path, file).map_err(|error| Failure::refused(&error))?;
    let model = loader.read(path, &file).map_err(|error| Failure::refused(&error))?;
    Ok((file, model))
}

fn split(options: &RunOptions, parts: usize, model: &Model) -> Result<Partition, Failure> {
    let graph = model.topology();
    let refused = |option: &str, error: GraphError| {
        let names = error.kind() == GraphErrorKind::UnknownNode;
        let hint = if names { "; --nodes prints the names" } else { "" };
        Failure::usage(format!("{option}: {}{hint}", Failure::refused(&error)))
    };
    let partition = match (&options.cut, &options.assign) {
        (Some(cuts), _) => {
            let names: Vec<&str> = cuts.0.iter().map(String::as_str).collect();
            Partition::at_cuts(graph, &names).map_err(|error| refused("--cut", error))?
        }
        (None, Some(path)) => {
            let list = std::fs::read_to_string(path).map_err(|error| {
                Failure::usage(format!("--assign: can't read {}: {error}", path.display()))
            })?;
            Partition::named(graph, parts, &list).map_err(|error| refused("--assign", error))?
        }
        // A graph of one node, or of none because the engine has computed all of them before, is one part.
        (None, None) => match Partition::balanced(graph, parts) {
            Err(_) if Partition::balanced(graph, 2).is_err() => Partition::balanced(graph, 1),
            balanced => balanced,
        }
        .map_err(|error| refused("--parts", error))?,
    };
    partition.check_pipeline(graph).map_err(|error| refused("--assign", error))?;
    Ok(partition)
}

/// The least number of rounds that are measured, if there are as many steps.
const ROUNDS: u64 = 3;
/// The time that a trial of steps should take at most, in nanoseconds. The parts report after each trial, so
/// a trial must end in time.
const TRIAL: u64 = 5_000_000_000;
/// The time that a trial of replays should take, in nanoseconds, so that the difference between the starts of
/// two parts does not count.
const REPLAY: u64 = 250_000_000;
/// The least and the largest number of steps of a trial of replays.
const REPLAYS: (u64, u64) = (4, 20_000);

/// The trials, and what they showed. All modes take turns, so that what else the machine does concerns all of
/// them.
#[derive(Debug)]
pub(crate) struct Rounds<'a> {
    options: &'a RunOptions,
    plan: &'a Plan,
    reference: &'a Reference,
    /// The micro-batches of a trial that is checked: a step at least, and each set of inputs at least once.
    batches_of_check: u64,
    /// The number of the next micro-batch.
    next: u64,
    modes: Vec<Measured>,
    /// The first tensor that differs in each trial with errors.
    pub(crate) differences: Vec<String>,
}

/// What was measured of a mode.
#[derive(Clone, Debug)]
struct Measured {
    mode: TransferMode,
    /// Time of the first step, in nanoseconds.
    first: u64,
    /// The steps of a trial of replays.
    replays: u64,
    /// Time of a step in each round, in nanoseconds.
    steps: Vec<f64>,
    transfers: Vec<f64>,
    checked: u64,
    errors: u64,
}

impl<'a> Rounds<'a> {
    /// Makes the rounds of a run.
    pub(crate) fn new(options: &'a RunOptions, plan: &'a Plan, reference: &'a Reference) -> Self {
        let measured = |&mode| Measured {
            mode,
            first: 0,
            replays: 0,
            steps: Vec::new(),
            transfers: Vec::new(),
            checked: 0,
            errors: 0,
        };
        let modes = plan.modes.iter().map(measured).collect();
        Self {
            options,
            plan,
            reference,
            batches_of_check: options.micro_batches.max(plan.sets),
            next: 0,
            modes,
            differences: Vec::new(),
        }
    }

    /// Has the parts carry out all trials.
    pub(crate) async fn run(&mut self, parts: &mut Parts) -> Result<(), Failure> {
        // A mode whose senders copy nothing is first, so that its first micro-batch is the one in which
        // allocation sites are traced.
        let mut order: Vec<usize> = (0..self.modes.len()).collect();
        order.sort_by_key(|mode| match self.plan.modes[*mode] {
            TransferMode::RdmaZerocp => 0,
            TransferMode::RdmaInPlace => 1,
            _ => 2,
        });
        for mode in order {
            self.warm_up(parts, mode).await?;
        }
        let rounds = self.rounds();
        for round in 0..rounds {
            // The steps are spread over the rounds.
            let steps = self.options.steps * (round + 1) / rounds - self.options.steps * round / rounds;
            for mode in 0..self.modes.len() {
                if steps > 0 {
                    // What is measured is not checked at the same time, because the check takes time of the
                    // step.
                    self.trial(parts, mode, self.batches_of_check, false, true).await?;
                    let nanos =
                        self.trial(parts, mode, steps * self.options.micro_batches, false, false).await?;
                    self.modes[mode].steps.push(nanos as f64 / steps as f64);
                }
                let replay = self.replay(parts, mode, self.modes[mode].replays).await?;
                self.modes[mode].transfers.push(replay);
            }
        }
        Ok(())
    }

    /// Returns the number of rounds over which the steps are spread.
    fn rounds(&self) -> u64 {
        let slowest = self.modes.iter().map(|mode| mode.first).max().unwrap_or(0).max(1);
        self.options
            .steps
            .div_ceil((TRIAL / slowest).max(1))
            .max(self.options.rounds.unwrap_or(ROUNDS.min(self.options.steps)))
    }

    /// Runs the first micro-batches of a mode, which are compared, and replays, which are not.
    async fn warm_up(&mut self, parts: &mut Parts, mode: usize) -> Result<(), Failure> {
        self.trial(parts, mode, 1, false, true).await?;
        self.modes[mode].first = self.trial(parts, mode, self.options.micro_batches, false, true).await?;
        // The first replay is slower than later ones.
        let mut steps = REPLAYS.0;
        for _ in 0..2 {
            let nanos = self.replay(parts, mode, steps).await?;
            // From a few steps follows a number that is far off, so it grows by and by.
            steps = ((REPLAY as f64 / nanos.max(1.0)) as u64).clamp(REPLAYS.0, 8 * steps);
        }
        let nanos = self.replay(parts, mode, steps).await?;
        self.modes[mode].replays = ((REPLAY as f64 / nanos.max(1.0)) as u64).clamp(REPLAYS.0, REPLAYS.1);
        Ok(())
    }

    /// Sends the tensors of the last micro-batch again, for this number of steps. Returns the time of a step,
    /// in nanoseconds.
    async fn replay(&mut self, parts: &mut Parts, mode: usize, steps: u64) -> Result<f64, Failure> {
        let nanos = self.trial(parts, mode, steps * self.options.micro_batches, true, false).await?;
        Ok(nanos as f64 / steps as f64)
    }

    /// Has all parts run micro-batches, and returns the time of the slowest part.
    async fn trial(
        &mut self,
        parts: &mut Parts,
        mode: usize,
        count: u64,
        replay: bool,
        check: bool,
    ) -> Result<u64, Failure> {
        let trial = Trial { mode: self.modes[mode].mode, first: self.next, count, replay, check };
        self.next += count;
        parts.send_all(&Order::Run(trial)).await?;
        let done = parts.collect_reports("run its micro-batches", only!(Report::Done(done) => done)).await?;
        let measured = &mut self.modes[mode];
        measured.checked += done.iter().map(|done| done.checked).sum::<u64>();
        measured.errors += done.iter().map(|done| done.errors).sum::<u64>();
        for (differs, content) in parts.differing.drain(..) {
            self.differences.push(self.reference.describe(self.plan, &differs, &content));
        }
        Ok(done.iter().map(|done| done.nanos).max().unwrap_or(0))
    }

    /// Returns the rows of the table.
    pub(crate) fn rows(self, described: &[Described]) -> Vec<ModeRow> {
        let micros = |nanos: Vec<f64>| nanos.into_iter().map(|nanos| nanos / 1000.0).collect::<Vec<f64>>();
        let row = |Measured { mode, steps, transfers, checked, errors, .. }| {
            let counts = described.iter().flat_map(|part| &part.modes).filter(|counts| counts.mode == mode);
            let [sent, sender_copies, received, receiver_copies] = counts.fold([0; 4], |sum, counts| {
                let SentCounts { sent, copied, received, received_copied, .. } = *counts;
                let [a, b, c, d] = sum;
                [a + sent, b + copied, c + received, d + received_copied]
            });
            let (steps, transfers) = (micros(steps), micros(transfers));
            ModeRow {
                mode,
                step_us: median(steps.iter().copied()),
                transfer_us: median(transfers.iter().copied()),
                step_us_of_rounds: steps,
                transfer_us_of_rounds: transfers,
                sent,
                sender_copies,
                sender_copies_per_tensor: if sent == 0 { 0.0 } else { sender_copies as f64 / sent as f64 },
                received,
                receiver_copies,
                checked,
                errors,
            }
        };
        self.modes.into_iter().map(row).collect()
    }
}

#[cfg(test)]
mod reference_tests;

/// The values of the unsplit model, for each set of inputs.
#[derive(Debug)]
pub(crate) struct Reference {
    sets: Vec<HashMap<Outlet, ModelValue>>,
}

impl Reference {
    /// Runs the unsplit model with each set of inputs.
    pub(crate) fn compute(plan: &Plan, seed: u64, lengths: &[u64]) -> Result<Self, Failure> {
        let failed = |error| Failure::run("the unsplit model").because(error);
        let graph = plan.model.topology();
        let crossings = plan.placements.crossings().iter().map(|crossing| crossing.outlet);
        let wanted: Vec<Outlet> = crossings.chain(graph.results().iter().copied()).collect();
        let symbols = plan.model.symbols();
        let sets = (0..plan.sets).map(|set| {
            let inputs = plan.model.inputs(set, seed, &lengths_of(&symbols, lengths, set)).map_err(failed)?;
            plan.model.run_unsplit(&inputs, wanted.iter().copied()).map_err(failed)
        });
        Ok(Self { sets: sets.collect::<Result<_, _>>()? })
    }

    /// Returns what a part has to check.
    pub(crate) fn expected(&self, plan: &Plan, part: usize) -> Result<Expected, Failure> {
        let digests = |outlet: Outlet| {
            let values = self.sets.iter().filter_map(|set| set.get(&outlet));
            let digests = values.map(digest).collect::<Result<Vec<u64>, _>>();
            digests.map_err(|error| Failure::run(error.to_string()))
        };
        let partition = plan.placements.partition();
        let mut expected = Expected::default();
        for crossing in plan.placements.crossings().iter().filter(|crossing| crossing.to.0 == part) {
            expected.crossings.push((crossing.id.0, digests(crossing.outlet)?));
        }
        for (position, outlet) in plan.model.topology().results().iter().enumerate() {
            if partition.part_of(outlet.node).is_some_and(|owner| owner.0 == part) {
                expected.results.push((position, digests(*outlet)?));
            }
        }
        Ok(expected)
    }

    /// Returns the bytes of an output of the largest set of inputs.
    pub(crate) fn bytes(&self, outlet: Outlet) -> u64 {
        let values = self.sets.iter().filter_map(|set| set.get(&outlet));
        values.map(|value| value.bytes().len() as u64).max().unwrap_or(0)
    }

    /// Describes a tensor that differs: its name, and its first element that differs.
    pub(crate) fn describe(&self, plan: &Plan, differs: &Differs, content: &[u8]) -> String {
        let graph = plan.model.topology();
        let (name, outlet) = match differs.what {
            Checked::Crossing(number) => match plan.placements.crossings().get(number) {
                Some(crossing) => (format!("crossing tensor {}", crossing.name), crossing.outlet),
                None => return format!("crossing tensor {number} is not in the model"),
            },
            Checked::Result(position) => match graph.results().get(position) {
                Some(outlet) => (format!("result {}", graph.outlet_name(*outlet)), *outlet),
                None => return format!("result {position} is not in the model"),
            },
        };
        let begin = format!(
            "{}, micro-batch {}: {name} differs from the unsplit model",
            differs.mode, differs.micro_batch
        );
        let Some(right) = self.sets.get(differs.set as usize).and_then(|set| set.get(&outlet)) else {
            return begin;
        };
        match right.spec() {
            Ok(spec) if spec.to_string() == differs.spec => {
                let size = spec.dtype().size().unwrap_or(1).max(1);
                let mut pairs = right.bytes().chunks(size).zip(content.chunks(size)).enumerate();
                match pairs.find(|(_, (right, found))| right != found) {
                    Some((element, (right, found))) => format!(
                        "{begin}, first at element {element} of {spec}: it is {}, and should be {}",
                        number(&differs.spec, found),
                        number(&differs.spec, right)
                    ),
                    None => begin,
                }
            }
            Ok(spec) => format!("{begin}: it is {}, and should be {spec}", differs.spec),
            Err(_) => begin,
        }
    }
}

/// Writes an element of a tensor of this type, with its bytes.
fn number(spec: &str, bytes: &[u8]) -> String {
    let hex: String = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect();
    match <[u8; 4]>::try_from(bytes) {
        Ok(four) if spec.starts_with("float32") => format!("{} (0x{hex})", f32::from_ne_bytes(four)),
        _ => format!("0x{hex}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_gets_another_port() {
        assert_eq!(with_port("host:1", 2), "host:2");
        assert_eq!(with_port("[::1]:50", 70), "[::1]:70");
    }
}
