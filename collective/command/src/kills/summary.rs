//! What many trials have shown.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Serialize, Serializer};
use tonic_rdma_commands::table::grid;

use super::rank::STOPPED;
use super::said::Said;
use super::schedule::{Schedule, Steps};
use super::trial::{COMBINATIONS, Loss, Trial};
use crate::choices::{Algorithm, Named as _};
use crate::statistics::{median, p99};

/// The most faults that a summary keeps as text.
const FAULTS: usize = 20;

/// What a fresh group has: the fingerprints of its results, and the steps of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fresh {
    pub(super) hashes: Vec<u64>,
    pub(super) steps: Steps,
}

/// What the ranks of one group of processes said.
#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) said: Vec<Said>,
    pub(super) failures: Vec<String>,
    pub(super) fault: Option<String>,
    pub(super) hang: bool,
}

impl Heard {
    /// Returns what a fresh group has. All of its ranks must have the same results.
    pub(super) fn fresh(&self, ranks: usize) -> Result<Fresh, String> {
        if let Some(fault) = self.fault.iter().chain(&self.failures).next() {
            return Err(fault.clone());
        }
        let (mut all, mut steps) = (Vec::new(), BTreeMap::new());
        for said in &self.said {
            match said {
                Said::Works { trial: None, wrong, .. } if *wrong > 0 => {
                    return Err(format!("{wrong} wrong elements"));
                }
                Said::Works { trial: None, hashes, .. } => all.push(hashes.clone()),
                Said::Steps { rank, steps: of_rank } => {
                    steps.insert(*rank, of_rank.clone());
                }
                _ => {}
            }
        }
        match all.first() {
            Some(first) if all.len() == ranks && all.iter().all(|hashes| hashes == first) => {}
            _ => return Err("its ranks have different results".to_owned()),
        }
        match steps.len() == ranks {
            true => Ok(Fresh { hashes: all.swap_remove(0), steps: steps.into_values().collect() }),
            false => Err(format!("{} of its ranks told their steps", steps.len())),
        }
    }
}

/// Times in ms, which are shown by their median, 99 % and maximum.
#[derive(Clone, Debug, Default, PartialEq)]
struct Times(Vec<f64>);

impl Times {
    fn figures(&self) -> [f64; 3] {
        [median(&self.0), p99(&self.0), self.0.iter().copied().fold(0.0, f64::max)]
    }

    fn texts(&self) -> [String; 3] {
        self.figures().map(|value| if self.0.is_empty() { "–".to_owned() } else { format!("{value:.1}") })
    }

    fn within(&self, limit: f64) -> usize {
        self.0.iter().filter(|value| **value <= limit).count()
    }
}

impl Serialize for Times {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let [p50, p99, max] = self.figures();
        BTreeMap::from([("p50", p50), ("p99", p99), ("max", max)]).serialize(serializer)
    }
}

/// The figures of the trials with one algorithm and one number of ranks.
#[derive(Debug, Default, Serialize)]
struct Row {
    trials: u64,
    /// Steps before which a rank was lost, of all kinds of messages, with the end of the operation.
    steps_reached: usize,
    /// All such steps.
    steps: usize,
    /// The slowest survivor of each trial, from the loss to its knowledge of it.
    known_ms: Times,
    /// The slowest survivor of each trial, from the loss to its first result in the new group.
    continued_ms: Times,
    /// Trials in which a result differs from that of a fresh group.
    wrong_results: u64,
    /// Trials in which a survivor did not name the lost rank.
    named_wrongly: u64,
    hangs: u64,
    /// Trials that failed in another way.
    failed: u64,
    /// Stopped ranks that were not told that they are excluded.
    not_excluded: u64,
    /// Combinations and steps.
    #[serde(skip)]
    reached: BTreeSet<(usize, u32)>,
}

impl Row {
    const fn bad(&self) -> u64 {
        self.wrong_results + self.named_wrongly + self.hangs + self.failed + self.not_excluded
    }
}

/// A row with its place in the table, for JSON.
#[derive(Serialize)]
struct Placed<'a> {
    algorithm: Algorithm,
    ranks: usize,
    #[serde(flatten)]
    row: &'a Row,
}

/// The figures of all trials.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    loss: Loss,
    trials: u64,
    #[serde(serialize_with = "placed")]
    rows: BTreeMap<(Algorithm, usize), Row>,
    faults: Vec<String>,
}

fn placed<S: Serializer>(rows: &BTreeMap<(Algorithm, usize), Row>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rows.iter().map(|((algorithm, ranks), row)| Placed {
        algorithm: *algorithm,
        ranks: *ranks,
        row,
    }))
}

impl Summary {
    pub(super) fn new(loss: Loss) -> Self {
        Self { loss, trials: 0, rows: BTreeMap::new(), faults: Vec::new() }
    }

