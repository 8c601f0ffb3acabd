//! The results of a command: text for people, and files. The file `-` is stdout; the text for people goes to
//! stderr then.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::failure::{Context as _, Failure};

/// Whether this program is built with optimisation. Without it, a run measures the program more than the transport.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Optimised(pub bool);

impl Default for Optimised {
    fn default() -> Self {
        Self(!cfg!(debug_assertions))
    }
}

/// The options of a command whose results are rows: where the rows go, beside the table on stdout.
#[derive(Clone, Debug, Default, Args)]
pub struct Outputs {
    /// Write the results as JSON; without FILE, or with -, to stdout
    #[arg(short = 'J', long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
    /// Write the rows as CSV; FILE as for --json
    ///
    /// With the names of the JSON's fields.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub csv: Option<PathBuf>,
    /// Write the table in Markdown; FILE as for --json
    ///
    /// As GitHub shows it.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub markdown: Option<PathBuf>,
}

impl Outputs {
    /// Checks that the files can be written. This precedes the work, so that no run is lost.
    ///
    /// # Errors
    ///
    /// Fails if a file can't be written, or if two options name the same file or stdout.
    pub fn check(&self) -> Result<(), Failure> {
        check_files(&[
            ("--json", self.json.as_deref()),
            ("--csv", self.csv.as_deref()),
            ("--markdown", self.markdown.as_deref()),
        ])
    }

    /// Writes the files that were asked for, and prints `text` for people. The JSON is all of `document`, the
    /// CSV has `rows`. A file that can't be written loses no text, and a closed stdout no file.
    ///
    /// # Errors
    ///
    /// Fails if a file or stdout can't be written.
    pub fn show(
        &self,
        text: &str,
        markdown: impl FnOnce() -> String,
        document: &impl Serialize,
        rows: &[impl Serialize],
    ) -> Result<(), Failure> {
        let files = || {
            self.json.as_deref().map_or(Ok(()), |path| write_json(path, document))?;
            self.csv.as_deref().map_or(Ok(()), |path| write(path, &to_csv(rows)?))?;
            self.markdown.as_deref().map_or(Ok(()), |path| write(path, &markdown()))
        };
        let written = files();
        let paths = [&self.json, &self.csv, &self.markdown];
        let stdout = paths.into_iter().flatten().map(PathBuf::as_path).find(|path| is_stdout(path));
        let printed = print(text, stdout);
        written.and(printed)
    }
}

/// Returns whether an option names stdout.
fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// The options that take `-` as stdout.
const TO_STDOUT: [&str; 3] = ["--json", "--csv", "--markdown"];

/// Checks that the files of these options can be written. This precedes the work, so that no run is lost.
///
/// # Errors
///
/// Fails if a file can't be written, with the name of its option, if an option takes no `-`, or if two options
/// name the same file or `-`.
pub fn check_files(files: &[(&str, Option<&Path>)]) -> Result<(), Failure> {
    let (mut stdout, mut taken) = (None, Vec::<(PathBuf, &str)>::new());
    let named = files.iter().filter_map(|(flag, path)| Some((*flag, (*path)?)));
    for (flag, path) in named {
        if !is_stdout(path) {
            OpenOptions::new().append(true).create(true).open(path).map_err(|error| {
                Failure::usage(format!("{flag}: can't write {}", path.display())).because(error)
            })?;
            // A device, such as /dev/null, may have any number of results.
            let file = path.canonicalize().ok().filter(|file| file.is_file());
            if let Some((_, other)) = taken.iter().find(|(taken, _)| Some(taken) == file.as_ref()) {
                let path = path.display();
                return Err(Failure::usage(format!(
                    "{flag}: {path} is the file of {other}; accepted: another path"
                )));
            }
            taken.extend(file.map(|file| (file, flag)));
            continue;
        }
        let fault = match stdout.replace(flag) {
            _ if !TO_STDOUT.contains(&flag) => format!("which {} take", TO_STDOUT.join(", ")),
            Some(other) => format!("which {other} has"),
            None => continue,
        };
        return Err(Failure::usage(format!("{flag}: - is stdout, {fault}; accepted: a path, such as ./-")));
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
    write(json, &(text + "\n"))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    if is_stdout(path) { write_stdout(text) } else { write_file(path, text) }
}

/// Writes `text` to a file.
///
/// # Errors
///
/// Fails if the file can't be written.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).context(format!("can't write {}", path.display()))
}

