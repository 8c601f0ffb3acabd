//! The only place where a column's outcome may differ from that over stock TCP. Each entry says why in one sentence. An undeclared difference
//! fails the behaviour's test, and so does a declared one that no longer differs.

use crate::column::Column;

/// What is declared about a behaviour over a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Declared {
    /// The outcome is another one.
    Outcome(&'static str),
    /// The behaviour can't be asked for over this column.
    NotRun,
}

/// A declared difference.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Difference {
    pub(crate) behaviour: &'static str,
    pub(crate) column: Column,
    pub(crate) outcome: Declared,
    /// The reason, in one sentence.
    pub(crate) because: &'static str,
}

/// All differences.
pub(crate) static ALL: &[Difference] = &[];

/// Returns what is declared about `behaviour` over `column`.
pub(crate) fn find(behaviour: &str, column: Column) -> Option<&'static Difference> {
    ALL.iter().find(|difference| difference.behaviour == behaviour && difference.column == column)
}
