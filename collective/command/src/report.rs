//! What ranks report, and the rows of a run.

use serde::{Deserialize, Serialize};

use crate::options::{Algorithm, Operand, Options, Type};
use tonic_rdma_collective::Reduction;
use tonic_rdma_commands::output::{self, Optimised};
use tonic_rdma_commands::plot::{self, Axis, Content, Plot, Scale, Series};
use tonic_rdma_commands::statistics::{geometric_mean, median, quantile};
use tonic_rdma_commands::table::{dash, grid, markdown, times};
use tonic_rdma_commands::units::{digits, micros, size};
use tonic_rdma_commands::{Failure, Named as _};

/// A message of a rank to the process that started it. Each is a line of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The rank is alive. Rank 0 sends this once a second.
    Alive,
    /// The plans of the communicator, and their reasons.
    Plans(Plans),
    Row(Row),
    Counted(Counted),
    Compared(Compared),
    /// The rank has done its work. It found this many wrong elements in its own results.
    Done {
        wrong: u64,
    },
    Failed {
        reason: String,
    },
}

/// The plans of a number of ranks, as the communicator prints them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plans {
    pub(crate) ranks: usize,
    pub(crate) text: String,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) ranks: usize,
    pub(crate) bytes: u64,
    pub(crate) algorithm: Algorithm,
    #[serde(rename = "type")]
    pub(crate) kind: Type,
    pub(crate) operand: Operand,
}

/// The figures of one cell with one algorithm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) key: Key,
    pub(crate) reduction: String,
    pub(crate) iterations: usize,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) bus_gbytes_per_s: f64,
    /// Wrong elements on all ranks.
    pub(crate) errors: u64,
}

impl Row {
    /// Makes the row of the latencies of all iterations, in µs.
    pub(crate) fn new(key: Key, reduction: Reduction, latencies: &[f64], errors: u64) -> Self {
        let p50_us = median(latencies.iter().copied());
        Self {
            key,
            reduction: reduction.to_string(),
            iterations: latencies.len(),
            p50_us,
            p99_us: quantile(latencies.iter().copied(), 0.99),
            bus_gbytes_per_s: bus_gbytes_per_s(key.ranks, key.bytes, p50_us),
            errors,
        }
    }
}

/// Bytes of a rank: sent, received, sent to other hosts, copied.
pub(crate) type Moved<T> = [T; 4];

/// The bytes that the operations of a cell moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counted {
    #[serde(flatten)]
    pub(crate) key: Key,
    pub(crate) operations: u64,
    /// The number of ranks on each simulated host, if hosts are simulated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) hosts: Vec<usize>,
    /// The bytes that all ranks together moved in one operation.
    pub(crate) moved_bytes: f64,
    /// The bytes that all ranks together copied in one operation.
    pub(crate) copied_bytes: f64,
    /// The bytes that each rank sent in one operation, received, and sent to ranks of other hosts.
    pub(crate) sent_bytes: Vec<f64>,
    pub(crate) received_bytes: Vec<f64>,
    pub(crate) across_bytes: Vec<f64>,
}

impl Counted {
    /// Makes the counts of one operation of those that moved `moved`.
    pub(crate) fn new(key: Key, hosts: Vec<usize>, operations: usize, moved: &[Moved<f64>]) -> Self {
        let of =
            |index: usize| moved.iter().map(|rank| rank[index] / operations as f64).collect::<Vec<f64>>();
        let (sent_bytes, received_bytes, across_bytes) = (of(0), of(1), of(2));
        Self {
            key,
            operations: operations as u64,
            hosts,
            moved_bytes: sent_bytes.iter().sum(),
            copied_bytes: of(3).iter().sum(),
            sent_bytes,
            received_bytes,
            across_bytes,
        }
    }

    /// Returns the most that one rank sent.
    fn busiest_bytes(&self) -> f64 {
        self.sent_bytes.iter().copied().fold(0.0, f64::max)
    }

