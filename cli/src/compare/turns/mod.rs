//! The measuring: modes take turns in each cell, and the outcomes of their turns are added up. The plan has the number and
//! the order of the turns (`Plan::rounds`, `Plan::order`).
//!
//! ```text
//!  meter ─→ participant (a mode and its connection)
//!    │ closed_loop, open_loop (with its arrivals): when operations begin
//!    └─→ outcome of a turn ─→ tally of a mode in a cell ─→ row
//! ```

pub(crate) mod meter;
pub(crate) mod open_loop;
pub(crate) mod participant;
