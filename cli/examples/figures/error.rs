//! The reasons why a table or a picture can't be made.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A failure of this program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FigureError {
    #[error("the arguments are wrong; the beginning of this program's source shows the right ones")]
    Usage,
    #[error("{}", .0.display())]
    File(PathBuf, #[source] io::Error),
    #[error("{}", .0.display())]
    Json(PathBuf, #[source] serde_json::Error),
    #[error("{0}")]
    Figure(String, #[source] Box<FigureError>),
    #[error("{0} (benches/figures --render)")]
    Stale(String),
    #[error("{} has no figures", .0.display())]
    NoFigures(PathBuf),
    #[error("a run has no rows")]
    NoRows,
    #[error("no cell: {0:?}")]
    BadCell(String),
    #[error("the runs have no cell {0}")]
    NoCell(String),
    #[error("no column: {0:?}")]
    BadColumn(String),
    #[error("{heading}: no figure {figure:?}; there are: {}", crate::columns::FIGURES.join(", "))]
    NoFigure { heading: String, figure: String },
    #[error("{heading}: no row of {mode}")]
    NoRow { heading: String, mode: String },
    #[error("can't draw a curve")]
    Curve(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("can't draw the picture")]
    Drawing(#[from] crate::bars::PlotError),
}

impl FigureError {
    /// Returns a function that adds the path to an error of a file.
    pub(crate) fn of(path: &Path) -> impl Fn(io::Error) -> Self {
        move |error| Self::File(path.to_owned(), error)
    }
}

/// An error with its causes, on one line.
pub(crate) struct Chain<'a>(pub(crate) &'a FigureError);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)?;
        let mut cause = std::error::Error::source(self.0);
        while let Some(error) = cause {
            write!(formatter, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
