//! The table of algorithms by length, and its text form. All ranks have the same, so they make the same plans.

use std::fmt;
use std::str::FromStr;

use super::step::{Algorithm, Collective};
use tonic_rdma::unstable::units;

/// The length of a piece if nothing else is said, in bytes.
pub(super) const PIECE: usize = 256 << 10;
/// The largest length of a message that holds its elements, in bytes; see `LaneSettings`.
const INLINE: usize = 16 << 10;
/// From this number of ranks on, a small broadcast goes along a tree.
const TREE_FROM: usize = 5;

/// Which algorithm an operation of a given length uses, and why.
///
/// Its text form names an algorithm, if need be the length of its pieces, and the sizes from the end of the range before up to, and
/// without, an end. [`FromStr`](std::str::FromStr) parses that form, and [`pinned`](Self::pinned) writes it.
///
/// ```
/// use tonic_rdma_collective::{Algorithm, PlanTable};
///
/// let table: PlanTable = "one-shot:..16KiB,halving-doubling:..1MiB,ring/128KiB:..".parse()?;
/// assert_eq!(table.choose(4096).0, Algorithm::OneShot);
/// assert_eq!(table.choose(16 << 10).0, Algorithm::HalvingDoubling);
/// assert_eq!(table.choose(64 << 20), (Algorithm::Ring, 128 << 10));
/// # Ok::<(), tonic_rdma_collective::PlanTableError>(())
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
    pub piece: usize,
    /// The reason for this choice, such as `it is pinned`.
    pub reason: &'static str,
}

impl PlanTable {
    /// Returns the default table of a group of this many ranks. It comes from measurements of 2 to 8 ranks on one host
    /// (`tonic-rdma-allreduce --tuner-check`).
    ///
    /// ```
    /// use tonic_rdma_collective::{Algorithm, PlanTable};
    ///
    /// let table = PlanTable::for_ranks(4);
    /// assert_eq!(table.choose(8).0, Algorithm::OneShot);
    /// assert_eq!(table.choose(64 << 20).0, Algorithm::Ring);
    /// ```
    pub fn for_ranks(ranks: usize) -> Self {
        // A one-shot moves N − 1 times the elements. Above 16 KiB no message holds its elements, and a one-shot gains nothing.
        let small = ((32 << 10) / ranks.saturating_sub(1).max(1)).next_power_of_two();
        let small = small.clamp(1 << 10, INLINE + 1);
        // A few ranks have long parts, so that longer pieces leave enough of them for a pipeline.
        let long = if ranks <= 4 { 1 << 20 } else { PIECE };
        let rows = [
            (Some(small), Algorithm::OneShot, PIECE),
            (Some(1 << 20), Algorithm::HalvingDoubling, PIECE),
            (None, Algorithm::Ring, long),
        ];
        Self::from_rows("it is the default", rows)
    }

    /// Returns a table with one algorithm for all sizes.
    pub(crate) fn fixed(algorithm: Algorithm, piece: usize) -> Self {
        Self::from_rows("the program set it", [(None, algorithm, piece)])
    }

    /// Makes a table of rows: end, algorithm and piece. Each ends above the one before, and only the last has no end.
    pub(super) fn from_rows(
        reason: &'static str,
        rows: impl IntoIterator<Item = (Option<usize>, Algorithm, usize)>,
    ) -> Self {
        let mut start = 0;
        let with_start = |(end, algorithm, piece): (Option<usize>, Algorithm, usize)| {
            let range = PlanRange { start, end, algorithm, piece, reason };
            start = end.unwrap_or(usize::MAX);
            range
        };
        Self { ranges: rows.into_iter().map(with_start).collect() }
    }

    /// Returns the algorithm of an all-reduce of this length, and the largest length of its messages, both lengths in bytes.
    pub fn choose(&self, bytes: usize) -> (Algorithm, usize) {
        let range = self.ranges.iter().find(|range| range.end.is_none_or(|end| bytes < end));
        range.map_or((Algorithm::Ring, PIECE), |range| (range.algorithm, range.piece))
    }

