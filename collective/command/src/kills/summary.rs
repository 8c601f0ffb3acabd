//! What many trials have shown.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IsTerminal as _, Write as _};

use serde::Serialize;
use tonic_rdma_commands::Failure;

use super::rank::STOPPED;
use super::said::Said;
use super::trial::{COMBINATIONS, Loss, Trial};
use crate::statistics::median;

/// The most faults that a summary keeps as text.
const FAULTS: usize = 20;

/// What the ranks of one group of processes said.
#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) said: Vec<Said>,
    pub(super) failures: Vec<String>,
    pub(super) fault: Option<String>,
    pub(super) hang: bool,
}

impl Heard {
    /// Returns the fingerprints of a fresh group, which all of its ranks must have.
    pub(super) fn fresh(&self, ranks: usize) -> Result<Vec<u64>, String> {
        if let Some(fault) = self.fault.iter().chain(&self.failures).next() {
            return Err(fault.clone());
        }
        let mut all = Vec::new();
        for said in &self.said {
            if let Said::Works { trial: None, hashes, wrong, .. } = said {
                if *wrong > 0 {
                    return Err(format!("{wrong} wrong elements"));
                }
                all.push(hashes.clone());
            }
        }
        match all.first() {
            Some(first) if all.len() == ranks && all.iter().all(|hashes| hashes == first) => {
                Ok(first.clone())
            }
            _ => Err("its ranks have different results".to_owned()),
        }
    }
}

/// The figures of all trials.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    loss: Loss,
    most_ranks: usize,
    trials: u64,
    /// Trials in which a result differs from that of a fresh group.
    wrong_results: u64,
    /// Trials in which a survivor did not name the lost rank.
    named_wrongly: u64,
    hangs: u64,
    /// Trials that failed in another way.
    failed: u64,
    /// Stopped ranks that were not told that they are excluded.
    not_excluded: u64,
    /// The slowest survivor of each trial, in ms from the loss.
    notice_ms: Vec<f64>,
    continue_ms: Vec<f64>,
    /// Steps before which a rank was lost: size, combination, step, number of steps.
    #[serde(skip)]
    reached: BTreeSet<(usize, usize, u32)>,
    #[serde(skip)]
    steps: BTreeMap<(usize, usize), BTreeSet<u32>>,
    faults: Vec<String>,
}

impl Summary {
    pub(super) fn new(loss: Loss, most_ranks: usize) -> Self {
        Self {
            loss,
            most_ranks,
            trials: 0,
            wrong_results: 0,
            named_wrongly: 0,
            hangs: 0,
            failed: 0,
            not_excluded: 0,
            notice_ms: Vec::new(),
            continue_ms: Vec::new(),
            reached: BTreeSet::new(),
            steps: BTreeMap::new(),
            faults: Vec::new(),
        }
    }

    fn note(&mut self, trial: Trial, text: &str) {
        if self.faults.len() < FAULTS {
            let combination = COMBINATIONS[trial.combination()];
            let (number, victim, size) = (trial.number, trial.victim(), trial.size);
            self.faults.push(format!(
                "trial {number}, {} {}, rank {victim} of {size} lost: {text}",
                combination.algorithm, combination.messages
            ));
        }
    }

    /// Judges a trial by what the ranks said.
    pub(super) fn add(&mut self, trial: Trial, heard: &Heard, fresh: &BTreeMap<usize, Vec<u64>>) {
        self.trials += 1;
        let number = trial.number;
        let gone = heard.said.iter().find_map(|said| match said {
            Said::Gone { trial, at, step, steps } if *trial == number => Some((*at, *step, *steps)),
            _ => None,
        });
        let Some((at, step, steps)) = gone else {
            self.lacks(trial, heard, "the rank was not lost");
            return;
        };
        let pair = (trial.size, trial.combination());
        self.reached.insert((pair.0, pair.1, step));
        self.steps.entry(pair).or_default().insert(steps);
        let milliseconds = |then: u64| then.saturating_sub(at) as f64 / 1e6;
        let (mut noticed, mut works) = (Vec::new(), Vec::new());
        let (mut named_wrongly, mut wrong, mut resumed) = (None, None, None);
        for said in &heard.said {
            match said {
                Said::Noticed { trial, at, named, error } if *trial == number => {
                    noticed.push(milliseconds(*at));
                    if !named {
                        named_wrongly = Some(error.clone());
                    }
                }
                Said::Works { trial: Some(trial), size, first_result, hashes, wrong: elements }
                    if *trial == number =>
                {
                    works.push(milliseconds(*first_result));
                    if *elements > 0 {
                        wrong = Some(format!("{elements} wrong elements"));
                    } else if fresh.get(size) != Some(hashes) {
                        wrong = Some("the results are not those of a fresh group".to_owned());
                    }
                }
                Said::Differs { trial, combination } if *trial == number => {
                    wrong = Some(format!("a result of {:?} changed", COMBINATIONS[*combination]));
                }
                Said::Resumed { trial, excluded, error } if *trial == number => {
                    resumed = Some((*excluded, error.clone()));
                }
                _ => {}
            }
        }
        if let Some(text) = wrong {
            self.wrong_results += 1;
            self.note(trial, &text);
        }
        if let Some(text) = named_wrongly {
            self.named_wrongly += 1;
            self.note(trial, &format!("named wrongly: {text}"));
        }
        if noticed.len() != trial.size - 1 || works.len() != trial.size - 1 {
            let text = format!("{} ranks noticed it, {} went on", noticed.len(), works.len());
            self.lacks(trial, heard, &text);
            return;
        }
        if self.loss == Loss::Stop && !matches!(resumed, Some((true, _))) {
            self.not_excluded += 1;
            self.note(trial, &format!("not told that it is excluded: {resumed:?}"));
        }
        self.notice_ms.push(noticed.into_iter().fold(0.0, f64::max));
        self.continue_ms.push(works.into_iter().fold(0.0, f64::max));
    }

