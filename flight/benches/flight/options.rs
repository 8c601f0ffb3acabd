//! The options of the bench, and its cells.

use std::fmt;

use super::runtimes::Flavour;

/// A pair of client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Path {
    Ours,
    /// arrow-flight over TCP, a message for each batch.
    Stock,
    /// arrow-flight over TCP, with messages as short as its encoder makes them.
    StockSplit,
}

impl Path {
    const ALL: [Self; 3] = [Self::Ours, Self::Stock, Self::StockSplit];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Stock => "stock",
            Self::StockSplit => "stock-split",
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        named(&Self::ALL, Self::name, name)
    }
}

/// The direction of the batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Get,
    Put,
}

impl Direction {
    const ALL: [Self; 2] = [Self::Get, Self::Put];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        named(&Self::ALL, Self::name, name)
    }
}

fn named<T: Copy>(all: &[T], name_of: fn(T) -> &'static str, name: &str) -> T {
    let found = all.iter().copied().find(|one| name_of(*one) == name);
    let names: Vec<_> = all.iter().map(|one| name_of(*one)).collect();
    found.unwrap_or_else(|| panic!("{name:?} is none of {}", names.join(", ")))
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cell {
    pub(crate) runtime: Flavour,
    pub(crate) direction: Direction,
    /// Bytes of a batch.
    pub(crate) bytes: usize,
    pub(crate) path: Path,
}

impl fmt::Display for Cell {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runtime, direction, bytes, path } = self;
        write!(formatter, "{} of {bytes} bytes, {}, {runtime}", direction.name(), path.name())
    }
}

#[derive(Debug)]
pub(crate) struct Options {
    runtimes: Vec<Flavour>,
    directions: Vec<Direction>,
    sizes: Vec<usize>,
    pub(crate) paths: Vec<Path>,
    pub(crate) rounds: usize,
    pub(crate) millis: u64,
    /// Receivers compare all numbers in the timed calls as well.
    pub(crate) check_all: bool,
    pub(crate) json: Option<String>,
}

impl Options {
    fn default() -> Self {
        Self {
            runtimes: vec![Flavour::MultiThread, Flavour::CurrentThread],
            directions: Direction::ALL.to_vec(),
            sizes: vec![64 << 10, 1 << 20, 8 << 20, 32 << 20],
            paths: Path::ALL.to_vec(),
            rounds: 3,
            millis: 500,
            check_all: false,
            json: None,
        }
    }

    /// Returns options that measure every cell for a moment.
    pub(crate) fn once() -> Self {
        Self { rounds: 1, millis: 1, ..Self::default() }
    }

    pub(crate) fn parse(arguments: &[String]) -> Self {
        let mut options = Self::default();
        for pair in arguments.chunks(2) {
            let [flag, value] = pair else { panic!("{} needs a value", pair[0]) };
            let items = || value.split(',');
            match flag.as_str() {
                "--runtimes" => options.runtimes = items().map(Flavour::from_name).collect(),
                "--directions" => options.directions = items().map(Direction::from_name).collect(),
                "--sizes" => options.sizes = items().map(|item| item.parse().unwrap()).collect(),
                "--paths" => options.paths = items().map(Path::from_name).collect(),
                "--rounds" => options.rounds = value.parse().unwrap(),
                "--millis" => options.millis = value.parse().unwrap(),
                "--check" => {
                    options.check_all = named(&[false, true], |all| if all { "all" } else { "pages" }, value)
                }
                "--json" => options.json = Some(value.clone()),
                other => panic!(
                    "no option {other:?}: --runtimes, --directions, --sizes, --paths, --rounds, --millis, --check, --json"
                ),
            }
        }
        options
    }

    /// Returns the cells. Those that differ in their path alone stand together.
    pub(crate) fn turns(&self) -> Vec<Vec<Cell>> {
        let mut turns = Vec::new();
        for &runtime in &self.runtimes {
            for &direction in &self.directions {
                for &bytes in &self.sizes {
                    let cell = |&path: &Path| Cell { runtime, direction, bytes, path };
                    turns.push(self.paths.iter().map(cell).collect());
                }
            }
        }
        turns
    }
}
