//! The table of algorithms by length, and its text form. All ranks have the same, so they make the same
//! plans.

use std::fmt;
use std::str::FromStr;

use super::step::{Algorithm, Collective};
use crate::error::{CollectiveError, setting};
use tonic_rdma::unstable::units;

/// The length of a chunk if nothing else is said, in bytes.
pub(super) const CHUNK: usize = 256 << 10;
/// The largest length of a message that holds its elements, in bytes; see `LinkSettings`.
const INLINE: usize = 16 << 10;
/// From this number of ranks on, a small broadcast is sent along a tree.
const TREE_FROM: usize = 5;
/// How many bytes more an operation may send to save a round: those that move in the time of a message. At
/// 100 Gb/s, 32 KiB take 2.6 µs.
const ROUND: usize = 32 << 10;

/// Which algorithm an operation of a given length uses, and why.
///
/// Its text form names an algorithm, if need be the length of its chunks, and the sizes from the end of the
/// range before up to, and without, an end. [`FromStr`](std::str::FromStr) parses that form, and
/// [`pinned`](Self::pinned) writes it.
///
/// ```
/// use tonic_rdma_collective::{Algorithm, PlanTable};
///
/// let table: PlanTable = "one-shot:..16KiB,halving-doubling:..1MiB,ring/128KiB:..".parse()?;
/// assert_eq!(table.choose(4096).0, Algorithm::OneShot);
/// assert_eq!(table.choose(16 << 10).0, Algorithm::HalvingDoubling);
/// assert_eq!(table.choose(64 << 20), (Algorithm::Ring, 128 << 10));
/// # Ok::<(), tonic_rdma_collective::CollectiveError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanTable {
    /// At least one; each starts where the one before ends, and the last has no end.
    ranges: Vec<PlanRange>,
}

/// The sizes of one row of a [`PlanTable`], and what is chosen for them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanRange {
    /// The smallest length of this range, in bytes.
    pub start: usize,
    /// The smallest length above this range, in bytes; `None` if the range has no end.
    pub end: Option<usize>,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The largest length of a message, in bytes.
    pub chunk_bytes: usize,
    /// The reason for this choice, such as `it is pinned`.
    pub reason: &'static str,
}

impl PlanTable {
    /// Returns the default table of a group of this many ranks. It comes from measurements of 2 to 8 ranks on
    /// one host (`tonic-rdma-allreduce --tuner-check`).
    ///
    /// ```
    /// use tonic_rdma_collective::{Algorithm, PlanTable};
    ///
    /// let table = PlanTable::for_ranks(4);
    /// assert_eq!(table.choose(8).0, Algorithm::OneShot);
    /// assert_eq!(table.choose(64 << 20).0, Algorithm::Ring);
    /// ```
    pub fn for_ranks(ranks: usize) -> Self {
        // A one-shot moves N − 1 times the elements. Above 16 KiB no message holds its elements, and a
        // one-shot gains nothing.
        let small = (ROUND / ranks.saturating_sub(1).max(1)).next_power_of_two();
        let small = small.clamp(1 << 10, INLINE + 1);
        // A few ranks have long parts, so that longer chunks leave enough of them for a pipeline.
        let long = if ranks <= 4 { 1 << 20 } else { CHUNK };
        let rows = [
            (Some(small), Algorithm::OneShot, CHUNK),
            (Some(1 << 20), Algorithm::HalvingDoubling, CHUNK),
            (None, Algorithm::Ring, long),
        ];
        Self::from_rows("it is the default", rows)
    }

    /// Returns the default table of a group with this many ranks on each host: [`for_ranks`](Self::for_ranks)
    /// on one host, or with one rank on each. Otherwise it is hierarchical, but for the smallest operations.
    ///
    /// It comes from a model: the bytes that leave the busiest host, and 32 KiB for each round across hosts. Of
    /// the algorithms with two rounds or more, the hierarchical one is best for all numbers of ranks on all
    /// hosts; a test counts both. A one-shot has one round, in which a host with L of N ranks sends L·(N−L)
    /// times the elements.
    ///
    /// ```
    /// use tonic_rdma_collective::{Algorithm, PlanTable};
    ///
    /// let table = PlanTable::for_hosts(&[4, 4]);
    /// assert_eq!(table.choose(1024).0, Algorithm::OneShot);
    /// assert_eq!(table.choose(64 << 10).0, Algorithm::Hierarchical);
    /// assert_eq!(PlanTable::for_hosts(&[4]), PlanTable::for_ranks(4));
    /// ```
    pub fn for_hosts(hosts: &[usize]) -> Self {
        let ranks = hosts.iter().sum();
        let count = hosts.iter().filter(|ranks| **ranks > 0).count();
        if count <= 1 || count == ranks {
            return Self::for_ranks(ranks);
        }
        let most = hosts.iter().map(|own| own * (ranks - own)).max().unwrap_or(0);
        // The hierarchical one sends the elements once, or up to twice.
        let small = (ROUND / (most - 1).max(1)).next_power_of_two().clamp(64, INLINE + 1);
        let rows = [(Some(small), Algorithm::OneShot, CHUNK), (None, Algorithm::Hierarchical, CHUNK)];
        Self::from_rows("it is the default for ranks of several hosts", rows)
    }

