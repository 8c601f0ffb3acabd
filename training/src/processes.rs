//! The processes of a job: this program, started several times.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use tonic_rdma_commands::process::{Child, Event, again, how_ended};
use tonic_rdma_commands::{Context as _, Failure};

use crate::options::Options;
use crate::train::Training;

/// The variable that sets the number of threads with which candle and its products of matrices compute.
pub(crate) const THREADS: &str = "RAYON_NUM_THREADS";

/// How long the other ranks may go on after one has failed, so that each can report the lost rank.
const GRACE: Duration = Duration::from_secs(10);

/// The longest wait for an event, after which the time limits are checked.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// What processes do, each with its number.
pub(crate) type Events<T> = Receiver<(usize, Event<T>)>;

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of ranks if the command line has none.
pub(crate) fn default_ranks() -> usize {
    cores().clamp(2, 256)
}

/// Starts `number` processes that carry out a job. `prepare` adds what is special about each.
pub(crate) fn start<T: DeserializeOwned + Send + 'static>(
    number: usize,
    job: &Options,
    prepare: impl Fn(usize, &mut Command),
) -> Result<(Vec<Child>, Events<T>), Failure> {
    let (sender, events) = channel();
    let job = serde_json::to_string(job).context("can't make JSON of the options")?;
    let start = |number| {
        let mut command = again()?;
        command.args(["--parent", &std::process::id().to_string(), "--job", &job]).env(THREADS, "1");
        prepare(number, &mut command);
        let sender = sender.clone();
        let sink = move |event: Event<String>| sender.send((number, event.parse())).is_ok();
        Child::start(format!("process {number}"), command, sink)
    };
    Ok(((0..number).map(start).collect::<Result<_, _>>()?, events))
}

/// Carries out a job with `ranks` processes that meet by tonic-rdma-collective, and returns what rank 0
/// reports.
pub(crate) fn run_ranks(ranks: usize, job: &Options) -> Result<Training, Failure> {
    // Rank 0 listens on this port a moment later. The kernel does not give it to another process so soon.
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let address = address.context("can't start the ranks")?;
    let (_children, events) = start(ranks, job, |rank, command| {
        command.envs([
            ("RDMA_COLLECTIVE_RANK", rank.to_string()),
            ("RDMA_COLLECTIVE_SIZE", ranks.to_string()),
            ("RDMA_COLLECTIVE_ADDRESS", address.to_string()),
        ]);
    })?;
    let (mut running, mut result, mut failed) = (ranks, None, None);
    while running > 0 && failed.as_ref().is_none_or(|(_, since): &(_, Instant)| since.elapsed() < GRACE) {
        let (rank, reason) = match events.recv_timeout(TICK) {
            Ok((_, Event::Report(training))) => {
                result = Some(training);
                continue;
            }
            Ok((rank, Event::Garbage(line))) => (rank, format!("wrote a line that is no result: {line}")),
            Ok((rank, Event::Ended(status))) => {
                running -= 1;
                if status.is_some_and(|status| status.success()) {
                    continue;
                }
                (rank, how_ended(status))
            }
            Ok((rank, Event::Lost(reason) | Event::Refused { reason, .. })) => {
                running -= 1;
                (rank, format!("is not there: {reason}"))
            }
            Err(_) => continue,
        };
        failed.get_or_insert((format!("rank {rank} {reason}"), Instant::now()));
    }
    match failed {
        Some((reason, _)) => Err(reason.into()),
        None => result.ok_or_else(|| "rank 0 reported no result".into()),
    }
}
