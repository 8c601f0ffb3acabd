//! `compare`: the same calls in every mode, side by side, between two processes.
//!
//! ```text
//!   this process                                     the server process (this program once more)
//!   plan → trials ── modes: grpc ─────────────────→  server: the services on TCP, Unix socket and RDMA
//!            │            placement ════════════════  placement: tensors, written into the server's memory
//!            │            memcpy
//!            ├→ connections: in place of trials in cells, the cost of many connections
//!            └→ results: rows, facts → table, JSON; runs: the spread of several runs
//! ```
//!
//! With `--server` the server process runs on another host, where `--listen` starts it. It is a child like the
//! local one, whose commands and reports go over TCP.
//!
//! This module measures. It never implements a transport: `measure::transport` makes all RDMA connections.

mod connections;
pub(crate) mod modes;
pub(crate) mod operations;
pub(crate) mod options;
pub(crate) mod plan;
pub(crate) mod results;
pub(crate) mod runs;
pub(crate) mod server;
pub(crate) mod trials;

use std::net::IpAddr;
use std::sync::Arc;

use indicatif::ProgressBar;
use tonic_rdma_commands::cores::{self, Cores};
use tonic_rdma_commands::ends;
use tonic_rdma_commands::remote::Host;
use tonic_rdma_commands::{Context as _, Failure, output, table};

use crate::compare::connections::ConnectionMeter;
use crate::compare::modes::grpc::client::{self, CallSettings, GrpcCaller};
use crate::compare::modes::mode::Mode;
use crate::compare::options::{CompareOptions, Conditions, PROGRAM, ServerJob, ServerOptions};
use crate::compare::plan::Plan;
use crate::compare::results::{Checks, Facts, Row};
use crate::compare::server::Addresses;
use crate::compare::trials::{Meter, Participant, generator_polls};
use crate::measure::machine::{Costs, Watch};
use crate::measure::process::{check_container, raise_open_files};
use crate::measure::recorder;
use crate::measure::report::progress_bar;
use crate::measure::transport::{LOCALHOST, Rdma, RdmaConnection};

/// Runs the comparison and shows its results.
pub(crate) fn run(options: &CompareOptions) -> Result<(), Failure> {
    if options.list_modes {
        return output::print(&list_of_modes(), None);
    }
    let conditions = Conditions::of(options);
    if let Some(address) = &options.listen {
        return server::listen_for_callers(address, options);
    }
    let plan = Plan::new(options)?;
    plan.check_ratio(options)?;
    conditions.allocator.ensure()?;
    if options.container {
        check_container()?;
    }
    if options.with_metrics {
        recorder::install().map(drop)?;
    }
    let rdma = match plan.modes.iter().any(|mode| mode.uses_rdma()) {
        true => Some(Rdma::new(&options.provider)?.for_load(plan.most_connections(), plan.longest_payload())),
        false => None,
    };
    // A connection that fails because the limit is too low is reported.
    let _ = raise_open_files();
    options.outputs.check()?;
    let (host, ends) = ends::call(PROGRAM, options.server.as_deref())?.unzip();
    // Must precede the pinning of this process to one core.
    let costs = Costs::measure();
    let cores = conditions.cores().filter(|cores| cores::pin(cores.client).is_ok());
    let progress = progress_bar(plan.parts().map(Plan::trials).sum::<u64>() * u64::from(options.runs));
    let watch = Watch::start();
    let measured = measure_runs(options, &plan, cores, (rdma.as_ref(), host.as_ref()), &progress);
    progress.finish_and_clear();
    let Measured { verdict, rows, checks, cores } = measured?;
    let warnings = [watch.warnings(), results::disturbed_runs(&rows)].concat();
    let facts = Facts::new(&plan, options, (cores, costs, warnings), (verdict, ends), checks);
    results::show(options, &facts, &rows)
}

/// Returns a line for each mode: its name, and what it is.
fn list_of_modes() -> String {
    let modes = Mode::all().iter().map(|mode| vec![mode.to_string(), mode.meaning()]);
    format!("{}\n", table::columns(&["mode", "what it is"], 2, modes))
}

