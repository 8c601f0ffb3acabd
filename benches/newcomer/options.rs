//! The options of the bench.

use std::time::Duration;

use super::path::{Cell, Path};
use super::runtimes::Flavour;

#[derive(Debug)]
pub(crate) struct Options {
    runtimes: Vec<Flavour>,
    paths: Vec<Path>,
    sizes: Vec<usize>,
    inflight: Vec<usize>,
    pub(crate) rounds: usize,
    pub(crate) duration: Duration,
}

impl Options {
    /// Bytes of the tensor in the book's example: 1024 × 1000 × f32.
    const SIZES: [usize; 3] = [64, 1 << 20, 4 * 1024 * 1000];

    fn default() -> Self {
        Self {
            runtimes: Flavour::ALL.to_vec(),
            paths: Path::ALL.to_vec(),
            sizes: Self::SIZES.to_vec(),
            inflight: vec![1, 64],
            rounds: 3,
            duration: Duration::from_millis(500),
        }
    }

    /// Returns options that measure every cell for a moment.
    pub(crate) fn once() -> Self {
        Self { rounds: 1, duration: Duration::from_millis(1), ..Self::default() }
    }

    pub(crate) fn parse(arguments: &[String]) -> Self {
        let mut options = Self::default();
        for pair in arguments.chunks(2) {
            let [flag, value] = pair else { panic!("{} needs a value", pair[0]) };
            let items = || value.split(',');
            match flag.as_str() {
                "--runtimes" => options.runtimes = items().map(Flavour::from_name).collect(),
                "--paths" => options.paths = items().map(Path::from_name).collect(),
                "--sizes" => options.sizes = items().map(|item| item.parse().unwrap()).collect(),
                "--inflight" => options.inflight = items().map(|item| item.parse().unwrap()).collect(),
                "--rounds" => options.rounds = value.parse().unwrap(),
                "--millis" => options.duration = Duration::from_millis(value.parse().unwrap()),
                other => panic!(
                    "no option {other:?}: --runtimes, --paths, --sizes, --inflight, --rounds, --millis"
                ),
            }
        }
        options
    }

    pub(crate) fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &runtime in &self.runtimes {
            for &bytes in &self.sizes {
                for &inflight in &self.inflight {
                    // Many calls in flight are measured only for small messages that do not depend on one another.
                    let measured = |path: &Path| inflight == 1 || (bytes <= 1024 && path.is_greeter());
                    let paths = self.paths.iter().copied().filter(measured);
                    cells.extend(paths.map(|path| Cell { runtime, bytes, inflight, path }));
                }
            }
        }
        cells
    }
}
