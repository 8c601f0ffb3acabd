//! gRPC's interoperability tests over our transport. `interop server` and `interop client` take the flags of the official
//! programs, and have the official cases and some more.
#![forbid(unsafe_code)]

mod args;
mod client;
mod compression;
mod content;
mod deadline;
mod output;
mod proto;
mod server;
mod tensors;
#[cfg(test)]
mod tests;
mod tls;
mod transport;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use tonic_rdma_commands::{Failure, explain, log};

use args::{Cli, Command};

fn main() -> ExitCode {
    let outcome = log(None, "warn").and_then(|()| match Cli::try_parse() {
        Ok(cli) => run(cli.command),
        Err(error) => explain(&error, &Cli::command()).map(|()| ExitCode::SUCCESS),
    });
    outcome.unwrap_or_else(|failure| failure.report("interop"))
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::Server(options) => on_all_cores(server::run(&options)).map(done),
        Command::Client(options) => on_all_cores(client::run(&options)),
        Command::Tensors => on_all_cores(tensors::serve()).map(done),
    }
}

fn on_all_cores<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = tonic_rdma::runtime::idle_polling(&mut builder).enable_all().build();
    runtime.map_err(|error| Failure::run("can't start a runtime").because(error))?.block_on(work)
}
