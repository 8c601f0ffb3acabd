//! The files that a run writes: checked before the run, written after it.

use std::path::Path;

use serde::Serialize;
use tonic_rdma_commands::{Failure, output};

/// Checks that the output files can be written. This precedes the measuring, so that no run is lost.
pub(crate) fn check_outputs(json: Option<&Path>, report: Option<&Path>) -> Result<(), Failure> {
    output::check_files(&[("--json", json)])?;
    let Some(directory) = report else { return Ok(()) };
    if directory.as_os_str() == "-" {
        return output::check_files(&[("--report", report)]);
    }
    std::fs::create_dir_all(directory).map_err(|error| {
        Failure::usage(format!("--report: can't write {}", directory.display())).because(error)
    })?;
    output::check_files(&[("--report", Some(&directory.join("index.html")))])
}

/// Writes the facts and the rows of a run as JSON to `path`. Scripts rely on this document.
pub(crate) fn write_json(
    path: &Path,
    facts: &impl Serialize,
    rows: &[impl Serialize],
) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Document<F, R> {
        #[serde(flatten)]
        facts: F,
        rows: R,
    }
    output::write_json(path, &Document { facts, rows })
}
