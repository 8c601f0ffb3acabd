//! Makes a table of measured times.
//!
//! The table is the path through the sizes that costs least. At each size, an algorithm that takes longer than the best one costs the
//! logarithm of the ratio, more than that if the ratio is large, and nothing if it is within the noise. A change from one size to the next
//! costs as much as 8 % at one size. So noise changes nothing, and a difference that lasts over some sizes does. Where ranks share cores, a
//! ring counts as 10 % longer.

use super::table::{PIECE, PlanTable, Row};
use super::times::{Candidate, Source, Times};
use super::units::{Bytes, Time};
use crate::plan::Algorithm;

/// The cost of a change of the algorithm, and of a change of its pieces alone.
const CHANGE: f64 = 0.08;
const CHANGE_OF_PIECES: f64 = 0.04;
/// The logarithm of a ratio that costs nothing. Medians of the same operation differ by some 2 %.
const NOISE: f64 = 0.02;
/// What a ring costs beside its time where ranks share cores: there trials show rings about as fast as halving and doubling at lengths at
/// which rings are some 10 % slower in a longer measurement.
const RING: f64 = 0.1;
/// How much more a large ratio costs: at 20 %, about as much again.
const STEEPNESS: f64 = 4.0;
/// The cost of a candidate that has no time at a size.
const UNKNOWN: f64 = 1e6;
/// A difference below which two times count as equal in a reason.
const EQUAL: f64 = 1.02;

/// Returns the best table for these sizes, which are in order. Unless the table is complete with them, larger sizes have the choices of
/// [`PlanTable::unmeasured`].
pub(super) fn table(times: &Times, ranks: usize, sizes: &[usize], is_complete: bool) -> PlanTable {
    let sizes: Vec<usize> = sizes.iter().copied().filter(|bytes| times.best(*bytes).is_some()).collect();
    let path = path(times, &sizes);
    if path.is_empty() {
        return PlanTable::unmeasured(ranks);
    }
    let mut rows: Vec<Row> = Vec::new();
    let mut first = 0;
    for last in 0..sizes.len() {
        let is_end = path.get(last + 1) != Some(&path[last]);
        if !is_end {
            continue;
        }
        let end =
            path.get(last + 1).map(|next| crossing(times, path[last], *next, sizes[last], sizes[last + 1]));
        let candidate = times.candidates()[path[last]];
        let reason = reason(times, path[last], &sizes[first..=last]);
        // Pieces that are longer than all messages of the range do nothing.
        let piece =
            if end.is_some_and(|end| end <= candidate.piece.min(PIECE)) { PIECE } else { candidate.piece };
        rows.push(Row { end, algorithm: candidate.algorithm, piece, reason });
        first = last + 1;
    }
    if let (false, Some(last), Some(row)) = (is_complete, sizes.last(), rows.last_mut()) {
        let end = last + 1;
        row.end = Some(end);
        for range in PlanTable::unmeasured(ranks).ranges() {
            if range.end.is_none_or(|other| other > end) {
                let reason = "there was no time to measure it".into();
                rows.push(Row { end: range.end, algorithm: range.algorithm, piece: range.piece, reason });
            }
        }
    }
    PlanTable::from_rows(rows)
}

/// Returns the candidate for each size, on the path that costs least.
pub(super) fn path(times: &Times, sizes: &[usize]) -> Vec<usize> {
    let candidates = times.candidates();
    let mut costs = vec![0.0; candidates.len()];
    let mut origins: Vec<Vec<usize>> = Vec::new();
    for bytes in sizes {
        let cheapest = |to: usize| {
            let with_change = |from: usize| (from, costs[from] + change(candidates[from], candidates[to]));
            // The candidate itself comes first, so that equal costs change nothing.
            let all = std::iter::once(to).chain(0..candidates.len()).map(with_change);
            all.min_by(|one, other| one.1.total_cmp(&other.1)).unwrap_or((to, 0.0))
        };
        let (from, reached): (Vec<usize>, Vec<f64>) = (0..candidates.len()).map(cheapest).unzip();
        costs = reached.iter().enumerate().map(|(to, cost)| cost + loss(times, to, *bytes)).collect();
        origins.push(from);
    }
    let last = (0..candidates.len()).min_by(|one, other| costs[*one].total_cmp(&costs[*other]));
    let Some(mut at) = last else { return Vec::new() };
    let mut path: Vec<usize> = Vec::with_capacity(sizes.len());
    for from in origins.iter().rev() {
        path.push(at);
        at = from[at];
    }
    path.reverse();
    path
}

