//! The report of all outcomes: a table, the outcomes that need attention, and a file for programs.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;
use tonic_rdma_commands::table::columns;
use tonic_rdma_commands::{Context as _, Failure, Named as _};

use crate::direction::Direction;
use crate::outcome::{Outcome, Outcomes, judge};
use crate::peer::Peer;
use crate::plan::Plan;
use crate::upstream;

/// Width of a peer's name, in columns.
const WIDTH: usize = 12;

/// Outcomes of one peer in one direction.
#[derive(Debug)]
pub(crate) struct RunResult {
    pub(crate) peer: Peer,
    pub(crate) direction: Direction,
    pub(crate) results: Outcomes,
    pub(crate) seconds: f64,
}

/// The outcomes of all combinations.
#[derive(Debug)]
pub(crate) struct Report {
    provider: String,
    directions: Vec<Direction>,
    skipped: BTreeMap<Peer, String>,
    /// Name and version that each peer sends, or the reason why it is unknown.
    names: BTreeMap<Peer, Result<String, Failure>>,
    runs: BTreeMap<(Peer, Direction), RunResult>,
}

#[expect(clippy::print_stdout, reason = "a command prints its results")]
impl Report {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            provider: plan.provider.clone(),
            directions: plan.directions.clone(),
            skipped: BTreeMap::new(),
            names: BTreeMap::new(),
            runs: BTreeMap::new(),
        }
    }

    /// Adds a peer that can't run. `.ci/run` collects the line that this prints.
    pub(crate) fn skip(&mut self, peer: Peer, reason: String) {
        println!("skipped: {peer}: {reason}");
        self.skipped.insert(peer, reason);
    }

    /// Adds the name that a peer sends, with its version.
    pub(crate) fn name(&mut self, peer: Peer, name: Result<String, Failure>) {
        match &name {
            Ok(name) => println!("{peer:<WIDTH$} is {name}"),
            Err(reason) => println!("{peer:<WIDTH$} has no known version: {}", reason.with_causes()),
        }
        self.names.insert(peer, name);
    }

    pub(crate) fn add(&mut self, run: RunResult) {
        let passed = run.results.values().filter(|it| **it == Outcome::Passed).count();
        let (peer, direction) = (run.peer, run.direction);
        println!(
            "{peer:<WIDTH$} {direction:<15} {passed} of {} passed ({:.1} s)",
            run.results.len(),
            run.seconds
        );
        self.runs.insert((peer, direction), run);
    }

    /// Compares every case with its control.
    pub(crate) fn judge(&mut self) {
        let before: BTreeMap<_, _> = self.runs.iter().map(|(key, run)| (*key, run.results.clone())).collect();
        let absent = Outcome::Failed("the control did not run it".to_owned());
        for ((peer, direction), run) in &mut self.runs {
            let control = before.get(&(*peer, direction.control())).filter(|_| !direction.is_control());
            for (case, outcome) in &mut run.results {
                let control = control.map(|results| results.get(case).unwrap_or(&absent));
                let known = upstream::find(*peer, direction.role(), case);
                *outcome = judge(outcome, control, known);
            }
        }
    }

    /// Returns whether a case passed, every peer has a known version, and no outcome needs attention.
    pub(crate) fn as_expected(&self) -> bool {
        let mut outcomes = self.runs.values().flat_map(|run| run.results.values());
        outcomes.clone().any(|outcome| *outcome == Outcome::Passed)
            && outcomes.all(Outcome::expected)
            && self.names.values().all(Result::is_ok)
    }

    pub(crate) fn print(&self) {
        println!("\nover {}: passed / failed / upstream / not applicable", self.provider);
        let (tls, plain): (Vec<_>, Vec<_>) =
            self.directions.iter().partition(|direction| direction.has_tls());
        for directions in [plain, tls].iter().filter(|directions| !directions.is_empty()) {
            self.print_table(directions);
        }
        for (peer, name) in &self.names {
            println!("{peer:<WIDTH$} {}", name.as_ref().map_or("of an unknown version", String::as_str));
        }
        for ((outcome, peer, case, reason), directions) in self.remarks() {
            let directions: Vec<_> = directions.iter().map(|direction| direction.name()).collect();
            println!("{outcome:<8} {peer:<WIDTH$} {case} ({}): {reason}", directions.join(", "));
        }
    }

    fn print_table(&self, directions: &[Direction]) {
        let headings: Vec<_> = std::iter::once("").chain(directions.iter().map(|it| it.name())).collect();
        let row = |peer: Peer| {
            let counts_of = |direction: &Direction| {
                self.runs.get(&(peer, *direction)).map_or("-".to_owned(), |run| counts(&run.results))
            };
            std::iter::once(peer.name().to_owned()).chain(directions.iter().map(counts_of)).collect()
        };
        println!("{}", columns(&headings, 1, self.peers().into_iter().map(row)));
    }

    fn peers(&self) -> Vec<Peer> {
        let mut peers: Vec<_> = self.runs.keys().map(|(peer, _)| *peer).collect();
        peers.dedup();
        peers
    }

    /// Returns all outcomes other than a pass, grouped by peer, case and reason.
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

    /// Writes all results to a file, as JSON.
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
        let versions: BTreeMap<_, _> = self
            .names
            .iter()
            .map(|(peer, name)| (peer.name(), name.as_ref().map_or(json!(null), |name| json!(name))))
            .collect();
        let skipped =
            self.skipped.iter().map(|(peer, reason)| json!({"peer": peer.name(), "reason": reason}));
        let all = json!({
            "provider": self.provider,
            "as_expected": self.as_expected(),
            "versions": versions,
            "results": results.collect::<Vec<_>>(),
            "skipped": skipped.collect::<Vec<_>>(),
        });
        std::fs::write(path, format!("{all:#}\n")).context(format!("--json: can't write {}", path.display()))
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
                RunResult { peer: Peer::Python, direction: *direction, results, seconds: 0.0 },
            )
        });
        let mut report = Report {
            provider: "soft".to_owned(),
            directions: outcomes.iter().map(|(direction, _)| *direction).collect(),
            skipped: BTreeMap::new(),
            names: BTreeMap::new(),
            runs: runs.collect(),
        };
        report.judge();
        report
    }

    #[test]
    fn a_case_is_compared_with_its_own_control() {
        let absent = || Outcome::NotApplicable("why".to_owned());
        let lost =
            report(&[(Direction::TcpTonic, Outcome::Passed), (Direction::Fallback, absent())], "ping_pong");
        assert!(!lost.as_expected());
        assert_eq!(lost.runs[&(Peer::Python, Direction::TcpTonic)].results["ping_pong"], Outcome::Passed);
        // The client's control is no control for the server.
        let other =
            report(&[(Direction::TonicTcp, Outcome::Passed), (Direction::Fallback, absent())], "ping_pong");
        assert!(other.as_expected());
        let mut unrun = report(&[(Direction::TcpTonic, Outcome::Passed)], "ping_pong");
        let results = [("empty_unary".to_owned(), Outcome::NotApplicable("why".to_owned()))].into();
        let (peer, direction) = (Peer::Python, Direction::Fallback);
        unrun.runs.insert((peer, direction), RunResult { peer, direction, results, seconds: 0.0 });
        unrun.judge();
        assert!(!unrun.as_expected());
    }

    #[test]
    fn a_peer_without_a_version_is_not_as_expected() {
        let mut report = report(&[(Direction::Direct, Outcome::Passed)], "ping_pong");
        report.name(Peer::Python, Ok("grpc-python/1.0".to_owned()));
        assert!(report.as_expected());
        report.name(Peer::Go, Err("why".into()));
        assert!(!report.as_expected());
    }

    #[test]
    fn a_report_without_a_pass_is_not_as_expected() {
        assert!(!report(&[], "ping_pong").as_expected());
        let absent = Outcome::NotApplicable("why".to_owned());
        assert!(!report(&[(Direction::Direct, absent)], "ping_pong").as_expected());
        assert!(report(&[(Direction::Direct, Outcome::Passed)], "ping_pong").as_expected());
    }
}