    /// Returns what all ranks sent to other hosts.
    fn sum_across(&self) -> f64 {
        self.across_bytes.iter().sum()
    }

    /// Returns 2(N−1)/N times the size for each of N ranks, so 2(N−1) times the size for all.
    pub(crate) fn least_bytes(&self) -> f64 {
        bus_bytes(self.key.ranks, self.key.bytes) * self.key.ranks as f64
    }

    /// Returns whether the counters are as promised: the ring moves the least, the naive reducer all over rank
    /// 0, each element goes to and from each simulated host once if it is hierarchical, and registered memory
    /// is not copied.
    pub(crate) fn holds(&self) -> bool {
        let (others, bytes) = (self.key.ranks.saturating_sub(1) as f64, self.key.bytes as f64);
        let near = |found: f64, promised: f64| (found - promised).abs() < 0.5;
        let moved = match self.key.algorithm {
            Algorithm::Ring => near(self.moved_bytes, self.least_bytes()),
            Algorithm::Naive => {
                let of_rank_0 = near(self.moved_bytes, 2.0 * others * bytes);
                of_rank_0
                    && [&self.sent_bytes, &self.received_bytes].iter().all(|it| near(it[0], others * bytes))
            }
            Algorithm::Hierarchical if !self.hosts.is_empty() => {
                near(self.sum_across(), 2.0 * (self.hosts.len() - 1) as f64 * bytes)
            }
            _ => true,
        };
        moved && (self.key.operand == Operand::Slice || self.copied_bytes == 0.0)
    }
}

/// The algorithm of the plans beside the fixed algorithms, for one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Compared {
    pub(crate) ranks: usize,
    pub(crate) bytes: u64,
    pub(crate) auto_us: f64,
    /// The fixed algorithms with their medians. An algorithm without a median was far behind in the warm-up.
    pub(crate) fixed_us: Vec<(Algorithm, Option<f64>)>,
}

impl Compared {
    /// Returns the best fixed algorithm and its median.
    pub(crate) fn best(&self) -> Option<(Algorithm, f64)> {
        let measured = self.fixed_us.iter().filter_map(|(algorithm, micros)| Some((*algorithm, (*micros)?)));
        measured.min_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// Returns the time of the algorithm of the plans over that of the best fixed algorithm.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.best().filter(|(_, micros)| *micros > 0.0).map(|(_, micros)| self.auto_us / micros)
    }
}

/// How near the plans are to the best fixed algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Verdict {
    pub(crate) geometric_mean: f64,
    pub(crate) worst: f64,
    pub(crate) holds: bool,
}

impl Verdict {
    /// The accepted geometric mean and the accepted worst of the ratios.
    pub(crate) const ACCEPTED: (f64, f64) = (1.05, 1.25);

    pub(crate) fn of(compared: &[Compared]) -> Self {
        let ratios: Vec<f64> = compared.iter().filter_map(Compared::ratio).collect();
        let geometric_mean = geometric_mean(ratios.iter().copied());
        let worst = ratios.iter().copied().fold(0.0, f64::max);
        let holds = !ratios.is_empty() && geometric_mean <= Self::ACCEPTED.0 && worst <= Self::ACCEPTED.1;
        Self { geometric_mean, worst, holds }
    }
}

/// Returns the bytes that the algorithms with the least traffic move for each rank: 2(N−1)/N times the size.
fn bus_bytes(ranks: usize, bytes: u64) -> f64 {
    2.0 * ranks.saturating_sub(1) as f64 / ranks.max(1) as f64 * bytes as f64
}

/// Returns the bus bandwidth in GB/s of an operation that took `micros`. One rank moves nothing, so its
/// bandwidth is 0.
fn bus_gbytes_per_s(ranks: usize, bytes: u64, micros: f64) -> f64 {
    if micros > 0.0 { bus_bytes(ranks, bytes) / micros / 1000.0 } else { 0.0 }
}

