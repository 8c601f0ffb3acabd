//! Measures gRPC by connectrpc, and iceoryx2, beside tonic-rdma, within one host.
//!
//! ```sh
//! benches/alternatives/run                    tokio's runtime as `#[tokio::main]` builds it
//! benches/alternatives/run --pin              each process polls on a core of its own
//! ```
//!
//! Each cell of each round has a server and a client, two fresh processes. The client's payloads differ from
//! call to call, and every byte depends on its place. The server checks all bytes of the first payload, and
//! 16 words of each further one, and answers. The table has medians over the rounds.

mod grpc;
mod measure;
mod memory;
mod mode;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tonic_rdma_commands::clap::{self, Parser, Subcommand, ValueEnum as _};
use tonic_rdma_commands::cores::{self, Cores};
use tonic_rdma_commands::ends::Machine;
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_commands::serde_json::{self, json};
use tonic_rdma_commands::table::grid;
use tonic_rdma_commands::{
    Context as _, Failure, Flavour, List, Named as _, ValueError, name_list, output, parse_set, status, units,
};

use crate::measure::Figures;
use crate::mode::Mode;

#[derive(Parser)]
#[command(name = "alternatives", about = "Measures connectrpc and iceoryx2 beside tonic-rdma")]
struct Options {
    /// Modes to measure [default: all]
    #[arg(long, value_name = "LIST", value_parser = name_list::<Mode>("mode"))]
    modes: Option<List<Mode>>,
    /// Payload sizes and calls in flight
    #[arg(long, value_name = "LIST", value_parser = |text: &str| parse_set(text, parse_cell), default_value = "64/1,64/32,64KiB/1,1MiB/1,16MiB/1")]
    cells: List<Cell>,
    /// Time to measure each cell in each mode and round
    #[arg(long, value_name = "TIME", value_parser = units::parse_time, default_value = "0.5")]
    duration: Duration,
    /// Rounds, each with fresh processes
    #[arg(long, value_parser = units::number::<u32>("number of rounds", 1..=99), default_value = "5")]
    rounds: u32,
    /// Keep each process on a core of its own, where it polls
    #[arg(long)]
    pin: bool,
    /// Also write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(subcommand)]
    role: Option<Role>,
}

/// The other processes.
#[derive(Subcommand)]
#[command(hide = true)]
enum Role {
    Serve {
        #[arg(value_parser = parse_job)]
        job: Job,
    },
    Call {
        #[arg(value_parser = parse_job)]
        job: Job,
    },
}

/// A payload size in bytes, and a number of calls in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Cell {
    bytes: usize,
    inflight: usize,
}

/// What a process needs to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Job {
    mode: Mode,
    cell: Cell,
    duration: Duration,
    /// The cores of both processes, which then poll.
    cores: Option<(usize, usize)>,
    /// The server's address, for the client; for the server, the path of a Unix socket that it may make.
    address: String,
    /// The server's process, for the client.
    server: i32,
}

impl Job {
    fn runtime(&self) -> Flavour {
        if self.cores.is_some() { Flavour::IdlePolling } else { Flavour::multi_thread() }
    }
}

fn parse_job(text: &str) -> Result<Job, serde_json::Error> {
    serde_json::from_str(text)
}

fn parse_cell(text: &str) -> Result<Cell, ValueError> {
    let wrong =
        || ValueError::unknown("SIZE/CALLS, such as 64/32 or 1MiB/1, of 8 to 64MiB and 1 to 64 calls");
    let (bytes, inflight) = text.split_once('/').ok_or_else(wrong)?;
    let bytes = usize::try_from(units::parse_size(bytes).map_err(|_| wrong())?).map_err(|_| wrong())?;
    let inflight = inflight.parse().map_err(|_| wrong())?;
    let accepted = (8..=64 << 20).contains(&bytes) && (1..=64).contains(&inflight);
    accepted.then_some(Cell { bytes, inflight }).ok_or_else(wrong)
}

fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = match &options.role {
        Some(Role::Serve { job }) => pin(job.cores.map(|cores| cores.1)).and_then(|()| mode::serve(job)),
        Some(Role::Call { job }) => pin(job.cores.map(|cores| cores.0)).and_then(|()| mode::call(job)),
        None => measure_all(&options),
    };
    status("alternatives", outcome)
}

fn pin(core: Option<usize>) -> Result<(), Failure> {
    core.map_or(Ok(()), |core| cores::pin(core).context(format!("can't run on core {core}")))
}

