//! The result of a calibration, and the choice of the threshold from the measured times.

use std::fmt;
use std::time::Duration;

use tonic_rdma_verbs::DeviceAttributes;
use tonic_rdma_verbs::internal::units::size;

/// Default length of a chunk, in bytes.
pub(super) const DEFAULT_CHUNK: usize = 256 * 1024;

/// The provider of the software device. It copies an eager message twice, in pieces that stay in the caches. It copies a rendezvous
/// twice, too, and needs a message to the peer first. So no write goes by rendezvous there, and connections measure nothing.
pub(super) const SOFTWARE: &str = "soft";

/// The conditions that a calibration holds for. A calibration of another device, driver, processor or version of this crate is not
/// used.
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
    /// Makes the key for the device with these attributes in this process, with receive buffers of `slot_size` bytes.
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

/// The times of both transfer modes on a device, size by size. They include the work of both ends, which are in one process.
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
    /// The part of `rendezvous` that copies into registered memory. A writer with registered memory saves this part.
    pub copying: Duration,
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
    /// Factor by which rendezvous has to be faster, because it takes more registered memory than eager messages.
    const MARGIN: f64 = 1.05;
    /// Factor by which another chunk size has to be faster than the default. Repeated measurements of one device differ by 5 %.
    const CLEARLY: f64 = 1.1;

    /// Returns the length from which on writes go by rendezvous, in bytes; `None` if no write does.
    ///
    /// For each measured size, the gain is the time of eager messages divided by the time of a rendezvous plus 5 %. The
    /// threshold is the size from which on the product of the gains is largest; `None` if no product is above 1. So one outlier
    /// does not decide. The software device has no threshold, whatever was measured.
    pub fn threshold(&self) -> Option<usize> {
        self.threshold_by(|point| point.rendezvous).filter(|_| self.key.provider != SOFTWARE)
    }

    /// Returns the threshold for writes from registered memory, which a rendezvous does not copy.
    pub fn registered_threshold(&self) -> Option<usize> {
        self.threshold_by(|point| point.rendezvous.saturating_sub(point.copying))
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

    fn threshold_by(&self, rendezvous: impl Fn(&Point) -> Duration) -> Option<usize> {
        // The gain of rendezvous for all sizes from the largest down to this one, as a sum of logarithms.
        let (mut gain, mut best, mut chosen) = (0.0_f64, 0.0_f64, None);
        for point in self.points.iter().rev() {
            let cost = rendezvous(point).as_secs_f64().max(1e-9) * Self::MARGIN;
            gain += (point.eager.as_secs_f64().max(1e-9) / cost).ln();
            if gain > best {
                (best, chosen) = (gain, Some(point.bytes));
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
            copying: micros(rendezvous / 3),
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
    fn a_rendezvous_from_registered_memory_saves_the_copy() {
        let calibration = sample(&[(65_536, 60, 75), (1 << 20, 1000, 1200)]);
        assert_eq!((calibration.threshold(), calibration.registered_threshold()), (None, Some(65_536)));
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
