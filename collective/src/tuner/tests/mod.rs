//! Tests of the tuner, with models of what operations cost.

mod choices;
mod texts;

use std::time::Duration;

use super::{Trial, Tuner, tune};
use crate::plan::Algorithm;
use crate::tuner::PlanTable;

const BUDGET: Duration = Duration::from_millis(400);
const LARGEST: usize = 64 << 20;

/// What operations cost on a machine.
#[derive(Clone, Copy, Debug)]
struct Model {
    ranks: usize,
    /// The time of a message, in nanoseconds.
    message: f64,
    /// The time of a byte that a rank moves, in nanoseconds.
    byte: f64,
    /// How much of the time of the bytes pieces hide. The shorter the pieces, the more, but each costs a message.
    hidden: f64,
    /// The factor for each byte of a ring, which has neighbours only.
    ring: f64,
}

impl Model {
    fn nanos(&self, algorithm: Algorithm, piece: usize, bytes: usize) -> f64 {
        let ranks = self.ranks as f64;
        // Two ranks send the same messages either way.
        let algorithm = match algorithm {
            Algorithm::Ring if self.ranks == 2 => Algorithm::HalvingDoubling,
            other => other,
        };
        let both_halves = 2.0 * (ranks - 1.0) / ranks * bytes as f64;
        let (rounds, moved, longest) = match algorithm {
            Algorithm::OneShot => (1.0 + 0.2 * (ranks - 2.0), (ranks - 1.0) * bytes as f64, bytes),
            Algorithm::HalvingDoubling => (2.0 * ranks.log2().ceil(), both_halves, bytes / 2),
            Algorithm::Ring => (2.0 * (ranks - 1.0), both_halves * self.ring, bytes / self.ranks),
        };
        let pieces = (longest as f64 / piece as f64).ceil().max(1.0);
        let hidden = self.hidden * (1.0 - 1.0 / pieces);
        self.message * rounds * (1.0 + 0.3 * (pieces - 1.0)) + moved * self.byte * (1.0 - hidden)
    }

    fn chosen(&self, table: &PlanTable, bytes: usize) -> f64 {
        let (algorithm, piece) = table.choose(bytes);
        self.nanos(algorithm, piece, bytes)
    }

    /// Returns the table, and the time that the trials took. Times differ by up to `noise`, and one in 30 is three times as long.
    fn tune(&self, noise: f64, seed: u64) -> (PlanTable, Duration) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut spent = Duration::ZERO;
        let measure = |trial: Trial| {
            let mut nanos = self.nanos(trial.algorithm, trial.piece, trial.bytes);
            nanos *= 1.0 + noise * random.f64();
            if noise > 0.0 && random.usize(..30) == 0 {
                nanos *= 3.0;
            }
            let time = Duration::from_nanos(nanos as u64);
            spent += time * (trial.repetitions + 1);
            Ok::<_, std::convert::Infallible>(time)
        };
        let Ok(table) = tune(Tuner::new(self.ranks, LARGEST, BUDGET), measure);
        (table, spent)
    }
}

/// Returns models of machines: shared memory, more ranks than cores, a network.
fn models() -> Vec<Model> {
    let mut models = Vec::new();
    for ranks in [2, 3, 4, 8, 16] {
        for (message, byte) in [(300.0, 0.15), (1500.0, 0.4), (30_000.0, 0.5), (4000.0, 0.08)] {
            for (hidden, ring) in [(0.0, 1.0), (0.4, 0.8), (0.3, 1.3), (0.1, 0.6)] {
                models.push(Model { ranks, message, byte, hidden, ring });
            }
        }
    }
    models
}
