//! Losses of ranks: `--kills` and `--stops`.
//!
//! Ranks reduce operands whose sums depend on the order of additions. In each trial one rank kills or stops itself before a certain
//! step of a certain algorithm. The others say when they noticed it, shrink the group, and reduce all combinations of algorithms and
//! kinds of messages. All bits of the results must be those of a fresh group of that size. One group of processes serves many trials.

mod content;
mod rank;
mod said;
mod schedule;
mod summary;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use rustix::process::Signal;

pub(crate) use self::rank::work_as_child;
pub(crate) use self::said::Said;
pub(crate) use self::trial::Batch;

use self::schedule::Schedule;
use self::summary::{Fresh, Heard, Summary};
use self::trial::Loss;
use crate::launch::{Event, Processes, places};
use crate::options::Options;
use crate::report::Report;
use tonic_rdma_commands::{Failure, output};

/// The longest time without a message of any rank. Only a hang takes so long.
const SILENCE: Duration = Duration::from_secs(60);
/// The numbers of ranks of which one is lost, unless `--ranks` says otherwise.
const RANKS: std::ops::RangeInclusive<usize> = 2..=8;

/// Carries out the trials that the options ask for.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let sizes: BTreeSet<usize> = match &options.ranks {
        Some(list) => list.0.iter().copied().collect(),
        None => RANKS.collect(),
    };
    let sizes: Vec<usize> = sizes.into_iter().collect();
    if sizes.iter().any(|ranks| *ranks < 2) {
        return Err(Failure::usage("--ranks: a rank can be lost only where there are 2 or more"));
    }
    let algorithms = options.lossy_algorithms()?;
    let mut summaries = Vec::new();
    for (loss, trials) in [(Loss::Kill, options.kills), (Loss::Stop, options.stops)] {
        if let Some(trials) = trials {
            let fresh = fresh(loss, sizes.last().copied().unwrap_or(0))?;
            let steps = fresh.iter().map(|(size, fresh)| (*size, fresh.steps.clone())).collect();
            let schedule = Schedule::new(loss, trials, &sizes, &algorithms, &steps);
            summaries.push(lose(loss, schedule, &fresh));
        }
    }
    if let Some(file) = &options.json {
        output::write_json(file, &summaries)?;
    }
    for summary in &summaries {
        output::print(&summary.render(), options.json.as_deref())?;
    }
    match summaries.iter().find_map(Summary::fault) {
        Some(fault) => Err(Failure::run(fault)),
        None => Ok(()),
    }
}

/// Asks fresh groups of up to `most` ranks for their results.
fn fresh(loss: Loss, most: usize) -> Result<BTreeMap<usize, Fresh>, Failure> {
    let of = |size| {
        let heard = batch(size, &Batch { loss, trials: Vec::new() });
        let said = heard.fresh(size);
        said.map(|fresh| (size, fresh))
            .map_err(|fault| Failure::run(format!("a fresh group of {size} ranks: {fault}")))
    };
    (1..=most).map(of).collect()
}

fn lose(loss: Loss, mut schedule: Schedule, fresh: &BTreeMap<usize, Fresh>) -> Summary {
    let mut summary = Summary::new(loss);
    let mut done = 0;
    while let Some(next) = schedule.batch() {
        let ranks = next.trials.first().map_or(0, |trial| trial.size);
        let heard = batch(ranks, &next);
        for trial in &next.trials {
            summary.add(*trial, &heard, fresh);
        }
        done += next.trials.len() as u64;
        announce(done, schedule.trials());
    }
    summary.end(&schedule);
    summary
}

/// Says on a terminal how far the trials are.
fn announce(done: u64, trials: u64) {
    let mut stderr = io::stderr();
    if stderr.is_terminal() || done == trials {
        // The trials go on if stderr is closed.
        let _ = writeln!(stderr, "{done} of {trials} trials");
    }
}

/// Starts ranks, and collects what they say until all have ended.
fn batch(ranks: usize, batch: &Batch) -> Heard {
    let mut heard = Heard::default();
    if let Err(failure) = collect(ranks, batch, &mut heard) {
        heard.fault = Some(failure.with_causes());
    }
    heard
}

fn collect(ranks: usize, batch: &Batch, heard: &mut Heard) -> Result<(), Failure> {
    let mut places = places(ranks, 1, None)?;
    places.iter_mut().for_each(|place| place.batch = Some(batch.clone()));
    let mut processes = Processes::start(&places)?;
    let mut ended = 0;
    let mut stopped = BTreeMap::new();
    while ended < ranks {
        match processes.next(SILENCE) {
            Some(Event::Report(rank, Report::Trial(said))) => {
                match &said {
                    Said::Gone { trial, .. } if batch.loss == Loss::Stop => {
                        let size = batch.trials.iter().find(|it| it.number == *trial).map_or(1, |it| it.size);
                        stopped.insert(*trial, (rank, size - 1));
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
