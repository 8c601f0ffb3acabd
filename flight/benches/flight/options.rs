//! The options of the bench and of its other processes, and its cells.

use std::fmt;
use std::path::PathBuf;

use tonic_rdma_commands::clap::{self, Args, Parser, Subcommand, ValueEnum};
use tonic_rdma_commands::{Flavour, Named as _};

/// A pair of client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Path {
    Ours,
    /// arrow-flight over TCP, a message for each batch.
    Stock,
    /// arrow-flight over TCP, with messages as short as its encoder makes them.
    StockSplit,
}

/// The direction of the batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Direction {
    Get,
    Put,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Args)]
pub(crate) struct Cell {
    #[arg(value_parser = Flavour::parse)]
    pub(crate) runtime: Flavour,
    pub(crate) direction: Direction,
    /// Bytes of a batch.
    pub(crate) bytes: usize,
    pub(crate) path: Path,
}

impl Cell {
    /// Returns the cell as arguments of another process.
    pub(crate) fn arguments(self) -> [String; 4] {
        let Self { runtime, direction, bytes, path } = self;
        [runtime.to_string(), direction.name().to_owned(), bytes.to_string(), path.name().to_owned()]
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runtime, direction, bytes, path } = self;
        write!(formatter, "{} of {bytes} bytes, {}, {runtime}", direction.name(), path.name())
    }
}

#[derive(Debug, Parser)]
pub(crate) struct Options {
    #[arg(long, value_parser = Flavour::parse, value_delimiter = ',', default_value = "multi-thread,current-thread")]
    runtimes: Vec<Flavour>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "get,put")]
    directions: Vec<Direction>,
    #[arg(long, value_delimiter = ',', default_value = "65536,1048576,8388608,33554432")]
    sizes: Vec<usize>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "ours,stock,stock-split")]
    pub(crate) paths: Vec<Path>,
    #[arg(long, default_value_t = 3)]
    pub(crate) rounds: usize,
    #[arg(long, default_value_t = 500)]
    pub(crate) millis: u64,
    /// What receivers compare in the timed calls.
    #[arg(long, value_enum, default_value = "pages")]
    pub(crate) check: Checked,
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    /// Measures every cell once, for a moment.
    #[arg(long)]
    pub(crate) test: bool,
    #[command(subcommand)]
    pub(crate) role: Option<Role>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Checked {
    /// All numbers.
    All,
    /// One number in each page.
    Pages,
}

/// What a process of a cell does.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Role {
    #[command(hide = true)]
    Server(Cell),
    #[command(hide = true)]
    Client {
        #[command(flatten)]
        cell: Cell,
        address: String,
        millis: u64,
        check: Checked,
    },
}

impl Options {
    /// Returns the cells. Cells that differ only in their path are in one list, so that they are measured one
    /// after the other.
    pub(crate) fn cells_by_path(&self) -> Vec<Vec<Cell>> {
        let mut lists = Vec::new();
        for &runtime in &self.runtimes {
            for &direction in &self.directions {
                for &bytes in &self.sizes {
                    let cell = |&path: &Path| Cell { runtime, direction, bytes, path };
                    lists.push(self.paths.iter().map(cell).collect());
                }
            }
        }
        lists
    }
}
