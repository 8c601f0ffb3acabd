//! The processes of a job: this program, started several times, here or in part at a listening end on another
//! host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::ends::{self, Ends};
use tonic_rdma_commands::output::note;
use tonic_rdma_commands::process::{Child, Event, again, how_ended};
use tonic_rdma_commands::remote::{Host, Request};
use tonic_rdma_commands::{Context as _, Failure, units};

use crate::checkpoint::{self, Folder};
use crate::options::{Job, MOST_RANKS, OnDeath, Options};
use crate::step::JobShape;
use crate::train::Training;

/// The variable that sets the number of threads with which candle and its products of matrices compute.
pub(crate) const THREADS: &str = "RAYON_NUM_THREADS";

/// How long the other ranks may go on after one has failed, so that each can report the lost rank.
const GRACE: Duration = Duration::from_secs(10);

/// The longest wait for an event, after which the time limits are checked.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// The most starts after deaths from one checkpoint, or from the first step.
const MOST_STARTS: u32 = 3;

/// What processes do, each with its number.
pub(crate) type Events<T> = Receiver<(usize, Event<T>)>;

/// This program, as both ends of a training between two hosts name it.
pub(crate) const PROGRAM: &str = "tonic-rdma-training";

/// A rank of a group, and where it meets the others.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Rank {
    rank: usize,
    ranks: usize,
    address: SocketAddr,
}

/// What a caller asks of a listening end: a process.
#[derive(Debug, Serialize, Deserialize)]
struct ProcessRequest {
    /// The arguments of the caller's command line.
    arguments: Vec<String>,
    rank: Option<Rank>,
}

/// Makes the command of a caller's process. `own` are the options of the listening end.
pub(crate) fn admit(request: &Request, own: &Options) -> Result<(String, Command), Failure> {
    let ProcessRequest { arguments, rank } = request.job()?;
    let mut asked: Options = ends::parse_arguments(&arguments)?;
    asked.check()?;
    let (model, shape) = (asked.model, asked.shape());
    let processes = match (&shape, rank) {
        (Some(shape), None) => shape.parts(),
        // Rank 0 listens on the address where all meet, and the others on that of the way to it. It also writes
        // the checkpoints, to a folder of its host.
        (None, Some(Rank { rank, ranks, address }))
            if (1..ranks).contains(&rank)
                && ranks as u64 <= MOST_RANKS
                && address.ip().to_canonical() == request.caller =>
        {
            ranks
        }
        _ => {
            return Err(Failure::usage(
                "the request does not fit the training: a graph takes no rank, and other trainings need a rank above 0, \
                 which meets the others at the caller's address",
            ));
        }
    };
    // Of each mode: the variables and their momentum in two versions, and the gradients; and both variables and
    // gradients for each part.
    let copies = asked.mode.len() * (5 + 2 * shape.as_ref().map_or(1, JobShape::parts));
    let needs = (model.parameters() * size_of::<f32>() * copies) as u64;
    if needs > own.limit {
        let (needs, limit) = (units::rough_size(needs), units::rough_size(own.limit));
        return Err(Failure::usage(format!(
            "--limit of the listening end: this training needs about {needs} in each process, and {limit} are granted"
        )));
    }
    let way = shape.map_or("tonic-rdma-collective", |_| "parameter servers");
    let what = format!("one of {processes} processes, {model:?}, {way}");
    // A caller names no file here. Ranks only need to know that rank 0 writes checkpoints.
    (asked.data, asked.texts) = (own.data.clone(), own.texts.clone());
    asked.checkpoint = asked.checkpoint.map(|_| PathBuf::new());
    (asked.json, asked.plot) = (None, None);
    let job = Job { options: asked, ip: request.ip, memory: Some(own.limit) };
    let mut command = command(&job, rank)?;
    command.env("RDMA_PINNED_LIMIT", own.limit.to_string());
    Ok((what, command))
}

/// Calls the other hosts of a job.
pub(crate) fn call_hosts(options: &Options) -> Result<(Vec<Arc<Host>>, Vec<Ends>), Failure> {
    let call = |address: &String| ends::call_host(PROGRAM, "--hosts", address);
    let called: Vec<_> = options.hosts.iter().map(call).collect::<Result<_, _>>()?;
    let (hosts, ends): (Vec<_>, Vec<_>) = called.into_iter().unzip();
    let from = ip(&hosts);
    if let Some((other, address)) = hosts.iter().zip(&options.hosts).find(|(host, _)| host.local_ip() != from)
    {
        return Err(Failure::usage(format!(
            "--hosts: this host reaches {} from {from}, and {address} from {}; accepted: hosts that it reaches from one address, \
             where they all find its processes",
            options.hosts.first().map_or("", String::as_str),
            other.local_ip(),
        )));
    }
    Ok((hosts, ends))
}

/// Returns the address on which processes here listen for the others.
fn ip(hosts: &[Arc<Host>]) -> IpAddr {
    hosts.first().map_or(Ipv4Addr::LOCALHOST.into(), |host| host.local_ip())
}

/// Returns the command of a process that carries out a job.
fn command(job: &Job, rank: Option<Rank>) -> Result<Command, Failure> {
    let job = serde_json::to_string(job).context("can't make JSON of a job")?;
    let mut command = again()?;
    command.args(["--parent", &std::process::id().to_string(), "--job", &job]).env(THREADS, "1");
    if let Some(Rank { rank, ranks, address }) = rank {
        command.envs([
            ("RDMA_COLLECTIVE_RANK", rank.to_string()),
            ("RDMA_COLLECTIVE_SIZE", ranks.to_string()),
            ("RDMA_COLLECTIVE_ADDRESS", address.to_string()),
        ]);
    }
    Ok(command)
}

