//! The files that a run writes: checked before the run, written after it.

use std::fs::OpenOptions;
use std::path::Path;

use serde::Serialize;
use tonic_rdma_commands::Failure;

/// Checks that the output files can be written. This precedes the measuring, so that no run is lost.
pub(crate) fn check_outputs(json: Option<&Path>, report: Option<&Path>) -> Result<(), Failure> {
    let refuse = |flag: &str, path: &Path, error: std::io::Error| {
        Err(Failure::usage(format!("{flag}: can't write {}", path.display())).because(error))
    };
    let open = |path: &Path| OpenOptions::new().append(true).create(true).open(path).map(drop);
    if let Some(path) = json
        && let Err(error) = open(path)
    {
        return refuse("--json", path, error);
    }
    if let Some(directory) = report
        && let Err(error) =
            std::fs::create_dir_all(directory).and_then(|()| open(&directory.join("index.html")))
    {
        return refuse("--report", directory, error);
    }
    Ok(())
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
    let mut text = serde_json::to_string_pretty(&Document { facts, rows })
        .map_err(|error| Failure::run("can't make JSON of the results").because(error))?;
    text.push('\n');
    std::fs::write(path, text)
        .map_err(|error| Failure::run(format!("can't write {}", path.display())).because(error))
}
