//! What ranks report, and the rows of a run.

use serde::{Deserialize, Serialize};
use tonic_rdma_collective::Reduction;
use tonic_rdma_commands::statistics::{geometric_mean, median, quantile};

use crate::choices::{Algorithm, Operand, Type};

/// A message of a rank to the process that started it. Each is a line of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The rank works. Rank 0 says so once a second.
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

/// The bytes that the operations of a cell moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counted {
    #[serde(flatten)]
    pub(crate) key: Key,
    pub(crate) operations: u64,
    /// The bytes that all ranks together moved in one operation.
    pub(crate) moved_bytes: f64,
    /// The bytes that all ranks together copied in one operation.
    pub(crate) copied_bytes: f64,
}

impl Counted {
    /// Returns 2(N−1)/N times the size for each of N ranks, so 2(N−1) times the size for all.
    pub(crate) fn least_bytes(&self) -> f64 {
        bus_bytes(self.key.ranks, self.key.bytes) * self.key.ranks as f64
    }

    /// Returns whether the counters are as promised: the ring moves the least, and registered memory is not copied.
    pub(crate) fn holds(&self) -> bool {
        let ring =
            self.key.algorithm != Algorithm::Ring || (self.moved_bytes - self.least_bytes()).abs() < 0.5;
        ring && (self.key.operand == Operand::Slice || self.copied_bytes == 0.0)
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

/// Returns the bus bandwidth in GB/s of an operation that took `micros`. One rank moves nothing, so its bandwidth is 0.
fn bus_gbytes_per_s(ranks: usize, bytes: u64, micros: f64) -> f64 {
    if micros > 0.0 { bus_bytes(ranks, bytes) / micros / 1000.0 } else { 0.0 }
}

#[cfg(test)]
pub(crate) fn sample(ranks: usize, bytes: u64, algorithm: Algorithm, p50: f64) -> Row {
    let key = Key { ranks, bytes, algorithm, kind: Type::F32, operand: Operand::Registered };
    Row::new(key, Reduction::Sum, &[p50], 0)
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
        let ring = Counted { key, operations: 10, moved_bytes: 4000.0, copied_bytes: 0.0 };
        assert_eq!(ring.least_bytes(), 4000.0);
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
