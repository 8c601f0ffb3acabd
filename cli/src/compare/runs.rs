//! Several runs of a command: what each has measured, for the spread of a row's figures, and the runs that stand
//! out. `parameter-server` and `load` have them too.

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};
use tonic_rdma_commands::statistics::{deviation, median, range};

/// What each of several runs has measured, by the names of the figures in the JSON. A figure that a run lacks is
/// not there.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Runs(Vec<(&'static str, Vec<f64>)>);

/// A figure of a row: its name in the JSON, and how it is found. It is absent if nothing was measured.
pub(crate) type Figure<R> = (&'static str, fn(&R) -> Option<f64>);

impl Runs {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps `figures` of several `runs` of one row.
    pub(crate) fn of<R>(runs: &[&R], figures: &[Figure<R>]) -> Self {
        let all = |(name, figure): &Figure<R>| {
            let values = runs.iter().map(|row| figure(row)).collect::<Option<Vec<_>>>();
            Some((*name, values?))
        };
        Self(figures.iter().filter(|_| runs.len() > 1).filter_map(all).collect())
    }

    /// Returns what the runs have measured, in their order.
    pub(crate) fn of_figure(&self, name: &str) -> Option<&[f64]> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, values)| values.as_slice())
    }

    pub(crate) fn range(&self, name: &str) -> Option<[f64; 2]> {
        range(self.of_figure(name)?)
    }
}

/// Returns a range as a text.
pub(crate) fn from_to(range: [f64; 2], text: impl Fn(f64) -> String) -> String {
    let [least, most] = range.map(text);
    format!("{least} to {most}")
}

/// Of `p50_us` the JSON has `p50_us_min`, `p50_us_max` and `p50_us_runs`.
impl Serialize for Runs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, values) in &self.0 {
            if let Some([least, most]) = range(values) {
                map.serialize_entry(&format!("{name}_min"), &least)?;
                map.serialize_entry(&format!("{name}_max"), &most)?;
                map.serialize_entry(&format!("{name}_runs"), values)?;
            }
        }
        map.end()
    }
}

/// Describes runs whose median time is far from that of the others. What disturbs a run disturbs many rows, so each
/// run has one warning. Each row has a name, and `figure` of it is shown as `text`.
pub(crate) fn that_stand_out<'a>(
    rows: impl IntoIterator<Item = (String, &'a Runs)>,
    figure: &str,
    text: fn(f64) -> String,
) -> Vec<String> {
    let of_rows = rows.into_iter().filter_map(|(name, runs)| Some((name, runs.of_figure(figure)?)));
    let of_rows: Vec<_> = of_rows.filter(|(_, runs)| runs.len() >= 3).collect();
    let mut warnings = Vec::new();
    // A first run has to be slower than the others in most rows. That of a single row often is, by chance.
    let first = median(of_rows.iter().map(|(_, runs)| runs[0] / median(runs[1..].iter().copied())));
    if first > 1.0 + FAR {
        warnings.push(format!(
            "the first run was slower than the others: its p50 is {first:.2} times theirs (the median of all rows); caches were \
             cold, or the machine was busy. Run once more"
        ));
    }
    let most = of_rows.iter().map(|(_, runs)| runs.len()).max().unwrap_or(0);
    for run in usize::from(!warnings.is_empty())..most {
        let is_far = |runs: &[f64]| {
            let (value, middle) = (*runs.get(run)?, median(runs.iter().copied()));
            let apart = (value - middle).abs();
            let far =
                runs.len() >= ENOUGH_RUNS && apart > DEVIATIONS * deviation(runs) && apart > FAR * middle;
            far.then_some((apart / middle, value, middle))
        };
        let far: Vec<_> = of_rows.iter().filter_map(|(name, runs)| Some((name, is_far(runs)?))).collect();
        let Some((name, (_, value, middle))) =
            far.iter().max_by(|(_, one), (_, other)| one.0.total_cmp(&other.0))
        else {
            continue;
        };
        warnings.push(format!(
            "run {} stands out in {} of {} rows, most in {name}: p50 {}, median {}",
            run + 1,
            far.len(),
            of_rows.len(),
            text(*value),
            text(*middle)
        ));
    }
    warnings
}

/// A run stands out if it is further from the median than this share of it, and than so many median absolute
/// deviations. Of fewer runs the deviation says too little.
const FAR: f64 = 0.1;
const DEVIATIONS: f64 = 10.0;
const ENOUGH_RUNS: usize = 5;

#[cfg(test)]
mod tests {
    use crate::compare::plan::Cell;
    use crate::compare::results::row_tests::sample_row;
    use crate::compare::results::{disturbed_runs, medians};

    #[test]
    fn runs_that_stand_out_are_named_once_for_all_rows() {
        let (small, large) = (Cell::closed(64, 1), Cell::closed(1 << 20, 1));
        // The latencies of each run, in microseconds, of a small and of a large call.
        let warnings = |runs: &[[f64; 2]]| {
            let of_run = |[one, other]: &[f64; 2]| {
                vec![sample_row("grpc-tcp", small, *one), sample_row("grpc-tcp", large, *other)]
            };
            disturbed_runs(&medians(runs.iter().map(of_run).collect()))
        };
        let quiet = [[10.0, 100.0], [10.1, 101.0], [9.9, 99.0], [10.05, 102.0], [10.2, 100.5]];
        assert_eq!(warnings(&quiet), [""; 0]);
        assert_eq!(warnings(&quiet[..1]), [""; 0]);
        let mut disturbed = quiet;
        disturbed[3] = [30.0, 150.0];
        let said =
            "run 4 stands out in 2 of 2 rows, most in grpc-tcp at 64 B × 1: p50 30.0 µs, median 10.1 µs";
        assert_eq!(warnings(&disturbed), [said]);
        // Far beyond the deviation, but close to the median.
        disturbed[3] = [10.9, 100.0];
        assert_eq!(warnings(&disturbed), [""; 0]);
        let mut cold = quiet;
        cold[0] = [20.0, 130.0];
        let said = warnings(&cold);
        assert!(
            said.len() == 1
                && said[0].starts_with("the first run was slower than the others: its p50 is 1.6")
        );
        // Of three runs only the first can be told from the others.
        assert_eq!((warnings(&cold[..3]).len(), warnings(&disturbed[2..]).len()), (1, 0));
        // A first run that is slower in one row of two.
        cold[0] = [11.5, 100.0];
        assert_eq!(
            warnings(&cold),
            ["run 1 stands out in 1 of 2 rows, most in grpc-tcp at 64 B × 1: p50 11.5 µs, median 10.1 µs"]
        );
    }
}