#[cfg(test)]
pub(crate) fn sample(ranks: usize, bytes: u64, algorithm: Algorithm, p50: f64) -> Row {
    let key = Key { ranks, bytes, algorithm, kind: Type::F32, operand: Operand::Registered };
    Row::new(key, Reduction::Sum, &[p50], 0)
}

const LEGEND: &str = "p50, p99: of the slowest rank in each iteration. bus GB/s: 2(N-1)/N times the size over p50. \
                      errors: wrong elements.";
const COUNTERS: &str = "For each operation, of a rank on average. least: 2(N-1)/N times the size. busiest: the most that one rank sent. \
                        across: what all ranks together sent to other hosts.";

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
    optimised: Optimised,
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
            Report::Alive | Report::Done { .. } | Report::Failed { .. } => {}
        }
    }

    /// Writes the files that were asked for, prints the tables, and returns a failure if a check did not
    /// hold.
    pub(crate) fn show(&self, options: &Options) -> Result<(), Failure> {
        if let Some(path) = &options.plot {
            output::write_file(path, &draw(&self.rows)?)?;
        }
        let table = || format!("{}\n", markdown(&HEADINGS, TEXTS, self.rows.iter().map(texts)));
        options.outputs.show(&self.render(), table, self, &self.rows)?;
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
                "the choice of the plans takes {:.3} times the best fixed algorithm's time (geometric mean; at most {}), {:.3} times \
                 at worst (at most {})",
                verdict.geometric_mean,
                Verdict::ACCEPTED.0,
                verdict.worst,
                Verdict::ACCEPTED.1
            ));
        }
        if failed.is_empty() { Ok(()) } else { Err(Failure::run(failed.join("; "))) }
    }

    /// Renders everything that the terminal shows.
    fn render(&self) -> String {
        let mut text = String::new();
        for plans in &self.plans {
            text.push_str(&format!("Plans of {} ranks:\n{}\n\n", plans.ranks, plans.text.trim_end()));
        }
        if self.tuner.is_empty() {
            text.push_str(&format!("{}\n{LEGEND}\n", rows(&self.rows)));
        } else {
            text.push_str(&format!("{}\n", compared(&self.tuner)));
        }
        if !self.counters.is_empty() {
            text.push_str(&format!("\n{}\n{COUNTERS}\n", counters(&self.counters)));
        }
        if let Some(Verdict { geometric_mean, worst, .. }) = self.tuner_verdict {
            text.push_str(&format!(
                "auto over the best fixed algorithm: geometric mean {geometric_mean:.3}, worst {worst:.3}\n"
            ));
        }
        text
    }
}

/// Makes a table with a group of rows for each key.
fn groups<T, K: PartialEq>(
    headings: &[&str],
    rows: &[T],
    key: impl Fn(&T) -> K,
    text: impl Fn(&T) -> Vec<String>,
) -> String {
    let groups = rows.chunk_by(|one, next| key(one) == key(next));
    grid(headings, groups.map(|group| group.iter().map(&text).collect())).to_string()
}

/// Returns the first columns of a row: ranks, type, operand, size, algorithm.
fn key_texts(key: &Key) -> [String; 5] {
    let [kind, operand, algorithm] = [key.kind.name(), key.operand.name(), key.algorithm.name()];
    [key.ranks.to_string(), kind.to_owned(), operand.to_owned(), size(key.bytes), algorithm.to_owned()]
}

/// The headings of the rows, and how many of them are of texts.
const HEADINGS: [&str; 10] =
    ["ranks", "type", "operand", "size", "algorithm", "iterations", "p50", "p99", "bus GB/s", "errors"];
const TEXTS: usize = 5;

fn texts(row: &Row) -> Vec<String> {
    let mut texts = key_texts(&row.key).to_vec();
    texts.extend([row.iterations.to_string(), micros(row.p50_us), micros(row.p99_us)]);
    texts.extend([digits(row.bus_gbytes_per_s), row.errors.to_string()]);
    texts
}

