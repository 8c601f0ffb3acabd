//! The measuring: modes take turns in each cell, and the outcomes of their turns are added up.

mod closed_loop;
pub(crate) mod meter;
mod open_loop;
mod outcome;
pub(crate) mod participant;
pub(crate) mod schedule;
mod tally;
