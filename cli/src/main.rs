//! The `tonic-rdma` command. It compares transports, measures the traffic of a parameter server, carries the
//! byte streams of other programs over RDMA, lists RDMA devices, tunes them, and starts the programs beside it.
#![forbid(unsafe_code)]

mod about;
mod args;
mod bridge;
mod call;
mod compare;
mod devices;
mod diff;
mod measure;
#[cfg(test)]
mod pages_tests;
mod parameter_server;
mod probe;
mod programs;
mod tune;
mod workload;

use std::process::ExitCode;

use tonic_rdma_commands::Failure;

/// The allocator of the process, for all modes. Reports name it because it has more influence on large
/// messages than the transport has. It is mimalloc unless the environment asks for the system's allocator, as
/// `compare --allocator` does.
#[global_allocator]
static ALLOCATOR: tonic_rdma_verbs::unstable::allocator::Chosen =
    tonic_rdma_verbs::unstable::allocator::Chosen;

fn main() -> ExitCode {
    let parsed = tonic_rdma_commands::parse::<args::Cli>(args::command());
    let outcome = parsed.and_then(|cli| cli.map_or(Ok(()), |cli| run(&cli.command)));
    tonic_rdma_commands::status("tonic-rdma", outcome)
}

fn run(command: &args::Command) -> Result<(), Failure> {
    // Operators of a bridge want to see first which transport its connections use.
    let (filter, usual) = match command {
        args::Command::Bridge(options) => (options.log.as_deref(), "warn,tonic_rdma::bridge=info"),
        _ => (None, "warn"),
    };
    tonic_rdma_commands::log(filter, usual)?;
    match command {
        args::Command::Bridge(options) => bridge::run(options),
        args::Command::Call(options) => call::run(options),
        args::Command::Compare(options) => compare::run(options),
        args::Command::CompareServer(options) => compare::serve(options),
        args::Command::Load(options) => call::load::run(options),
        args::Command::ParameterServer(options) => parameter_server::run(options),
        args::Command::ParameterServerServer(options) => parameter_server::serve(options),
        args::Command::ParameterServerWorker(options) => parameter_server::work(options),
        args::Command::Devices(options) => devices::run(options),
        args::Command::Diff(options) => diff::run(options),
        args::Command::Probe(options) => probe::run(options),
        args::Command::Tune(options) => tune::run(options),
        args::Command::Allreduce(arguments) => programs::run("allreduce", arguments),
        args::Command::Graph(arguments) => programs::run("graph", arguments),
        args::Command::Training(arguments) => programs::run("training", arguments),
        args::Command::Completions(options) => about::complete(options, &args::command()),
        args::Command::Man(options) => about::man(options, args::command()),
    }
}