fn measure_all(options: &Options) -> Result<(), Failure> {
    output::check_files(&[("--json", options.json.as_deref())])?;
    let cores = match (options.pin, Cores::choose()) {
        (false, _) => None,
        (true, Some(cores)) => Some((cores.client, cores.server)),
        (true, None) => return Err(Failure::usage("--pin needs two cores")),
    };
    let modes = options.modes.as_ref().map_or(Mode::value_variants(), |List(modes)| modes);
    let List(cells) = &options.cells;
    let mut found: Vec<(Cell, Mode, Vec<Figures>)> = Vec::new();
    found.extend(cells.iter().flat_map(|cell| modes.iter().map(|mode| (*cell, *mode, Vec::new()))));
    found.retain(|(cell, mode, _)| mode.has(*cell));
    for round in 0..options.rounds as usize {
        // Each round begins with another mode.
        let first = round * found.len() / options.rounds as usize;
        let count = found.len();
        for index in 0..count {
            let (cell, mode, figures) = &mut found[(first + index) % count];
            let (mode, cell, duration) = (*mode, *cell, options.duration);
            figures.push(pair(Job { mode, cell, duration, cores, address: String::new(), server: 0 })?);
        }
    }
    let rows: Vec<(Cell, Mode, Figures)> =
        found.iter().map(|(cell, mode, figures)| (*cell, *mode, Figures::medians(figures))).collect();
    if let Some(path) = &options.json {
        output::write_json(path, &results(options, &rows))?;
    }
    output::print(&format!("{}\n", table(cells, &rows)), options.json.as_deref())
}

/// Measures a mode in a cell, with two new processes.
fn pair(mut job: Job) -> Result<Figures, Failure> {
    const START: Duration = Duration::from_secs(20);
    let start = |name: &str, role: &str, job: &Job| {
        let mut command = process::again()?;
        command.arg(role).arg(serde_json::to_string(job).context("can't make JSON of a job")?);
        Child::with_lines(
            format!("{name} of {} in {}/{}", job.mode, job.cell.bytes, job.cell.inflight),
            command,
        )
    };
    let folder = tempfile::tempdir().context("can't make a folder for a socket")?;
    job.address = folder.path().join("socket").display().to_string();
    let mut server = start("the server", "serve", &job)?;
    job.address = server.line(START)?;
    job.server = server.id().unwrap_or_default().cast_signed();
    let mut client = start("the client", "call", &job)?;
    let figures = client.report(START + 4 * job.duration)?;
    // The client stays until its stdin ends, because a server may fail when its client is gone.
    for process in [&mut server, &mut client] {
        match process.end(START) {
            Some(status) if status.success() => {}
            ended => return Err(Failure::run(format!("{} {}", process.name(), process::how_ended(ended)))),
        }
    }
    Ok(figures)
}

/// In the form that `cli/examples/figures` reads.
fn results(options: &Options, rows: &[(Cell, Mode, Figures)]) -> serde_json::Value {
    let row = |(cell, mode, figures): &(Cell, Mode, Figures)| {
        json!({ "mode": mode.name(), "bytes": cell.bytes, "inflight": cell.inflight, "ops": figures.ops,
                "p50_us": figures.p50_us, "p99_us": figures.p99_us, "ops_per_s": figures.ops_per_s,
                "gbytes_per_s": figures.ops_per_s * cell.bytes as f64 / 1e9, "cpu_us_per_op": figures.cpu_us_per_op })
    };
    json!({ "machine": Machine::this(), "allocator": "system", "optimised": !cfg!(debug_assertions), "pin": options.pin,
            "rounds": options.rounds, "rows": rows.iter().map(row).collect::<Vec<_>>() })
}

fn table(cells: &[Cell], rows: &[(Cell, Mode, Figures)]) -> String {
    let group = |cell: &Cell| {
        let rows = rows.iter().filter(|(of, ..)| of == cell);
        rows.map(|(cell, mode, figures)| {
            let times = [figures.p50_us, figures.p99_us, figures.cpu_us_per_op].map(units::micros);
            let [p50, p99, cpu] = times;
            let size = units::size(cell.bytes as u64);
            vec![
                size,
                cell.inflight.to_string(),
                mode.to_string(),
                p50,
                p99,
                units::count(figures.ops_per_s),
                cpu,
            ]
        })
        .collect()
    };
    let headings = ["payload", "in flight", "mode", "p50", "p99", "calls/s", "CPU a call"];
    grid(&headings, cells.iter().map(group)).to_string()
}
