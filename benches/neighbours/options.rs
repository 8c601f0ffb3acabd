//! The options of the bench, and those of its other processes.

use std::path::PathBuf;
use std::time::Duration;

use tonic_rdma_commands::Flavour;
use tonic_rdma_commands::clap::{self, Parser, Subcommand};

use super::cell::{Cell, Level, Neighbour, Transport};

#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// Shows the kinds of neighbours.
    #[arg(long)]
    pub(crate) list: bool,
    /// Measures every cell once, for a moment.
    #[arg(long)]
    test: bool,
    #[arg(long, value_delimiter = ',', value_parser = Neighbour::parse)]
    neighbours: Vec<Neighbour>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tcp,rdma")]
    transports: Vec<Transport>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "user,stranger")]
    levels: Vec<Level>,
    #[arg(long, value_delimiter = ',', default_value = "64,1048576")]
    sizes: Vec<usize>,
    #[arg(long, value_parser = Flavour::parse, default_value = "current-thread")]
    pub(crate) runtime: Flavour,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    #[arg(long)]
    pub(crate) table: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) role: Option<Role>,
}

/// What a process of a cell does.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Role {
    /// Serves.
    #[command(hide = true)]
    Server {
        transport: Transport,
        #[arg(value_parser = Flavour::parse)]
        runtime: Flavour,
    },
    /// Is a bad neighbour.
    #[command(hide = true)]
    Bad(Caller),
    /// Is an honest client that makes one call.
    #[command(hide = true)]
    Visit(Caller),
}

/// The options of another client.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Caller {
    pub(crate) transport: Transport,
    #[arg(value_parser = Flavour::parse)]
    pub(crate) runtime: Flavour,
    #[arg(value_parser = Neighbour::parse)]
    pub(crate) neighbour: Neighbour,
    pub(crate) level: Level,
    pub(crate) address: String,
    /// The names of the server's sockets.
    pub(crate) names: String,
}

impl Options {
    pub(crate) fn rounds(&self) -> usize {
        if self.test { 1 } else { self.rounds }
    }

    pub(crate) fn duration(&self) -> Duration {
        Duration::from_secs_f64(if self.test { 0.1 } else { self.seconds })
    }

    pub(crate) fn cells(&self) -> Vec<Cell> {
        let all: Vec<Neighbour> = Neighbour::all().collect();
        let neighbours = if self.neighbours.is_empty() { &all } else { &self.neighbours };
        let mut cells = Vec::new();
        for &bytes in &self.sizes {
            for &neighbour in neighbours {
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