fn change(from: Candidate, to: Candidate) -> f64 {
    match (from == to, from.algorithm == to.algorithm) {
        (true, _) => 0.0,
        (_, true) => CHANGE_OF_PIECES,
        _ => CHANGE,
    }
}

/// Returns the cost of a candidate at one size.
fn loss(times: &Times, index: usize, bytes: usize) -> f64 {
    match (times.estimate(index, bytes), times.best(bytes)) {
        (Some(time), Some((_, best))) => {
            let is_ring = times.candidates()[index].algorithm == Algorithm::Ring;
            let more = if is_ring && times.is_crowded() { RING } else { 0.0 };
            let ratio = ((time.nanos / best.nanos).ln() + more - NOISE).max(0.0);
            ratio + STEEPNESS * ratio * ratio
        }
        _ => UNKNOWN,
    }
}

/// Returns the size from which on `to` is faster than `from`, between two sizes: above the one, and at most the other.
fn crossing(times: &Times, from: usize, to: usize, below: usize, above: usize) -> usize {
    // How much longer `to` takes; below 0 if it is faster.
    let lead = |bytes| match (times.estimate(from, bytes), times.estimate(to, bytes)) {
        (Some(from), Some(to)) => Some((to.nanos / from.nanos).ln()),
        _ => None,
    };
    let along = match (lead(below), lead(above)) {
        (Some(before), Some(after)) if before > 0.0 && after < 0.0 => before / (before - after),
        _ => 0.5,
    };
    let size = below as f64 * (above as f64 / below as f64).powf(along);
    // Two digits of the binary number: 16, 24, 32, 48 KiB.
    let unit = 2_f64.powi(size.log2().floor() as i32 - 1);
    let rounded = (size / unit).round() * unit;
    let rounded = if rounded <= below as f64 { rounded + unit } else { rounded };
    (rounded as usize).clamp(below + 1, above)
}

/// Returns why a candidate was chosen for these sizes, in words.
fn reason(times: &Times, chosen: usize, sizes: &[usize]) -> String {
    let candidates = times.candidates();
    let time = |bytes: usize| times.estimate(chosen, bytes).filter(|time| time.source != Source::Between);
    let known: Vec<usize> = sizes.iter().copied().filter(|bytes| time(*bytes).is_some()).collect();
    // The middle measured size says most about the range; an extrapolated one says what was extrapolated.
    let measured: Vec<usize> = known
        .iter()
        .copied()
        .filter(|bytes| time(*bytes).is_some_and(|time| time.source == Source::Measured))
        .collect();
    let of = if measured.is_empty() { &known } else { &measured };
    let Some((bytes, own)) = of.get(of.len() / 2).and_then(|bytes| time(*bytes).map(|time| (*bytes, time)))
    else {
        return "it was the best at the sizes around".into();
    };
    let mut others: Vec<String> = Vec::new();
    let (mut best_other, mut best_ring) = (f64::MAX, f64::MAX);
    for algorithm in Algorithm::ALL {
        let rivals =
            times.distinct(bytes).into_iter().filter(|index| candidates[*index].algorithm == algorithm);
        let rivals = rivals.filter_map(|index| times.estimate(index, bytes).map(|time| (index, time)));
        let best = rivals.min_by(|(_, one), (_, other)| one.nanos.total_cmp(&other.nanos));
        let Some((index, rival)) = best else { continue };
        if algorithm == Algorithm::Ring && times.is_crowded() && candidates[chosen].algorithm != algorithm {
            best_ring = rival.nanos;
        } else {
            best_other = best_other.min(rival.nanos);
        }
        if algorithm != candidates[chosen].algorithm {
            others.push(format!("{algorithm} {}", Time(rival.duration())));
        } else if rival.nanos * EQUAL < own.nanos {
            others.push(format!("pieces of {} {}", Bytes(candidates[index].piece), Time(rival.duration())));
        }
    }
    let mut reason = match own.source {
        Source::Beyond(from) => {
            format!("it would take {} at {}, judged by {}", Time(own.duration()), Bytes(bytes), Bytes(from))
        }
        _ => format!("it took {} at {}", Time(own.duration()), Bytes(bytes)),
    };
    for other in others {
        reason.push_str(", ");
        reason.push_str(&other);
    }
    if best_other * EQUAL < own.nanos {
        reason.push_str("; the difference is too small for a change");
    } else if best_ring * EQUAL < own.nanos {
        reason.push_str("; a ring counts as 10 % longer where ranks share cores");
    }
    reason
}
