//! Runs stock gRPC peers against our transport, in all directions, and tells whether all went as expected.
//!
//! Each case is held against a control: the same peer, plain TCP, tonic's own transport. It has to come out as it does there
//! ([`compare`]). What fails there too is the peer's or tonic's, and has to be known to [`upstream`], with the reason.
#![forbid(unsafe_code)]

mod bridge;
mod certificates;
mod compare;
mod direction;
mod options;
mod outcome;
mod peer;
mod process;
mod report;
mod stage;
mod tls;
mod upstream;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::direction::Direction;
use crate::options::{Options, Plan};
use crate::outcome::Outcome;
use crate::peer::Peer;
use crate::report::{Report, Run};

/// What kept the matrix from being run.
type Failure = Box<dyn std::error::Error + Send + Sync>;

#[expect(clippy::print_stderr, reason = "a command says what went wrong")]
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = tokio::select! {
        outcome = run(options) => outcome,
        // What was started ends with the future that held it.
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

/// Runs all that was asked for and prints what came of it: whether that is as expected.
async fn run(options: Options) -> Result<bool, Failure> {
    let json = options.json.clone();
    let jobs = options.jobs;
    let plan = Arc::new(Plan::make(options).await?);
    let mut report = Report::new(&plan);
    let combinations = combinations(&plan, &mut report);
    let mut peers: Vec<_> = combinations.iter().map(|(peer, _)| *peer).collect();
    peers.dedup();
    // It is a call of the control's.
    for peer in peers.into_iter().filter(|_| plan.controls) {
        report.name(peer, stage::name(&plan, peer).await.map_err(|error| error.to_string()));
    }
    let turns = Arc::new(Semaphore::new(jobs));
    let mut running = JoinSet::new();
    for (peer, direction) in combinations {
        let (plan, turns) = (Arc::clone(&plan), Arc::clone(&turns));
        running.spawn(async move {
            let _turn = turns.acquire_owned().await?;
            Ok::<Run, Failure>(one(&plan, peer, direction).await)
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

/// What runs, and in `report` the peers that can't.
fn combinations(plan: &Plan, report: &mut Report) -> Vec<(Peer, Direction)> {
    let mut combinations = Vec::new();
    for peer in &plan.peers {
        if let Some(reason) = peer.unavailable(plan) {
            report.skip(*peer, reason);
            continue;
        }
        let directions = plan.directions.iter().filter(|direction| direction.suits(*peer));
        combinations.extend(directions.map(|direction| (*peer, *direction)));
    }
    combinations
}

/// All cases of one peer in one direction.
async fn one(plan: &Plan, peer: Peer, direction: Direction) -> Run {
    let started = std::time::Instant::now();
    let results = match stage::run(plan, peer, direction).await {
        Ok(results) => results,
        Err(error) => {
            let reason = error.to_string();
            let cases = plan.cases(peer, direction).into_iter();
            cases.map(|case| (case, Outcome::Failed(reason.clone()))).collect()
        }
    };
    Run { peer, direction, results, seconds: started.elapsed().as_secs_f64() }
}
