//! The work of one rank of a batch of trials.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tokio::runtime::Runtime;
use tonic_rdma_collective::{CollectiveError, Communicator, Launch, PlanChoice, Reduction};
use tonic_rdma_commands::Failure;

use super::content;
use super::said::Said;
use super::trial::{Batch, COMBINATIONS, END, Loss, Trial, plans};
use crate::launch::Place;
use crate::rank::{config, now};
use crate::report::Report;

/// The deadline of an operation where a rank is killed: only a hang takes so long.
const HANG: Duration = Duration::from_secs(20);
/// The deadline of an operation where a rank is stopped.
pub(super) const STOPPED: Duration = Duration::from_secs(1);
/// How long the last survivors stay after the last rank was stopped.
const LINGER: Duration = Duration::from_secs(3);
/// Operations after the one in which a rank is lost. The survivors notice long before.
const AFTER: u64 = 1_000;

/// Works as a rank that this command started.
pub(crate) fn work_as_child(place: &Place, batch: &Batch) -> Result<(), Failure> {
    match work(place, batch) {
        Ok(()) => report(&Report::Done { wrong: 0 }),
        Err(failure) => report(&Report::Failed { reason: failure.with_causes() }),
    }
}

fn work(place: &Place, batch: &Batch) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|error| Failure::run("can't start the runtime").because(error))?;
    let address = place.addresses.first().cloned().unwrap_or_default();
    let limit = if batch.loss == Loss::Kill { HANG } else { STOPPED };
    let builder =
        Communicator::builder().config(config()?).plans(PlanChoice::Pinned(plans()?)).deadline(limit);
    let builder = builder.launch(Launch::new(place.rank, place.size, address));
    let mut communicator = runtime
        .block_on(builder.connect())
        .map_err(|error| Failure::run(format!("rank {} can't meet the others", place.rank)).because(error))?;
    if batch.trials.is_empty() {
        say(Said::Steps { rank: communicator.rank(), steps: steps(&communicator)? })?;
    }
    let mut hashes = results(&communicator, None, 0)?;
    for trial in &batch.trials {
        let (trial, number) = (*trial, trial.number);
        let error = lose(&communicator, trial, batch.loss, &hashes)?;
        let stopped = batch.loss == Loss::Stop && communicator.rank() == trial.victim;
        communicator = match shrink(&runtime, &communicator) {
            Err(error) if stopped => {
                let excluded = matches!(error, CollectiveError::Excluded { .. });
                return say(Said::Resumed { trial: number, excluded, error: error.to_string() });
            }
            Ok(_) if stopped => {
                let error = "it is in the new group".to_owned();
                return say(Said::Resumed { trial: number, excluded: false, error });
            }
            result => result.map_err(|failed| {
                Failure::run(format!("trial {number}: no group of survivors after {error:?}")).because(failed)
            })?,
        };
        hashes = results(&communicator, Some(number), trial.combination)?;
    }
    let end = communicator.barrier().wait();
    end.map(drop).map_err(|error| Failure::run("the last barrier").because(error))?;
    if batch.loss == Loss::Stop && !batch.trials.is_empty() {
        // A rank that goes on now has to find the group without it, and not its end.
        std::thread::sleep(LINGER);
    }
    Ok(())
}

fn shrink(runtime: &Runtime, communicator: &Communicator) -> Result<Communicator, CollectiveError> {
    runtime.block_on(communicator.shrink())
}

/// Returns the steps of this rank in each combination.
fn steps(communicator: &Communicator) -> Result<Vec<u32>, Failure> {
    let seen = Arc::new(AtomicU32::new(0));
    let watched = Arc::clone(&seen);
    communicator.watch_steps(move |place| watched.store(place.steps, Ordering::Relaxed));
    let mut all = Vec::new();
    for combination in 0..COMBINATIONS.len() {
        seen.store(0, Ordering::Relaxed);
        reduce(communicator, combination, true)
            .map_err(|error| Failure::run(format!("combination {combination}")).because(error))?;
        all.push(seen.load(Ordering::Relaxed));
    }
    communicator.watch_steps(|_| {});
    Ok(all)
}

/// Reduces each combination once, says that the group works, and returns the fingerprints of the results.
fn results(communicator: &Communicator, trial: Option<u64>, first: usize) -> Result<Vec<u64>, Failure> {
    let size = communicator.size();
    let mut hashes = vec![0; COMBINATIONS.len()];
    let (mut first_result, mut wrong) = (None, 0);
    for index in 0..COMBINATIONS.len() {
        let combination = (first + index) % COMBINATIONS.len();
        let result = reduce(communicator, combination, index.is_multiple_of(2)).map_err(|error| {
            Failure::run(format!("after trial {trial:?}, combination {combination}, {size} ranks"))
                .because(error)
        })?;
        first_result.get_or_insert_with(now);
        hashes[combination] = content::fingerprint(&result);
        wrong += content::wrong(size, &result);
    }
    let first_result = first_result.unwrap_or_default();
    say(Said::Works { trial, size, first_result, hashes: hashes.clone(), wrong })?;
    Ok(hashes)
}

