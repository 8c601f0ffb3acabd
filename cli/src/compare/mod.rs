//! `compare`: the same calls in every mode, side by side, between two processes.
//!
//! ```text
//!   this process                                     the server process (this program once more)
//!   plan → turns ── modes: grpc ─────────────────→  server: the services on TCP, Unix socket and RDMA
//!            │            placement ════════════════  placement: tensors, written into the server's memory
//!            │            memcpy
//!            ├→ connections: in place of turns in cells, the cost of many connections
//!            └→ results: rows, facts → table, JSON, report
//! ```
//!
//! This module measures. It never implements a transport: `measure::transport` makes all RDMA connections.

mod conditions;
mod connections;
pub(crate) mod modes;
mod operations;
pub(crate) mod options;
mod plan;
mod results;
mod server;
mod turns;
mod values;

use self::conditions::{Conditions, RunContext};
use self::connections::ConnectionMeter;
use self::connections::row::ConnectionRow;
use self::modes::caller;
use self::modes::grpc::client::GrpcCaller;
use self::modes::grpc::connect;
use self::modes::mode::Mode;
use self::options::{CompareOptions, ServerOptions};
use self::plan::Plan;
use self::results::facts::Facts;
use self::results::gate;
use self::results::report;
use self::results::row::{Checks, Row, describe_errors};
use self::results::table;
use self::server::process::ServerProcess;
use self::server::serve;
use self::server::start_report::Addresses;
use self::turns::meter::Meter;
use self::turns::participant::Participant;
use crate::measure::machine::costs::Costs;
use crate::measure::output::files::{check_outputs, write_json};
use crate::measure::output::progress::progress_bar;
use crate::measure::process::limits::raise_open_files;
use crate::measure::process::{container, cores};
use crate::measure::transport::encode::Encode;
use crate::measure::transport::http2::Http2;
use crate::measure::transport::rdma::{Rdma, RdmaConnection};
use tonic_rdma_commands::Failure;

/// Runs the comparison and shows its results.
pub(crate) fn run(options: &CompareOptions) -> Result<(), Failure> {
    let plan = Plan::new(options)?;
    let conditions = Conditions::of(options);
    gate::check_plan(options, &plan)?;
    conditions.allocator.ensure()?;
    if options.container {
        container::check()?;
    }
    let rdma = match plan.modes.iter().any(|mode| mode.uses_rdma()) {
        true => Some(Rdma::new(&options.provider)?.for_load(plan.most_connections(), plan.longest_payload())),
        false => None,
    };
    // A connection that fails because the limit is too low is reported.
    let _ = raise_open_files();
    check_outputs(options.json.as_deref(), options.report.as_deref())?;
    // Must precede the pinning of this process to one core.
    let costs = Costs::measure();
    let cores = conditions.cores().filter(|cores| cores::pin(cores.client).is_ok());
    let flavour = conditions.runtime;
    let runtime = if plan.is_open_loop() { flavour.build_never_idle() } else { flavour.build() };
    let runtime = runtime.map_err(|error| Failure::run("can't start a runtime").because(error))?;

    let context = RunContext { conditions, cores, costs };
    let (facts, rows) = runtime.block_on(measure(options, &plan, &context, rdma.as_ref()))?;
    match rows {
        Rows::Cells(rows) => show(options, &facts, &rows),
        Rows::Connections(rows) => show_connections(options, &facts, &rows),
    }
}

/// The rows of a run.
enum Rows {
    Cells(Vec<Row>),
    Connections(Vec<ConnectionRow>),
}

/// Writes all outputs that `options` ask for. Errors in rows are failures.
fn show(options: &CompareOptions, facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    table::print(facts, rows, options.json.as_deref())?;
    if let Some(path) = &options.json {
        write_json(path, facts, rows)?;
    }
    if let Some(directory) = &options.report {
        report::write(directory, facts, rows)?;
    }
    let errors: Vec<String> = rows.iter().filter(|row| row.errors > 0).map(describe_errors).collect();
    match (errors.as_slice(), options.at_least) {
        ([], None) => Ok(()),
        ([], Some(least)) => gate::check_rows(least, rows),
        (errors, _) => Err(Failure::run(errors.join("; "))),
    }
}

