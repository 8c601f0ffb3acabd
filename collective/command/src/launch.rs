//! The start of local ranks, and the collection of their reports.

use std::io::{self, IsTerminal, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tonic_rdma_commands::process::{self, Child, Event, how_ended};
use tonic_rdma_commands::{Failure, Named as _, cores, units};

use crate::options::{Length, Options, Pin};
use crate::report::{Report, Results, Row};

/// The longest time without a message of any rank. Rank 0 sends one each second while it measures.
const SILENCE: Duration = Duration::from_secs(60);
/// How long the other ranks may take to report after one has failed. The first to report is not always the
/// one that failed.
const GRACE: Duration = Duration::from_secs(2);
/// How long a rank may take to end after its last report. It gives back gigabytes, and the machine may have
/// other work.
const END: Duration = Duration::from_secs(30);

/// What a process that this command started must know to be a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankSpec {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// The address of rank 0 for each communicator.
    pub(crate) addresses: Vec<String>,
    /// The core that the rank stays on.
    pub(crate) core: Option<usize>,
    /// The host that is simulated for the rank.
    pub(crate) host: Option<usize>,
    /// The process that started the ranks.
    pub(crate) parent: u32,
}

impl RankSpec {
    /// Returns the text for the command line of the rank.
    fn to_text(&self) -> Result<String, Failure> {
        serde_json::to_string(self).map_err(|error| Failure::run("can't describe a rank").because(error))
    }

    /// Reads the text of the command line.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        serde_json::from_str(text).map_err(|error| Failure::usage(format!("--child {text:?}: {error}")))
    }

    /// Makes this process the rank: it ends with its parent, and stays on its core.
    pub(crate) fn take(&self) -> Result<(), Failure> {
        process::end_with(self.parent)?;
        let Some(core) = self.core else { return Ok(()) };
        cores::pin(core).map_err(|error| {
            Failure::run(format!("can't keep rank {} on core {core}", self.rank)).because(error)
        })
    }
}

/// Measures with local ranks, one number of ranks after the other.
pub(crate) fn measure_local(options: &Options) -> Result<Results, Failure> {
    let numbers = options.local_ranks()?;
    // Bad options are refused before anything starts.
    for ranks in &numbers {
        options.cells(*ranks)?;
        choose_cores(options.pin, *ranks, &cores::allowed())?;
    }
    let mut results = Results::default();
    for ranks in numbers {
        measure(options, ranks, &mut results)?;
    }
    Ok(results)
}

fn measure(options: &Options, ranks: usize, results: &mut Results) -> Result<(), Failure> {
    let pinned = choose_cores(options.pin, ranks, &cores::allowed())?;
    let mut specs = specs(ranks, options.algorithms().len(), pinned.as_deref())?;
    specs.iter_mut().for_each(|spec| spec.host = options.host(spec.rank));
    let (mut children, events) = start(&specs)?;
    let durations = options.cells(ranks)?.into_iter().map(|cell| match cell.length {
        Length::Duration(duration) => duration,
        Length::Iterations(_) => Duration::ZERO,
    });
    let longest = SILENCE + durations.max().unwrap_or_default();
    let mut done = vec![false; ranks];
    while done.contains(&false) {
        let Ok((rank, event)) = events.recv_timeout(longest) else {
            let limit = longest.as_secs();
            return Err(Failure::run(format!(
                "none of the {ranks} ranks reported anything within {limit} s"
            )));
        };
        match event {
            Event::Report(Report::Done { wrong }) => {
                results.wrong += wrong;
                done[rank] = true;
            }
            Event::Report(Report::Failed { reason }) => return Err(failed(rank, reason, done, &events)),
            Event::Report(report) => {
                announce(&report);
                results.add(report);
            }
            Event::Garbage(line) => {
                return Err(Failure::run(format!(
                    "rank {rank} of {ranks} wrote {line:?}, which is no report"
                )));
            }
            Event::Lost(reason) | Event::Refused { reason, .. } => {
                return Err(failed(rank, reason, done, &events));
            }
            Event::Ended(_) if done[rank] => {}
            Event::Ended(status) => {
                return Err(failed(rank, format!("its process {}", how_ended(status)), done, &events));
            }
        }
    }
    match process::end_all(&mut children, END).first() {
        None => Ok(()),
        Some(rank) => Err(Failure::run(format!("the process of rank {rank} of {ranks} did not end"))),
    }
}

/// The running ranks, and what they do. The drop of the former kills them.
type Ranks = (Vec<Child>, Receiver<(usize, Event<Report>)>);

/// Starts this program again for each rank.
fn start(specs: &[RankSpec]) -> Result<Ranks, Failure> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let (sender, events) = channel();
    let start = |spec: &RankSpec| {
        let (mut command, rank, sender) = (process::again()?, spec.rank, sender.clone());
        command.args(&arguments).arg("--child").arg(spec.to_text()?);
        Child::start(format!("rank {rank}"), command, move |event| sender.send((rank, event.parse())).is_ok())
    };
    Ok((specs.iter().map(start).collect::<Result<_, _>>()?, events))
}

