//! The result of a calibration, the choice of the threshold from the measured times, and calibrations on
//! disk: a small text file for each device, in the user's cache directory.
//!
//! If a file can't be used, the device is measured again. Only files and directories of this user are read
//! and written, and links are not followed. Other programs may have written a file, so a value that can't
//! have been measured is refused, too.

use std::error::Error;
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;

use crate::endpoint::config::{Config, TuneCache};
use tonic_rdma_verbs::DeviceAttributes;
use tonic_rdma_verbs::unstable::units::size;

/// Default length of a chunk, in bytes.
pub(super) const DEFAULT_CHUNK: usize = 256 * 1024;

/// The provider of the software device. It copies an eager message twice, in parts that stay in the caches.
/// It copies a rendezvous twice, too, and needs a message to the peer first. So no write goes by rendezvous
/// there, and connections measure nothing.
pub(super) const SOFTWARE: &str = "soft";

/// The conditions that a calibration holds for. A calibration of another device, driver, processor or version
/// of this crate is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Key {
    /// Provider that drives the device.
    pub provider: String,
    /// Name of the device.
    pub device: String,
    /// The device's kind and firmware, and the version of the kernel; empty on the software device.
    pub driver: String,
    /// Version and kind of build of this crate.
    pub version: String,
    /// Model of the processor.
    pub processor: String,
    /// Length of a receive buffer in bytes, which limits the length of an eager message.
    pub slot_size: u32,
}

impl Key {
    /// Makes the key for the device with these attributes in this process, with receive buffers of
    /// `slot_size` bytes.
    pub fn new(attributes: &DeviceAttributes, slot_size: u32) -> Self {
        let build = if cfg!(debug_assertions) { "debug" } else { "release" };
        let driver = if attributes.locks_memory { driver(&attributes.name) } else { String::new() };
        Self {
            provider: line(attributes.provider),
            device: line(&attributes.name),
            driver: line(&driver),
            version: format!("{} {build}", env!("CARGO_PKG_VERSION")),
            processor: line(&processor()),
            slot_size,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { provider, device, driver, version, processor, slot_size } = self;
        let comma = if driver.is_empty() { "" } else { ", " };
        write!(f, "{device} ({provider}{comma}{driver}), {processor}, tonic-rdma {version}, ")?;
        write!(f, "receive buffers of {slot_size} bytes")
    }
}

/// Returns kind and firmware of a device with a driver in the kernel, and the version of the kernel.
fn driver(device: &str) -> String {
    let read =
        |path: String| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let attribute = |name: &str| read(format!("/sys/class/infiniband/{device}/{name}"));
    [attribute("hca_type"), attribute("fw_ver"), read("/proc/sys/kernel/osrelease".into())].join(" ")
}

/// Returns the model of the processor.
fn processor() -> String {
    let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else { return String::new() };
    let named = |line: &str| {
        let (name, value) = line.split_once(':')?;
        ["model name", "CPU part"].contains(&name.trim()).then(|| value.trim().to_owned())
    };
    text.lines().find_map(named).unwrap_or_default()
}

/// Returns `text` as one line of a bounded length.
fn line(text: &str) -> String {
    const LONGEST: usize = 120;
    let plain: String = text.chars().filter(|character| !character.is_control()).take(LONGEST).collect();
    plain.trim().to_owned()
}

/// The times of both transfer modes on a device, size by size. They include the work of both sides, which are
/// in one process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Calibration {
    /// The conditions that the calibration holds for.
    pub key: Key,
    /// The measured times, by size.
    pub points: Vec<Point>,
    /// The measured times, by chunk size.
    pub chunks: Vec<ChunkPoint>,
    /// Repeated measurements agreed well enough to be kept on disk. If not, the machine was busy.
    pub steady: bool,
}

/// The times of a message of one size; medians.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Point {
    /// Length of the message, in bytes.
    pub bytes: usize,
    /// Time by eager messages, from the writer's memory into the reader's.
    pub eager: Duration,
    /// Time by rendezvous, from the writer's memory into the reader's.
    pub rendezvous: Duration,
    /// Times from registered memory of the writer; `None` where a rendezvous from there costs a registration.
    pub registered: Option<RegisteredTimes>,
}

/// The times of a message from registered memory of the writer, which is not copied there; medians.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegisteredTimes {
    /// Time by eager messages, which the device reads from the writer's memory.
    pub eager: Duration,
    /// Time by rendezvous, with the grants to the peer and their end.
    pub rendezvous: Duration,
}

impl Point {
    /// Returns the time of a rendezvous as a multiple of the time of eager messages.
    pub fn ratio(&self) -> f64 {
        self.rendezvous.as_secs_f64() / self.eager.as_secs_f64().max(1e-9)
    }
}

/// The time of a rendezvous with chunks of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChunkPoint {
    /// Length of a chunk, in bytes.
    pub chunk: usize,
    /// Length of the message, in bytes.
    pub bytes: usize,
    /// Time of the rendezvous; the median.
    pub rendezvous: Duration,
}

