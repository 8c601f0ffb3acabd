//! The command line, and the combinations and cases of one run of the matrix.

use std::path::PathBuf;
use std::process::Command;

use clap::{Parser, ValueEnum as _};
use tonic_rdma_commands::Failure;
use tonic_rdma_commands::units::number;

use crate::certificates::Certificates;
use crate::direction::Direction;
use crate::peer::{Paths, Peer};
use crate::{process, tls};

/// Runs stock gRPC peers against our transport, in all directions. `interop/matrix` installs the peers and
/// starts this program in the repository's root.
#[derive(Debug, Parser)]
#[command(name = "interop-matrix", version)]
pub(crate) struct Options {
    /// Peers, of: tonic, python, python-rdma, node, ruby, go, cpp-official [default: all]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) peers: Vec<Peer>,
    /// Directions [default: all]; their controls run as well
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) directions: Vec<Direction>,
    /// Run no controls: a case that is n/a, or known to fail, counts as such without a control, and peers are
    /// not asked for their versions
    #[arg(long)]
    pub(crate) no_controls: bool,
    /// Cases [default: all that `interop client --list` names; with TLS the cases that TLS can change]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) cases: Vec<String>,
    /// Device for RDMA: soft, or a device of the feature ibverbs, such as rxe0 (rxe and siw: the first device
    /// of this kind)
    #[arg(long, default_value = "soft")]
    pub(crate) provider: String,
    /// Write all results to this file, as JSON
    #[arg(long, value_name = "FILE", value_parser = json)]
    pub(crate) json: Option<PathBuf>,
    /// Number of combinations of peer and direction that run at a time
    #[arg(long, value_name = "NUMBER", default_value = "2", value_parser = number::<usize>("number of jobs", 1..=64))]
    pub(crate) jobs: usize,
    /// Folder with the installed peers
    #[arg(long, value_name = "DIR", default_value = "target/interop")]
    pub(crate) stock: PathBuf,
}

/// The combinations and cases to run, with the programs for them.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) peers: Vec<Peer>,
    pub(crate) directions: Vec<Direction>,
    /// True if the controls are run as well.
    pub(crate) controls: bool,
    cases: Vec<String>,
    /// True if the options name cases.
    some_cases: bool,
    /// Cases for directions with TLS.
    tls_cases: Vec<String>,
    /// Certificates, if a direction has TLS.
    pub(crate) certificates: Option<Certificates>,
    pub(crate) provider: String,
    pub(crate) paths: Paths,
}

fn json(text: &str) -> Result<PathBuf, Failure> {
    match text {
        "-" => Err("stdout has the progress of the program, so name a file".into()),
        file => Ok(file.into()),
    }
}

impl Plan {
    /// Makes the plan.
    ///
    /// # Errors
    /// A case is unknown, or one of our programs is not built.
    pub(crate) fn make(options: Options) -> Result<Self, Failure> {
        let paths = Paths::find(&options.stock)?;
        let mut list = Command::new(&paths.interop);
        list.args(["client", "--list"]);
        let known = process::lines(list)?;
        if let Some(unknown) = options.cases.iter().find(|case| !known.contains(case)) {
            return Err(format!("--cases: {unknown} is none of {}", known.join(", ")).into());
        }
        let directions = or_all(options.directions, Direction::value_variants());
        let directions = if options.no_controls { directions } else { with_controls(directions) };
        let with_tls = directions.iter().any(|direction| direction.has_tls());
        Ok(Self {
            peers: or_all(options.peers, Peer::value_variants()),
            directions,
            controls: !options.no_controls,
            tls_cases: or_all(options.cases.clone(), &tls::CASES.map(str::to_owned)),
            some_cases: !options.cases.is_empty(),
            cases: or_all(options.cases, &known),
            certificates: with_tls.then(Certificates::make).transpose()?,
            provider: options.provider,
            paths,
        })
    }

    /// Returns the cases of a peer in a direction.
    pub(crate) fn cases(&self, peer: Peer, direction: Direction) -> Vec<String> {
        if direction.has_tls() {
            return self.tls_cases.clone();
        }
        let more = if self.some_cases { &[] } else { peer.more_cases(direction.role()) };
        self.cases.iter().cloned().chain(more.iter().map(|case| (*case).to_owned())).collect()
    }

    /// Returns the variables that configure our transport in our programs and the bridges.
    pub(crate) fn rdma(&self) -> Vec<(&'static str, String)> {
        let provider = if self.provider == "soft" { "soft" } else { "ibverbs" };
        vec![("RDMA_PROVIDER", provider.to_owned()), ("RDMA_DEVICE", self.device())]
    }

    /// Returns the device that RDMA has to use.
    pub(crate) fn device(&self) -> String {
        match self.provider.as_str() {
            kind @ ("soft" | "rxe" | "siw") => format!("{kind}0"),
            device => device.to_owned(),
        }
    }
}

fn or_all<T: Clone>(chosen: Vec<T>, all: &[T]) -> Vec<T> {
    if chosen.is_empty() { all.to_vec() } else { chosen }
}

/// Returns the chosen directions with their controls, each once.
fn with_controls(chosen: Vec<Direction>) -> Vec<Direction> {
    let controls: Vec<_> = chosen.iter().map(|direction| direction.control()).collect();
    let all = Direction::value_variants().iter();
    all.filter(|direction| chosen.contains(direction) || controls.contains(direction)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_direction_brings_its_control() {
        assert_eq!(with_controls(vec![Direction::Bridge]), [Direction::TonicTcp, Direction::Bridge]);
        assert_eq!(with_controls(vec![Direction::FromBridge]), [Direction::TcpTonic, Direction::FromBridge]);
        let tls = [Direction::TlsTonic, Direction::FallbackTls];
        assert_eq!(with_controls(vec![Direction::FallbackTls]), tls);
    }

    #[test]
    fn no_choice_means_all() {
        assert_eq!(or_all(Vec::new(), &[1, 2]), [1, 2]);
        assert_eq!(or_all(vec![2], &[1, 2]), [2]);
    }
}
