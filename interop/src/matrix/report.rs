//! What came of all of it: a table, what is to be looked at, and a file for programs.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use crate::Failure;
use crate::direction::Direction;
use crate::options::Plan;
use crate::outcome::{Outcome, Outcomes};
use crate::peer::Peer;
use crate::upstream;

/// One peer in one direction.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) peer: Peer,
    pub(crate) direction: Direction,
    pub(crate) results: Outcomes,
    pub(crate) seconds: f64,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Report {
    provider: String,
    directions: Vec<Direction>,
    skipped: BTreeMap<Peer, String>,
    runs: BTreeMap<(Peer, Direction), Run>,
}

#[expect(clippy::print_stdout, reason = "a command says what came of it")]
impl Report {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            provider: plan.provider.clone(),
            directions: plan.directions.clone(),
            skipped: BTreeMap::new(),
            runs: BTreeMap::new(),
        }
    }

    /// A peer that is not here. The line is one that `.ci/run` collects.
    pub(crate) fn skip(&mut self, peer: Peer, reason: String) {
        println!("skipped: {peer}: {reason}");
        self.skipped.insert(peer, reason);
    }

    pub(crate) fn add(&mut self, run: Run) {
        let passed = run.results.values().filter(|it| **it == Outcome::Passed).count();
        let (peer, direction) = (run.peer, run.direction);
        println!("{peer:<8} {direction:<15} {passed} of {} passed ({:.1} s)", run.results.len(), run.seconds);
        self.runs.insert((peer, direction), run);
    }

    /// Tells failures that are not our transport's, and known, from others.
    pub(crate) fn judge(&mut self) {
        let keys: Vec<_> = self.runs.keys().copied().collect();
        for (peer, direction) in keys {
            let control = self.runs.get(&(peer, direction.control())).map(|run| run.results.clone());
            let control = control.unwrap_or_default();
            let Some(run) = self.runs.get_mut(&(peer, direction)) else { continue };
            for (case, outcome) in &mut run.results {
                let known = upstream::reason(peer, direction.side(), case);
                let fails_without_us =
                    !matches!(control.get(case), Some(Outcome::Passed | Outcome::Stale(_)));
                match (&*outcome, known) {
                    (Outcome::Failed(_), Some(reason)) if fails_without_us => {
                        *outcome = Outcome::Upstream(reason);
                    }
                    (Outcome::Passed, Some(reason)) => *outcome = Outcome::Stale(reason),
                    _ => {}
                }
            }
        }
    }

    /// Something ran, and nobody has to look at anything.
    pub(crate) fn as_expected(&self) -> bool {
        let mut outcomes = self.runs.values().flat_map(|run| run.results.values());
        outcomes.clone().any(|outcome| *outcome == Outcome::Passed) && outcomes.all(Outcome::expected)
    }

    pub(crate) fn print(&self) {
        println!("\nover {}: passed / failed / upstream / not applicable", self.provider);
        let (tls, plain): (Vec<_>, Vec<_>) =
            self.directions.iter().partition(|direction| direction.has_tls());
        for directions in [plain, tls].iter().filter(|directions| !directions.is_empty()) {
            self.print_table(directions);
        }
        for ((outcome, peer, case, reason), directions) in self.remarks() {
            let directions: Vec<_> = directions.iter().map(|direction| direction.name()).collect();
            println!("{outcome:<8} {peer:<8} {case} ({}): {reason}", directions.join(", "));
        }
    }

    fn print_table(&self, directions: &[Direction]) {
        print!("{:<8}", "");
        for direction in directions {
            print!(" {direction:>15}");
        }
        println!();
        for peer in self.peers() {
            print!("{peer:<8}");
            for direction in directions {
                let cell =
                    self.runs.get(&(peer, *direction)).map_or("-".to_owned(), |run| counts(&run.results));
                print!(" {cell:>15}");
            }
            println!();
        }
    }

    fn peers(&self) -> Vec<Peer> {
        let mut peers: Vec<_> = self.runs.keys().map(|(peer, _)| *peer).collect();
        peers.dedup();
        peers
    }

    /// All that is no pass, alike ones together.
    fn remarks(&self) -> BTreeMap<(&'static str, Peer, &str, &str), Vec<Direction>> {
        let mut remarks: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for run in self.runs.values() {
            for (case, outcome) in run.results.iter().filter(|(_, outcome)| **outcome != Outcome::Passed) {
                let key = (outcome.name(), run.peer, case.as_str(), outcome.reason());
                remarks.entry(key).or_default().push(run.direction);
            }
        }
        remarks
    }

    /// Every single result.
    pub(crate) fn write(&self, path: &Path) -> Result<(), Failure> {
        let results = self.runs.values().flat_map(|run| {
            run.results.iter().map(|(case, outcome)| {
                json!({
                    "peer": run.peer.name(),
                    "direction": run.direction.name(),
                    "case": case,
                    "outcome": outcome.name(),
                    "reason": outcome.reason(),
                })
            })
        });
        let skipped =
            self.skipped.iter().map(|(peer, reason)| json!({"peer": peer.name(), "reason": reason}));
        let all = json!({
            "provider": self.provider,
            "as_expected": self.as_expected(),
            "results": results.collect::<Vec<_>>(),
            "skipped": skipped.collect::<Vec<_>>(),
        });
        std::fs::write(path, format!("{all:#}\n"))
            .map_err(|error| format!("--json: can't write {}: {error}", path.display()).into())
    }
}

