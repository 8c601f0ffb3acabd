//! Runs stock gRPC peers against our transport, in all directions, and reports whether all outcomes are as
//! expected.
//!
//! Each case is compared with a control: the same case and peer over plain TCP and tonic's own transport. The
//! outcome of the case has to equal the outcome of the control ([`outcome`]). If a case fails in the control
//! too, the fault is in the peer or in tonic, and the case has to be listed in [`upstream`], with the reason.
#![forbid(unsafe_code)]

mod bridge;
mod certificates;
mod combination;
mod direction;
mod outcome;
mod peer;
mod plan;
mod process;
mod report;
mod tls;
mod upstream;

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use clap::Parser as _;
use tonic_rdma_commands::{Failure, Signals};
use tonic_rdma_verbs::unstable::lock;

use crate::direction::Direction;
use crate::outcome::Outcome;
use crate::peer::Peer;
use crate::plan::{Options, Plan};
use crate::report::{Report, RunResult};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = Options::parse();
    let mut work = tokio::task::spawn_blocking(|| run(options));
    let outcome = tokio::select! {
        outcome = &mut work => outcome,
        signal = interrupted() => {
            // The work then ends the processes that it started.
            process::stop();
            work.await.map(|_| Err(signal))
        }
    };
    match outcome.unwrap_or_else(|error| Err(error.to_string().into())) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(failure) => {
            failure.report("interop-matrix");
            ExitCode::from(2)
        }
    }
}

async fn interrupted() -> Failure {
    match Signals::new() {
        Ok(mut signals) => signals.next().await,
        Err(failure) => failure,
    }
}

/// Runs all combinations and prints the report. Returns whether all outcomes are as expected.
fn run(options: Options) -> Result<bool, Failure> {
    let (json, jobs) = (options.json.clone(), options.jobs);
    let plan = Plan::make(options)?;
    let mut report = Report::new(&plan);
    let combinations = combinations(&plan, &mut report);
    let mut peers: Vec<_> = combinations.iter().map(|(peer, _)| *peer).collect();
    peers.dedup();
    // Asking for the name is a call of the control.
    for peer in peers.into_iter().filter(|_| plan.controls) {
        report.name(peer, combination::name(&plan, peer));
    }
    let (left, (sender, finished)) = (Mutex::new(combinations.into_iter()), channel());
    thread::scope(|scope| {
        for _ in 0..jobs {
            let (plan, left, sender) = (&plan, &left, sender.clone());
            let next = || lock(left).next();
            scope.spawn(move || {
                while process::fail_if_stopped().is_ok()
                    && let Some((peer, direction)) = next()
                {
                    let _ = sender.send(run_one(plan, peer, direction));
                }
            });
        }
        drop(sender);
        finished.iter().try_for_each(|result| process::fail_if_stopped().map(|()| report.add(result)))
    })?;
    report.judge();
    report.print();
    if let Some(path) = json {
        report.write(&path)?;
    }
    Ok(report.as_expected())
}

/// Returns the combinations to run, and adds the peers that can't run to `report`.
fn combinations(plan: &Plan, report: &mut Report) -> Vec<(Peer, Direction)> {
    let mut combinations = Vec::new();
    for peer in &plan.peers {
        if let Some(reason) = peer.unavailable(&plan.paths) {
            report.skip(*peer, reason);
            continue;
        }
        let directions = plan.directions.iter().filter(|direction| peer.takes_part_in(**direction));
        combinations.extend(directions.map(|direction| (*peer, *direction)));
    }
    combinations
}

/// Runs all cases of one peer in one direction.
fn run_one(plan: &Plan, peer: Peer, direction: Direction) -> RunResult {
    let started = Instant::now();
    let results = combination::run(plan, peer, direction).unwrap_or_else(|error| {
        let reason = error.with_causes();
        let cases = plan.cases(peer, direction).into_iter();
        cases.map(|case| (case, Outcome::Failed(reason.clone()))).collect()
    });
    RunResult { peer, direction, results, seconds: started.elapsed().as_secs_f64() }
}
