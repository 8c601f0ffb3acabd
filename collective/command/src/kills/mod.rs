//! Losses of ranks: `--kills` and `--stops`.
//!
//! Ranks reduce operands whose sums depend on the order of additions. In each trial one rank ends or stops itself before a certain
//! step. The others say when they noticed it, shrink the group, and reduce all combinations of algorithms and kinds of messages.
//! All bits of the results must be those of a fresh group of that size. One group of processes serves many trials.

mod content;
mod rank;
mod said;
mod summary;
mod trial;

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::Signal;

pub(crate) use self::rank::work_as_child;
pub(crate) use self::said::Said;
pub(crate) use self::trial::{Batch, Loss};

use self::summary::{Heard, Summary};
use self::trial::Trial;
use crate::launch::{Event, Processes, places};
use crate::options::Options;
use crate::report::Report;
use tonic_rdma_commands::Failure;

/// The longest time without a message of any rank. Only a hang takes so long.
const SILENCE: Duration = Duration::from_secs(60);
/// The ranks of a group at its start, unless `--ranks` says otherwise.
const RANKS: usize = 8;

/// Carries out the trials that the options ask for.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let numbers = options.ranks.as_ref().map_or_else(|| vec![RANKS], |list| list.0.clone());
    if numbers.iter().any(|ranks| *ranks < 2) {
        return Err(Failure::usage("--ranks: a rank can be lost only where there are 2 or more"));
    }
    let mut summaries = Vec::new();
    for (loss, trials) in [(Loss::Kill, options.kills), (Loss::Stop, options.stops)] {
        if let Some(trials) = trials {
            summaries.push(lose(loss, trials, &numbers)?);
        }
    }
    if let Some(file) = &options.json {
        let text = serde_json::to_string_pretty(&summaries)
            .map_err(|error| Failure::run("can't write the summary").because(error))?;
        std::fs::write(file, text + "\n")
            .map_err(|error| Failure::run(format!("--json {}", file.display())).because(error))?;
    }
    for summary in &summaries {
        summary.show()?;
    }
    match summaries.iter().find_map(Summary::fault) {
        Some(fault) => Err(Failure::run(fault)),
        None => Ok(()),
    }
}

fn lose(loss: Loss, trials: u64, numbers: &[usize]) -> Result<Summary, Failure> {
    let most = numbers.iter().copied().max().unwrap_or(RANKS);
    let mut fresh = BTreeMap::new();
    for size in 1..=most {
        let heard = batch(size, Batch { loss, first: 0, trials: 0 });
        match heard.fresh(size) {
            Ok(hashes) => fresh.insert(size, hashes),
            Err(fault) => return Err(Failure::run(format!("a fresh group of {size} ranks: {fault}"))),
        };
    }
    let mut summary = Summary::new(loss, most);
    let (mut first, mut turn) = (0, 0);
    while first < trials {
        let ranks = numbers[turn % numbers.len()];
        turn += 1;
        let batch_of = Batch { loss, first, trials: (ranks as u64 - 1).min(trials - first) };
        let heard = batch(ranks, batch_of);
        for index in 0..batch_of.trials {
            let trial = Trial { number: first + index, size: ranks - index as usize };
            summary.add(trial, &heard, &fresh);
        }
        first += batch_of.trials;
        summary.announce(first, trials);
    }
    Ok(summary)
}

/// Starts ranks, and collects what they say until all have ended.
fn batch(ranks: usize, batch: Batch) -> Heard {
    let mut heard = Heard::default();
    if let Err(failure) = collect(ranks, batch, &mut heard) {
        heard.fault = Some(failure.with_causes());
    }
    heard
}

fn collect(ranks: usize, batch: Batch, heard: &mut Heard) -> Result<(), Failure> {
    let mut places = places(ranks, 1, None)?;
    places.iter_mut().for_each(|place| place.batch = Some(batch));
    let mut processes = Processes::start(&places)?;
    let mut ended = 0;
    let mut stopped = BTreeMap::new();
    while ended < ranks {
        match processes.next(SILENCE) {
            Some(Event::Report(rank, Report::Trial(said))) => {
                match &said {
                    Said::Gone { trial, .. } if batch.loss == Loss::Stop => {
                        let others = ranks - 1 - (trial - batch.first) as usize;
                        stopped.insert(*trial, (rank, others));
                    }
                    Said::Works { trial: Some(trial), .. } => {
                        if let Some((rank, waiting)) = stopped.get_mut(trial) {
                            *waiting = waiting.saturating_sub(1);
                            if *waiting == 0 {
                                processes.signal(*rank, Signal::CONT)?;
                            }
                        }
                    }
                    _ => {}
                }
                heard.said.push(said);
            }
            Some(Event::Report(rank, Report::Failed { reason })) => {
                heard.failures.push(format!("rank {rank} of {ranks} at first: {reason}"));
            }
            Some(Event::Report(..)) => {}
            Some(Event::Garbage(rank, line)) => {
                heard.failures.push(format!("rank {rank} of {ranks} at first wrote {line:?}"));
            }
            Some(Event::End(_)) => ended += 1,
            None => {
                heard.hang = true;
                return Err(Failure::run(format!("no rank said anything for {} s", SILENCE.as_secs())));
            }
        }
    }
    Ok(())
}