fn counts(results: &Outcomes) -> String {
    let count = |names: &[&str]| results.values().filter(|it| names.contains(&it.name())).count();
    format!(
        "{}/{}/{}/{}",
        count(&["passed"]),
        count(&["failed", "stale"]),
        count(&["upstream"]),
        count(&["n/a"])
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outcomes: &[(Direction, Outcome)], case: &str) -> Report {
        let runs = outcomes.iter().map(|(direction, outcome)| {
            let results = [(case.to_owned(), outcome.clone())].into();
            (
                (Peer::Python, *direction),
                Run { peer: Peer::Python, direction: *direction, results, seconds: 0.0 },
            )
        });
        let mut report = Report {
            provider: "soft".to_owned(),
            directions: outcomes.iter().map(|(direction, _)| *direction).collect(),
            skipped: BTreeMap::new(),
            runs: runs.collect(),
        };
        report.judge();
        report
    }

    fn failed() -> Outcome {
        Outcome::Failed("why".to_owned())
    }

    #[test]
    fn a_known_failure_is_one_only_where_the_control_fails_too() {
        // What the list has of grpcio's server.
        let case = "client_compressed_unary";
        let both = report(&[(Direction::TcpTonic, failed()), (Direction::Fallback, failed())], case);
        assert!(both.runs.values().all(|run| matches!(run.results[case], Outcome::Upstream(_))));
        let ours = report(&[(Direction::TcpTonic, Outcome::Passed), (Direction::Fallback, failed())], case);
        assert_eq!(ours.runs[&(Peer::Python, Direction::Fallback)].results[case], failed());
        assert!(matches!(ours.runs[&(Peer::Python, Direction::TcpTonic)].results[case], Outcome::Stale(_)));
        assert!(!ours.as_expected());
    }

    #[test]
    fn a_failure_that_is_not_listed_is_one_even_if_the_control_fails_too() {
        let both = report(&[(Direction::TcpTonic, failed()), (Direction::Fallback, failed())], "ping_pong");
        assert!(!both.as_expected());
    }

    #[test]
    fn nothing_that_ran_is_not_as_expected() {
        assert!(!report(&[], "ping_pong").as_expected());
        let absent = Outcome::NotApplicable("why".to_owned());
        assert!(!report(&[(Direction::Direct, absent)], "ping_pong").as_expected());
        assert!(report(&[(Direction::Direct, Outcome::Passed)], "ping_pong").as_expected());
    }
}