impl Calibration {
    /// Factor by which rendezvous has to be faster, because it takes more registered memory than eager
    /// messages.
    const MARGIN: f64 = 1.05;
    /// Factor by which another chunk size has to be faster than the default. Repeated measurements of one
    /// device differ by 5 %.
    const CLEARLY: f64 = 1.1;

    /// Returns the length from which on writes go by rendezvous, in bytes; `None` if no write does.
    ///
    /// For each measured size, the gain is the time of eager messages divided by the time of a rendezvous
    /// plus 5 %. The threshold is the size from which on the product of the gains is largest; `None` if no
    /// product is above 1. So one outlier does not decide. The software device has no threshold, whatever was
    /// measured.
    pub fn threshold(&self) -> Option<usize> {
        self.threshold_by(|point| Some((point.eager, point.rendezvous)))
    }

    /// Returns the threshold for writes from registered memory, which are copied neither by eager messages nor
    /// by a rendezvous; `None` if no such write goes by rendezvous.
    pub fn registered_threshold(&self) -> Option<usize> {
        self.threshold_by(|point| point.registered.map(|times| (times.eager, times.rendezvous)))
    }

    /// Returns the length of a chunk in bytes: 256 KiB, unless another length was clearly faster.
    pub fn chunk(&self) -> usize {
        let default = self.chunks.iter().find(|point| point.chunk == DEFAULT_CHUNK);
        let best = self.chunks.iter().min_by_key(|point| point.rendezvous);
        match (default, best) {
            (Some(default), Some(best)) if best.rendezvous.mul_f64(Self::CLEARLY) < default.rendezvous => {
                best.chunk
            }
            _ => DEFAULT_CHUNK,
        }
    }

    /// Returns the reason for the threshold, in words.
    pub fn reason(&self) -> String {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            return "nothing was measured".into();
        };
        let takes =
            |point: &Point| format!("{:.2} times as long at {}", point.ratio(), size(point.bytes as u64));
        let chosen = self.points.iter().find(|point| Some(point.bytes) == self.threshold());
        let why = match chosen {
            Some(_) => "it is faster from there on",
            None if self.key.provider == SOFTWARE => "no write of the software device does",
            None => "it is faster at no length",
        };
        format!("{why}: it takes {}, and {}", takes(chosen.unwrap_or(first)), takes(last))
    }

    fn threshold_by(&self, times: impl Fn(&Point) -> Option<(Duration, Duration)>) -> Option<usize> {
        if self.key.provider == SOFTWARE {
            return None;
        }
        // The gain of rendezvous for all sizes from the largest down to this one, as a sum of logarithms.
        let (mut gain, mut best, mut chosen) = (0.0_f64, 0.0_f64, None);
        let measured = self.points.iter().rev().filter_map(|point| Some((point.bytes, times(point)?)));
        for (bytes, (eager, rendezvous)) in measured {
            let cost = rendezvous.as_secs_f64().max(1e-9) * Self::MARGIN;
            gain += (eager.as_secs_f64().max(1e-9) / cost).ln();
            if gain > best {
                (best, chosen) = (gain, Some(bytes));
            }
        }
        chosen
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Makes a calibration with these points, in bytes and microseconds.
    pub(crate) fn sample(points: &[(usize, u64, u64)]) -> Calibration {
        let micros = Duration::from_micros;
        let point = |&(bytes, eager, rendezvous): &(usize, u64, u64)| Point {
            bytes,
            eager: micros(eager),
            rendezvous: micros(rendezvous),
            registered: Some(RegisteredTimes {
                eager: micros(eager),
                rendezvous: micros(rendezvous * 2 / 3),
            }),
        };
        let mut key = Key::new(&tonic_rdma_verbs::soft::attributes(), 17_408);
        (key.provider, key.device) = ("ibverbs".into(), "rxe0".into());
        Calibration { key, points: points.iter().map(point).collect(), chunks: Vec::new(), steady: true }
    }

    #[test]
    fn the_threshold_is_where_rendezvous_begins_to_pay() {
        let crossing = sample(&[(1024, 1, 9), (4096, 4, 10), (16_384, 16, 12), (65_536, 64, 32)]);
        assert_eq!(crossing.threshold(), Some(16_384));
        assert_eq!(
            crossing.reason(),
            "it is faster from there on: it takes 0.75 times as long at 16 KiB, and 0.50 times as long at 64 KiB"
        );
        let never = sample(&[(1024, 1, 9), (65_536, 64, 90)]);
        assert_eq!(never.threshold(), None);
        assert!(
            never.reason().contains("at no length: it takes 9.00 times as long at 1 KiB"),
            "{}",
            never.reason()
        );
        assert_eq!(sample(&[(1024, 9, 1), (65_536, 90, 60)]).threshold(), Some(1024));
        assert_eq!(sample(&[]).threshold(), None);
    }

    #[test]
    fn one_outlier_does_not_decide() {
        let low =
            sample(&[(1024, 1, 9), (4096, 4, 3), (16_384, 16, 40), (65_536, 64, 40), (1 << 18, 250, 160)]);
        assert_eq!(low.threshold(), Some(65_536));
        let high = sample(&[(16_384, 16, 12), (65_536, 64, 40), (1 << 18, 250, 255), (1 << 20, 1000, 650)]);
        assert_eq!(high.threshold(), Some(16_384));
    }

    #[test]
    fn equal_costs_mean_eager() {
        assert_eq!(sample(&[(1024, 10, 10), (65_536, 100, 100)]).threshold(), None);
    }

    #[test]
    fn registered_memory_has_a_threshold_of_its_own() {
        let mut calibration = sample(&[(65_536, 60, 75), (1 << 20, 1000, 1200)]);
        assert_eq!((calibration.threshold(), calibration.registered_threshold()), (None, Some(65_536)));
        calibration.points[0].registered = None;
        assert_eq!(calibration.registered_threshold(), Some(1 << 20), "only measured sizes count");
        calibration.points[1].registered = None;
        assert_eq!(calibration.registered_threshold(), None);
        let mut software = sample(&[(65_536, 60, 10)]);
        software.key.provider = SOFTWARE.into();
        assert_eq!((software.threshold(), software.registered_threshold()), (None, None));
    }

    #[test]
    fn another_chunk_size_has_to_be_clearly_faster() {
        let chunk =
            |chunk, micros| ChunkPoint { chunk, bytes: 1 << 20, rendezvous: Duration::from_micros(micros) };
        let mut calibration = sample(&[]);
        assert_eq!(calibration.chunk(), DEFAULT_CHUNK);
        calibration.chunks = vec![chunk(65_536, 97), chunk(DEFAULT_CHUNK, 100)];
        assert_eq!(calibration.chunk(), DEFAULT_CHUNK);
        calibration.chunks = vec![chunk(65_536, 80), chunk(DEFAULT_CHUNK, 100), chunk(1 << 20, 90)];
        assert_eq!(calibration.chunk(), 65_536);
    }

    #[test]
    fn keys_of_the_software_device_differ_by_slot_size() {
        let attributes = tonic_rdma_verbs::soft::attributes();
        let key = Key::new(&attributes, 17_408);
        assert_eq!((key.provider.as_str(), key.device.as_str()), (SOFTWARE, "soft0"));
        assert!(key.version.starts_with(env!("CARGO_PKG_VERSION")) && key.driver.is_empty());
        assert_ne!(key, Key::new(&attributes, 4096));
    }

    #[test]
    fn a_name_stays_on_its_line() {
        assert_eq!(line(" a\nb=c\u{7f} "), "ab=c");
        assert_eq!(line(&"x".repeat(1000)).len(), 120);
    }
}

