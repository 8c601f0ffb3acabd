//! The results of a run: table, JSON and plot.

mod plot;
mod table;

use serde::Serialize;
use tonic_rdma_commands::{Failure, output};

use crate::options::Options;
use crate::report::{Compared, Counted, Plans, Report, Row, Verdict};

/// The results of all numbers of ranks.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Results {
    pub(crate) rows: Vec<Row>,
    pub(crate) plans: Vec<Plans>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) counters: Vec<Counted>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tuner: Vec<Compared>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tuner_verdict: Option<Verdict>,
    /// The wrong elements that the ranks found. This sum does not travel by the operations that are checked.
    pub(crate) wrong: u64,
}

impl Results {
    /// Keeps a report.
    pub(crate) fn add(&mut self, report: Report) {
        match report {
            Report::Row(row) => self.rows.push(row),
            Report::Plans(plans) => self.plans.push(plans),
            Report::Counted(counted) => self.counters.push(counted),
            Report::Compared(compared) => {
                self.tuner.push(compared);
                self.tuner_verdict = Some(Verdict::of(&self.tuner));
            }
            Report::Alive | Report::Trial(_) | Report::Done { .. } | Report::Failed { .. } => {}
        }
    }

    /// Writes the files that were asked for, prints the tables, and returns a failure if a check did not hold.
    pub(crate) fn show(&self, options: &Options) -> Result<(), Failure> {
        let json = options.json.as_deref();
        if let Some(path) = json {
            output::write_json(path, self)?;
        }
        if let Some(path) = &options.plot {
            let svg =
                plot::draw(&self.rows).map_err(|error| Failure::run("can't draw the plot").because(error))?;
            output::write_file(path, &svg)?;
        }
        output::print(&table::render(self), json)?;
        self.check()
    }

    /// Returns a failure that names each check that did not hold.
    fn check(&self) -> Result<(), Failure> {
        let mut failed = Vec::new();
        let in_rows: u64 = self.rows.iter().map(|row| row.errors).sum();
        if self.wrong.max(in_rows) > 0 {
            failed.push(format!("{} elements of results were wrong", self.wrong.max(in_rows)));
        }
        if self.rows.is_empty() {
            failed.push("nothing was measured".to_owned());
        }
        let bad = self.counters.iter().filter(|counted| !counted.holds()).count();
        if bad > 0 {
            failed
                .push(format!("the counters of {bad} of {} cells are not as promised", self.counters.len()));
        }
        if let Some(verdict) = self.tuner_verdict.filter(|verdict| !verdict.holds) {
            failed.push(format!(
                "the tuner's choice takes {:.3} times the best fixed algorithm's time (geometric mean; at most {}), {:.3} times \
                 at worst (at most {})",
                verdict.geometric_mean,
                Verdict::ACCEPTED.0,
                verdict.worst,
                Verdict::ACCEPTED.1
            ));
        }
        if failed.is_empty() { Ok(()) } else { Err(Failure::run(failed.join("; "))) }
    }

    pub(crate) const fn verdict(&self) -> Option<Verdict> {
        self.tuner_verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choices::Algorithm;
    use crate::report::sample;

    #[test]
    fn json_has_rows_and_plans() {
        let mut results = Results::default();
        results.add(Report::Row(sample(2, 1024, Algorithm::Ring, 4.0)));
        results.add(Report::Plans(Plans { ranks: 2, text: "ring".to_owned() }));
        let json = serde_json::to_value(&results).unwrap();
        let mut keys: Vec<&String> = json["rows"][0].as_object().unwrap().keys().collect();
        keys.sort();
        let expected = [
            "algorithm",
            "bus_gbytes_per_s",
            "bytes",
            "errors",
            "iterations",
            "operand",
            "p50_us",
            "p99_us",
            "ranks",
            "reduction",
            "type",
        ];
        assert_eq!(keys, expected);
        assert_eq!(json["plans"][0]["text"], "ring");
        assert!(json.get("counters").is_none() && json.get("tuner_verdict").is_none());
    }

    #[test]
    fn each_failed_check_is_named() {
        let mut results = Results::default();
        assert!(results.check().unwrap_err().to_string().contains("nothing was measured"));
        results.add(Report::Row(sample(2, 1024, Algorithm::Ring, 4.0)));
        results.check().unwrap();
        // The ranks count by themselves, so that a broken sum does not hide errors.
        results.wrong = 3;
        assert!(results.check().unwrap_err().to_string().contains("3 elements"));
        results.rows[0].errors = 5;
        assert!(results.check().unwrap_err().to_string().contains("5 elements"));
        let compared =
            Compared { ranks: 2, bytes: 8, auto_us: 2.0, fixed_us: vec![(Algorithm::Ring, Some(1.0))] };
        results.add(Report::Compared(compared));
        let text = results.check().unwrap_err().to_string();
        assert!(text.contains("5 elements") && text.contains("2.000 times"), "{text}");
    }
}
