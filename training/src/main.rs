//! An example that trains a network on several processes, through a graph or with tonic-rdma-collective.
#![forbid(unsafe_code)]

mod array;
mod data;
mod distributed;
mod failure;
mod group;
mod layer;
mod network;
mod options;
mod processes;
mod results;
mod step;
mod texts;
mod train;
mod variables;

use std::alloc::System;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use clap::{CommandFactory as _, Parser as _};
use serde::Serialize;
use serde_json::json;
use tonic_rdma_commands::plot::{self, Plot};
use tonic_rdma_commands::{explain, log, output, process, status};
use tonic_rdma_verbs::memory::trace::TracingAllocator;

use failure::{Context as _, Error, Failure};
use group::Group;
use options::Options;
use processes::{THREADS, default_ranks};
use results::Training;

/// Places the tensors that cross in registered memory, from the second step of a graph on.
#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);

fn main() -> ExitCode {
    let outcome = match Options::try_parse() {
        Ok(options) => log(None, "warn").map_err(Error::from).and_then(|()| run(&options)),
        Err(error) => explain(&error, &Options::command()).map_err(Error::from),
    };
    status("tonic-rdma-training", outcome.map_err(failure::of))
}

fn run(options: &Options) -> Result<(), Error> {
    if let (Some(job), Some(parent)) = (&options.job, options.parent) {
        process::end_with(parent)?;
        let job: Options = serde_json::from_str(job).context("--job has no options")?;
        if job.shape().is_some() {
            return Ok(distributed::serve(job)?);
        }
        return carry_out(&job)?.map_or(Ok(()), |training| Ok(process::report(&training)?));
    }
    options.check()?;
    output::check_files(&[("--json", options.json.as_deref()), ("--plot", options.plot.as_deref())])?;
    let ranks = options.asked_ranks();
    if group::is_launched()? {
        if ranks.is_some() {
            return Err(Failure::usage(
                "a launcher started this process as one of several ranks; --ranks and --sync start processes of their own, \
                 so leave them out or leave out the launcher",
            )
            .into());
        }
        return carry_out(options)?.map_or(Ok(()), |training| report_training(options, &training));
    }
    if let Some(shape) = options.shape() {
        let comparison = distributed::run(options, shape)?;
        let plot = || distributed::figure(&comparison);
        report(options, &comparison, &distributed::text(&comparison), plot)
    } else {
        report_training(options, &processes::run_ranks(ranks.unwrap_or_else(default_ranks), options)?)
    }
}

/// Carries out a job as one rank. Returns the result at rank 0.
fn carry_out(job: &Options) -> Result<Option<Training>, Error> {
    one_thread()?;
    let group = Group::connect()?;
    let training = train::train(job, &group)?;
    // No rank leaves while another still needs it.
    group.barrier()?;
    Ok((group.rank() == 0).then_some(training))
}

/// Makes sure that candle computes with one thread. It reads the number from the environment, which a process can only change for a
/// program that it starts. So the program starts again in place of itself.
fn one_thread() -> Result<(), Failure> {
    if std::env::var_os(THREADS).is_some_and(|threads| threads == "1") {
        return Ok(());
    }
    let arguments = std::env::args_os().skip(1);
    let again =
        std::env::current_exe().map(|program| Command::new(program).args(arguments).env(THREADS, "1").exec());
    let error = again.unwrap_or_else(|error| error);
    Err(Failure::run(format!("can't start again with {THREADS}=1")).because(error))
}

fn report_training(options: &Options, training: &Training) -> Result<(), Error> {
    // Scripts expect the training under its name.
    report(options, &json!({ "train": training }), &training.text(), || results::losses(training))
}

/// Writes the files that the command line asks for, and prints the text.
fn report(
    options: &Options,
    result: &impl Serialize,
    text: &str,
    plot: impl FnOnce() -> Plot<'static>,
) -> Result<(), Error> {
    if let Some(path) = &options.plot {
        let svg = plot::draw(&[plot()]).context("can't make the plot")?;
        output::write_file(path, &svg)?;
    }
    if let Some(path) = &options.json {
        output::write_json(path, result)?;
    }
    Ok(output::print(text, options.json.as_deref())?)
}