    /// Returns a table with one algorithm for all sizes.
    pub(crate) fn fixed(algorithm: Algorithm, chunk: usize) -> Self {
        Self::from_rows("the program set it", [(None, algorithm, chunk)])
    }

    /// Makes a table of rows: end, algorithm and chunk. Each ends above the one before, and only the last has
    /// no end.
    pub(super) fn from_rows(reason: &'static str, rows: impl IntoIterator<Item = Row>) -> Self {
        let mut start = 0;
        let with_start = |(end, algorithm, chunk_bytes): Row| {
            let range = PlanRange { start, end, algorithm, chunk_bytes, reason };
            start = end.unwrap_or(usize::MAX);
            range
        };
        Self { ranges: rows.into_iter().map(with_start).collect() }
    }

    /// Returns the algorithm of an all-reduce of this length, and the largest length of its messages, both
    /// lengths in bytes.
    pub fn choose(&self, bytes: usize) -> (Algorithm, usize) {
        let range = self.ranges.iter().find(|range| range.end.is_none_or(|end| bytes < end));
        range.map_or((Algorithm::Ring, CHUNK), |range| (range.algorithm, range.chunk_bytes))
    }

    /// Returns the algorithm of an operation whose whole has this length, and the largest length of its
    /// messages, in bytes.
    ///
    /// Reduce-scatter and all-gather are the halves of an all-reduce, so they use what it uses. The root
    /// sends a broadcast to all ranks directly if it is small and the ranks are few. It is sent along a tree
    /// if an all-reduce uses halving and doubling, from host to host if that is hierarchical, and otherwise
    /// along a chain. A barrier has one algorithm.
    pub(crate) fn choose_for(
        &self,
        collective: Collective,
        ranks: usize,
        bytes: usize,
    ) -> (Algorithm, usize) {
        let (algorithm, chunk) = self.choose(bytes);
        match (collective, algorithm) {
            (Collective::Broadcast { .. }, Algorithm::OneShot) if ranks >= TREE_FROM => {
                (Algorithm::HalvingDoubling, chunk)
            }
            _ => (algorithm, chunk),
        }
    }

    /// Returns the ranges, the smallest sizes first.
    pub fn ranges(&self) -> &[PlanRange] {
        &self.ranges
    }

    /// Returns the text form, which pins these choices for later runs: `one-shot:..16KiB,ring/128KiB:..`.
    ///
    /// ```
    /// let text = "one-shot:..16KiB,ring/128KiB:..";
    /// let table: tonic_rdma_collective::PlanTable = text.parse()?;
    /// assert_eq!(table.pinned(), text);
    /// # Ok::<(), tonic_rdma_collective::CollectiveError>(())
    /// ```
    pub fn pinned(&self) -> String {
        let ranges = self.ranges.iter().map(|range| {
            let chunk = match range.chunk_bytes {
                CHUNK => String::new(),
                chunk => format!("/{}", compact(chunk)),
            };
            let end = range.end.map(compact).unwrap_or_default();
            format!("{}{chunk}:..{end}", range.algorithm)
        });
        ranges.collect::<Vec<_>>().join(",")
    }
}

/// One line for each range: the sizes, the algorithm, and the reason.
impl fmt::Display for PlanTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.ranges.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{range}")?;
        }
        Ok(())
    }
}

