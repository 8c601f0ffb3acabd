//! The figures of Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys 2019), beside ours. `benches/paper`
//! stores ours as `paper-8` to `paper-12`, with the numbers of the paper's figures.

mod pictures;
mod sizes;
mod summary;
mod training;

pub(crate) use pictures::picture;
pub(crate) use summary::{SUMMARY, summary};
pub(crate) use training::{curves, into_rows};

use tonic_rdma_commands::units;

use crate::columns::Row;

/// The paper's six models, in the order of its table 2.
const MODELS: [&str; 6] = ["alexnet", "inception-v3", "vgg16", "lstm", "gru", "fcn5"];

/// Returns `over`'s operations a second divided by those of `under`, in one cell.
fn speed_up(cell: &[Row<'_>], over: &str, under: &str) -> Option<f64> {
    let of = |mode: &str| cell.iter().find(|row| row.mode() == mode)?.each_second();
    Some(of(over)? / of(under)?)
}

/// Returns `under`'s median time divided by that of `over`, in one cell.
fn time_ratio(cell: &[Row<'_>], over: &str, under: &str) -> Option<f64> {
    let of = |mode: &str| cell.iter().find(|row| row.mode() == mode)?.p50();
    Some(of(under)? / of(over)?)
}

/// Returns a ratio as text.
fn ratio(value: f64) -> String {
    if value >= 9.995 { units::digits(value) } else { format!("{value:.2}") }
}

/// Returns the least and the largest of `values` as text, or a dash without values.
fn range(values: impl IntoIterator<Item = f64>) -> String {
    let (least, most) = values
        .into_iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(value), most.max(value)));
    match (ratio(least), ratio(most)) {
        _ if least > most => "–".to_owned(),
        (least, most) if least == most => least,
        (least, most) => format!("{least} to {most}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_both_ends_or_one_value() {
        assert_eq!(range([2.0, 1.5, 14.2]), "1.50 to 14.2");
        assert_eq!(range([2.0, 2.001]), "2.00");
        assert_eq!(range([]), "–");
    }
}
