//! gRPC's interoperability tests over our transport. `interop server` and `interop client` take the flags of
//! the official programs, and have the official cases and some more.
#![forbid(unsafe_code)]

mod client;
mod compression;
mod content;
mod deadline;
mod proto;
mod server;
#[cfg(test)]
mod tests;
mod tls;
mod transport;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use tonic_rdma::Config;
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::{Context as _, Failure, log, parse};
use tonic_rdma_tensor::{Dtype, RdmaDevice, Rights, Shape, TensorSpec};

use client::ClientOptions;
use server::ServerOptions;

#[derive(Debug, Parser)]
#[command(name = "interop", version, about = "gRPC's interoperability tests over tonic-rdma")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// A command of the program.
#[derive(Debug, Subcommand)]
enum Command {
    /// Serve grpc.testing.TestService and tonic_rdma.interop.v1.Checked; prints the port first
    Server(ServerOptions),
    /// Run cases against a server; prints a line for each
    Client(ClientOptions),
    /// Serve a tensor device for stock clients; prints the port first
    Tensors,
}

fn main() -> ExitCode {
    let parsed = log(None, "warn").and_then(|()| parse::<Cli>(Cli::command()));
    let outcome = parsed.and_then(|cli| cli.map_or(Ok(ExitCode::SUCCESS), |cli| run(cli.command)));
    outcome.unwrap_or_else(|failure| failure.report("interop"))
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::Server(options) => on_all_cores(server::run(&options)).map(done),
        Command::Client(options) => on_all_cores(client::run(&options)),
        Command::Tensors => on_all_cores(async { Ok(serve_tensors().await?) }).map(done),
    }
}

fn on_all_cores<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = tonic_rdma::runtime::idle_polling(&mut builder).enable_all().build();
    runtime.context("can't start a runtime")?.block_on(work)
}

/// Serves a device with a region and two slots, one of which has received a tensor. Prints the port, and runs
/// without end.
async fn serve_tensors() -> Result<(), Box<dyn std::error::Error>> {
    let settings = RdmaDevice::builder().queue_pairs_per_peer(2).config(Config::from_env()?);
    let device = settings.clone().bind("127.0.0.1:0").await?;
    let _parameters = device.export("parameters", device.allocate(1 << 20)?, Rights::READ_WRITE)?;
    let weights = TensorSpec::new(Dtype::F32, Shape::new(&[1024, 1000])?)?;
    let mut receiver = device.static_receiver("weights", &weights, 2)?;
    let _activations = device.dynamic_receiver("activations", 4)?;

    let worker = settings.bind("127.0.0.1:0").await?;
    let channel = worker.channel(&device.endpoint(), 0).await?;
    let mut sender = channel.static_sender("weights", &weights).await?;
    let region = worker.allocate(weights.bytes().unwrap_or(0) as usize)?;
    let (sent, arrived) = tokio::join!(sender.send_region(region), receiver.recv());
    sent?;
    drop(arrived?);

    report_line(device.local_addr().map_or(0, |address| address.port()))?;
    std::future::pending().await
}
