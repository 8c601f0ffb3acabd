//! The options of the bench.

use std::path::PathBuf;
use std::time::Duration;

use super::cell::{Cell, Level, Neighbour, Transport};
use super::runtimes::Flavour;

#[derive(Debug)]
pub(crate) struct Options {
    neighbours: Vec<Neighbour>,
    transports: Vec<Transport>,
    levels: Vec<Level>,
    sizes: Vec<usize>,
    pub(crate) runtime: Flavour,
    pub(crate) rounds: usize,
    pub(crate) duration: Duration,
    pub(crate) json: Option<PathBuf>,
    pub(crate) table: Option<PathBuf>,
}

impl Options {
    fn default() -> Self {
        Self {
            neighbours: Neighbour::all().collect(),
            transports: Transport::ALL.to_vec(),
            levels: Level::ALL.to_vec(),
            sizes: vec![64, 1 << 20],
            runtime: Flavour::CurrentThread,
            rounds: 3,
            duration: Duration::from_secs(3),
            json: None,
            table: None,
        }
    }

    /// Returns options that measure every cell for a moment.
    pub(crate) fn once() -> Self {
        Self { rounds: 1, duration: Duration::from_millis(100), ..Self::default() }
    }

    pub(crate) fn parse(arguments: &[String]) -> Self {
        let mut options = Self::default();
        for pair in arguments.chunks(2) {
            let [flag, value] = pair else { panic!("{} needs a value", pair[0]) };
            let items = || value.split(',');
            match flag.as_str() {
                "--neighbours" => options.neighbours = items().map(Neighbour::from_name).collect(),
                "--transports" => options.transports = items().map(Transport::from_name).collect(),
                "--levels" => options.levels = items().map(Level::from_name).collect(),
                "--sizes" => options.sizes = items().map(|item| item.parse().unwrap()).collect(),
                "--runtime" => options.runtime = Flavour::from_name(value),
                "--rounds" => options.rounds = value.parse().unwrap(),
                "--seconds" => options.duration = Duration::from_secs_f64(value.parse().unwrap()),
                "--json" => options.json = Some(value.into()),
                "--table" => options.table = Some(value.into()),
                other => panic!(
                    "no option {other:?}: --list, --neighbours, --transports, --levels, --sizes, --runtime, --rounds, --seconds, --json, --table"
                ),
            }
        }
        options
    }

    pub(crate) fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &bytes in &self.sizes {
            for &neighbour in &self.neighbours {
                for &transport in &self.transports {
                    let levels = self.levels.iter().copied();
                    let there = levels.filter(|&level| neighbour.exists(transport, level));
                    cells.extend(there.map(|level| Cell { bytes, neighbour, transport, level }));
                }
            }
        }
        cells
    }
}
