//! The results of a run: rows of figures, the facts about the run, and everything that shows them.

pub(crate) mod facts;
pub(crate) mod gate;
mod plots;
pub(crate) mod report;
pub(crate) mod row;
pub(crate) mod table;