/// The first line, with the version of the format.
const FIRST: &str = "tonic-rdma calibration 3";
/// Longest file that is read, in bytes.
const LONGEST: u64 = 16 << 10;

/// The reason why a calibration was not read from disk, or not kept there.
#[derive(Debug, thiserror::Error)]
pub(super) enum CacheError {
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
    for Point { bytes, eager, rendezvous, registered } in &calibration.points {
        let _ = write!(text, "size {bytes} {} {}", eager.as_nanos(), rendezvous.as_nanos());
        if let Some(RegisteredTimes { eager, rendezvous }) = registered {
            let _ = write!(text, " {} {}", eager.as_nanos(), rendezvous.as_nanos());
        }
        text.push('\n');
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
            ("size", Ok(&[bytes, ref times @ ..]))
                if is_length(bytes)
                    && bytes.is_power_of_two()
                    && [2, 4].contains(&times.len())
                    && times.iter().all(|time| is_time(*time))
                    && points.last().is_none_or(|last| last.bytes < bytes as usize) =>
            {
                let time = |index: usize| times.get(index).copied().map(Duration::from_nanos);
                let registered = time(2).zip(time(3));
                let registered = registered.map(|(eager, rendezvous)| RegisteredTimes { eager, rendezvous });
                let (eager, rendezvous) = time(0).zip(time(1)).unwrap_or_default();
                points.push(Point { bytes: bytes as usize, eager, rendezvous, registered });
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
mod cache_tests {
    use proptest::prelude::*;

    use super::tests::sample;
    use super::*;

    fn calibration() -> Calibration {
        let mut calibration = sample(&[(1024, 1, 9), (65_536, 64, 40), (1 << 22, 4000, 3000)]);
        let rendezvous = Duration::from_micros(123);
        calibration.chunks = vec![ChunkPoint { chunk: 65_536, bytes: 1 << 20, rendezvous }];
        calibration.points[1].registered = None;
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
            (text.replace("calibration 3", "calibration 2"), "another version of the format"),
            (text[..text.len() / 2].to_owned(), "another version of the format"),
            (text.replace("64000", "63000"), "its sum is wrong"),
            (changed("rxe0", "rxe1"), "another device"),
            (changed("tonic-rdma 0", "tonic-rdma 9"), "another device, driver, processor, version"),
            (
                changed("size 1024 1000", "size 1024 99999999999"),
                r#"line "size 1024 99999999999 9000 1000 6000""#,
            ),
            (changed("size 1024", "size 1023"), r#"line "size 1023 1000 9000 1000 6000""#),
            (changed("1000 6000", "1000"), r#"line "size 1024 1000 9000 1000""#),
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
