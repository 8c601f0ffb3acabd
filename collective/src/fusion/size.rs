//! The size of a bucket: pinned by the caller, or the quickest of a few, measured in the first steps.
//!
//! All ranks try the same sizes in the same steps. In the end rank 0's times decide, on all ranks.

use std::fmt;
use std::time::Duration;

use tonic_rdma::internal::units;

use super::layout::{Layout, List};

/// The sizes that the ranks try, in bytes. Small buckets start early, large ones have fewer operations.
const CANDIDATES: [usize; 6] = [256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];

/// Steps with one size whose times count. One more step comes before these and does not count, because its memory is fresh.
const COUNTED: usize = 3;

/// The size of a bucket, and its reason. Displays both.
#[derive(Clone, Debug)]
pub struct BucketSize {
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// Before the first step has ended.
    Open,
    Pinned(usize),
    /// All sizes that would be tried give the same buckets.
    Only(usize),
    Measuring(Trial),
    Measured {
        chosen: usize,
        /// Each size, and the median of its steps. Only rank 0 decides by its own times.
        times: Vec<(usize, Duration)>,
        rank: usize,
    },
}

#[derive(Clone, Debug)]
struct Trial {
    candidates: Vec<usize>,
    /// The times of the steps of each size that has begun.
    times: Vec<Vec<Duration>>,
}

impl BucketSize {
    pub(super) fn open() -> Self {
        Self { state: State::Open }
    }

    /// Returns the sizes for these gradients.
    pub(super) fn new(list: &List, element: usize) -> Self {
        if let Some(pinned) = list.bucket_bytes {
            return Self { state: State::Pinned(usize::try_from(pinned).unwrap_or(usize::MAX)) };
        }
        let mut candidates: Vec<usize> = Vec::new();
        let mut last: Vec<usize> = Vec::new();
        for bytes in CANDIDATES {
            let layout = Layout::new(list, bytes / element);
            if candidates.is_empty() || layout.buckets() != last {
                candidates.push(bytes);
                last = layout.buckets().to_vec();
            }
        }
        let state = match candidates[..] {
            [only] => State::Only(only),
            _ => State::Measuring(Trial { candidates, times: vec![Vec::new()] }),
        };
        Self { state }
    }

    /// Returns the size of the buckets of the next step, in bytes.
    pub fn bytes(&self) -> usize {
        match &self.state {
            State::Open => CANDIDATES[0],
            State::Pinned(bytes) | State::Only(bytes) => *bytes,
            State::Measuring(trial) => trial.candidates[trial.times.len() - 1],
            State::Measured { chosen, .. } => *chosen,
        }
    }

    /// Returns whether the ranks still measure.
    pub fn measuring(&self) -> bool {
        matches!(self.state, State::Open | State::Measuring(_))
    }

    /// Takes the time of a step. Returns the index of the quickest size when all have been measured; rank 0's index is for
    /// [`settle`](Self::settle).
    pub(super) fn record(&mut self, time: Duration) -> Option<u64> {
        let State::Measuring(trial) = &mut self.state else { return None };
        let (begun, last) = (trial.times.len(), trial.times.last_mut()?);
        last.push(time);
        if last.len() <= COUNTED {
            return None;
        }
        if begun < trial.candidates.len() {
            trial.times.push(Vec::new());
            return None;
        }
        let quickest = trial.medians().enumerate().min_by_key(|&(_, (_, median))| median);
        quickest.map(|(index, _)| index as u64)
    }

    /// Takes rank 0's choice. Returns false if there is no such size.
    pub(super) fn settle(&mut self, index: u64, rank: usize) -> bool {
        let State::Measuring(trial) = &self.state else { return false };
        let Some(&chosen) = usize::try_from(index).ok().and_then(|index| trial.candidates.get(index)) else {
            return false;
        };
        self.state = State::Measured { chosen, times: trial.medians().collect(), rank };
        true
    }
}

impl Trial {
    fn medians(&self) -> impl Iterator<Item = (usize, Duration)> {
        std::iter::zip(&self.candidates, &self.times).map(|(&bytes, times)| {
            let mut counted = times.get(1..).unwrap_or_default().to_vec();
            counted.sort_unstable();
            (bytes, counted.get(counted.len() / 2).copied().unwrap_or(Duration::MAX))
        })
    }
}

impl fmt::Display for BucketSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            State::Open => f.write_str("buckets: chosen after the first step"),
            State::Pinned(bytes) => write!(f, "buckets of {}, because `bucket_bytes` says so", size(*bytes)),
            State::Only(bytes) => {
                write!(f, "buckets of {}, because other sizes give the same buckets", size(*bytes))
            }
            State::Measuring(trial) => write!(
                f,
                "buckets of {}, because size {} of {} is being measured",
                size(self.bytes()),
                trial.times.len(),
                trial.candidates.len()
            ),
            State::Measured { chosen, times, rank } => {
                write!(f, "buckets of {}, because ", size(*chosen))?;
                match rank {
                    0 => f.write_str("steps were the quickest with it:")?,
                    _ => f.write_str("rank 0's steps were the quickest with it; here:")?,
                }
                for (at, (bytes, time)) in times.iter().enumerate() {
                    write!(f, "{} {time:.1?} with {}", if at == 0 { "" } else { "," }, size(*bytes))?;
                }
                Ok(())
            }
        }
    }
}

fn size(bytes: usize) -> String {
    units::size(bytes as u64)
}
