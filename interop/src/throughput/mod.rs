//! What our listener costs stock clients: the same service behind ours and behind tonic's own TCP listener, called by a stock
//! tonic client (or any program) over TCP, in turns.
//!
//! Two servers, a process each, share a core; the client, a process for each turn, has another. Nodelay is set on both ends.
//! Turns come in fours, ours, plain, plain, ours, so that a machine that gets slower or faster hits both alike; the ratio of
//! a cell is the median of its fours'.

mod cores;
mod load;
mod options;
mod process;
mod table;

pub(crate) use load::call;
pub(crate) use options::{LoadOptions, ServedOptions, ThroughputOptions};
pub(crate) use process::serve;

use crate::Failure;
use crate::transport::Transport;
use cores::Cores;
use process::{Client, Server};
use table::Row;

/// Measures all cells, prints a table, and writes what it is told to.
pub(crate) fn run(options: &ThroughputOptions) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("can't start a runtime: {error}")))?;
    let json = options.json.as_deref().map(table::JsonFile::create).transpose()?;
    let rows = runtime.block_on(measure(options))?;
    table::print(&rows)?;
    json.map_or(Ok(()), |file| file.write(&rows))
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
                let turn = async |port| client.turn(port, *bytes, *inflight, options.duration).await;
                let (first, second) = (turn(ours.port).await?, turn(plain.port).await?);
                let (third, fourth) = (turn(plain.port).await?, turn(ours.port).await?);
                row.add([first, fourth], [second, third]);
            }
            rows.push(row);
        }
    }
    Ok(rows)
}
