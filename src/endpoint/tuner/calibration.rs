//! What a calibration found, and what follows from it.

use std::time::Duration;

use super::decision::Bytes;
use super::key::CalibrationKey;

/// Bytes of a chunk unless measurement says better.
pub(super) const DEFAULT_CHUNK: usize = 256 * 1024;

/// What both ways cost on a device, size by size, in one process that talks to itself: the work of both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibration {
    pub(super) key: CalibrationKey,
    pub(super) points: Vec<Point>,
    pub(super) chunks: Vec<ChunkPoint>,
    pub(super) post_cost: Duration,
    pub(super) message_cost: Duration,
    pub(super) round_trip: Duration,
    /// Whether repeated measurements agreed well enough to be kept.
    pub(super) steady: bool,
}

/// What a message of one size took; medians.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Point {
    /// Bytes of the message.
    pub bytes: usize,
    /// By eager messages, from the writer's memory into the reader's.
    pub eager: Duration,
    /// By rendezvous, from the writer's memory into the reader's.
    pub rendezvous: Duration,
    /// Of the latter, copying into registered memory, which a writer spares whose memory is registered.
    pub copying: Duration,
}

impl Point {
    /// Returns how many times as long a rendezvous took.
    pub fn ratio(&self) -> f64 {
        self.rendezvous.as_secs_f64() / self.eager.as_secs_f64().max(1e-9)
    }
}

/// What a rendezvous took with chunks of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChunkPoint {
    /// Bytes of a chunk.
    pub chunk: usize,
    /// Bytes of the message.
    pub bytes: usize,
    /// What it took; the median.
    pub rendezvous: Duration,
}

impl Calibration {
    /// How much better rendezvous has to be in all: it takes memory that eager messages do without.
    const MARGIN: f64 = 1.05;
    /// How much better a chunk size has to be than the default: the same device gives 5 % now to one, now to another.
    const CLEARLY: f64 = 1.1;

    /// Returns the device and the setting that it is of.
    pub fn key(&self) -> &CalibrationKey {
        &self.key
    }

    /// Returns what was measured, by size.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Returns what was measured of chunk sizes.
    pub fn chunks(&self) -> &[ChunkPoint] {
        &self.chunks
    }

    /// Returns from which length on, in bytes, writes are to go by rendezvous; `None` if none are.
    ///
    /// It is the one of the sizes measured, or none of them, for which all sizes together come closest to their better
    /// way, each by its ratio: one outlier decides nothing.
    pub fn threshold(&self) -> Option<usize> {
        self.threshold_by(|point| point.rendezvous)
    }

    /// Returns the threshold for writes out of registered memory, which a rendezvous need not copy.
    pub fn registered_threshold(&self) -> Option<usize> {
        self.threshold_by(|point| point.rendezvous.saturating_sub(point.copying))
    }

    /// Returns the bytes of a chunk: 256 KiB, unless another length was clearly better.
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

    /// Returns what a small message costs both ends together: posting it, finding its completion, taking it out of the receive
    /// buffer and posting that again.
    pub fn message_cost(&self) -> Duration {
        self.message_cost
    }

    /// Returns how long posting a small message takes until the call returns.
    pub fn post_cost(&self) -> Duration {
        self.post_cost
    }

    /// Returns how long a small message and the answer to it take, both ends on one processor.
    pub fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// Returns whether repeated measurements agreed. If not, the machine was busy, and the calibration is not kept on disk.
    pub fn is_steady(&self) -> bool {
        self.steady
    }

    /// Returns how many times as long a rendezvous takes as eager messages of `size` bytes.
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
        // What choosing rendezvous from the largest size down to this one gains, as a sum of logarithms.
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

    /// A calibration with these points, in bytes and microseconds.
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
    fn one_outlier_decides_nothing() {
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
    fn registered_memory_spares_the_copy() {
        let calibration = sample(&[(65_536, 60, 75), (1 << 20, 1000, 1200)]);
        assert_eq!((calibration.threshold(), calibration.registered_threshold()), (None, Some(65_536)));
    }

    #[test]
    fn another_chunk_size_has_to_be_clearly_better() {
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
