//! Texts: the sayings of Debian's package `fortunes`, of varying length, as numbers of characters.
//!
//! A file has sayings that are separated by lines with a single `%`. Files whose name has an extension are tables of the program
//! fortune, or links.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::array::Block;
use tonic_rdma_commands::{Context as _, Failure};

/// The folder into which Debian's package puts the files.
pub(crate) const FOLDER: &str = "/usr/share/games/fortunes";

/// The number of different characters: none (0), the printable ones of ASCII (1 to 95), and the end of a line (96).
pub(crate) const CHARACTERS: usize = 97;

/// Every n-th saying is tested with, and not trained with.
const TESTED: usize = 20;

/// Sayings with fewer characters are left out.
const LEAST: usize = 8;

/// Sayings as numbers of characters.
type Sayings = Vec<Vec<u8>>;

/// Reads the sayings of the files in `folder`, in the order of the files' names: those to train with, and those to test with. Each
/// is cut after `length` characters.
pub(crate) fn read(folder: &Path, length: usize) -> Result<(Sayings, Sayings), Failure> {
    let missing = |what: &str| {
        format!(
            "{} {what}; training/prepare installs Debian's package fortunes, and --texts names another folder of such files",
            folder.display()
        )
    };
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let paths = entries.context(missing("can't be read"))?.into_iter().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.extension().is_none() && path.is_file()).collect();
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        let bytes = fs::read(&path).context(format!("can't read {}", path.display()))?;
        all.extend(sayings(&bytes).iter().map(|saying| numbers(saying, length)));
    }
    all.retain(|text| text.len() >= LEAST.min(length));
    let (mut train, mut test) = (Vec::new(), Vec::new());
    for (number, text) in all.into_iter().enumerate() {
        if number % TESTED == 0 { test.push(text) } else { train.push(text) }
    }
    if train.is_empty() { Err(Failure::run(missing("has no sayings"))) } else { Ok((train, test)) }
}

/// Returns the characters that the network sees and those that it has to predict, for these texts: both of shape (texts, the largest
/// length). The network sees number 0 first, and each text is filled up with 0.
pub(crate) fn batch<'a>(texts: impl Iterator<Item = &'a Vec<u8>>) -> Result<(Block<u32>, Block<u32>), Error> {
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
    let dims = [texts.len(), length];
    Ok((Block::new(&dims, seen)?, Block::new(&dims, next)?))
}

/// Returns the sayings of a file, without the ends of their last lines.
fn sayings(bytes: &[u8]) -> Vec<Vec<u8>> {
    let lines: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    let sayings = lines.split(|line| line.trim_ascii_end() == b"%").map(|lines| lines.join(&b'\n'));
    sayings.map(|saying| saying.trim_ascii_end().to_vec()).filter(|saying| !saying.is_empty()).collect()
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
        assert_eq!(sayings(text), [&b"one"[..], b"two %\nlines", b"100%\n% no end"]);
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
        let error = |folder: &Path| read(folder, 9).unwrap_err().with_causes();
        for error in [error(folder.path()), error(Path::new("/missing/folder"))] {
            assert!(error.contains("training/prepare installs Debian's package fortunes"), "{error}");
        }
        std::fs::write(folder.path().join("short.dat"), "no text").unwrap();
        let text: String = (0..40).map(|number| format!("saying number {number}\n%\n")).collect();
        std::fs::write(folder.path().join("short"), text).unwrap();
        let (train, test) = read(folder.path(), 9).unwrap();
        assert_eq!((train.len(), test.len()), (38, 2));
        assert!(train.iter().all(|text| text.len() == 9));
    }
}
