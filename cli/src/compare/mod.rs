//! `compare`: the same calls in every mode, side by side, between two processes.
//!
//! ```text
//!   this process                                     the server process (this program once more)
//!   plan: cells → measure ── client ── grpc ──────→  server: the services on TCP, Unix socket and RDMA
//!                  │  │       ├ placement ═══════════ placement: tensors, put into the server's memory
//!                  │  │       └ memcpy  ←───────────  content: what arrived is checked; consume: and used
//!                  │  └ closed_loop, open_loop: when the next of the operations begins
//!                  └→ tally → results → table, json, report
//! ```
//!
//! This owns the measuring and never the transport: RDMA connections are made in `rdma` alone.

pub(crate) mod allocator;
pub(crate) mod bars;
mod budget;
mod busy;
pub(crate) mod cell;
mod child;
mod client;
mod closed_loop;
mod conditions;
pub(crate) mod consume;
pub(crate) mod content;
pub(crate) mod cores;
pub(crate) mod costs;
pub(crate) mod direction;
pub(crate) mod encode;
pub(crate) mod facts;
pub(crate) mod gate;
mod grpc;
pub(crate) mod http2;
mod json;
mod layout;
mod measure;
mod memcpy;
pub(crate) mod memory;
pub(crate) mod mode;
pub(crate) mod open_loop;
mod operations;
mod placement;
pub(crate) mod plan;
mod plots;
pub(crate) mod rdma;
pub(crate) mod report;
mod results;
pub(crate) mod runtime;
mod sample;
pub(crate) mod server;
mod source;
pub(crate) mod table;
mod tally;

use std::fs::OpenOptions;
use std::io::IsTerminal;
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use self::child::ServerProcess;
use self::conditions::{Conditions, Surroundings};
use self::costs::Costs;
use self::facts::Facts;
use self::grpc::GrpcCaller;
use self::measure::{Lane, Meter};
use self::plan::Plan;
use self::rdma::{Rdma, Verdict};
use self::results::{Checks, Row};
use crate::args::{CompareOptions, ServerOptions};
use crate::failure::Failure;

/// Runs the comparison and shows it.
pub(crate) fn run(options: &CompareOptions) -> Result<(), Failure> {
    let plan = Plan::new(options)?;
    let conditions = Conditions::of(options);
    gate::check_plan(options, &plan)?;
    conditions.allocator.ensure()?;
    let rdma = match plan.modes.iter().any(|mode| mode.uses_rdma()) {
        true => Some(Rdma::new(&options.provider)?),
        false => None,
    };
    check_outputs(options.json.as_deref(), options.report.as_deref())?;
    // Before this process is pinned to one core.
    let costs = Costs::measure();
    let cores = conditions.cores().filter(|cores| cores::pin(cores.client).is_ok());
    let flavour = conditions.runtime;
    let runtime = if plan.is_open_loop() { flavour.build_never_idle() } else { flavour.build() };
    let runtime = runtime.map_err(|error| Failure::run(format!("can't start a runtime: {error}")))?;

    let surroundings = Surroundings { conditions, cores, costs };
    let (facts, rows) = runtime.block_on(measure(options, &plan, &surroundings, rdma.as_ref()))?;
    table::print(&facts, &rows)?;
    if let Some(path) = &options.json {
        json::write(path, &facts, &rows)?;
    }
    if let Some(directory) = &options.report {
        report::write(directory, &facts, &rows)?;
    }
    let errors: Vec<String> =
        rows.iter().filter(|row| row.errors > 0).map(results::describe_errors).collect();
    match (errors.as_slice(), options.at_least) {
        ([], None) => Ok(()),
        ([], Some(least)) => gate::check_rows(least, &rows),
        (errors, _) => Err(Failure::run(errors.join("; "))),
    }
}

/// Runs the serving process.
pub(crate) fn serve(options: &ServerOptions) -> Result<(), Failure> {
    server::run(options)
}

/// Refuses files that can't be written before the time is spent, not after.
pub(crate) fn check_outputs(json: Option<&Path>, report: Option<&Path>) -> Result<(), Failure> {
    let refuse = |flag: &str, path: &Path, error: std::io::Error| {
        Err(Failure::usage(format!("{flag}: can't write {}: {error}", path.display())))
    };
    let open = |path: &Path| OpenOptions::new().append(true).create(true).open(path).map(drop);
    if let Some(path) = json
        && let Err(error) = open(path)
    {
        return refuse("--json", path, error);
    }
    if let Some(directory) = report
        && let Err(error) =
            std::fs::create_dir_all(directory).and_then(|()| open(&directory.join("index.html")))
    {
        return refuse("--report", directory, error);
    }
    Ok(())
}

/// Starts the server, measures, and ends the server, whatever happens.
async fn measure(
    options: &CompareOptions,
    plan: &Plan,
    surroundings: &Surroundings,
    rdma: Option<&Rdma>,
) -> Result<(Facts, Vec<Row>), Failure> {
    let cores = surroundings.cores;
    let mut server = ServerProcess::start(rdma.is_some(), options, surroundings).await?;
    let addresses = server.addresses.clone();
    let progress = progress_bar(plan);
    let work = async {
        let (lanes, verdict) = connect(options, plan, rdma, &addresses).await?;
        let channel = grpc::tcp(addresses.tcp, http2::Http2::Default).await?;
        let control = GrpcCaller::new(channel, mode::Mode::GrpcTcp, encode::Encode::Copy);
        let (progress, checks) = (progress.clone(), Checks::default());
        let pinned = cores.is_some() && addresses.pinned;
        let consumed = plan.modes.iter().any(|mode| options.consume.reduces(*mode));
        let mut meter = Meter { plan, lanes, control, progress, checks, pinned, consumed };
        let rows = meter.run().await?;
        Ok((verdict, rows, meter.checks))
    };
    let result = tokio::select! {
        biased;
        _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
        failure = server.end() => Err(failure),
        result = work => result,
    };
    progress.finish_and_clear();
    let result = server.explain(result).await;
    // The connections are gone with the work, and say goodbye before the server is stopped.
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    server.stop().await;
    let (verdict, rows, checks) = result?;
    let surroundings = Surroundings { cores: cores.filter(|_| addresses.pinned), ..*surroundings };
    Ok((Facts::new(plan, options, &surroundings, verdict, checks), rows))
}

/// A connection for each mode of the plan.
async fn connect(
    options: &CompareOptions,
    plan: &Plan,
    rdma: Option<&Rdma>,
    addresses: &server::Addresses,
) -> Result<(Vec<Lane>, Option<Verdict>), Failure> {
    let mut lanes = Vec::new();
    let mut verdict = None;
    for mode in &plan.modes {
        let (caller, agreed) = client::connect(*mode, addresses, options, rdma).await?;
        lanes.push(Lane::new(*mode, caller));
        verdict = verdict.or(agreed);
    }
    Ok((lanes, verdict))
}

/// Turns of all modes in all cells; nothing is shown where stderr is not a terminal.
fn progress_bar(plan: &Plan) -> ProgressBar {
    let rounds: u64 = plan.cells.iter().map(|cell| u64::from(plan.rounds(*cell))).sum();
    let turns = rounds * plan.modes.len() as u64;
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(turns), target);
    match ProgressStyle::with_template("{bar:40} {percent:>3} %  {elapsed} of about {duration}  {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