fn rows(rows: &[Row]) -> String {
    groups(&HEADINGS, rows, |row| (row.key.ranks, row.key.kind, row.key.operand), texts)
}

fn counters(counters: &[Counted]) -> String {
    let headings = [
        "ranks",
        "type",
        "operand",
        "size",
        "algorithm",
        "moved",
        "least",
        "moved / least",
        "busiest",
        "across",
        "copied",
    ];
    let text = |it: &Counted| {
        let each = |bytes: f64| format!("{:.1} B", bytes / it.key.ranks.max(1) as f64);
        let ratio = it.moved_bytes / it.least_bytes();
        let ratio = if ratio.is_finite() { format!("{ratio:.3}") } else { dash() };
        let mut texts = key_texts(&it.key).to_vec();
        texts.extend([each(it.moved_bytes), each(it.least_bytes()), ratio]);
        texts.extend([it.busiest_bytes(), it.sum_across()].map(|bytes| format!("{bytes:.1} B")));
        texts.push(each(it.copied_bytes));
        texts
    };
    groups(&headings, counters, |it| it.key.ranks, text)
}

fn compared(compared: &[Compared]) -> String {
    let names = compared.first().map_or(&[][..], |first| &first.fixed_us);
    let mut headings = vec!["ranks", "size", "auto"];
    headings.extend(names.iter().map(|(algorithm, _)| algorithm.name()));
    headings.extend(["best", "auto / best"]);
    let text = |it: &Compared| {
        let mut texts = vec![it.ranks.to_string(), size(it.bytes), micros(it.auto_us)];
        let far_behind = || "far behind".to_owned();
        texts.extend(it.fixed_us.iter().map(|(_, median)| median.map_or_else(far_behind, micros)));
        texts.push(it.best().map_or("", |(algorithm, _)| algorithm.name()).to_owned());
        texts.push(times(it.ratio()));
        texts
    };
    groups(&headings, compared, |it| it.ranks, text)
}

/// Draws the rows.
fn draw(rows: &[Row]) -> Result<String, Failure> {
    let plot = |title, unit, value: fn(&Row) -> f64| Plot {
        title,
        y: Axis { name: unit, scale: Scale::Log },
        content: Content::Lines {
            x: Axis { name: "size", scale: Scale::Sizes },
            lines: lines(rows, value),
            marks: true,
        },
    };
    let latency = "Latency of the slowest rank, median (lower is better)";
    let bandwidth = "Bus bandwidth, 2(N-1)/N · size / latency (higher is better)";
    let svg = plot::draw(&[
        plot(latency, "µs", |row| row.p50_us),
        // A single rank moves nothing, so it has no bandwidth.
        plot(bandwidth, "GB/s", |row| row.bus_gbytes_per_s),
    ]);
    match svg {
        Ok(svg) if svg.is_empty() => {
            Err(Failure::run("can't draw the plot: no row has a size and a time above zero"))
        }
        Ok(svg) => Ok(svg),
        Err(error) => Err(Failure::run("can't draw the plot").because(error)),
    }
}

