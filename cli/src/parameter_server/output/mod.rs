//! The outputs of a run: rows, facts, and everything that shows them.

mod columns;
pub(crate) mod facts;
pub(crate) mod row;
pub(crate) mod show;