/// Reduces until an operation fails because a rank is lost: this one, if it is the victim.
fn lose(
    communicator: &Communicator,
    trial: Trial,
    loss: Loss,
    hashes: &[u64],
) -> Result<CollectiveError, Failure> {
    let (number, combination) = (trial.number, trial.combination);
    let is_victim = communicator.rank() == trial.victim;
    let armed = Arc::new(AtomicBool::new(false));
    let noticed = |error: CollectiveError| {
        let named = names(&error, trial.victim);
        if !is_victim {
            say(Said::Noticed { trial: number, at: now(), named, error: error.to_string() })?;
        }
        Ok(error)
    };
    // All ranks have ended the operations before: those do not belong to this trial.
    if let Err(failed) = communicator.barrier().wait() {
        return noticed(failed.into());
    }
    if is_victim {
        let armed = Arc::clone(&armed);
        communicator.watch_steps(move |place| {
            if place.step == trial.step && armed.swap(false, Ordering::Relaxed) {
                go(loss, number, place.step);
            }
        });
    }
    for operation in 0..trial.before() + AFTER {
        let fatal = is_victim && operation == trial.before();
        armed.store(fatal, Ordering::Relaxed);
        match reduce(communicator, combination, (number + operation).is_multiple_of(2)) {
            Ok(result) if content::fingerprint(&result) != hashes[combination] => {
                say(Said::Differs { trial: number, combination })?;
            }
            Ok(_) => {}
            Err(error) => return noticed(error),
        }
        if fatal && armed.swap(false, Ordering::Relaxed) {
            go(loss, number, END);
        }
    }
    Err(Failure::run(format!("trial {number}: {AFTER} operations succeeded after a rank was lost")))
}

/// Says that this rank goes, and goes.
fn go(loss: Loss, trial: u64, step: u32) {
    let signal = match loss {
        Loss::Kill => Signal::KILL,
        Loss::Stop => Signal::STOP,
    };
    // The parent notices if this fails: the rank is then not lost.
    let _ = say(Said::Gone { trial, at: now(), step });
    let _ = kill_process(getpid(), signal);
}

/// Reduces the operands of a combination, in registered memory or in a slice.
fn reduce(
    communicator: &Communicator,
    combination: usize,
    registered: bool,
) -> Result<Vec<f32>, CollectiveError> {
    let elements = COMBINATIONS[combination].elements;
    if registered {
        let mut buffer = communicator.allocate::<f32>(elements)?;
        content::fill(communicator.rank(), &mut buffer);
        return Ok(communicator.all_reduce(buffer, Reduction::Sum).wait()?.to_vec());
    }
    let mut slice = vec![0.0; elements];
    content::fill(communicator.rank(), &mut slice);
    communicator.all_reduce(&mut slice[..], Reduction::Sum).wait()?;
    Ok(slice)
}

/// Returns whether the error says that this rank is lost.
fn names(error: &CollectiveError, lost: usize) -> bool {
    match error {
        CollectiveError::RankLost { rank, .. } | CollectiveError::Deadline { rank, .. } => *rank == lost,
        CollectiveError::Reported { message, .. } => {
            let said = |what: &str| message.contains(&format!("rank {lost} {what}"));
            said("is lost") || said("did not answer")
        }
        CollectiveError::Revoked(error) => names(error, lost),
        _ => false,
    }
}

fn say(said: Said) -> Result<(), Failure> {
    report(&Report::Trial(said))
}

/// Writes a report with one call, so that a rank that ends at once has written all of it.
fn report(report: &Report) -> Result<(), Failure> {
    let mut line =
        serde_json::to_string(report).map_err(|error| Failure::run("can't write a report").because(error))?;
    line.push('\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).map_err(|error| Failure::output(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_name_the_lost_rank_are_told_from_others() {
        let reported = |message: &str| CollectiveError::Reported { rank: 0, message: message.into() };
        assert!(names(&reported("rank 3 is lost, noticed at step 1"), 3));
        assert!(!names(&reported("rank 13 is lost"), 3));
        assert!(names(&CollectiveError::Revoked(Arc::new(reported("rank 3 did not answer"))), 3));
        assert!(!names(&CollectiveError::Setup("rank 3 is lost".into()), 3));
    }
}
