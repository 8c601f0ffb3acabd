//! Runs stock gRPC peers against our transport, in all directions, and reports whether all outcomes are as expected.
//!
//! Each case is compared with a control: the same case and peer over plain TCP and tonic's own transport. The outcome of the
//! case has to equal the outcome of the control ([`outcome::judge`]). If a case fails in the control too, the fault is in the peer or
//! in tonic, and the case has to be listed in [`outcome::upstream`], with the reason.
#![forbid(unsafe_code)]

mod certificates;
mod direction;
mod options;
mod outcome;
mod peer;
mod places;
mod plan;
mod report;
mod run;
mod tls;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::direction::Direction;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::peer::Peer;
use crate::places::Failure;
use crate::plan::Plan;
use crate::report::{Report, RunResult};
use crate::run::combination;

#[expect(clippy::print_stderr, reason = "a command reports its errors")]
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = tokio::select! {
        outcome = run(options) => outcome,
        // Dropping the future ends the processes that it started.
        signal = interrupted() => Err(signal),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("interop-matrix: {error}");
            ExitCode::from(2)
        }
    }
}

async fn interrupted() -> Failure {
    match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(mut interrupt), Ok(mut terminate)) => {
            tokio::select! {
                _ = interrupt.recv() => "interrupted".into(),
                _ = terminate.recv() => "terminated".into(),
            }
        }
        (Err(error), _) | (_, Err(error)) => format!("can't watch for signals: {error}").into(),
    }
}

/// Runs all combinations and prints the report. Returns whether all outcomes are as expected.
async fn run(options: Options) -> Result<bool, Failure> {
    let json = options.json.clone();
    let jobs = options.jobs;
    let plan = Arc::new(Plan::make(options).await?);
    let mut report = Report::new(&plan);
    let combinations = combinations(&plan, &mut report);
    let mut peers: Vec<_> = combinations.iter().map(|(peer, _)| *peer).collect();
    peers.dedup();
    // Asking for the name is a call of the control.
    for peer in peers.into_iter().filter(|_| plan.controls) {
        report.name(peer, combination::name(&plan, peer).await);
    }
    let slots = Arc::new(Semaphore::new(jobs));
    let mut running = JoinSet::new();
    for (peer, direction) in combinations {
        let (plan, slots) = (Arc::clone(&plan), Arc::clone(&slots));
        running.spawn(async move {
            let _slot = slots.acquire_owned().await?;
            Ok::<RunResult, Failure>(run_one(&plan, peer, direction).await)
        });
    }
    while let Some(finished) = running.join_next().await {
        report.add(finished??);
    }
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
        if let Some(reason) = peer.unavailable(&plan.places) {
            report.skip(*peer, reason);
            continue;
        }
        let directions = plan.directions.iter().filter(|direction| peer.takes_part_in(**direction));
        combinations.extend(directions.map(|direction| (*peer, *direction)));
    }
    combinations
}

/// Runs all cases of one peer in one direction.
async fn run_one(plan: &Plan, peer: Peer, direction: Direction) -> RunResult {
    let started = std::time::Instant::now();
    let results = match combination::run(plan, peer, direction).await {
        Ok(results) => results,
        Err(error) => {
            let reason = error.to_string();
            let cases = plan.cases(peer, direction).into_iter();
            cases.map(|case| (case, Outcome::Failed(reason.clone()))).collect()
        }
    };
    RunResult { peer, direction, results, seconds: started.elapsed().as_secs_f64() }
}
