//! The result of a calibration, and the choice of the threshold from the measured times.

use std::time::Duration;

use super::decision::Bytes;
use super::key::CalibrationKey;

/// Default length of a chunk, in bytes.
pub(super) const DEFAULT_CHUNK: usize = 256 * 1024;

/// The times of both transfer modes on a device, size by size. They include the work of both ends, which are in one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibration {
    pub(super) key: CalibrationKey,
    pub(super) points: Vec<Point>,
    pub(super) chunks: Vec<ChunkPoint>,
    pub(super) post_cost: Duration,
    pub(super) message_cost: Duration,
    pub(super) round_trip: Duration,
    /// Repeated measurements agreed well enough to be kept.
    pub(super) steady: bool,
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

    /// Returns the conditions that the calibration holds for.
    pub fn key(&self) -> &CalibrationKey {
        &self.key
    }

    /// Returns the measured times, by size.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Returns the measured times, by chunk size.
    pub fn chunks(&self) -> &[ChunkPoint] {
        &self.chunks
    }

    /// Returns the length from which on writes go by rendezvous, in bytes; `None` if no write does.
    ///
    /// For each measured size, the gain is the time of eager messages divided by the time of a rendezvous plus 5 %. The
    /// threshold is the size from which on the product of the gains is largest; `None` if no product is above 1. So one outlier
    /// does not decide.
    pub fn threshold(&self) -> Option<usize> {
        self.threshold_by(|point| point.rendezvous)
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
            (Some(default), Some(best))
                if best.rendezvous.as_secs_f64() * Self::CLEARLY < default.rendezvous.as_secs_f64() =>
            {
                best.chunk
            }
            _ => DEFAULT_CHUNK,
        }
    }

    /// Returns the time that a small message takes of both ends together: posting it, finding its completion, copying it from the
    /// receive buffer and posting the buffer again.
    pub fn message_cost(&self) -> Duration {
        self.message_cost
    }

    /// Returns the time of the call that posts a small message.
    pub fn post_cost(&self) -> Duration {
        self.post_cost
    }

    /// Returns the time of a small message and its answer, with both ends on one thread.
    pub fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// Returns whether repeated measurements agreed. If not, the machine was busy, and the calibration is not kept on disk.
    pub fn is_steady(&self) -> bool {
        self.steady
    }

    /// Returns the time of a rendezvous of `size` bytes as a multiple of the time of eager messages.
    pub fn ratio(&self, size: usize) -> f64 {
        let nearest = |point: &&Point| point.bytes.abs_diff(size);
        self.points.iter().min_by_key(nearest).map_or(1.0, Point::ratio)
    }

    /// Returns the reason for the threshold, in words.
    pub fn reason(&self) -> String {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            return "nothing was measured".into();
        };
        match self.threshold() {
            None => format!(
                "rendezvous pays at no length: it takes {:.1} times as long at {}, and {:.1} times at {}",
                first.ratio(),
                Bytes(first.bytes),
                last.ratio(),
                Bytes(last.bytes)
            ),
            Some(threshold) => format!(
                "from {} on rendezvous is faster: it takes {:.2} times as long there, and {:.2} times at {}",
                Bytes(threshold),
                self.ratio(threshold),
                last.ratio(),
                Bytes(last.bytes)
            ),
        }
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
        Calibration {
            key: CalibrationKey::new(&tonic_rdma_verbs::soft::attributes(), 17_408),
            points: points.iter().map(point).collect(),
            chunks: Vec::new(),
            post_cost: Duration::from_nanos(200),
            message_cost: Duration::from_nanos(500),
            round_trip: micros(1),
            steady: true,
        }
    }

    #[test]
    fn the_threshold_is_where_rendezvous_begins_to_pay() {
        let crossing = sample(&[(1024, 1, 9), (4096, 4, 10), (16_384, 16, 14), (65_536, 64, 40)]);
        assert_eq!(crossing.threshold(), Some(16_384));
        assert!(crossing.reason().starts_with("from 16 KiB on"), "{}", crossing.reason());
        let never = sample(&[(1024, 1, 9), (65_536, 64, 90)]);
        assert_eq!(never.threshold(), None);
        assert!(never.reason().contains("9.0 times as long at 1 KiB"), "{}", never.reason());
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
}