/// Returns a line for each combination of ranks, algorithm, type and operand. Its name has what differs among
/// the rows.
fn lines(rows: &[Row], value: fn(&Row) -> f64) -> Vec<Series<(f64, f64)>> {
    let keys: [fn(&Row) -> &'static str; 3] =
        [|row| row.key.algorithm.name(), |row| row.key.kind.name(), |row| row.key.operand.name()];
    let differs = |key: &fn(&Row) -> &'static str| rows.iter().any(|row| key(row) != key(&rows[0]));
    let shown: Vec<_> = keys.into_iter().filter(differs).collect();
    let name = |row: &Row| {
        let ranks = format!("{} ranks", row.key.ranks);
        shown.iter().fold(ranks, |name, key| name + ", " + key(row))
    };
    let mut lines: Vec<Series<(f64, f64)>> = Vec::new();
    for row in rows.iter().filter(|row| row.key.bytes > 0 && value(row) > 0.0) {
        let (name, point) = (name(row), (row.key.bytes as f64, value(row)));
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.values.push(point),
            None => lines.push(Series::new(name, lines.len(), vec![point])),
        }
    }
    for line in &mut lines {
        line.values.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_names_that_scripts_rely_on() {
        let row = serde_json::to_value(sample(4, 1 << 20, Algorithm::HalvingDoubling, 1000.0)).unwrap();
        assert_eq!((&row["ranks"], &row["bytes"], &row["errors"]), (&4.into(), &(1 << 20).into(), &0.into()));
        assert_eq!((&row["algorithm"], &row["type"]), (&"halving-doubling".into(), &"f32".into()));
        assert_eq!((&row["p50_us"], &row["p99_us"]), (&1000.0.into(), &1000.0.into()));
        assert_eq!(row["bus_gbytes_per_s"], 1.572864);
        assert_eq!((&row["operand"], &row["reduction"]), (&"registered".into(), &"sum".into()));
    }

    #[test]
    fn reports_are_read_back_from_one_line() {
        for report in [
            Report::Alive,
            Report::Plans(Plans { ranks: 2, text: "a\nb".to_owned() }),
            Report::Row(sample(2, 8, Algorithm::Auto, 0.5)),
            Report::Done { wrong: 3 },
            Report::Failed { reason: "rank 1 is lost".to_owned() },
        ] {
            let line = serde_json::to_string(&report).unwrap();
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(serde_json::from_str::<Report>(&line).unwrap(), report);
        }
    }

    #[test]
    fn counters_of_the_ring_and_copies_are_checked() {
        let key = sample(3, 1000, Algorithm::Ring, 1.0).key;
        let counted = |algorithm, hosts: &[usize], moved: &[Moved<f64>]| {
            Counted::new(Key { algorithm, ..key }, hosts.to_vec(), 10, moved)
        };
        let third = [40_000.0 / 3.0, 40_000.0 / 3.0, 0.0, 0.0];
        let ring = counted(Algorithm::Ring, &[], &[third; 3]);
        assert_eq!(ring.least_bytes(), 4000.0);
        let (of_0, of_others) = ([20_000.0, 20_000.0, 0.0, 0.0], [10_000.0, 10_000.0, 0.0, 0.0]);
        assert!(counted(Algorithm::Naive, &[], &[of_0, of_others, of_others]).holds());
        assert!(!counted(Algorithm::Naive, &[], &[of_others, of_0, of_others]).holds());
        let across = |bytes: f64| [0.0, 0.0, bytes, 0.0];
        let hierarchical = [across(5_000.0), across(5_000.0), across(10_000.0)];
        assert!(counted(Algorithm::Hierarchical, &[2, 1], &hierarchical).holds());
        assert!(!counted(Algorithm::Hierarchical, &[1, 1, 1], &hierarchical).holds());
        assert!(ring.holds());
        assert!(!Counted { moved_bytes: 4004.0, ..ring.clone() }.holds());
        assert!(
            Counted {
                key: Key { algorithm: Algorithm::OneShot, ..key },
                moved_bytes: 6000.0,
                ..ring.clone()
            }
            .holds()
        );
        assert!(!Counted { copied_bytes: 0.1, ..ring.clone() }.holds());
        assert!(
            Counted { key: Key { operand: Operand::Slice, ..key }, copied_bytes: 2000.0, ..ring }.holds()
        );
    }

    #[test]
    fn the_verdict_is_of_the_mean_and_of_the_worst() {
        let compared = |auto_us| Compared {
            ranks: 2,
            bytes: 8,
            auto_us,
            fixed_us: vec![
                (Algorithm::Ring, Some(10.0)),
                (Algorithm::OneShot, Some(20.0)),
                (Algorithm::HalvingDoubling, None),
            ],
        };
        assert_eq!(compared(11.0).best(), Some((Algorithm::Ring, 10.0)));
        let near = Verdict::of(&[compared(10.0), compared(10.0), compared(11.0)]);
        assert!(near.holds && (near.worst - 1.1).abs() < 1e-9, "{near:?}");
        let mut many = vec![compared(10.0); 20];
        many.push(compared(13.0));
        let one_bad = Verdict::of(&many);
        assert!(!one_bad.holds && one_bad.geometric_mean < 1.05, "{one_bad:?}");
        assert!(!Verdict::of(&[compared(11.0), compared(11.0)]).holds);
        assert!(!Verdict::of(&[]).holds);
    }

    #[test]
    fn the_bus_bandwidth_counts_what_the_ring_moves() {
        // 1 MB over 4 ranks: 1.5 MB for each rank.
        assert_eq!(bus_bytes(4, 1_000_000), 1_500_000.0);
        assert_eq!(bus_gbytes_per_s(4, 1_000_000, 1_000.0), 1.5);
        assert_eq!(bus_gbytes_per_s(2, 1_000_000, 1_000.0), 1.0);
        assert_eq!(bus_gbytes_per_s(1, 1_000_000, 1_000.0), 0.0);
        assert_eq!(bus_gbytes_per_s(4, 1_000_000, 0.0), 0.0);
    }
}

#[cfg(test)]
mod output_tests {
    use super::*;
    use crate::options::Algorithm;
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
        assert_eq!(json["optimised"], !cfg!(debug_assertions));
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

    #[test]
    fn tables_show_plans_rows_counters_and_the_verdict() {
        let mut results = Results::default();
        results.add(Report::Plans(Plans { ranks: 2, text: "up to 4 KiB: one-shot".to_owned() }));
        results.add(Report::Row(sample(2, 1 << 20, Algorithm::Auto, 104.8576)));
        let key = sample(2, 1000, Algorithm::Ring, 1.0).key;
        let counted = Counted::new(key, Vec::new(), 4, &[[4000.0, 4000.0, 0.0, 0.0]; 2]);
        results.add(Report::Counted(counted));
        let text = results.render();
        for part in
            ["Plans of 2 ranks:\nup to 4 KiB: one-shot", "1 MiB", "105 µs", "10.0", "1000.0 B", "1.000"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        results.add(Report::Compared(Compared {
            ranks: 2,
            bytes: 8,
            auto_us: 1.1,
            fixed_us: vec![(Algorithm::OneShot, Some(1.0)), (Algorithm::Ring, None)],
        }));
        let text = results.render();
        for part in ["auto / best", "1.10 µs", "far behind", "geometric mean 1.100, worst 1.100"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn lines_are_named_by_what_differs() {
        let rows = [
            sample(2, 1 << 20, Algorithm::Ring, 100.0),
            sample(2, 8, Algorithm::Ring, 1.0),
            sample(4, 8, Algorithm::Auto, 2.0),
        ];
        let found = lines(&rows, |row| row.p50_us);
        assert_eq!(found[0].name, "2 ranks, ring");
        assert_eq!(found[0].values, [(8.0, 1.0), (1048576.0, 100.0)]);
        assert_eq!((found.len(), found[1].name.as_str()), (2, "4 ranks, auto"));
        let svg = draw(&rows).unwrap();
        for text in ["2 ranks, ring", "4 ranks, auto", "Bus bandwidth", "µs", "GB/s"] {
            assert!(svg.contains(text), "{text}");
        }
        let alone = lines(&rows[..1], |row| row.p50_us);
        assert_eq!(alone[0].name, "2 ranks");
    }

    #[test]
    fn rows_without_time_or_size_make_no_plot() {
        for rows in [&[][..], &[sample(2, 0, Algorithm::Auto, 3.0)]] {
            assert!(draw(rows).unwrap_err().to_string().contains("no row has a size and a time"));
        }
        // A single rank has a latency, and no bandwidth.
        assert!(draw(&[sample(1, 8, Algorithm::Auto, 3.0)]).unwrap().contains("1 ranks"));
    }
}
