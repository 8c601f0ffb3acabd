//! The tables for the terminal.

use comfy_table::Table;
use tonic_rdma_commands::table::grid;
use tonic_rdma_commands::units::{digits, micros, size};

use super::Results;
use crate::choices::Named;
use crate::report::{Compared, Counted, Row, Verdict};

/// Renders everything that the terminal shows.
pub(super) fn render(results: &Results) -> String {
    let mut text = String::new();
    for plans in &results.plans {
        text.push_str(&format!("Plans of {} ranks:\n{}\n\n", plans.ranks, plans.text.trim_end()));
    }
    if results.tuner.is_empty() {
        text.push_str(&format!("{}\n{LEGEND}\n", rows(&results.rows)));
    } else {
        text.push_str(&format!("{}\n", tuner(&results.tuner)));
    }
    if !results.counters.is_empty() {
        text.push_str(&format!("\n{}\n{COUNTERS}\n", counters(&results.counters)));
    }
    if let Some(Verdict { geometric_mean, worst, .. }) = results.verdict() {
        text.push_str(&format!(
            "auto over the best fixed algorithm: geometric mean {geometric_mean:.3}, worst {worst:.3}\n"
        ));
    }
    text
}

const LEGEND: &str = "p50, p99: of the slowest rank in each iteration. bus GB/s: 2(N-1)/N times the size over p50. \
                      errors: wrong elements.";
const COUNTERS: &str = "For each operation, of a rank on average. least: 2(N-1)/N times the size.";

fn rows(rows: &[Row]) -> Table {
    let headings =
        ["ranks", "type", "operand", "size", "algorithm", "iterations", "p50", "p99", "bus GB/s", "errors"];
    let text = |row: &Row| {
        vec![
            row.ranks.to_string(),
            row.kind.name().to_owned(),
            row.operand.name().to_owned(),
            size(row.bytes),
            row.algorithm.name().to_owned(),
            row.iterations.to_string(),
            micros(row.p50_us),
            micros(row.p99_us),
            digits(row.bus_gbytes_per_s),
            row.errors.to_string(),
        ]
    };
    let key = |row: &Row| (row.ranks, row.kind, row.operand);
    grid(
        &headings,
        rows.chunk_by(|one, next| key(one) == key(next)).map(|group| group.iter().map(text).collect()),
    )
}

fn counters(counters: &[Counted]) -> Table {
    let headings =
        ["ranks", "type", "operand", "size", "algorithm", "moved", "least", "moved / least", "copied"];
    let text = |it: &Counted| {
        let ranks = it.ranks.max(1) as f64;
        let ratio = it.moved_bytes / it.least_bytes();
        vec![
            it.ranks.to_string(),
            it.kind.name().to_owned(),
            it.operand.name().to_owned(),
            size(it.bytes),
            it.algorithm.name().to_owned(),
            format!("{:.1} B", it.moved_bytes / ranks),
            format!("{:.1} B", it.least_bytes() / ranks),
            if ratio.is_finite() { format!("{ratio:.3}") } else { "–".to_owned() },
            format!("{:.1} B", it.copied_bytes / ranks),
        ]
    };
    grid(
        &headings,
        counters.chunk_by(|one, next| one.ranks == next.ranks).map(|group| group.iter().map(text).collect()),
    )
}

fn tuner(compared: &[Compared]) -> Table {
    let names = compared.first().map_or(&[][..], |first| &first.fixed_us);
    let mut headings = vec!["ranks", "size", "auto"];
    headings.extend(names.iter().map(|(algorithm, _)| algorithm.name()));
    headings.extend(["best", "auto / best"]);
    let text = |it: &Compared| {
        let mut texts = vec![it.ranks.to_string(), size(it.bytes), micros(it.auto_us)];
        texts.extend(
            it.fixed_us.iter().map(|(_, median)| median.map_or_else(|| "far behind".to_owned(), micros)),
        );
        texts.push(it.best().map_or_else(String::new, |(algorithm, _)| algorithm.name().to_owned()));
        texts.push(it.ratio().map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}")));
        texts
    };
    grid(
        &headings,
        compared.chunk_by(|one, next| one.ranks == next.ranks).map(|group| group.iter().map(text).collect()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choices::{Algorithm, Operand, Type};
    use crate::report::{Plans, Report, sample};

    #[test]
    fn tables_show_plans_rows_counters_and_the_verdict() {
        let mut results = Results::default();
        results.add(Report::Plans(Plans { ranks: 2, text: "up to 4 KiB: one-shot".to_owned() }));
        results.add(Report::Row(sample(2, 1 << 20, Algorithm::Auto, 104.8576)));
        results.add(Report::Counted(Counted {
            ranks: 2,
            bytes: 1000,
            algorithm: Algorithm::Ring,
            kind: Type::F32,
            operand: Operand::Registered,
            operations: 4,
            moved_bytes: 2000.0,
            copied_bytes: 0.0,
        }));
        let text = render(&results);
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
        let text = render(&results);
        for part in ["auto / best", "1.10 µs", "far behind", "geometric mean 1.100, worst 1.100"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
