//! gRPC's interoperability tests over our transport. `interop server` and `interop client` take the flags of the official
//! programs, and have the official cases and some more. `interop throughput` measures the cost of our listener for stock clients.
#![forbid(unsafe_code)]

mod args;
mod client;
mod compression;
mod content;
mod deadline;
mod failure;
mod output;
mod proto;
mod server;
mod tensors;
#[cfg(test)]
mod tests;
mod throughput;
mod tls;
mod transport;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use tonic_rdma_commands::explain;

use args::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    if let Err(failure) = tonic_rdma_commands::log(None, "warn") {
        return failure.report("interop");
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            return tonic_rdma_commands::status("interop", explain(&error, &Cli::command()));
        }
    };
    match run(cli.command) {
        Ok(code) => code,
        Err(failure) => report(&failure),
    }
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::Server(options) => on_all_cores(server::run(&options)).map(done),
        Command::Client(options) => on_all_cores(client::run(&options)),
        Command::Tensors => on_all_cores(tensors::serve()).map(done),
        Command::Throughput(options) => throughput::run(&options).map(done),
        Command::ThroughputServer(options) => throughput::serve(&options).map(done),
        Command::ThroughputClient(options) => throughput::call(&options).map(done),
    }
}

fn on_all_cores<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = tonic_rdma::runtime::idle_polling(&mut builder).enable_all().build();
    runtime.map_err(|error| Failure::new(format!("can't start a runtime: {error}")))?.block_on(work)
}

fn report(failure: &Failure) -> ExitCode {
    output::note(&format!("interop: {failure}"));
    ExitCode::FAILURE
}
