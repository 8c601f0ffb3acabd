//! gRPC's interoperability tests over our transport. `interop server` and `interop client` take the flags of the official
//! programs, and have the official cases and some more. `interop throughput` measures the cost of our listener for stock clients.
#![forbid(unsafe_code)]

mod args;
mod client;
mod compression;
mod content;
mod deadline;
mod output;
mod proto;
mod runtime;
mod server;
mod tensors;
#[cfg(test)]
mod tests;
mod throughput;
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
        Command::Throughput(options) => throughput::run(&options).map(done),
        Command::ThroughputServer(options) => throughput::serve(&options).map(done),
        Command::ThroughputClient(options) => throughput::call(&options).map(done),
    }
}

fn on_all_cores<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    runtime::start(tonic_rdma::runtime::idle_polling(&mut builder))?.block_on(work)
}
