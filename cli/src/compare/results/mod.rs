//! The results of a run: rows of figures and the facts about the run, shown as a table, as JSON and as a page with
//! plots. `gate` compares them with the ratio of `--at-least`.

pub(crate) mod facts;
pub(crate) mod gate;
pub(crate) mod plots;
pub(crate) mod report;
pub(crate) mod row;
pub(crate) mod table;
