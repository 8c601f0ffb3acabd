//! The command line.

use std::path::PathBuf;

use clap::Parser;
use tonic_rdma_commands::units::parse_number;

use crate::direction::Direction;
use crate::peer::Peer;
use crate::places::Failure;

/// Runs stock gRPC peers against our transport, in all directions. `interop/matrix` installs the peers and starts this program
/// in the repository's root.
#[derive(Debug, Parser)]
#[command(name = "interop-matrix", version)]
pub(crate) struct Options {
    /// Peers, of: tonic, python, node, ruby, go, cpp-official [default: all]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) peers: Vec<Peer>,
    /// Directions [default: all]; their controls run as well
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) directions: Vec<Direction>,
    /// Run no controls: a case that is n/a, or known to fail, counts as such without a control, and peers are not asked for
    /// their versions
    #[arg(long)]
    pub(crate) no_controls: bool,
    /// Cases [default: all that `interop client --list` names; with TLS the cases that TLS can change]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) cases: Vec<String>,
    /// Device for RDMA: soft, or a device of the feature ibverbs, such as rxe0 (rxe and siw: the first device of this kind)
    #[arg(long, default_value = "soft")]
    pub(crate) provider: String,
    /// Write all results to this file, as JSON
    #[arg(long, value_name = "FILE", value_parser = json)]
    pub(crate) json: Option<PathBuf>,
    /// Number of combinations of peer and direction that run at a time
    #[arg(long, value_name = "NUMBER", default_value = "2", value_parser = jobs)]
    pub(crate) jobs: usize,
    /// Folder with the installed peers
    #[arg(long, value_name = "DIR", default_value = "target/interop")]
    pub(crate) stock: PathBuf,
}

fn json(text: &str) -> Result<PathBuf, Failure> {
    match text {
        "-" => Err("stdout has the progress of the program, so name a file".into()),
        file => Ok(file.into()),
    }
}

fn jobs(text: &str) -> Result<usize, Failure> {
    Ok(usize::try_from(parse_number("number of jobs", text, 1..=64)?)?)
}
