//! The results of a command: text for people, and files. The file `-` of `--json` is stdout; the text goes to
//! stderr then.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use crate::failure::{Context as _, Failure};

/// Returns whether `--json` names stdout.
fn is_stdout(json: &Path) -> bool {
    json.as_os_str() == "-"
}

/// Checks that the files of these options can be written. This precedes the work, so that no run is lost.
/// Only `--json` takes `-`.
///
/// # Errors
///
/// Fails if a file can't be written, with the name of its option.
pub fn check_files(files: &[(&str, Option<&Path>)]) -> Result<(), Failure> {
    let named = files.iter().filter_map(|(flag, path)| Some((flag, (*path)?)));
    for (flag, path) in named {
        match (is_stdout(path), *flag) {
            (true, "--json") => continue,
            (true, _) => {
                let accepted = "accepted: a path, such as ./-";
                return Err(Failure::usage(format!(
                    "{flag}: - is stdout, which only --json takes; {accepted}"
                )));
            }
            (false, _) => {}
        }
        OpenOptions::new().append(true).create(true).open(path).map_err(|error| {
            Failure::usage(format!("{flag}: can't write {}", path.display())).because(error)
        })?;
    }
    Ok(())
}

/// Writes `results` to the file of `--json`, or to stdout if it is `-`. Scripts rely on this document.
///
/// # Errors
///
/// Fails if the file or stdout can't be written.
pub fn write_json(json: &Path, results: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(results).context("can't make JSON of the results")?;
    let text = text + "\n";
    if is_stdout(json) { write_stdout(&text) } else { write_file(json, &text) }
}

/// Writes `text` to a file.
///
/// # Errors
///
/// Fails if the file can't be written.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).context(format!("can't write {}", path.display()))
}

/// Prints text for people: to stdout, or to stderr if `json` is `-`.
///
/// # Errors
///
/// Fails if stdout can't be written. stderr may be closed.
pub fn print(text: &str, json: Option<&Path>) -> Result<(), Failure> {
    if json.is_some_and(is_stdout) {
        let _ = io::stderr().write_all(text.as_bytes());
        return Ok(());
    }
    write_stdout(text)
}

fn write_stdout(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|error| Failure::output(&error))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_named_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        let (there, missing) = (folder.path().join("file"), folder.path().join("missing/file"));
        let error = check_files(&[("--json", None), ("--plot", Some(&missing))]).unwrap_err().with_causes();
        assert!(error.contains("--plot: can't write") && error.contains("missing/file"), "{error}");
        check_files(&[("--json", Some(&there)), ("--plot", None)]).unwrap();
        check_files(&[("--json", Some(Path::new("-")))]).unwrap();
        let error = check_files(&[("--json", None), ("--plot", Some(Path::new("-")))]).unwrap_err();
        assert!(error.with_causes().contains("--plot: - is stdout"), "{error}");
        assert!(!Path::new("-").exists());
        write_json(&there, &[1]).unwrap();
        assert_eq!(std::fs::read_to_string(there).unwrap(), "[\n  1\n]\n");
    }
}
