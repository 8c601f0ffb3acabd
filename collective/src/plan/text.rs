//! The text form of a table, which people pin.

use std::str::FromStr;

use tonic_rdma::internal::units;

use super::step::Algorithm;
use super::table::{PIECE, PlanTable, compact};

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
