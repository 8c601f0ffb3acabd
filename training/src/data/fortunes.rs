//! Texts: the sayings of Debian's package `fortunes`, of varying length, as numbers of characters.
//!
//! A file has sayings that are separated by lines with a single `%`. Files whose name has an extension are tables of the program
//! fortune, or links.

use std::fs;
use std::path::{Path, PathBuf};

use crate::array::Block;
use crate::failure::Failure;

/// The folder into which Debian's package puts the files.
pub(crate) const FOLDER: &str = "/usr/share/games/fortunes";

/// The number of different characters: none (0), the printable ones of ASCII (1 to 95), and the end of a line (96).
pub(crate) const CHARACTERS: usize = 97;

/// Every n-th saying is tested with, and not trained with.
const TESTED: usize = 20;

/// Sayings with fewer characters are left out.
const LEAST: usize = 8;

/// Texts as numbers of characters, in the order of the files' names.
#[derive(Debug)]
pub(crate) struct Texts {
    pub(crate) train: Vec<Vec<u8>>,
    pub(crate) test: Vec<Vec<u8>>,
}

impl Texts {
    /// Reads the files in `folder`. Each saying is cut after `length` characters.
    pub(crate) fn read(folder: &Path, length: usize) -> Result<Self, Failure> {
        let mut all = Vec::new();
        for path in files(folder)? {
            let bytes = fs::read(&path)
                .map_err(|error| Failure::run(format!("can't read {}", path.display())).because(error))?;
            all.extend(sayings(&bytes).map(|saying| numbers(saying, length)));
        }
        all.retain(|text| text.len() >= LEAST.min(length));
        let (test, train): (Vec<_>, Vec<_>) =
            all.into_iter().enumerate().partition(|(number, _)| number % TESTED == 0);
        let texts =
            |texts: Vec<(usize, Vec<u8>)>| texts.into_iter().map(|(_, text)| text).collect::<Vec<_>>();
        let texts = Self { train: texts(train), test: texts(test) };
        if texts.train.is_empty() {
            return Err(missing(folder, "has no sayings"));
        }
        Ok(texts)
    }
}

/// Returns the characters that the network sees and those that it has to predict, for these texts: both of shape (texts, the largest
/// length). The network sees number 0 first, and each text is filled up with 0.
pub(crate) fn batch<'a>(
    texts: impl Iterator<Item = &'a Vec<u8>>,
) -> Result<(Block<u32>, Block<u32>), Failure> {
    let texts: Vec<&Vec<u8>> = texts.collect();
    let length = texts.iter().map(|text| text.len()).max().unwrap_or(0);
    let (mut seen, mut next) = (Vec::new(), Vec::new());
    for text in &texts {
        let padding = length - text.len();
        let before = text.iter().take(text.len().saturating_sub(1));
        seen.extend([0].iter().chain(before).map(|number| u32::from(*number)).take(text.len()));
        next.extend(text.iter().map(|number| u32::from(*number)));
        seen.extend(std::iter::repeat_n(0, padding));
        next.extend(std::iter::repeat_n(0, padding));
    }
    let block = |numbers| {
        Block::new(&[texts.len(), length], numbers)
            .map_err(|error| Failure::run("can't make a batch of texts").because(error))
    };
    Ok((block(seen)?, block(next)?))
}

fn files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).map_err(|error| missing(folder, "can't be read").because(error))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| missing(folder, "can't be read").because(error))?.path();
        if path.extension().is_none() && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() { Err(missing(folder, "has no files of sayings")) } else { Ok(files) }
}

fn missing(folder: &Path, what: &str) -> Failure {
    Failure::run(format!(
        "{} {what}; training/prepare installs Debian's package fortunes, and --texts names another folder of such files",
        folder.display()
    ))
}

/// Returns the sayings of a file, without the ends of their last lines.
fn sayings(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(bytes);
    std::iter::from_fn(move || {
        let bytes = rest?;
        let mut from = 0;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if line.trim_ascii_end() == b"%" {
                rest = bytes.get(from + line.len()..);
                return bytes.get(..from);
            }
            from += line.len();
        }
        rest = None;
        Some(bytes)
    })
    .map(<[u8]>::trim_ascii_end)
    .filter(|saying| !saying.is_empty())
}

/// Returns the numbers of the first characters. Other characters than those of ASCII count as a question mark.
fn numbers(saying: &[u8], length: usize) -> Vec<u8> {
    let number = |byte: &u8| match byte {
        b'\n' => 96,
        b'\t' => 1,
        b' '..=b'~' => byte - b' ' + 1,
        _ => b'?' - b' ' + 1,
    };
    saying.iter().filter(|byte| **byte != b'\r').take(length).map(number).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes texts that repeat a few characters, of varying length.
    pub(crate) fn texts(number: usize, length: usize) -> Vec<Vec<u8>> {
        let text = |text: usize| {
            (0..LEAST + text % (length - LEAST + 1)).map(|at| 34 + ((at + text) % 3) as u8).collect()
        };
        (0..number).map(text).collect()
    }

    #[test]
    fn sayings_are_separated_by_lines_with_a_percent_sign() {
        let text = b"one\n%\ntwo %\nlines\n%\n\n%\n100%\n% no end\n";
        let found: Vec<&[u8]> = sayings(text).collect();
        assert_eq!(found, [&b"one"[..], b"two %\nlines", b"100%\n% no end"]);
        assert_eq!(numbers("a~ \n\u{e9}".as_bytes(), 9), [66, 95, 1, 96, 32, 32]);
        assert_eq!(numbers(b"abc", 2), [66, 67]);
    }

    #[test]
    fn a_batch_sees_each_character_after_the_one_before() {
        let (seen, next) = batch([vec![5, 6, 7], vec![8]].iter()).unwrap();
        assert_eq!((seen.dims(), next.dims()), (&[2, 3][..], &[2, 3][..]));
        assert_eq!(seen.values(), [0, 5, 6, 0, 0, 0]);
        assert_eq!(next.values(), [5, 6, 7, 8, 0, 0]);
    }

    #[test]
    fn a_folder_is_read_and_a_missing_one_names_the_package_and_the_script() {
        let folder = tempfile::tempdir().unwrap();
        let error = |folder: &Path| Texts::read(folder, 9).unwrap_err().with_causes();
        for error in [error(folder.path()), error(Path::new("/missing/folder"))] {
            assert!(error.contains("training/prepare installs Debian's package fortunes"), "{error}");
        }
        std::fs::write(folder.path().join("short.dat"), "no text").unwrap();
        let text: String = (0..40).map(|number| format!("saying number {number}\n%\n")).collect();
        std::fs::write(folder.path().join("short"), text).unwrap();
        let texts = Texts::read(folder.path(), 9).unwrap();
        assert_eq!((texts.train.len(), texts.test.len()), (38, 2));
        assert!(texts.train.iter().all(|text| text.len() == 9));
    }
}
