//! The outputs of a run: bars and an HTML page, a table for the terminal, JSON, and a progress bar.

pub(crate) mod bars;
pub(crate) mod files;
pub(crate) mod grid;
pub(crate) mod page;
pub(crate) mod progress;
