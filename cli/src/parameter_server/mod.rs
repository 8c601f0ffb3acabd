//! `parameter-server`: the traffic of a training job, mini-batch after mini-batch, in every mode (§5.2 and
//! figure 9 of Xue et al., "Fast Distributed Deep Learning over RDMA", EuroSys 2019).
//!
//! ```text
//!                         this process: cells, trials, rows
//!                          │ commands and reports, JSON lines over pipes │
//!                          ▼                                             ▼
//!   server process: holds the variables ── pull: every variable ──▶ worker processes, 1 to 8
//!                   consumes gradients  ◀─ push: every gradient ──  each pulls, then computes if asked, then pushes,
//!                                                                   then the next mini-batch
//! ```
//!
//! In gRPC modes each variable is a call, with several calls in flight. In the other modes each variable has
//! a static slot. The server writes into the slots without a request, as soon as the worker's last gradients
//! have arrived. Every receiver checks and consumes, in all modes. The content differs from mini-batch to
//! mini-batch, and from offset to offset.
//!
//! Several servers hold the variables in turn: variable i is on server i modulo their number, as in the
//! paper.
//!
//! This module owns the processes and the measuring. The modes, with their services and checks, are those of
//! `compare`.

mod children;
mod meter;
mod options;
mod show;

use tonic_rdma_commands::ends;
use tonic_rdma_commands::{Context as _, Failure};

use crate::measure::machine::{Costs, Watch};
use crate::measure::report::progress_bar;
use crate::measure::transport::Rdma;
use crate::parameter_server::meter::TrainingMeter;
use crate::parameter_server::show::TrainingFacts;

pub(crate) use crate::parameter_server::options::{HELP, ParameterServerOptions, ProcessOptions};

/// The command, as both ends of a run between two hosts name it.
const PROGRAM: &str = "tonic-rdma parameter-server";

/// Measures, and shows the results.
pub(crate) fn run(options: &ParameterServerOptions) -> Result<(), Failure> {
    // A bad variable or provider is refused before the measuring.
    Rdma::new(&options.provider)?;
    if let Some(address) = &options.listen {
        return ends::listen(PROGRAM, address, options.limit, |request| meter::admit(request, options));
    }
    options.outputs.check()?;
    let cells = meter::cells(options)?;
    let (host, ends) = ends::call(PROGRAM, options.server.as_deref())?.unzip();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("can't start a runtime")?;
    // Before the processes start: while they run, or give their memory back, no cost is the machine's.
    let (costs, watch) = (Costs::measure(), Watch::start());
    let progress = progress_bar(0);
    let mut meter = TrainingMeter::new(options, host.as_ref(), progress.clone());
    let rows = runtime.block_on(async {
        tokio::select! {
            biased;
            _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
            rows = meter.measure(&cells) => rows,
        }
    });
    progress.finish_and_clear();
    let rows = rows?;
    let warnings = [watch.warnings(), show::disturbed_runs(&rows)].concat();
    let facts = TrainingFacts::new(options, &meter, ends, (costs, warnings));
    show::show(options, &facts, &rows)
}

/// Runs the server process, which [`run`] starts.
pub(crate) fn serve(options: &ProcessOptions) -> Result<(), Failure> {
    children::run(&options.job, true)
}

/// Runs a worker process, which [`run`] starts.
pub(crate) fn work(options: &ProcessOptions) -> Result<(), Failure> {
    children::run(&options.job, false)
}
