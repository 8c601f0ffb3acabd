//! The throughput of stock clients at our listener, compared with tonic's own TCP listener. A stock tonic client (or any other
//! program) calls one service over TCP, alternately through the one listener and through the other.
//!
//! Two servers, each a process, share a core. The client is a new process for each run, on another core. Both ends set nodelay.
//! Runs come in groups of four, ours, plain, plain, ours, so that a machine that gets slower or faster affects both alike. The
//! ratio of a cell is the median of the ratios of its groups.

mod load;
mod options;
mod process;
mod table;

pub(crate) use load::call;
pub(crate) use options::{LoadOptions, ServedOptions, ThroughputOptions};
pub(crate) use process::serve;

use tonic_rdma_commands::cores::Cores;
use tonic_rdma_commands::output;

use crate::transport::Transport;
use table::Row;
use tonic_rdma_commands::Failure;

/// Measures all cells, prints a table, and writes the results to a file if the options name one.
pub(crate) fn run(options: &ThroughputOptions) -> Result<(), Failure> {
    let json = options.json.as_deref();
    output::check_files(&[("--json", json)])?;
    let rows = measure(options)?;
    table::print(&rows, json)?;
    json.map_or(Ok(()), |path| table::write_json(path, &rows))
}

fn measure(options: &ThroughputOptions) -> Result<Vec<Row>, Failure> {
    let cores = Cores::choose();
    table::announce(cores, options)?;
    let (_ours, to_ours) = process::server(Transport::Rdma, cores)?;
    let (_plain, to_plain) = process::server(Transport::Tcp, cores)?;
    let (program, core) = (options.client.as_deref(), cores.map(|cores| cores.client));
    let mut rows = Vec::new();
    for bytes in &options.sizes {
        for inflight in &options.inflight {
            let mut row = Row::new(*bytes, *inflight);
            let run = |port| process::client(program, core, port, *bytes, *inflight, options.duration);
            for _ in 0..options.rounds {
                let (first, second) = (run(to_ours)?, run(to_plain)?);
                let (third, fourth) = (run(to_plain)?, run(to_ours)?);
                row.add([first, fourth], [second, third]);
            }
            rows.push(row);
        }
    }
    Ok(rows)
}
