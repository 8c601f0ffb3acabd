//! The outputs of a run: bars and an HTML page, JSON, and a progress bar.

pub(crate) mod bars;
pub(crate) mod files;
pub(crate) mod page;
pub(crate) mod progress;
