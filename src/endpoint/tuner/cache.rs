//! Calibrations on disk: a small text file for each device, in the user's cache directory.
//!
//! If a file can't be used, the device is measured again. Only files and directories of this user are read and written, and links
//! are not followed. Other programs may have written a file, so a value that can't have been measured is refused, too.

use std::error::Error;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;

use super::calibration::{Calibration, ChunkPoint, Key, Point};
use crate::endpoint::config::{Config, TuneCache};

/// The first line, with the version of the format.
const FIRST: &str = "tonic-rdma calibration 2";
/// Longest file that is read, in bytes.
const LONGEST: u64 = 16 << 10;

/// The reason why a calibration was not read from disk, or not kept there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The settings, or the measurement, allow no file.
    #[error("{0}")]
    NoFile(&'static str),
    /// A file, or its directory, can't be used.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem with it.
        problem: Problem,
    },
}

type Problem = Box<dyn Error + Send + Sync>;

/// Reads the calibration for a key, and returns its file, too; `None` if there is no file.
pub(super) fn load(config: &Config, key: &Key) -> Result<Option<(Calibration, PathBuf)>, CacheError> {
    let directory = directory(config)?;
    let path = file(&directory, key);
    match read(&directory, &path, key) {
        Ok(found) => Ok(found.map(|calibration| (calibration, path))),
        Err(problem) => Err(CacheError::File { path, problem }),
    }
}

fn read(directory: &Path, path: &Path, key: &Key) -> Result<Option<Calibration>, Problem> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    check_owner(directory)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err("it is no file of this user".into());
    }
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text)?;
    Ok(Some(decode(&text, key)?))
}

/// Writes a calibration in place of an older one; returns the file.
pub(super) fn store(config: &Config, calibration: &Calibration) -> Result<PathBuf, CacheError> {
    if !calibration.steady {
        return Err(CacheError::NoFile("measurements did not agree: the machine was busy"));
    }
    let directory = directory(config)?;
    let path = file(&directory, &calibration.key);
    match write(&directory, &path, &encode(calibration)) {
        Ok(()) => Ok(path),
        Err(problem) => Err(CacheError::File { path, problem }),
    }
}

fn write(directory: &Path, path: &Path, text: &str) -> Result<(), Problem> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    check_owner(directory)?;
    let fresh = path.with_extension(format!("{}-new", std::process::id()));
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| std::fs::rename(&fresh, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&fresh);
    }
    Ok(written?)
}

/// Checks that the directory is no link and belongs to this user.
fn check_owner(directory: &Path) -> Result<(), Problem> {
    let metadata = directory.symlink_metadata()?;
    if !metadata.is_dir() {
        return Err("its directory is none (links are not followed)".into());
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err("its directory belongs to another user".into());
    }
    Ok(())
}

/// Returns the directory of calibrations.
fn directory(config: &Config) -> Result<PathBuf, CacheError> {
    if config.max_inline.is_some() {
        return Err(CacheError::NoFile(
            "a limit on inline bytes is set (RDMA_MAX_INLINE), and the cache has no calibrations with a limit",
        ));
    }
    match &config.tune_cache {
        TuneCache::Directory(directory) => Ok(directory.clone()),
        TuneCache::Off => Err(CacheError::NoFile("the cache is off")),
        TuneCache::Environment => from_environment(|name| std::env::var_os(name)),
    }
}