/// Measures all parts of the plan in each run, and returns the medians of the runs. Each part of a run has a
/// new server and new connections, because what differs between them, such as the addresses of their buffers,
/// is part of the spread.
fn measure_runs(
    options: &CompareOptions,
    plan: &Plan,
    cores: Option<Cores>,
    ends: (Option<&Rdma>, Option<&Arc<Host>>),
    progress: &ProgressBar,
) -> Result<Measured, Failure> {
    let flavour = Conditions::of(options).runtime;
    let (mut all, mut runs) = (Measured::default(), Vec::new());
    for _ in 0..options.runs {
        let mut rows = Vec::new();
        for part in plan.parts() {
            let never_idle = part.is_open_loop() && generator_polls(cores.is_some());
            let runtime = if never_idle { flavour.build_never_idle() } else { flavour.build() };
            let runtime = runtime.context("can't start a runtime")?;
            let measured = runtime.block_on(measure(options, part, cores, ends, progress))?;
            rows.extend(measured.rows);
            all.checks.add(measured.checks);
            all.verdict = all.verdict.or(measured.verdict);
            all.cores = measured.cores;
        }
        runs.push(rows);
    }
    Ok(Measured { rows: results::medians(runs), ..all })
}

/// What a run, or a part of it, has measured.
#[derive(Debug, Default)]
struct Measured {
    verdict: Option<RdmaConnection>,
    rows: Vec<Row>,
    checks: Checks,
    /// The cores that both processes were kept on.
    cores: Option<Cores>,
}

/// Runs the server process.
pub(crate) fn serve(options: &ServerOptions) -> Result<(), Failure> {
    server::run(&options.job)
}

/// Starts the server, measures, and ends the server in every case.
async fn measure(
    options: &CompareOptions,
    plan: &Plan,
    cores: Option<Cores>,
    (rdma, host): (Option<&Rdma>, Option<&Arc<Host>>),
    progress: &ProgressBar,
) -> Result<Measured, Failure> {
    let job = ServerJob {
        options: options.clone(),
        rdma: rdma.is_some(),
        longest_payload: plan.longest_payload(),
        core: cores.map(|cores| cores.server),
        grant: None,
        http2: plan.http2(options),
    };
    let (mut server, addresses) = server::start(&job, host).await?;
    let server_id = server.id(0);
    let work = async {
        let control =
            GrpcCaller::new(client::control(&addresses).await?, Mode::GrpcTcp, CallSettings::default());
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
            return Ok((meter.verdict, rows, meter.checks));
        }
        let local = host.map_or(LOCALHOST, |host| host.local_ip());
        let (participants, verdict) = connect(options, plan, rdma, &addresses, local).await?;
        let pinned = cores.is_some() && addresses.core.is_some();
        let consumed = plan.modes.iter().any(|mode| mode.reduces(options.consume));
        let mut meter = Meter { plan, participants, control, progress, checks, pinned, consumed };
        let rows = meter.run().await?;
        Ok((verdict, rows, meter.checks))
    };
    let result = tokio::select! {
        biased;
        _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
        Some(failure) = server.end() => Err(failure),
        result = work => result,
    };
    let (verdict, rows, checks) = server.explain(result, server::EXPLANATION).await?;
    let cores = cores.zip(addresses.core).map(|(cores, server)| Cores { server, ..cores });
    Ok(Measured { verdict, rows, checks, cores })
}

/// Connects each mode of the plan. `local`: the address of this process, for the server.
async fn connect(
    options: &CompareOptions,
    plan: &Plan,
    rdma: Option<&Rdma>,
    addresses: &Addresses,
    local: IpAddr,
) -> Result<(Vec<Participant>, Option<RdmaConnection>), Failure> {
    let mut participants = Vec::new();
    let mut verdict = None;
    for contender in &plan.contenders {
        let (caller, agreed) = modes::connect(*contender, addresses, options, rdma, local).await?;
        participants.push(Participant::new(*contender, caller)?);
        verdict = verdict.or(agreed);
    }
    Ok((participants, verdict))
}