/// Returns the failure of a run, with what the other ranks report about it within a moment.
fn failed(
    rank: usize,
    reason: String,
    mut reported: Vec<bool>,
    events: &Receiver<(usize, Event<Report>)>,
) -> Failure {
    let mut text = format!("rank {rank} of {}: {reason}", reported.len());
    reported[rank] = true;
    while reported.contains(&false) {
        let Ok((other, event)) = events.recv_timeout(GRACE) else { break };
        let reason = match event {
            Event::Report(Report::Failed { reason }) => reason,
            Event::Ended(status) => format!("its process {}", how_ended(status)),
            _ => continue,
        };
        if !std::mem::replace(&mut reported[other], true) {
            text.push_str(&format!("; rank {other}: {reason}"));
        }
    }
    Failure::run(text)
}

/// Returns a core for each rank, or none if the ranks share all cores.
fn choose_cores(pin: Pin, ranks: usize, allowed: &[usize]) -> Result<Option<Vec<usize>>, Failure> {
    match (pin, allowed.get(..ranks)) {
        (Pin::No, _) | (Pin::Auto, None) => Ok(None),
        (_, Some(cores)) => Ok(Some(cores.to_vec())),
        (Pin::Yes, None) => Err(Failure::usage(format!(
            "--pin yes: {ranks} ranks need {ranks} cores (--ranks), and this process has {}",
            allowed.len()
        ))),
    }
}

/// Returns the spec of each rank, with an address for each communicator.
fn specs(ranks: usize, communicators: usize, cores: Option<&[usize]>) -> Result<Vec<RankSpec>, Failure> {
    let parent = std::process::id();
    let addresses = free_addresses(communicators, parent as u16)?;
    let spec = |rank: usize| {
        let core = cores.and_then(|cores| cores.get(rank).copied());
        RankSpec { rank, size: ranks, addresses: addresses.clone(), core, host: None, parent }
    };
    Ok((0..ranks).map(spec).collect())
}

/// Returns addresses of this machine whose ports are free. Linux gives ports from 32768 on to outgoing
/// connections, so these lie below. `seed` spreads commands that start at the same time.
fn free_addresses(count: usize, seed: u16) -> Result<Vec<String>, Failure> {
    const FIRST: u16 = 10_000;
    const PORTS: u16 = 10_000;
    let ports = (0..PORTS).map(|index| FIRST + seed.wrapping_mul(61).wrapping_add(index) % PORTS);
    let free = ports.filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    let addresses: Vec<String> = free.take(count).map(|port| format!("127.0.0.1:{port}")).collect();
    match addresses.len() == count {
        true => Ok(addresses),
        false => Err(Failure::run(format!(
            "{count} free ports from {FIRST} to {} on 127.0.0.1 are not there",
            FIRST + PORTS - 1
        ))),
    }
}

/// Shows a finished cell on a terminal, because the table comes at the end.
pub(crate) fn announce(report: &Report) {
    let mut stderr = io::stderr();
    if let (Report::Row(Row { key, p50_us, .. }), true) = (report, stderr.is_terminal()) {
        // stderr may be closed, and the run continues.
        let _ = writeln!(
            stderr,
            "{} ranks, {}, {}, {}: {}",
            key.ranks,
            key.algorithm.name(),
            key.operand.name(),
            units::size(key.bytes),
            units::micros(*p50_us)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_a_core_each_or_share_all() {
        let choose = |pin, ranks| choose_cores(pin, ranks, &[3, 5]);
        assert_eq!(choose(Pin::Auto, 2).unwrap(), Some(vec![3, 5]));
        assert_eq!(choose(Pin::Auto, 3).unwrap(), None);
        assert_eq!(choose(Pin::No, 1).unwrap(), None);
        assert_eq!(choose(Pin::Yes, 1).unwrap(), Some(vec![3]));
        let error = choose(Pin::Yes, 3).unwrap_err().to_string();
        assert!(
            error.contains("--pin yes") && error.contains("3 cores") && error.contains("has 2"),
            "{error}"
        );
    }

    #[test]
    fn each_communicator_has_an_address_that_all_ranks_know() {
        let specs = specs(3, 4, Some(&[0, 1, 2])).unwrap();
        let addresses: std::collections::BTreeSet<_> = specs[0].addresses.iter().collect();
        assert_eq!((specs.len(), addresses.len()), (3, 4));
        assert!(
            specs.iter().all(|spec| spec.addresses == specs[0].addresses && spec.core == Some(spec.rank))
        );
    }

    #[test]
    fn a_spec_is_read_back() {
        let addresses = vec!["127.0.0.1:4000".to_owned()];
        let spec = RankSpec { rank: 1, size: 4, addresses, core: Some(1), host: Some(2), parent: 77 };
        assert_eq!(RankSpec::parse(&spec.to_text().unwrap()).unwrap(), spec);
        let error = RankSpec::parse("{}").unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("--child"), "{error}");
    }
}
