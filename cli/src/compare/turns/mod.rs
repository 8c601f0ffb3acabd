//! The measuring: modes take turns in each cell, and the outcomes of their turns are added up.
//!
//! ```text
//!  meter ─→ participant (a mode and its connection)
//!    │ closed_loop, open_loop (with its schedule): when operations begin
//!    └─→ outcome of a turn ─→ tally of a mode in a cell ─→ row
//! ```

mod closed_loop;
pub(crate) mod meter;
mod open_loop;
mod outcome;
pub(crate) mod participant;
pub(crate) mod schedule;
mod tally;
