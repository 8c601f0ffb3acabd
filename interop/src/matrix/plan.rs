//! The combinations and cases of one run of the matrix.

use clap::ValueEnum as _;

use crate::certificates::Certificates;
use crate::direction::Direction;
use crate::options::Options;
use crate::peer::Peer;
use crate::places::Failure;
use crate::places::Places;
use crate::run::process;
use crate::tls;

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
    pub(crate) places: Places,
}

impl Plan {
    /// Makes the plan.
    ///
    /// # Errors
    /// A case is unknown, or one of our programs is not built.
    pub(crate) async fn make(options: Options) -> Result<Self, Failure> {
        let places = Places::find(&options.stock)?;
        let known =
            process::lines(tokio::process::Command::new(&places.interop).args(["client", "--list"])).await?;
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
            places,
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
