//! The convergence of training: figure 10 of the paper.

use super::summary::{Cells, Line};

/// Returns the lines of figure 10.
pub(super) fn training(_cells: &Cells<'_>) -> Vec<Line> {
    Vec::new()
}
