//! The throughput of stock clients at our listener, compared with tonic's own TCP listener. A stock tonic client (or any other
//! program) calls one service over TCP, alternately through the one listener and through the other.
//!
//! Two servers, each a process, share a core. The client is a new process for each run, on another core. Both ends set nodelay.
//! Runs come in groups of four, ours, plain, plain, ours, so that a machine that gets slower or faster affects both alike. The
//! ratio of a cell is the median of the ratios of its groups.

mod cores;
mod load;
mod options;
mod process;
mod table;

pub(crate) use load::call;
pub(crate) use options::{LoadOptions, ServedOptions, ThroughputOptions};
pub(crate) use process::serve;

use tonic_rdma_commands::output;

use crate::Failure;
use crate::transport::Transport;
use cores::Cores;
use process::{Client, Server};
use table::Row;

/// Measures all cells, prints a table, and writes the results to a file if the options name one.
pub(crate) fn run(options: &ThroughputOptions) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("can't start a runtime: {error}")))?;
    let json = options.json.as_deref();
    output::check_files(&[("--json", json)])?;
    let rows = runtime.block_on(measure(options))?;
    table::print(&rows, json)?;
    json.map_or(Ok(()), |path| table::write_json(path, &rows))
}

async fn measure(options: &ThroughputOptions) -> Result<Vec<Row>, Failure> {
    let cores = Cores::choose();
    table::announce(cores, options)?;
    let ours = Server::start(Transport::Rdma, cores).await?;
    let plain = Server::start(Transport::Tcp, cores).await?;
    let client = Client { program: options.client.as_deref(), core: cores.map(|cores| cores.client) };
    let mut rows = Vec::new();
    for bytes in &options.sizes {
        for inflight in &options.inflight {
            let mut row = Row::new(*bytes, *inflight);
            for _ in 0..options.rounds {
                let run = async |port| client.run(port, *bytes, *inflight, options.duration).await;
                let (first, second) = (run(ours.port).await?, run(plain.port).await?);
                let (third, fourth) = (run(plain.port).await?, run(ours.port).await?);
                row.add([first, fourth], [second, third]);
            }
            rows.push(row);
        }
    }
    Ok(rows)
}