fn from_environment(lookup: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, CacheError> {
    match lookup("RDMA_TUNE_CACHE") {
        Some(value) if value.is_empty() => return Err(CacheError::NoFile("RDMA_TUNE_CACHE is empty")),
        Some(value) if value.eq_ignore_ascii_case("off") => {
            return Err(CacheError::NoFile("the cache is off (RDMA_TUNE_CACHE)"));
        }
        Some(value) => return Ok(value.into()),
        None => {}
    }
    // The XDG Base Directory Specification says to ignore relative paths.
    let absolute = |name| lookup(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    cache
        .map(|cache| cache.join("tonic-rdma"))
        .ok_or(CacheError::NoFile("neither XDG_CACHE_HOME nor HOME is set"))
}

/// Returns the file for a key.
fn file(directory: &Path, key: &Key) -> PathBuf {
    let build = if key.version.ends_with("debug") { "-debug" } else { "" };
    let name = format!("{}-{}-{}{build}", key.provider, key.device, key.slot_size);
    let keep = |character: char| character.is_ascii_alphanumeric() || "_-".contains(character);
    directory.join(name.replace(|character| !keep(character), "_"))
}

/// Returns a calibration as text: its conditions, the measured times in nanoseconds, and a checksum.
fn encode(calibration: &Calibration) -> String {
    let mut text = format!("{FIRST}\n{}\n", calibration.key);
    for ChunkPoint { chunk, bytes, rendezvous } in &calibration.chunks {
        let _ = writeln!(text, "chunk {chunk} {bytes} {}", rendezvous.as_nanos());
    }
    for Point { bytes, eager, rendezvous, copying } in &calibration.points {
        let [eager, rendezvous, copying] = [eager, rendezvous, copying].map(Duration::as_nanos);
        let _ = writeln!(text, "size {bytes} {eager} {rendezvous} {copying}");
    }
    let sum = sum(&text);
    text + &format!("sum {sum:016x}\n")
}

/// Reads a calibration for `key`.
fn decode(text: &str, key: &Key) -> Result<Calibration, String> {
    let body = text.rsplit_once("sum ").filter(|_| text.starts_with(FIRST));
    let (body, last) = body.ok_or("it is of another version of the format, or none of ours")?;
    if last.trim_end() != format!("{:016x}", sum(body)) {
        return Err("its sum is wrong: it was damaged, or changed by hand".into());
    }
    let mut lines = body.lines().skip(1);
    let found = lines.next().unwrap_or_default();
    if found != key.to_string() {
        return Err(format!(
            "it is of another device, driver, processor, version or length of buffers: {found}"
        ));
    }
    let (mut chunks, mut points) = (Vec::new(), Vec::<Point>::new());
    for line in lines {
        let (kind, numbers) = line.split_once(' ').unwrap_or_default();
        let numbers: Result<Vec<u64>, _> = numbers.split(' ').map(str::parse).collect();
        match (kind, numbers.as_deref()) {
            ("chunk", Ok(&[chunk, bytes, rendezvous]))
                if (4096..=1 << 20).contains(&chunk) && is_length(bytes) && is_time(rendezvous) =>
            {
                let rendezvous = Duration::from_nanos(rendezvous);
                chunks.push(ChunkPoint { chunk: chunk as usize, bytes: bytes as usize, rendezvous });
            }
            ("size", Ok(&[bytes, eager, rendezvous, copying]))
                if is_length(bytes)
                    && bytes.is_power_of_two()
                    && [eager, rendezvous, copying].into_iter().all(is_time)
                    && copying <= rendezvous
                    && points.last().is_none_or(|last| last.bytes < bytes as usize) =>
            {
                let [eager, rendezvous, copying] = [eager, rendezvous, copying].map(Duration::from_nanos);
                points.push(Point { bytes: bytes as usize, eager, rendezvous, copying });
            }
            _ => return Err(format!("line {line:?} is wrong")),
        }
    }
    if points.is_empty() {
        return Err("it has no sizes".into());
    }
    Ok(Calibration { key: key.clone(), points, chunks, steady: true })
}

/// Returns whether a message of this length may have been measured.
fn is_length(bytes: u64) -> bool {
    (1024..=64 << 20).contains(&bytes)
}

/// Returns whether this time may have been measured, 1 ns to 10 s.
fn is_time(nanos: u64) -> bool {
    (1..=10_000_000_000).contains(&nanos)
}

/// Returns the FNV-1a checksum, 64 bits. It detects damage, but not a change on purpose.
fn sum(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::calibration::tests::sample;
    use super::*;

    fn calibration() -> Calibration {
        let mut calibration = sample(&[(1024, 1, 9), (65_536, 64, 40), (1 << 22, 4000, 3000)]);
        let rendezvous = Duration::from_micros(123);
        calibration.chunks = vec![ChunkPoint { chunk: 65_536, bytes: 1 << 20, rendezvous }];
        calibration
    }

    fn within(directory: &Path) -> Config {
        Config::default().tune_cache(TuneCache::Directory(directory.into()))
    }

    #[test]
    fn a_calibration_is_stored_loaded_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("deep").join("down");
        let (config, first, second) = (within(&directory), calibration(), sample(&[(2048, 2, 9)]));
        assert_eq!(load(&config, &first.key).unwrap(), None);
        let path = store(&config, &first).unwrap();
        assert_eq!(load(&config, &first.key).unwrap(), Some((first.clone(), path.clone())));
        assert_eq!(store(&config, &second).unwrap(), path);
        assert_eq!(load(&config, &first.key).unwrap(), Some((second, path.clone())));
        let left: Vec<_> =
            std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left, [path], "nothing else is left behind");
    }

    #[test]
    fn settings_and_busy_machines_allow_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let config = within(folder.path());
        store(&config, &Calibration { steady: false, ..calibration() }).unwrap_err();
        for config in [config.clone().max_inline(200), config.tune_cache(TuneCache::Off)] {
            store(&config, &calibration()).unwrap_err();
            load(&config, &calibration().key).unwrap_err();
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_damaged_file_is_reported_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (config, calibration) = (within(folder.path()), calibration());
        let path = store(&config, &calibration).unwrap();
        for bytes in [&b"nonsense"[..], &[0xff; 100], &[b'x'; 1 << 20], b""] {
            std::fs::write(&path, bytes).unwrap();
            let error = load(&config, &calibration.key).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        store(&config, &calibration).unwrap();
        assert_eq!(load(&config, &calibration.key).unwrap(), Some((calibration, path)));
    }

    #[test]
    fn links_and_files_in_place_of_directories_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let (calibration, link, file) = (calibration(), place("link"), place("file"));
        let path = store(&within(&place("real")), &calibration).unwrap();
        std::os::unix::fs::symlink(place("real"), &link).unwrap();
        std::fs::write(&file, "").unwrap();
        for directory in [&link, &file, &file.join("below")] {
            store(&within(directory), &calibration).unwrap_err();
            load(&within(directory), &calibration.key).unwrap_err();
        }
        std::fs::rename(&path, place("copy")).unwrap();
        std::os::unix::fs::symlink(place("copy"), &path).unwrap();
        load(&within(&place("real")), &calibration.key).unwrap_err();
    }

    #[test]
    fn a_device_of_any_name_has_a_file_in_the_directory() {
        let mut key = sample(&[]).key;
        key.device = "../..//x\u{fc}".into();
        let path = file(Path::new("/cache"), &key);
        assert_eq!(path.parent(), Some(Path::new("/cache")));
        assert!(path.to_str().unwrap().is_ascii());
    }

    #[test]
    fn the_environment_names_the_directory() {
        let place = |variables: &[(&str, &str)]| {
            from_environment(|asked| {
                variables.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.into())
            })
            .ok()
        };
        let all = [("RDMA_TUNE_CACHE", "/t"), ("XDG_CACHE_HOME", "/c"), ("HOME", "/h")];
        assert_eq!(place(&all), Some("/t".into()));
        assert_eq!(place(&all[1..]), Some("/c/tonic-rdma".into()));
        assert_eq!(place(&all[2..]), Some("/h/.cache/tonic-rdma".into()));
        assert_eq!(place(&[("XDG_CACHE_HOME", "c"), ("HOME", "/h")]), Some("/h/.cache/tonic-rdma".into()));
        for none in [
            &[("RDMA_TUNE_CACHE", "Off"), ("HOME", "/h")][..],
            &[("RDMA_TUNE_CACHE", "")],
            &[("HOME", "h")],
            &[],
        ] {
            assert_eq!(place(none), None);
        }
    }

    /// Returns the text with `from` replaced, and the right checksum.
    fn changed(from: &str, to: &str) -> String {
        let text = encode(&calibration());
        assert!(text.contains(from), "{from:?} in {text}");
        let text = text.replacen(from, to, 1);
        let body = text.split("sum ").next().unwrap();
        format!("{body}sum {:016x}\n", sum(body))
    }

    #[test]
    fn a_calibration_is_read_back() {
        let calibration = calibration();
        let text = encode(&calibration);
        assert_eq!(decode(&text, &calibration.key), Ok(calibration));
        assert!((text.len() as u64) < LONGEST);
    }

    #[test]
    fn damage_and_impossible_values_are_refused() {
        let key = calibration().key;
        let text = encode(&calibration());
        for (text, problem) in [
            (String::new(), "another version of the format"),
            (text.replace("calibration 2", "calibration 1"), "another version of the format"),
            (text[..text.len() / 2].to_owned(), "another version of the format"),
            (text.replace("64000", "63000"), "its sum is wrong"),
            (changed("rxe0", "rxe1"), "another device"),
            (changed("tonic-rdma 0", "tonic-rdma 9"), "another device, driver, processor, version"),
            (changed("size 1024 1000", "size 1024 99999999999"), r#"line "size 1024 99999999999 9000 3000""#),
            (changed("size 1024", "size 1023"), r#"line "size 1023 1000 9000 3000""#),
            (changed("9000 3000", "9000 9001"), r#"line "size 1024 1000 9000 9001""#),
            (changed("chunk 65536", "chunk 1"), r#"line "chunk 1 1048576 123000""#),
            (changed("size 1024", "size 65536"), r#"line "size 65536 64000"#),
        ] {
            let error = decode(&text, &key).unwrap_err();
            assert!(error.contains(problem), "{problem:?} in {error:?} of {text}");
        }
        let empty = Calibration { points: Vec::new(), ..calibration() };
        assert_eq!(decode(&encode(&empty), &key), Err("it has no sizes".into()));
    }

    proptest! {
        #[test]
        fn any_text_is_refused_without_a_panic(text in "\\PC{0,200}", lines in prop::collection::vec("[a-z_]{0,9} [0-9 ]{0,30}", 0..12)) {
            let key = calibration().key;
            let _ = decode(&text, &key);
            let body = format!("{FIRST}\n{key}\n{}\n", lines.join("\n"));
            let text = format!("{body}sum {:016x}\n", sum(&body));
            prop_assert!(decode(&text, &key).is_err());
        }
    }
}
