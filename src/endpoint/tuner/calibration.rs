//! The measured times of a device, and the threshold and the length of the chunks that they lead to.

use std::time::Duration;

/// Default length of a chunk, in bytes.
pub(in crate::endpoint) const DEFAULT_CHUNK: usize = 256 * 1024;

/// The provider of the software device. It copies an eager message twice, in parts that stay in the caches.
/// It copies a rendezvous twice, too, and needs a message to the peer first. So no write goes by rendezvous
/// there, and connections measure nothing.
pub(super) const SOFTWARE: &str = "soft";

/// The times of both transfer modes on a device. They include the work of both sides, which are in one process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Calibration {
    /// Provider that drives the device.
    pub provider: &'static str,
    /// The measured times, by size.
    pub points: Vec<Point>,
    /// Lengths of a chunk in bytes, and the time of a rendezvous of 4 MiB with each.
    pub chunks: Vec<(usize, Duration)>,
}

/// The times of a message of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Point {
    /// Length of the message, in bytes.
    pub bytes: usize,
    /// Times from memory that is not registered.
    pub copied: Times,
    /// Times from registered memory, which is not copied by the writer; `None` where a rendezvous from there
    /// costs a registration.
    pub registered: Option<Times>,
}

/// The times of a message from the writer's memory into the reader's; medians.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Times {
    /// Time by eager messages.
    pub eager: Duration,
    /// Time by rendezvous; from registered memory with the grants to the peer and their end.
    pub rendezvous: Duration,
}

impl Times {
    /// Returns the time of a rendezvous as a multiple of the time of eager messages.
    pub fn ratio(&self) -> f64 {
        self.rendezvous.as_secs_f64().max(1e-9) / self.eager.as_secs_f64().max(1e-9)
    }
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
        self.threshold_by(|point| Some(point.copied))
    }

    /// Returns the threshold for writes from registered memory, which are copied neither by eager messages nor
    /// by a rendezvous; `None` if no such write goes by rendezvous.
    pub fn registered_threshold(&self) -> Option<usize> {
        self.threshold_by(|point| point.registered)
    }

    /// Returns the length of a chunk in bytes: 256 KiB, unless another length was clearly faster.
    pub fn chunk(&self) -> usize {
        let default = self.chunks.iter().find(|(chunk, _)| *chunk == DEFAULT_CHUNK);
        let best = self.chunks.iter().min_by_key(|(_, time)| *time);
        match (default, best) {
            (Some((_, default)), Some((chunk, time))) if time.mul_f64(Self::CLEARLY) < *default => *chunk,
            _ => DEFAULT_CHUNK,
        }
    }

    fn threshold_by(&self, times: impl Fn(&Point) -> Option<Times>) -> Option<usize> {
        if self.provider == SOFTWARE {
            return None;
        }
        // The gain of rendezvous for all sizes from the largest down to this one, as a sum of logarithms.
        let (mut gain, mut best, mut chosen) = (0.0_f64, 0.0_f64, None);
        for (bytes, times) in self.points.iter().rev().filter_map(|point| Some((point.bytes, times(point)?)))
        {
            gain -= (times.ratio() * Self::MARGIN).ln();
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
        let times = |eager, rendezvous| Times { eager: micros(eager), rendezvous: micros(rendezvous) };
        let point = |&(bytes, eager, rendezvous): &(usize, u64, u64)| Point {
            bytes,
            copied: times(eager, rendezvous),
            registered: Some(times(eager, rendezvous * 2 / 3)),
        };
        Calibration { provider: "ibverbs", points: points.iter().map(point).collect(), chunks: Vec::new() }
    }

    #[test]
    fn the_threshold_is_where_rendezvous_begins_to_pay() {
        let crossing = sample(&[(1024, 1, 9), (4096, 4, 10), (16_384, 16, 12), (65_536, 64, 32)]);
        assert_eq!(crossing.threshold(), Some(16_384));
        let never = sample(&[(1024, 1, 9), (65_536, 64, 90)]);
        assert_eq!(never.threshold(), None);
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
        software.provider = SOFTWARE;
        assert_eq!((software.threshold(), software.registered_threshold()), (None, None));
    }

    #[test]
    fn another_chunk_size_has_to_be_clearly_faster() {
        let chunk = |chunk, micros| (chunk, Duration::from_micros(micros));
        let mut calibration = sample(&[]);
        assert_eq!(calibration.chunk(), DEFAULT_CHUNK);
        calibration.chunks = vec![chunk(65_536, 97), chunk(DEFAULT_CHUNK, 100)];
        assert_eq!(calibration.chunk(), DEFAULT_CHUNK);
        calibration.chunks = vec![chunk(65_536, 80), chunk(DEFAULT_CHUNK, 100), chunk(1 << 20, 90)];
        assert_eq!(calibration.chunk(), 65_536);
    }
}
