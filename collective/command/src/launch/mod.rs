//! The start of local ranks, and the collection of their reports.

mod place;
mod processes;

pub(crate) use place::Place;

use std::io::{self, IsTerminal, Write};
use std::net::TcpListener;
use std::time::Duration;

use tonic_rdma_commands::{Failure, units};

use crate::choices::Named;
use crate::cores;
pub(crate) use crate::launch::processes::{Event, Processes};
use crate::options::{Length, Options, Pin};
use crate::output::Results;
use crate::report::Report;

/// The longest time without a message of any rank. Rank 0 sends one each second while it measures.
const SILENCE: Duration = Duration::from_secs(60);
/// How long the other ranks may take to report after one has failed. The first to report is not always the one that failed.
const GRACE: Duration = Duration::from_secs(2);
/// How long a rank may take to end after its last report. It gives back gigabytes, and the machine may have other work.
const END: Duration = Duration::from_secs(30);

/// Measures with local ranks, one number of ranks after the other.
pub(crate) fn measure_local(options: &Options) -> Result<Results, Failure> {
    let numbers = options.local_ranks();
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
    let places = places(ranks, options.algorithms().len(), pinned.as_deref())?;
    let mut processes = Processes::start(&places)?;
    let longest = match options.cells(ranks)?.iter().map(|cell| cell.length).max_by_key(seconds) {
        Some(Length::Duration(duration)) => SILENCE + duration,
        _ => SILENCE,
    };
    let mut done = 0;
    while done < ranks {
        match processes.next(longest) {
            Some(Event::Report(_, Report::Done { wrong })) => {
                results.wrong += wrong;
                done += 1;
            }
            Some(Event::Report(rank, Report::Failed { reason })) => {
                return Err(failed(rank, ranks, &reason, &mut processes));
            }
            Some(Event::Report(_, report)) => {
                announce(&report);
                results.add(report);
            }
            Some(Event::Garbage(rank, line)) => {
                return Err(Failure::run(format!(
                    "rank {rank} of {ranks} wrote {line:?}, which is no report"
                )));
            }
            Some(Event::End(rank)) if processes.is_done(rank) => {}
            Some(Event::End(rank)) => {
                let status = processes.status(rank);
                return Err(failed(rank, ranks, &format!("its process ended ({status})"), &mut processes));
            }
            None => {
                let limit = longest.as_secs();
                return Err(Failure::run(format!(
                    "none of the {ranks} ranks reported anything within {limit} s"
                )));
            }
        }
    }
    processes
        .wait(END)
        .map_err(|rank| Failure::run(format!("the process of rank {rank} of {ranks} did not end")))
}

fn seconds(length: &Length) -> Duration {
    match length {
        Length::Duration(duration) => *duration,
        Length::Iterations(_) => Duration::ZERO,
    }
}

/// Returns the failure of a run, with what the other ranks report about it within a moment.
fn failed(rank: usize, ranks: usize, reason: &str, processes: &mut Processes) -> Failure {
    let mut text = format!("rank {rank} of {ranks}: {reason}");
    let mut others = 0;
    while others + 1 < ranks {
        match processes.next(GRACE) {
            Some(Event::Report(other, Report::Failed { reason })) if other != rank => {
                text.push_str(&format!("; rank {other}: {reason}"));
                others += 1;
            }
            Some(Event::End(other)) if other != rank && !processes.has_reported(other) => {
                text.push_str(&format!("; rank {other}: its process ended ({})", processes.status(other)));
                others += 1;
            }
            Some(_) => {}
            None => break,
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

/// Makes the place of each rank, with an address for each communicator.
pub(crate) fn places(
    ranks: usize,
    communicators: usize,
    cores: Option<&[usize]>,
) -> Result<Vec<Place>, Failure> {
    let parent = rustix::process::getpid().as_raw_nonzero().get();
    let addresses = free_addresses(communicators, parent.unsigned_abs() as u16)?;
    let place = |rank: usize| Place {
        rank,
        size: ranks,
        addresses: addresses.clone(),
        core: cores.and_then(|cores| cores.get(rank).copied()),
        batch: None,
        parent,
    };
    Ok((0..ranks).map(place).collect())
}

/// Returns addresses of this machine whose ports are free. Linux gives ports from 32768 on to outgoing connections, so these lie
/// below. `seed` spreads commands that start at the same time.
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
    if let (Report::Row(row), true) = (report, stderr.is_terminal()) {
        // The run goes on if stderr is closed.
        let _ = writeln!(
            stderr,
            "{} ranks, {}, {}, {}: {}",
            row.ranks,
            row.algorithm.name(),
            row.operand.name(),
            units::size(row.bytes),
            units::micros(row.p50_us)
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
        let places = places(3, 4, Some(&[0, 1, 2])).unwrap();
        let addresses: std::collections::BTreeSet<_> = places[0].addresses.iter().collect();
        assert_eq!((places.len(), addresses.len()), (3, 4));
        assert!(
            places
                .iter()
                .all(|place| place.addresses == places[0].addresses && place.core == Some(place.rank))
        );
    }
}