/// Starts the processes of a job, each at its host. Ranks meet at `meeting`.
pub(crate) fn start<T: DeserializeOwned + Send + 'static>(
    options: &Options,
    hosts: &[Arc<Host>],
    meeting: Option<SocketAddr>,
) -> Result<(Vec<Child>, Events<T>), Failure> {
    let (sender, events) = channel();
    let processes = options.processes();
    let job = Job { options: options.clone(), ip: ip(hosts), memory: None };
    let start = |process| {
        let sender = sender.clone();
        let sink = move |event: Event<String>| sender.send((process, event.parse())).is_ok();
        let rank = meeting.map(|address| Rank { rank: process, ranks: processes, address });
        match options.host_of(process).checked_sub(1).and_then(|other| hosts.get(other)) {
            Some(host) => {
                let request = ProcessRequest { arguments: ends::own_arguments(1)?, rank };
                host.start(options.name(process), &request, sink)
            }
            None => Child::start(options.name(process), command(&job, rank)?, sink),
        }
    };
    Ok(((0..processes).map(start).collect::<Result<_, _>>()?, events))
}

/// Counts the starts of a training after deaths.
#[derive(Debug, Default)]
pub(crate) struct Restarts {
    from: u64,
    number: u32,
}

impl Restarts {
    /// Counts a start from this step, and says so. Fails if there were too many from there.
    pub(crate) fn count(&mut self, died: &str, from: u64) -> Result<(), Failure> {
        let before = if from > self.from { 0 } else { self.number };
        if before >= MOST_STARTS {
            return Err(Failure::run(format!(
                "{died}; the training was started again {MOST_STARTS} times from step {from}, and reached no further checkpoint"
            )));
        }
        (self.from, self.number) = (from, before + 1);
        note(&format!("{died}; all processes start again from step {from}"));
        Ok(())
    }
}

/// Carries out a job with processes that meet by tonic-rdma-collective, and returns what rank 0 reports.
pub(crate) fn run_ranks(options: &Options, hosts: &[Arc<Host>]) -> Result<Training, Failure> {
    let mut options = options.clone();
    if options.checkpoint.is_some() {
        // A checkpoint that can't be used is found before any process starts.
        let folder = Folder::open(&options, options.processes(), options.samples()?.hash())?;
        folder.map_or(Ok(None), |folder| folder.begin(options.resume))?;
    }
    let mut restarts = Restarts::default();
    loop {
        let (failure, died) = match run_group(&options, hosts)? {
            Ok(training) => return Ok(training),
            Err(ended) => ended,
        };
        match &options.checkpoint {
            Some(folder) if died && options.on_death == OnDeath::Restart => {
                restarts.count(&failure, checkpoint::newest(folder))?;
                options.resume = true;
            }
            _ => return Err(failure.into()),
        }
    }
}

/// Runs a group of ranks to its end. Returns what rank 0 reports, or why the group ended, and whether a rank died:
/// a signal ended it, or its host is lost.
fn run_group(options: &Options, hosts: &[Arc<Host>]) -> Result<Result<Training, (String, bool)>, Failure> {
    // Rank 0 listens on this port a moment later. The kernel does not give it to another process so soon.
    let address = TcpListener::bind((ip(hosts), 0)).and_then(|listener| listener.local_addr());
    let address = address.context("can't start the ranks")?;
    let (children, events) = start::<Result<Training, String>>(options, hosts, Some(address))?;
    for child in &children {
        note(&format!("{} is {}", child.name(), child.place()));
    }
    let (mut running, mut result, mut died) = (children.len(), None, false);
    let mut failed = None::<(String, Instant)>;
    while running > 0 && failed.as_ref().is_none_or(|(_, since)| since.elapsed() < GRACE) {
        let (rank, reason) = match events.recv_timeout(TICK) {
            Ok((_, Event::Report(Ok(training)))) => {
                result = Some(training);
                continue;
            }
            Ok((rank, Event::Report(Err(reason)))) => {
                // The others end because of it, and their end may be seen before. Several may have one reason.
                failed = Some(match failed {
                    Some((text, since)) if text.contains(&reason) => (text, since),
                    Some((text, since)) => (format!("{text}; rank {rank} has failed: {reason}"), since),
                    None => (format!("rank {rank} has failed: {reason}"), Instant::now()),
                });
                continue;
            }
            Ok((rank, Event::Garbage(line))) => (rank, format!("wrote a line that is no result: {line}")),
            Ok((rank, Event::Ended(status))) => {
                running -= 1;
                if status.is_some_and(|status| status.success()) {
                    continue;
                }
                let by_signal = status.is_some_and(|status| status.signal().is_some());
                if by_signal && !died {
                    // The others may have ended before, because of it.
                    (died, failed) = (true, None);
                }
                (rank, how_ended(status))
            }
            Ok((rank, Event::Lost(reason))) => {
                (running, died) = (running - 1, true);
                (rank, format!("is lost: {reason}"))
            }
            Ok((rank, Event::Refused { reason, usage })) => {
                return Err(refused(&format!("rank {rank}"), &reason, usage));
            }
            Err(_) => continue,
        };
        failed.get_or_insert((format!("rank {rank} {reason}"), Instant::now()));
        if died && options.on_death == OnDeath::Restart {
            break;
        }
    }
    Ok(match failed {
        Some((reason, _)) => Err((reason, died)),
        None => result.ok_or_else(|| ("rank 0 reported no result".to_owned(), false)),
    })
}

/// Makes the failure of a process that the other end did not start.
pub(crate) fn refused(name: &str, reason: &str, usage: bool) -> Failure {
    let text = format!("{name} is refused at the other end: {reason}");
    if usage { Failure::usage(text) } else { Failure::run(text) }
}