    /// Returns the algorithm of an operation whose whole has this length, and the largest length of its messages, in bytes.
    ///
    /// Reduce-scatter and all-gather are the halves of an all-reduce, so they use what it uses. A broadcast goes to all ranks directly
    /// if it is small and the ranks are few, along a tree if an all-reduce goes by halving and doubling, and otherwise along
    /// a chain. A barrier has one algorithm.
    pub(crate) fn choose_for(
        &self,
        collective: Collective,
        ranks: usize,
        bytes: usize,
    ) -> (Algorithm, usize) {
        let (algorithm, piece) = self.choose(bytes);
        match (collective, algorithm) {
            (Collective::Broadcast { .. }, Algorithm::OneShot) if ranks >= TREE_FROM => {
                (Algorithm::HalvingDoubling, piece)
            }
            _ => (algorithm, piece),
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
    /// # Ok::<(), tonic_rdma_collective::PlanTableError>(())
    /// ```
    pub fn pinned(&self) -> String {
        let ranges = self.ranges.iter().map(|range| {
            let piece = match range.piece {
                PIECE => String::new(),
                piece => format!("/{}", compact(piece)),
            };
            let end = range.end.map(compact).unwrap_or_default();
            format!("{}{piece}:..{end}", range.algorithm)
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
        // Shorter operations go in one piece.
        if self.end.is_none_or(|end| end > self.piece) {
            write!(f, " in pieces of {}", size(self.piece))?;
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

/// The end of a range, its algorithm and its piece.
type Row = (Option<usize>, Algorithm, usize);

/// The largest number of ranges of a table.
const MOST_RANGES: usize = 64;

/// The error of a text that is no table of plans.
///
/// ```
/// use tonic_rdma_collective::PlanTable;
///
/// let error = "one-shot:..16KiB,star:..".parse::<PlanTable>().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     r#"in the part "star:..": there is no algorithm "star"; there are one-shot, halving-doubling and ring"#
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanTableError {
    /// The text is empty.
    #[error("the text has no part; the form is ALGORITHM[/PIECE]:..END,ALGORITHM[/PIECE]:..")]
    Empty,
    /// The text has too many parts.
    #[error("the text has {0} parts, and a table has at most 64")]
    TooMany(usize),
    /// A part has another form.
    #[error("the part {part:?} is not of the form ALGORITHM[/PIECE]:..[END], such as ring/256KiB:..1MiB")]
    Form {
        /// The part.
        part: String,
    },
    /// A part names an algorithm that does not exist.
    #[error(
        "in the part {part:?}: there is no algorithm {name:?}; there are one-shot, halving-doubling and ring"
    )]
    Algorithm {
        /// The part.
        part: String,
        /// The name.
        name: String,
    },
    /// A part has a size that is none.
    #[error(
        "in the part {part:?}: {size:?} is no size above 0; write a number of bytes, such as 64, 16KiB or 1MiB"
    )]
    Size {
        /// The part.
        part: String,
        /// The size.
        size: String,
    },
    /// The sizes of a part do not end above those of the part before.
    #[error("the part {part:?} must end above the part before it, which ends at {before}")]
    Order {
        /// The part.
        part: String,
        /// The end of the part before.
        before: String,
    },
    /// A part that is not the last one has no end.
    #[error("the part {part:?} has no end, so there are no sizes for the parts after it")]
    NoEnd {
        /// The part.
        part: String,
    },
    /// The last part has an end.
    #[error("the last part, {part:?}, has an end; larger sizes need a plan too, so leave out the end")]
    End {
        /// The part.
        part: String,
    },
}

impl FromStr for PlanTable {
    type Err = PlanTableError;

    /// Parses the text form. The name of an algorithm alone, such as `ring` or `ring/64KiB`, means all sizes.
    ///
    /// # Errors
    /// The text has another form. The error names the part at fault.
    fn from_str(text: &str) -> Result<Self, PlanTableError> {
        if text.trim().is_empty() {
            return Err(PlanTableError::Empty);
        }
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        if parts.len() > MOST_RANGES {
            return Err(PlanTableError::TooMany(parts.len()));
        }
        let mut rows: Vec<Row> = Vec::with_capacity(parts.len());
        for (index, text) in parts.iter().enumerate() {
            let row = parse_part(text, parts.len() == 1)?;
            let before = rows.last().map_or(0, |row| row.0.unwrap_or(0));
            let is_last = index + 1 == parts.len();
            let part = || (*text).to_owned();
            match row.0 {
                None if !is_last => return Err(PlanTableError::NoEnd { part: part() }),
                Some(_) if is_last => return Err(PlanTableError::End { part: part() }),
                Some(end) if end <= before => {
                    return Err(PlanTableError::Order { part: part(), before: compact(before) });
                }
                _ => rows.push(row),
            }
        }
        Ok(Self::from_rows("it is pinned", rows))
    }
}

/// Parses `ALGORITHM[/PIECE]:..[END]`, and `ALGORITHM[/PIECE]` if it is the only part.
fn parse_part(text: &str, is_only: bool) -> Result<Row, PlanTableError> {
    let part = || text.to_owned();
    let size = |size: &str| match units::parse_size(size).map(usize::try_from) {
        Ok(Ok(bytes)) if bytes > 0 => Ok(bytes),
        _ => Err(PlanTableError::Size { part: part(), size: size.to_owned() }),
    };
    let (plan, range) = match text.split_once(':') {
        Some((plan, range)) => (plan, range),
        None if is_only => (text, ".."),
        None => return Err(PlanTableError::Form { part: part() }),
    };
    let end = range.trim().strip_prefix("..").ok_or_else(|| PlanTableError::Form { part: part() })?;
    let (name, piece) = match plan.split_once('/') {
        Some((name, piece)) => (name.trim(), size(piece)?),
        None => (plan.trim(), PIECE),
    };
    let algorithm = Algorithm::from_name(name)
        .ok_or_else(|| PlanTableError::Algorithm { part: part(), name: name.to_owned() })?;
    let end = if end.is_empty() { None } else { Some(size(end)?) };
    Ok((end, algorithm, piece))
}