/// The fields of a row, in their order.
struct Fields(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Fields;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a row")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let entries = std::iter::from_fn(|| map.next_entry().transpose());
                entries.collect::<Result<_, _>>().map(Fields)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Makes CSV of `rows`, with a line of names. Every field that any row has gets a column. A list is one text
/// with blanks, and what a row lacks is empty.
fn to_csv(rows: &[impl Serialize]) -> Result<String, Failure> {
    let fields = |row| serde_json::from_str(&serde_json::to_string(row)?);
    let rows: Result<Vec<Fields>, serde_json::Error> = rows.iter().map(fields).collect();
    let rows = rows.context("can't make CSV of the rows")?;
    let mut names: Vec<&str> = Vec::new();
    for Fields(row) in &rows {
        // A field that only later rows have stays beside the field before it.
        let mut at = 0;
        for (name, _) in row {
            at = match names.iter().position(|other| other == name) {
                Some(found) => found + 1,
                None => {
                    names.insert(at, name);
                    at + 1
                }
            };
        }
    }
    let mut writer = csv::Writer::from_writer(Vec::new());
    let mut written = writer.write_record(&names);
    for Fields(row) in &rows {
        let of_row = |name: &&str| row.iter().find(|(other, _)| other == name).map(|(_, value)| value);
        written = written.and_then(|()| {
            writer.write_record(names.iter().map(|name| of_row(name).map(csv_text).unwrap_or_default()))
        });
    }
    written.context("can't make CSV of the rows")?;
    let bytes = writer.into_inner().context("can't make CSV of the rows")?;
    String::from_utf8(bytes).context("can't make CSV of the rows")
}

fn csv_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(csv_text).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

/// Prints text for people: to stdout, or to stderr if the results are written to `-`.
///
/// # Errors
///
/// Fails if stdout can't be written. stderr may be closed.
pub fn print(text: &str, results: Option<&Path>) -> Result<(), Failure> {
    if results.is_some_and(is_stdout) {
        let _ = io::stderr().write_all(text.as_bytes());
        return Ok(());
    }
    write_stdout(text)
}

/// Writes a line to stderr, which may be closed. It is one write, because other processes write lines there, too.
pub fn note(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
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
        let stdout = Some(Path::new("-"));
        check_files(&[("--json", stdout), ("--csv", None)]).unwrap();
        for (files, said) in [
            (
                [("--json", None), ("--plot", stdout)],
                "--plot: - is stdout, which --json, --csv, --markdown take",
            ),
            ([("--json", stdout), ("--csv", stdout)], "--csv: - is stdout, which --json has"),
        ] {
            let error = check_files(&files).unwrap_err().with_causes();
            assert!(error.contains(said), "{error}");
        }
        let same = folder.path().join("./file");
        let error =
            check_files(&[("--json", Some(&there)), ("--csv", Some(&same))]).unwrap_err().with_causes();
        assert!(error.contains("--csv: ") && error.contains("is the file of --json"), "{error}");
        let null = Some(Path::new("/dev/null"));
        check_files(&[("--json", null), ("--csv", null)]).unwrap();
        assert!(!Path::new("-").exists());
        write_json(&there, &[1]).unwrap();
        assert_eq!(std::fs::read_to_string(there).unwrap(), "[\n  1\n]\n");
    }

    impl Serialize for Fields {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
        }
    }

    #[test]
    fn csv_has_a_column_for_every_field_of_any_row() {
        let row = |text: &str| -> Fields { serde_json::from_str(text).unwrap() };
        let rows = [
            row(r#"{"mode": "a", "p50_us": 1.5, "errors": 0}"#),
            row(
                r#"{"mode": "b", "rate": 5, "p50_us": null, "runs": [1, 2.5], "errors": 1, "why": "x, \"y\"\nz"}"#,
            ),
        ];
        let text = to_csv(&rows).unwrap();
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let names: Vec<String> = reader.headers().unwrap().iter().map(str::to_owned).collect();
        assert_eq!(names, ["mode", "rate", "p50_us", "runs", "errors", "why"]);
        let read: Vec<Vec<String>> =
            reader.records().map(|row| row.unwrap().iter().map(str::to_owned).collect()).collect();
        assert_eq!(
            read,
            [vec!["a", "", "1.5", "", "0", ""], vec!["b", "5", "", "1 2.5", "1", "x, \"y\"\nz"]]
        );
    }
}
