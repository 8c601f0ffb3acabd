//! The results of a run: rows of figures and the facts about the run, shown as a table and as JSON.

pub(crate) mod facts;
pub(crate) mod row;
pub(crate) mod show;