    fn lacks(&mut self, trial: Trial, heard: &Heard, text: &str) {
        if heard.hang {
            self.hangs += 1;
        } else {
            self.failed += 1;
        }
        // The first reason is the cause of the others.
        let reason = heard.failures.iter().chain(&heard.fault).next();
        self.note(trial, &format!("{text}; {}", reason.map_or("no reason is known", String::as_str)));
    }

    /// Returns what is wrong, if something is.
    pub(super) fn fault(&self) -> Option<String> {
        let bad = self.wrong_results + self.named_wrongly + self.hangs + self.failed + self.not_excluded;
        (bad > 0).then(|| format!("{bad} faults in {} trials", self.trials))
    }

    /// Says on a terminal how far the trials are.
    pub(super) fn announce(&self, done: u64, trials: u64) {
        let mut stderr = io::stderr();
        if stderr.is_terminal() || done == trials {
            // The trials go on if stderr is closed.
            let _ = writeln!(stderr, "{done} of {trials} trials");
        }
    }

    /// Returns how many steps there are, of all sizes and combinations, with the end of each operation.
    fn all_steps(&self) -> usize {
        self.steps
            .values()
            .map(|steps| {
                steps.iter().filter(|steps| **steps != u32::MAX).max().map_or(1, |most| *most as usize + 1)
            })
            .sum()
    }

    /// Prints the figures.
    pub(super) fn show(&self) -> Result<(), Failure> {
        let within = |values: &[f64], limit: f64| values.iter().filter(|value| **value <= limit).count();
        let line = |values: &[f64]| {
            let worst = values.iter().copied().fold(0.0, f64::max);
            let middle = if values.is_empty() { 0.0 } else { median(values) };
            format!("median {middle:.1} ms, worst {worst:.1} ms")
        };
        let stopped = STOPPED.as_secs_f64() * 1e3;
        // A stopped rank is noticed at the deadline, and the next group comes at most a second later.
        let (what, notice, working) = match self.loss {
            Loss::Kill => ("killed", 100.0, 1000.0),
            Loss::Stop => ("stopped", stopped + 250.0, stopped + 1250.0),
        };
        let mut text = format!(
            "ranks {what}: {}, in groups of 2 to {}, before {} of {} steps\n",
            self.trials,
            self.most_ranks,
            self.reached.len(),
            self.all_steps()
        );
        text += &format!(
            "  wrong results {}, named wrongly {}, hangs {}, other failures {}\n",
            self.wrong_results, self.named_wrongly, self.hangs, self.failed
        );
        if self.loss == Loss::Stop {
            text += &format!("  not told that they are excluded: {}\n", self.not_excluded);
        }
        let known = within(&self.notice_ms, notice);
        text += &format!("  known by all survivors: {}; {known} within {notice} ms\n", line(&self.notice_ms));
        let count = within(&self.continue_ms, working);
        text += &format!(
            "  first result of all survivors: {}; {count} within {working} ms\n",
            line(&self.continue_ms)
        );
        for fault in &self.faults {
            text += &format!("  {fault}\n");
        }
        let mut stdout = io::stdout().lock();
        stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.flush())
            .map_err(|error| Failure::output(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIAL: Trial = Trial { number: 0, size: 2 };

    fn heard(hashes: u64, named: bool) -> Heard {
        let said = vec![
            Said::Gone { trial: 0, at: 1_000_000, step: 1, steps: 3 },
            Said::Noticed { trial: 0, at: 3_000_000, named, error: "rank 1".to_owned() },
            Said::Works { trial: Some(0), size: 1, first_result: 9_000_000, hashes: vec![hashes], wrong: 0 },
        ];
        Heard { said, ..Heard::default() }
    }

    #[test]
    fn trials_are_judged() {
        let fresh = BTreeMap::from([(1, vec![7])]);
        let judged = |heard: &Heard| {
            let mut summary = Summary::new(Loss::Kill, 2);
            summary.add(TRIAL, heard, &fresh);
            summary
        };
        let good = judged(&heard(7, true));
        assert_eq!((good.fault(), good.notice_ms, good.continue_ms), (None, vec![2.0], vec![8.0]));
        assert_eq!(judged(&heard(8, true)).wrong_results, 1);
        assert_eq!(judged(&heard(7, false)).named_wrongly, 1);
        assert_eq!(judged(&Heard { hang: true, ..Heard::default() }).hangs, 1);
        let mut silent = heard(7, true);
        silent.said.pop();
        assert_eq!(judged(&silent).failed, 1);
    }

    #[test]
    fn ranks_of_a_fresh_group_have_equal_results() {
        let works =
            |hash| Said::Works { trial: None, size: 2, first_result: 0, hashes: vec![hash], wrong: 0 };
        let of = |said| Heard { said, ..Heard::default() }.fresh(2);
        assert_eq!(of(vec![works(1), works(1)]), Ok(vec![1]));
        assert!(of(vec![works(1), works(2)]).is_err() && of(vec![works(1)]).is_err());
    }
}
