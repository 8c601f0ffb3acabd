//! What is asked for, and what is planned from it.

use std::path::PathBuf;

use clap::{Parser, ValueEnum as _};

use crate::Failure;
use crate::certificates::Certificates;
use crate::direction::Direction;
use crate::peer::Peer;
use crate::{process, tls};

/// Runs stock gRPC peers against our transport, in all directions. Started by `interop/matrix`, which installs the peers;
/// from the repository's root.
#[derive(Debug, Parser)]
#[command(name = "interop-matrix", version)]
pub(crate) struct Options {
    /// Peers, of: tonic, python, node, ruby, go, cpp, cpp-official [default: all]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    peers: Vec<Peer>,
    /// Directions [default: all]; the controls that belong to them run as well
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    directions: Vec<Direction>,
    /// Run nothing that was not asked for: what is n/a, or known to fail, passes for that without a look at the control, and
    /// peers are not asked for their versions
    #[arg(long)]
    no_controls: bool,
    /// Cases [default: all that `interop client --list` names; with TLS those that it can change]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    cases: Vec<String>,
    /// What carries RDMA: soft, or a device of the feature ibverbs, such as rxe0 (rxe and siw: the first of the kind)
    #[arg(long, default_value = "soft")]
    provider: String,
    /// Write every single result to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Combinations of peer and direction at once
    #[arg(long, value_name = "NUMBER", default_value = "2", value_parser = jobs)]
    pub(crate) jobs: usize,
    /// Folder with the installed peers
    #[arg(long, value_name = "DIR", default_value = "target/interop")]
    stock: PathBuf,
}

fn jobs(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(jobs @ 1..=64) => Ok(jobs),
        _ => Err("1 to 64 are possible".to_owned()),
    }
}

/// What is to run, with what.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) peers: Vec<Peer>,
    pub(crate) directions: Vec<Direction>,
    /// Whether the controls are run as well.
    pub(crate) controls: bool,
    cases: Vec<String>,
    /// Whether certain cases were asked for.
    some_cases: bool,
    /// Cases with TLS.
    tls_cases: Vec<String>,
    /// There if a direction has TLS.
    pub(crate) certificates: Option<Certificates>,
    pub(crate) provider: String,
    /// The repository.
    pub(crate) root: PathBuf,
    /// Installed peers.
    pub(crate) stock: PathBuf,
    /// Our service and client.
    pub(crate) interop: PathBuf,
    /// The command, which has the bridge.
    pub(crate) command: PathBuf,
}

impl Plan {
    /// # Errors
    /// A case is unknown, or what is to be run is not there.
    pub(crate) async fn make(options: Options) -> Result<Self, Failure> {
        let root = std::env::current_dir()?;
        if !root.join("interop/stock").is_dir() {
            return Err(format!("{} is not the repository's root", root.display()).into());
        }
        let here = std::env::current_exe()?;
        let binary = |name: &str| {
            let path = here.with_file_name(name);
            if path.is_file() { Ok(path) } else { Err(format!("{} is not built", path.display())) }
        };
        let interop = binary("interop")?;
        let known = process::lines(tokio::process::Command::new(&interop).args(["client", "--list"])).await?;
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
            stock: root.join(options.stock),
            interop,
            command: binary("tonic-rdma")?,
            root,
        })
    }

    /// Returns the cases of a peer in a direction.
    pub(crate) fn cases(&self, peer: Peer, direction: Direction) -> Vec<String> {
        if direction.has_tls() {
            return self.tls_cases.clone();
        }
        let more = if self.some_cases { &[] } else { peer.more_cases(direction.side()) };
        self.cases.iter().cloned().chain(more.iter().map(|case| (*case).to_owned())).collect()
    }

    /// Settings of our transport, for our own programs and the bridges.
    pub(crate) fn rdma(&self) -> Vec<(&'static str, String)> {
        let provider = if self.provider == "soft" { "soft" } else { "ibverbs" };
        vec![("RDMA_PROVIDER", provider.to_owned()), ("RDMA_DEVICE", self.device())]
    }

    /// The device that has to carry RDMA.
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

/// Each once, and a failure can be held against its control.
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
    fn what_is_not_chosen_is_all() {
        assert_eq!(or_all(Vec::new(), &[1, 2]), [1, 2]);
        assert_eq!(or_all(vec![2], &[1, 2]), [2]);
    }
}
