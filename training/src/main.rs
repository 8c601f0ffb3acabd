//! An example that trains a network on several processes, which average their gradients with tonic-rdma-collective. It also measures
//! how the training scales, and how much of the communication is hidden behind the computation.
#![forbid(unsafe_code)]

mod arguments;
mod array;
mod check;
mod data;
mod distributed;
mod failure;
mod group;
mod job;
mod model;
mod overlap;
mod plot;
mod processes;
mod scaling;
mod show;
mod step;
mod train;
mod variables;

use std::alloc::System;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use clap::{CommandFactory as _, Parser as _};
use tonic_rdma_commands::{explain, log, output};
use tonic_rdma_verbs::memory::trace::TracingAllocator;

use arguments::{Arguments, Mode, default_ranks};
use failure::Failure;
use group::Group;
use job::{Job, Outcome};
use processes::THREADS;

/// Places the tensors that cross in registered memory, from the second step of a graph on.
#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);

fn main() -> ExitCode {
    let parsed = Arguments::try_parse();
    let outcome = match &parsed {
        Ok(arguments) => log(None, "warn").map_err(Failure::from).and_then(|()| run(arguments)),
        Err(error) => explain(error, &Arguments::command()).map_err(Failure::from),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    if let (Some(job), Some(result), Some(parent)) = (&arguments.job, &arguments.result, arguments.parent) {
        processes::end_with(parent)?;
        let job =
            serde_json::from_str(job).map_err(|error| Failure::usage("--job is no job").because(error))?;
        return match carry_out(&job)? {
            Some(outcome) => show::write_json(result, &outcome),
            None => Ok(()),
        };
    }
    if let (Some(part), Some(parent)) = (&arguments.graph.part, arguments.parent) {
        processes::end_with(parent)?;
        let job =
            serde_json::from_str(part).map_err(|error| Failure::usage("--part is no job").because(error))?;
        return distributed::serve(job);
    }
    let mode = arguments.mode()?;
    output::check_files(&[("--json", arguments.json.as_deref()), ("--plot", arguments.plot.as_deref())])?;
    let launched = group::is_launched()?;
    match mode {
        Mode::Job { ranks: None, job } if launched => match carry_out(&job)? {
            Some(outcome) => report(arguments, &outcome),
            None => Ok(()),
        },
        _ if launched => Err(Failure::usage(
            "a launcher started this process as one of several ranks; --ranks, --check, --scaling and --sync start processes of their own, \
             so leave them out or leave out the launcher",
        )),
        Mode::Job { ranks, job } => {
            report(arguments, &processes::run(ranks.unwrap_or_else(default_ranks), &job)?)
        }
        Mode::Check { ranks, job } => {
            let check = check::check(ranks, &job)?;
            files(arguments, &check, || Some(show::losses(&[&check.one, &check.several])))?;
            show::print(&show::check(&check), arguments.json.as_deref())
        }
        Mode::Graph(plan) => {
            let comparison = distributed::run(&plan)?;
            files(arguments, &comparison, || Some(distributed::figure(&comparison)))?;
            show::print(&distributed::text(&comparison), arguments.json.as_deref())
        }
        Mode::Scaling { ranks, turns, job } => {
            let scaling = scaling::measure(&ranks, turns, &job)?;
            files(arguments, &scaling, || Some(show::figure(&scaling)))?;
            show::print(&show::scaling(&scaling), arguments.json.as_deref())
        }
    }
}

/// Carries out a job as one rank. Returns the result at rank 0.
fn carry_out(job: &Job) -> Result<Option<Outcome>, Failure> {
    one_thread()?;
    let group = Group::connect()?;
    let outcome = match job {
        Job::Train(job) => Outcome::Train(train::train(job, &group)?),
        Job::Overlap(job) => Outcome::Overlap(overlap::measure(job, &group)?),
    };
    // No rank leaves while another still needs it.
    group.barrier()?;
    Ok((group.rank() == 0).then_some(outcome))
}

/// Makes sure that candle computes with one thread. It reads the number from the environment, which a process can only change for a
/// program that it starts. So the program starts again in place of itself.
fn one_thread() -> Result<(), Failure> {
    if std::env::var_os(THREADS).is_some_and(|threads| threads == "1") {
        return Ok(());
    }
    let failed =
        |error: std::io::Error| Failure::run(format!("can't start again with {THREADS}=1")).because(error);
    let program = std::env::current_exe().map_err(failed)?;
    let arguments = std::env::args_os().skip(1);
    Err(failed(Command::new(program).args(arguments).env(THREADS, "1").exec()))
}

fn report(arguments: &Arguments, outcome: &Outcome) -> Result<(), Failure> {
    files(arguments, outcome, || match outcome {
        Outcome::Train(training) => Some(show::losses(&[training])),
        Outcome::Overlap(_) => None,
    })?;
    show::print(&show::outcome(outcome), arguments.json.as_deref())
}

/// Writes the files that the command line asks for.
fn files<'a>(
    arguments: &Arguments,
    result: &impl serde::Serialize,
    plot: impl FnOnce() -> Option<plot::Plot<'a>>,
) -> Result<(), Failure> {
    if let Some(path) = &arguments.json {
        show::write_json(path, result)?;
    }
    if let (Some(path), Some(plot)) = (&arguments.plot, plot()) {
        show::write_plot(path, &plot)?;
    }
    Ok(())
}
