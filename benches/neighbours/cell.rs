//! The cells of the measurement, the options of the bench, and those of its other processes.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::server::Resources;
use tonic_rdma_commands::clap::{self, Parser, Subcommand, ValueEnum};
use tonic_rdma_commands::{Flavour, ValueError};

/// The transport of all clients of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Transport {
    Tcp,
    Rdma,
}

/// The owner of the bad neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Level {
    /// The user of the server.
    User,
    /// Another user, who gets in by `RDMA_SOFT_PEERS=any`.
    Stranger,
}

/// The bad neighbour of the honest client: an index into [`KINDS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Neighbour(usize);

/// A kind of neighbours.
struct Kind {
    name: &'static str,
    does: &'static str,
    /// Whether there is such a neighbour over TCP, too, which shares no memory and no descriptors.
    over_tcp: bool,
    /// Descriptors that the server may hold because of it, by the bounds of the software device.
    descriptors: u64,
}

const fn kind(name: &'static str, does: &'static str) -> Kind {
    Kind { name, does, over_tcp: false, descriptors: 300 }
}

impl Kind {
    const fn over_tcp(self) -> Self {
        Self { over_tcp: true, ..self }
    }

    const fn descriptors(self, descriptors: u64) -> Self {
        Self { descriptors, ..self }
    }
}

/// All kinds.
const KINDS: [Kind; 26] = [
    kind("none", "there is no neighbour").over_tcp(),
    kind("paced", "makes 800 calls a second").over_tcp(),
    kind("busy", "makes 16 000 calls a second, more than half of what TCP carries").over_tcp(),
    kind("flooding", "keeps 64 calls in flight").over_tcp(),
    kind("stopped", "is stopped in the middle of large calls, and killed after a while").over_tcp(),
    // A listener negotiates with 1024 clients at a time.
    kind("half-open", "holds 1 000 connections on which it sends nothing").over_tcp().descriptors(1324),
    kind("reconnecting", "makes a connection, with its memory, for each call").over_tcp(),
    kind("dying", "dies at random instants").over_tcp(),
    kind("scribbling", "overwrites all memory that it shares"),
    kind("deaf", "makes calls while the thread of its device does not answer"),
    kind("forking", "forks children without exec, which end and run destructors"),
    kind("blocking", "clears O_NONBLOCK of all descriptors that it has"),
    // Before Linux 6.16 the descriptors get through, and wait to be closed.
    kind("knocking", "holds 1 000 connections to the server's device, with garbage and descriptors")
        .descriptors(1300),
    kind("lingering", "the same, with sockets whose close takes long").descriptors(1300),
    kind(
        "replies",
        "answers the server's device with replies without end, each with 253 sockets whose close takes long",
    ),
    kind("full-pipe", "gives a full pipe in place of a socket for wake-ups"),
    kind("pipe-without-reader", "gives a pipe without a reader in place of a socket for wake-ups"),
    kind("tcp", "gives a TCP socket in place of a socket for wake-ups"),
    kind(
        "locked-tcp",
        "gives a TCP socket that another thread keeps locked in place of a socket for wake-ups",
    ),
    kind("truncated", "gives memory whose length can change in place of the memory that it shares"),
    kind("huge-pages", "gives memory of huge pages in place of the memory that it shares"),
    kind("device", "gives /dev/zero in place of the memory that it shares"),
    kind("offering", "offers /dev/zero as memory, again and again"),
    // A listener negotiates with 1024 clients at a time.
    kind("unanswering", "dials 64 times at once, with a device that accepts and never answers")
        .descriptors(1324),
    kind("full-backlog", "the same, with a device whose backlog is full").descriptors(1324),
    // One queue pair stands for one connection, and 128 connections may have none.
    kind("proven", "holds 3 072 connections to the server's device, each with the token of one queue pair")
        .descriptors(500),
];

impl Neighbour {
    pub(crate) const NONE: Self = Self(0);

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..KINDS.len()).map(Self)
    }

    /// Returns a line for each kind: its name, and what it does.
    pub(crate) fn list() -> String {
        KINDS.iter().fold(String::new(), |list, kind| format!("{list}{:20} {}\n", kind.name, kind.does))
    }

    pub(crate) fn name(self) -> &'static str {
        KINDS[self.0].name
    }

    pub(crate) fn parse(name: &str) -> Result<Self, ValueError> {
        let found = Self::all().find(|neighbour| neighbour.name() == name);
        found.ok_or_else(|| ValueError::unknown("those of --list"))
    }

    /// Returns the most that the server may hold because of this neighbour.
    pub(crate) fn bound(self) -> Resources {
        Resources { resident_kib: 256 << 10, descriptors: KINDS[self.0].descriptors, mappings: 2000 }
    }

    /// Returns whether there is such a neighbour of this level over `transport`. TCP has one level.
    pub(crate) fn exists(self, transport: Transport, level: Level) -> bool {
        transport == Transport::Rdma || KINDS[self.0].over_tcp && level == Level::User
    }
}

impl fmt::Debug for Neighbour {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// One measurement: the bytes of an honest call, the neighbour, and its transport and level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cell {
    pub(crate) bytes: usize,
    pub(crate) neighbour: Neighbour,
    pub(crate) transport: Transport,
    pub(crate) level: Level,
}

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
