//! The times of the candidates, by size.

use std::collections::BTreeMap;
use std::time::Duration;

use super::table::PIECE;
use crate::plan::Algorithm;

/// The lengths of pieces among which the tuner chooses, in bytes.
const PIECES: [usize; 3] = [PIECE, 64 << 10, 1 << 20];
/// Below this length a ring is not tried, in bytes: its many steps take longer than they save.
const RING_FROM: usize = 4 << 10;

/// A time that is more than this factor above the one that the sizes around it suggest is measured again.
const DOUBTFUL: f64 = 1.3;

/// The number of sizes by which larger ones are judged.
const LINE: usize = 4;

/// An algorithm with a length of its pieces, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Candidate {
    pub(super) algorithm: Algorithm,
    pub(super) piece: usize,
}

/// The time of an operation, in nanoseconds, and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub(super) nanos: f64,
    pub(super) source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Measured,
    /// From the measured sizes below and above.
    Between,
    /// From measured sizes up to this one, in bytes.
    Beyond(usize),
}

impl Estimate {
    pub(super) fn duration(self) -> Duration {
        Duration::from_nanos(self.nanos as u64)
    }
}

/// The measured times of one candidate at one size.
#[derive(Clone, Debug)]
struct Samples {
    /// The median of all trials; of an even number, the smaller of the two in the middle. The smallest time would be that of the luckiest
    /// placement of the ranks on their cores.
    nanos: f64,
    /// In order.
    all: Vec<f64>,
}

impl Samples {
    fn add(&mut self, nanos: f64) {
        let at = self.all.partition_point(|other| *other < nanos);
        self.all.insert(at, nanos);
        self.nanos = self.all[(self.all.len() - 1) / 2];
    }
}

/// All measured times.
#[derive(Clone, Debug)]
pub(super) struct Times {
    ranks: usize,
    /// Ranks share cores.
    crowded: bool,
    candidates: Vec<Candidate>,
    samples: Vec<BTreeMap<usize, Samples>>,
}

impl Times {
    pub(super) fn new(ranks: usize) -> Self {
        // With two ranks, a ring sends the same messages as halving and doubling.
        let algorithms = &Algorithm::ALL[..if ranks > 2 { 3 } else { 2 }];
        let with_pieces =
            |algorithm: &Algorithm| PIECES.map(|piece| Candidate { algorithm: *algorithm, piece });
        let candidates: Vec<Candidate> = algorithms.iter().flat_map(with_pieces).collect();
        let samples = vec![BTreeMap::new(); candidates.len()];
        Self { ranks, crowded: false, candidates, samples }
    }

    pub(super) fn set_crowded(&mut self, crowded: bool) {
        self.crowded = crowded;
    }

    /// Returns whether ranks share cores.
    pub(super) fn is_crowded(&self) -> bool {
        self.crowded
    }

    pub(super) fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Returns the candidates that differ at this size, and may be tried there. Pieces that are longer than the longest message make
    /// no difference.
    pub(super) fn distinct(&self, bytes: usize) -> Vec<usize> {
        let is_tried = |index: &usize| {
            self.alike(*index, bytes) == *index
                && (self.candidates[*index].algorithm != Algorithm::Ring || bytes >= RING_FROM)
        };
        (0..self.candidates.len()).filter(is_tried).collect()
    }

    /// Returns the first candidate that sends the same messages as this one at this size.
    fn alike(&self, index: usize, bytes: usize) -> usize {
        let Candidate { algorithm, piece } = self.candidates[index];
        let longest = match algorithm {
            Algorithm::OneShot => bytes,
            Algorithm::HalvingDoubling => bytes.div_ceil(2),
            Algorithm::Ring => bytes.div_ceil(self.ranks),
        };
        if piece < longest {
            return index;
        }
        let is_alike = |other: &Candidate| other.algorithm == algorithm && other.piece >= longest;
        self.candidates.iter().position(is_alike).unwrap_or(index)
    }

    pub(super) fn record(&mut self, index: usize, bytes: usize, time: Duration) {
        // A clock that stands still would make a time of 0, which no ratio can be made of.
        let nanos = (time.as_nanos() as f64).max(1.0);
        self.samples[index].entry(bytes).or_insert(Samples { nanos, all: Vec::new() }).add(nanos);
    }

    /// Returns whether this candidate was measured at this size.
    pub(super) fn is_measured(&self, index: usize, bytes: usize) -> bool {
        self.samples[index].contains_key(&bytes)
    }