/// Writes the outputs of `--connections` in the same way.
fn show_connections(options: &CompareOptions, facts: &Facts, rows: &[ConnectionRow]) -> Result<(), Failure> {
    table::print_with_facts(facts, &connections::show::table(rows), options.json.as_deref())?;
    if let Some(path) = &options.json {
        write_json(path, facts, rows)?;
    }
    if let Some(directory) = &options.report {
        connections::show::write_page(directory, facts, rows)?;
    }
    let failed = rows.iter().filter(|row| row.row.errors > 0);
    let errors: Vec<String> = failed.map(ConnectionRow::describe_errors).collect();
    if errors.is_empty() { Ok(()) } else { Err(Failure::run(errors.join("; "))) }
}

/// Runs the server process.
pub(crate) fn serve(options: &ServerOptions) -> Result<(), Failure> {
    serve::run(options)
}

/// Starts the server, measures, and ends the server in every case.
async fn measure(
    options: &CompareOptions,
    plan: &Plan,
    context: &RunContext,
    rdma: Option<&Rdma>,
) -> Result<(Facts, Rows), Failure> {
    let cores = context.cores;
    let mut server = ServerProcess::start(rdma.is_some(), plan.longest_payload(), options, context).await?;
    let addresses = server.addresses.clone();
    let server_id = server.id();
    let progress = progress_bar(plan.turns());
    let work = async {
        let channel = connect::tcp(addresses.tcp, Http2::Default).await?;
        let control = GrpcCaller::new(channel, Mode::GrpcTcp, Encode::Copy);
        let (progress, checks) = (progress.clone(), Checks::default());
        if options.connections.is_some() {
            let (addresses, verdict) = (&addresses, None);
            let server = server_id.ok_or_else(|| Failure::run("the server process has ended"))?;
            let mut meter = ConnectionMeter {
                plan,
                options,
                rdma,
                addresses,
                server,
                control,
                progress,
                checks,
                verdict,
            };
            let rows = meter.run().await?;
            return Ok((meter.verdict, Rows::Connections(rows), meter.checks));
        }
        let (participants, verdict) = connect(options, plan, rdma, &addresses).await?;
        let pinned = cores.is_some() && addresses.pinned;
        let consumed = plan.modes.iter().any(|mode| mode.reduces(options.consume));
        let mut meter = Meter { plan, participants, control, progress, checks, pinned, consumed };
        let rows = meter.run().await?;
        Ok((verdict, Rows::Cells(rows), meter.checks))
    };
    let result = tokio::select! {
        biased;
        _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
        failure = server.end() => Err(failure),
        result = work => result,
    };
    progress.finish_and_clear();
    let result = server.explain(result).await;
    // The connections have been dropped. They send their last messages before the server stops.
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    server.stop().await;
    let (verdict, rows, checks) = result?;
    let context = RunContext { cores: cores.filter(|_| addresses.pinned), ..*context };
    Ok((Facts::new(plan, options, &context, verdict, checks), rows))
}

/// Connects each mode of the plan.
async fn connect(
    options: &CompareOptions,
    plan: &Plan,
    rdma: Option<&Rdma>,
    addresses: &Addresses,
) -> Result<(Vec<Participant>, Option<RdmaConnection>), Failure> {
    let mut participants = Vec::new();
    let mut verdict = None;
    for mode in &plan.modes {
        let (caller, agreed) = caller::connect(*mode, addresses, options, rdma).await?;
        participants.push(Participant::new(*mode, caller));
        verdict = verdict.or(agreed);
    }
    Ok((participants, verdict))
}
