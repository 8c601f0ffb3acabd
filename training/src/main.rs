//! An example that trains a network on several processes: with parameter servers through a graph, or with
//! tonic-rdma-collective.
#![forbid(unsafe_code)]

mod array;
mod checkpoint;
mod data;
mod distributed;
mod layer;
mod network;
mod options;
mod processes;
mod step;
mod train;
mod variables;

use std::alloc::System;
use std::collections::BTreeMap;
use std::process::ExitCode;

use serde::Serialize;
use tonic_rdma_commands::ends::{self, Ends, limit_memory};
use tonic_rdma_commands::output::{self, Optimised};
use tonic_rdma_commands::plot::{self, Plot};
use tonic_rdma_commands::{Context as _, Failure, process};
use tonic_rdma_verbs::memory::trace::TracingAllocator;

use array::failure;
use options::{Job, OnDeath, Options};
use processes::{PROGRAM, THREADS};
use train::{Group, Training};

/// Places the tensors that cross in registered memory, from the second step of a graph on.
#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);

fn main() -> ExitCode {
    tonic_rdma_commands::main(run)
}

fn run(options: &Options) -> Result<(), Failure> {
    if let (Some(job), Some(parent)) = (&options.job, options.parent) {
        process::end_with(parent)?;
        let job: Job = serde_json::from_str(job).context("--job has no job")?;
        return serve(job);
    }
    if let Some(address) = &options.listen {
        return ends::listen(PROGRAM, address, options.limit, |request| processes::admit(request, options));
    }
    options.check()?;
    output::check_files(&[("--json", options.json.as_deref()), ("--plot", options.plot.as_deref())])?;
    if train::is_launched()? {
        if options.asked_ranks().is_some() || !options.hosts.is_empty() || options.on_death != OnDeath::Fail {
            return Err(Failure::usage(
                "a launcher started this process as one of several ranks; --ranks, --sync, --hosts and --on-death are for processes \
                 that this program starts, so leave them out or leave out the launcher",
            ));
        }
        return carry_out(options)?.map_or(Ok(()), |training| report_training(options, &[], &training));
    }
    let (hosts, ends) = processes::call_hosts(options)?;
    if let Some(shape) = options.shape() {
        let comparison = distributed::run(options, shape, &hosts)?;
        let plot = || distributed::figure(&comparison);
        report(options, &ends, &comparison, &distributed::text(&comparison), plot)
    } else {
        report_training(options, &ends, &processes::run_ranks(options, &hosts)?)
    }
}

/// Carries out a job, for the process that started this one.
fn serve(job: Job) -> Result<(), Failure> {
    let limited = job.memory.map_or(Ok(()), limit_memory);
    if job.options.shape().is_some() {
        return limited.and_then(|()| distributed::serve(job));
    }
    let outcome = limited.and_then(|()| carry_out(&job.options));
    if let Err(failure) = &outcome
        && job.memory.is_some()
    {
        // stderr is that of the listening end.
        process::report(&Err::<Training, _>(failure.with_causes()))?;
    }
    outcome?.map_or(Ok(()), |training| process::report(&Ok::<_, String>(training)))
}

/// Carries out a job as one rank. Returns the result at rank 0.
fn carry_out(job: &Options) -> Result<Option<Training>, Failure> {
    // candle computes with as many threads as this variable says, which a process can only change for a
    // program that it starts. So the program starts again in place of itself.
    if std::env::var_os(THREADS).is_none_or(|threads| threads != "1") {
        return Err(process::exec_with(THREADS, "1"));
    }
    let group = Group::connect()?;
    let training = train::train(job, &group).map_err(failure)?;
    // No rank leaves while another still needs it.
    group.done("the barrier", group.communicator.barrier().wait())?;
    Ok((group.rank() == 0).then_some(training))
}

fn report_training(options: &Options, ends: &[Ends], training: &Training) -> Result<(), Failure> {
    // Scripts expect the training under its name.
    let result = BTreeMap::from([("train", training)]);
    report(options, ends, &result, &training.text(), || train::losses(training))
}

/// A result, with the hosts that it is from: this one and each of the others.
#[derive(Serialize)]
struct Between<'a, R> {
    #[serde(skip_serializing_if = "<[Ends]>::is_empty")]
    ends: &'a [Ends],
    optimised: Optimised,
    #[serde(flatten)]
    result: &'a R,
}

/// Writes the files that the command line asks for, and prints the hosts and the text.
fn report(
    options: &Options,
    ends: &[Ends],
    result: &impl Serialize,
    text: &str,
    plot: impl FnOnce() -> Plot<'static>,
) -> Result<(), Failure> {
    if let Some(path) = &options.plot {
        let svg = plot::draw(&[plot()]).context("can't make the plot")?;
        output::write_file(path, &svg)?;
    }
    if let Some(path) = &options.json {
        output::write_json(path, &Between { ends, optimised: Optimised::default(), result })?;
    }
    // Each begins with this host, which is shown once.
    let lines = ends.iter().enumerate().flat_map(|(at, ends)| ends.lines().into_iter().skip(at.min(1)));
    let hosts = lines.map(|(name, text)| format!("{name}: {text}\n"));
    output::print(&(hosts.collect::<String>() + text), options.json.as_deref())
}