    /// Returns the largest size at which anything was measured.
    pub(super) fn largest(&self) -> Option<usize> {
        self.samples.iter().filter_map(|samples| samples.keys().next_back()).max().copied()
    }

    /// Returns all sizes at which anything was measured, in order.
    pub(super) fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.samples.iter().flat_map(|samples| samples.keys().copied()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Returns the time of a candidate at a size: measured, or estimated from measured ones; `None` if the candidate is not in question
    /// there.
    pub(super) fn estimate(&self, index: usize, bytes: usize) -> Option<Estimate> {
        let index = self.alike(index, bytes);
        let of = |nanos, source| Some(Estimate { nanos, source });
        if let Some(samples) = self.samples[index].get(&bytes) {
            return of(samples.nanos, Source::Measured);
        }
        // Smaller sizes may have been measured with other pieces that are the same there.
        let below = self
            .sizes()
            .into_iter()
            .rev()
            .filter(|size| *size < bytes)
            .find_map(|size| self.measured(index, size));
        let (size, nanos) = below?;
        if let Some((above, samples)) = self.samples[index].range(bytes..).next() {
            let along = (bytes as f64 / size as f64).ln() / (*above as f64 / size as f64).ln();
            return of(nanos * (samples.nanos / nanos).powf(along), Source::Between);
        }
        // A candidate that was given up before the others is not in question.
        if Some(size) != self.largest() {
            return None;
        }
        let (fixed, slope) = self.line(index);
        of(fixed + slope * bytes as f64, Source::Beyond(size))
    }

    /// Returns the line through the times of the largest measured sizes: the time that each operation takes, in nanoseconds, and the
    /// time of a byte.
    ///
    /// It is the line with the smallest squares of relative errors, so that a time that is too long counts for less than one that is
    /// right.
    fn line(&self, index: usize) -> (f64, f64) {
        let largest = self.sizes().into_iter().rev().filter_map(|size| self.measured(index, size)).take(LINE);
        let largest: Vec<(usize, f64)> = largest.collect();
        // The errors are fixed / time + slope · bytes / time − 1.
        let (mut ones, mut mixed, mut squares, mut one, mut bytes) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (size, nanos) in &largest {
            let (x, y) = (1.0 / nanos, *size as f64 / nanos);
            (ones, mixed, squares) = (ones + x * x, mixed + x * y, squares + y * y);
            (one, bytes) = (one + x, bytes + y);
        }
        let determinant = ones * squares - mixed * mixed;
        let fixed = (squares * one - mixed * bytes) / determinant;
        let slope = (ones * bytes - mixed * one) / determinant;
        match fixed.is_finite() && fixed >= 0.0 && slope >= 0.0 {
            true => (fixed, slope),
            // A line through zero.
            false => (0.0, bytes / squares),
        }
    }

    fn measured(&self, index: usize, bytes: usize) -> Option<(usize, f64)> {
        self.samples[self.alike(index, bytes)].get(&bytes).map(|samples| (bytes, samples.nanos))
    }

    /// Returns whether the time of a candidate at a size is much longer than its times at the sizes around it say. Other work on the
    /// machine may have been in the way.
    pub(super) fn is_doubtful(&self, index: usize, bytes: usize) -> bool {
        let all = &self.samples[index];
        let Some(samples) = all.get(&bytes) else { return false };
        let below = all.range(..bytes).next_back().map(|(size, samples)| (*size as f64, samples.nanos));
        let above = all.range(bytes + 1..).next().map(|(size, samples)| (*size as f64, samples.nanos));
        let expected = match (below, above) {
            (Some((size, nanos)), Some((larger, longer))) => {
                let along = (bytes as f64 / size).ln() / (larger / size).ln();
                nanos * (longer / nanos).powf(along)
            }
            (None, Some((_, longer))) => longer,
            (Some((size, nanos)), None) => nanos * (bytes as f64 / size),
            (None, None) => return false,
        };
        samples.nanos > DOUBTFUL * expected
    }

    /// Returns the candidate with the smallest time at a size, and that time.
    pub(super) fn best(&self, bytes: usize) -> Option<(usize, Estimate)> {
        let estimates = self.distinct(bytes).into_iter();
        let estimates = estimates.filter_map(|index| self.estimate(index, bytes).map(|time| (index, time)));
        estimates.min_by(|(_, one), (_, other)| one.nanos.total_cmp(&other.nanos))
    }
}