    fn note(&mut self, trial: Trial, text: &str) {
        if self.faults.len() < FAULTS {
            let combination = COMBINATIONS[trial.combination];
            let Trial { number, size, victim, step, .. } = trial;
            let (algorithm, messages) = (combination.algorithm.name(), combination.messages);
            self.faults.push(format!(
                "trial {number}, {algorithm} {messages}, rank {victim} of {size} lost before step {step}: {text}"
            ));
        }
    }

    fn row(&mut self, trial: Trial) -> &mut Row {
        self.rows.entry((COMBINATIONS[trial.combination].algorithm, trial.size)).or_default()
    }

    /// Judges a trial by what the ranks said.
    pub(super) fn add(&mut self, trial: Trial, heard: &Heard, fresh: &BTreeMap<usize, Fresh>) {
        self.trials += 1;
        self.row(trial).trials += 1;
        let number = trial.number;
        let gone = heard.said.iter().find_map(|said| match said {
            Said::Gone { trial, at, step } if *trial == number => Some((*at, *step)),
            _ => None,
        });
        let Some((at, step)) = gone else {
            self.lacks(trial, heard, "the rank was not lost");
            return;
        };
        self.row(trial).reached.insert((trial.combination, step));
        if step != trial.step {
            self.row(trial).failed += 1;
            self.note(trial, "the rank was lost before another step, or at the end");
        }
        let milliseconds = |then: u64| then.saturating_sub(at) as f64 / 1e6;
        let (mut known, mut works) = (Vec::new(), Vec::new());
        let (mut named_wrongly, mut wrong, mut resumed) = (None, None, None);
        for said in &heard.said {
            match said {
                Said::Noticed { trial, at, named, error } if *trial == number => {
                    known.push(milliseconds(*at));
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
                    } else if fresh.get(size).map(|fresh| &fresh.hashes) != Some(hashes) {
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
            self.row(trial).wrong_results += 1;
            self.note(trial, &text);
        }
        if let Some(text) = named_wrongly {
            self.row(trial).named_wrongly += 1;
            self.note(trial, &format!("named wrongly: {text}"));
        }
        if known.len() != trial.size - 1 || works.len() != trial.size - 1 {
            let text = format!("{} ranks noticed it, {} went on", known.len(), works.len());
            self.lacks(trial, heard, &text);
            return;
        }
        if self.loss == Loss::Stop && !matches!(resumed, Some((true, _))) {
            self.row(trial).not_excluded += 1;
            self.note(trial, &format!("not told that it is excluded: {resumed:?}"));
        }
        let slowest = |times: Vec<f64>| times.into_iter().fold(0.0, f64::max);
        let row = self.row(trial);
        row.known_ms.0.push(slowest(known));
        row.continued_ms.0.push(slowest(works));
    }

    fn lacks(&mut self, trial: Trial, heard: &Heard, text: &str) {
        match heard.hang {
            true => self.row(trial).hangs += 1,
            false => self.row(trial).failed += 1,
        }
        // The first reason is the cause of the others.
        let reason = heard.failures.iter().chain(&heard.fault).next();
        self.note(trial, &format!("{text}; {}", reason.map_or("no reason is known", String::as_str)));
    }

    /// Counts the steps, after the last trial.
    pub(super) fn end(&mut self, schedule: &Schedule) {
        for ((algorithm, ranks), row) in &mut self.rows {
            row.steps = schedule.steps(*algorithm, *ranks);
            row.steps_reached = row.reached.len();
        }
    }

    /// Returns what is wrong, if something is.
    pub(super) fn fault(&self) -> Option<String> {
        let bad: u64 = self.rows.values().map(Row::bad).sum();
        (bad > 0).then(|| format!("{bad} faults in {} trials", self.trials))
    }

    /// Returns the figures as text.
    pub(super) fn render(&self) -> String {
        let stopped = STOPPED.as_secs_f64() * 1e3;
        // A stopped rank is noticed at the deadline, and the next group comes at most a second later.
        let (what, known, continued) = match self.loss {
            Loss::Kill => ("killed", 100.0, 1000.0),
            Loss::Stop => ("stopped", stopped + 250.0, stopped + 1250.0),
        };
        let mut text = format!("{}\n{LEGEND}\n", self.table());
        let sum = |of: fn(&Row) -> u64| self.rows.values().map(of).sum::<u64>();
        let (reached, steps) = (sum(|row| row.steps_reached as u64), sum(|row| row.steps as u64));
        text += &format!("ranks {what}: {}, before {reached} of {steps} steps\n", self.trials);
        text += &format!(
            "  wrong results {}, named wrongly {}, hangs {}, other failures {}\n",
            sum(|row| row.wrong_results),
            sum(|row| row.named_wrongly),
            sum(|row| row.hangs),
            sum(|row| row.failed)
        );
        if self.loss == Loss::Stop {
            text += &format!("  not told that they are excluded: {}\n", sum(|row| row.not_excluded));
        }
        for (what, limit, of) in [
            ("known by all survivors", known, (|row| &row.known_ms) as fn(&Row) -> &Times),
            ("first result of all survivors", continued, |row| &row.continued_ms),
        ] {
            let all = Times(self.rows.values().flat_map(|row| of(row).0.iter().copied()).collect());
            let [middle, most, worst] = all.figures();
            text += &format!(
                "  {what}: median {middle:.1} ms, 99 % {most:.1} ms, worst {worst:.1} ms; {} within {limit} ms\n",
                all.within(limit)
            );
        }
        for fault in &self.faults {
            text += &format!("  {fault}\n");
        }
        text
    }

    fn table(&self) -> String {
        let lost = match self.loss {
            Loss::Kill => "kills",
            Loss::Stop => "stops",
        };
        let headings = [
            "algorithm",
            "ranks",
            lost,
            "steps",
            "known p50",
            "p99",
            "max",
            "goes on p50",
            "p99",
            "max",
            "wrong",
            "hangs",
            "other",
        ];
        let line = |algorithm: Algorithm, ranks: usize, row: &Row| {
            let mut line = vec![algorithm.name().to_owned(), ranks.to_string(), row.trials.to_string()];
            line.push(format!("{}/{}", row.steps_reached, row.steps));
            line.extend(row.known_ms.texts());
            line.extend(row.continued_ms.texts());
            line.extend([row.wrong_results, row.hangs].map(|count| count.to_string()));
            line.push((row.bad() - row.wrong_results - row.hangs).to_string());
            line
        };
        let rows: Vec<_> = self.rows.iter().collect();
        let groups = rows.chunk_by(|one, next| one.0.0 == next.0.0);
        grid(
            &headings,
            groups.map(|group| {
                group.iter().map(|((algorithm, ranks), row)| line(*algorithm, *ranks, row)).collect()
            }),
        )
        .to_string()
    }
}

const LEGEND: &str = "Times in ms, from the loss of a rank to the slowest survivor: until it knows, and until it has a result \
                      of the new group.\nsteps: before how many of all steps and ends of operations a rank was lost.";

#[cfg(test)]
mod tests {
    use super::*;

    const TRIAL: Trial = Trial { number: 0, size: 2, combination: 2, victim: 1, step: 1 };

    fn heard(hashes: u64, named: bool) -> Heard {
        let said = vec![
            Said::Gone { trial: 0, at: 1_000_000, step: 1 },
            Said::Noticed { trial: 0, at: 3_000_000, named, error: "rank 1".to_owned() },
            Said::Works { trial: Some(0), size: 1, first_result: 9_000_000, hashes: vec![hashes], wrong: 0 },
        ];
        Heard { said, ..Heard::default() }
    }

    fn judged(heard: &Heard) -> Summary {
        let fresh = BTreeMap::from([(1, Fresh { hashes: vec![7], steps: Vec::new() })]);
        let mut summary = Summary::new(Loss::Kill);
        summary.add(TRIAL, heard, &fresh);
        summary
    }

    #[test]
    fn trials_are_judged() {
        let row = |heard: &Heard| judged(heard).rows.remove(&(Algorithm::Ring, 2)).unwrap();
        let good = row(&heard(7, true));
        assert_eq!((good.bad(), good.known_ms, good.continued_ms), (0, Times(vec![2.0]), Times(vec![8.0])));
        assert_eq!(row(&heard(8, true)).wrong_results, 1);
        assert_eq!(row(&heard(7, false)).named_wrongly, 1);
        assert_eq!(row(&Heard { hang: true, ..Heard::default() }).hangs, 1);
        let mut silent = heard(7, true);
        silent.said.pop();
        assert_eq!(row(&silent).failed, 1);
        assert!(judged(&silent).fault().unwrap().contains("1 faults in 1 trials"));
    }

    #[test]
    fn the_table_and_the_json_have_a_row_for_each_algorithm_and_number_of_ranks() {
        let summary = judged(&heard(7, true));
        let text = summary.render();
        for part in ["known p50", "ring", "ranks killed: 1", "worst 8.0 ms; 1 within 1000 ms"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json = serde_json::to_value(&summary).unwrap();
        let row = &json["rows"][0];
        assert_eq!((row["algorithm"].as_str(), row["ranks"].as_u64()), (Some("ring"), Some(2)));
        assert_eq!(row["known_ms"]["p99"], 2.0);
        assert_eq!(row["continued_ms"]["max"], 8.0);
    }

    #[test]
    fn ranks_of_a_fresh_group_have_equal_results_and_tell_their_steps() {
        let works =
            |hash| Said::Works { trial: None, size: 2, first_result: 0, hashes: vec![hash], wrong: 0 };
        let steps = |rank| Said::Steps { rank, steps: vec![rank as u32] };
        let of = |said| Heard { said, ..Heard::default() }.fresh(2);
        let equal = of(vec![works(1), steps(1), works(1), steps(0)]);
        assert_eq!(equal, Ok(Fresh { hashes: vec![1], steps: vec![vec![0], vec![1]] }));
        assert!(of(vec![works(1), works(2), steps(0), steps(1)]).is_err() && of(vec![works(1)]).is_err());
        assert!(of(vec![works(1), works(1), steps(0)]).is_err());
    }
}