impl fmt::Display for PlanRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.start, self.end) {
            (0, None) => f.write_str("all sizes")?,
            (0, Some(end)) => write!(f, "below {}", size(end))?,
            (start, Some(end)) => write!(f, "{} to {}", size(start), size(end))?,
            (start, None) => write!(f, "from {} on", size(start))?,
        }
        write!(f, ": {}", self.algorithm)?;
        // Shorter operations are one chunk.
        if self.end.is_none_or(|end| end > self.chunk_bytes) {
            write!(f, " in chunks of {}", size(self.chunk_bytes))?;
        }
        write!(f, ", because {}", self.reason)
    }
}

/// Returns a number of bytes with a unit: `4 KiB`.
fn size(bytes: usize) -> String {
    units::size(bytes as u64)
}

/// Returns the size without a space: `4KiB`.
pub(super) fn compact(bytes: usize) -> String {
    size(bytes).replace(' ', "")
}

/// The end of a range, its algorithm and its chunk.
type Row = (Option<usize>, Algorithm, usize);

/// The largest number of ranges of a table.
const MOST_RANGES: usize = 64;

impl FromStr for PlanTable {
    type Err = CollectiveError;

    /// Parses the text form. The name of an algorithm alone, such as `ring` or `ring/64KiB`, means all sizes.
    ///
    /// ```
    /// use tonic_rdma_collective::PlanTable;
    ///
    /// let error = "one-shot:..16KiB,star:..".parse::<PlanTable>().unwrap_err();
    /// assert_eq!(
    ///     error.reason(),
    ///     r#"in the part "star:..": there is no algorithm "star"; there are one-shot, halving-doubling, ring, hierarchical and naive"#
    /// );
    /// ```
    ///
    /// # Errors
    /// [`InvalidSetting`](crate::CollectiveErrorKind::InvalidSetting): the text has another form. The reason
    /// names the part at fault.
    fn from_str(text: &str) -> Result<Self, CollectiveError> {
        if text.trim().is_empty() {
            return Err(setting(
                "the text has no part; the form is ALGORITHM[/CHUNK]:..END,ALGORITHM[/CHUNK]:..",
            ));
        }
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        if parts.len() > MOST_RANGES {
            let count = parts.len();
            return Err(setting(format!(
                "the text has {count} parts, and a table has at most {MOST_RANGES}"
            )));
        }
        let mut rows: Vec<Row> = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            let row = parse_part(part, parts.len() == 1)?;
            let before = rows.last().map_or(0, |row| row.0.unwrap_or(0));
            let is_last = index + 1 == parts.len();
            let fault = match row.0 {
                None if !is_last => {
                    format!("the part {part:?} has no end, so there are no sizes for the parts after it")
                }
                Some(_) if is_last => format!(
                    "the last part, {part:?}, has an end; larger sizes need a plan too, so leave out the end"
                ),
                Some(end) if end <= before => {
                    let before = compact(before);
                    format!("the part {part:?} must end above the part before it, which ends at {before}")
                }
                _ => {
                    rows.push(row);
                    continue;
                }
            };
            return Err(setting(fault));
        }
        Ok(Self::from_rows("it is pinned", rows))
    }
}

/// Parses `ALGORITHM[/CHUNK]:..[END]`, and `ALGORITHM[/CHUNK]` if it is the only part.
fn parse_part(part: &str, is_only: bool) -> Result<Row, CollectiveError> {
    let form = || {
        setting(format!(
            "the part {part:?} is not of the form ALGORITHM[/CHUNK]:..[END], such as ring/256KiB:..1MiB"
        ))
    };
    let size = |size: &str| match units::parse_size(size).map(usize::try_from) {
        Ok(Ok(bytes)) if bytes > 0 => Ok(bytes),
        _ => Err(setting(format!(
            "in the part {part:?}: {size:?} is no size above 0; write a number of bytes, such as 64, 16KiB or 1MiB"
        ))),
    };
    let (plan, range) = match part.split_once(':') {
        Some((plan, range)) => (plan, range),
        None if is_only => (part, ".."),
        None => return Err(form()),
    };
    let end = range.trim().strip_prefix("..").ok_or_else(form)?;
    let (name, chunk) = match plan.split_once('/') {
        Some((name, chunk)) => (name.trim(), size(chunk)?),
        None => (plan.trim(), CHUNK),
    };
    let algorithm = Algorithm::from_name(name).ok_or_else(|| {
        let names = Algorithm::NAMES;
        setting(format!("in the part {part:?}: there is no algorithm {name:?}; there are {names}"))
    })?;
    let end = if end.is_empty() { None } else { Some(size(end)?) };
    Ok((end, algorithm, chunk))
}
