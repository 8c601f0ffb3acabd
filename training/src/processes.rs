//! The processes of a job: this program, started several times.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::failure::{Context as _, Error, Failure};
use crate::options::Options;
use crate::results::Outcome;

/// The variable that sets the number of threads with which candle and its products of matrices compute.
pub(crate) const THREADS: &str = "RAYON_NUM_THREADS";

/// How long the other ranks may go on after one has failed, so that each can report the lost rank.
const GRACE: Duration = Duration::from_secs(10);

/// The longest wait for a line, after which the clocks are looked at.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// Processes of this program, and the lines that they write. They end when this is dropped.
pub(crate) struct Processes {
    pub(crate) all: Vec<Process>,
    /// The number of the process and a line of its stdout, or `None` when stdout has ended.
    pub(crate) lines: Receiver<(usize, Option<String>)>,
}

pub(crate) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
}

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of ranks if the command line has none.
pub(crate) fn default_ranks() -> usize {
    cores().clamp(2, 256)
}

/// Makes this process end with the process `parent` that started it.
pub(crate) fn end_with(parent: u32) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("can't ask for a signal at the end of the parent")?;
    // The parent may have ended before.
    let current = getppid().map(|process| process.as_raw_nonzero().get());
    if current != i32::try_from(parent).ok() {
        return Err(Failure::run(format!("the process {parent}, which started this one, has ended")));
    }
    Ok(())
}

/// Carries out a job with `ranks` processes that meet by tonic-rdma-collective, and returns what rank 0 reports.
pub(crate) fn run_ranks(ranks: usize, job: &Options) -> Result<Outcome, Error> {
    // Rank 0 listens on this port a moment later. The kernel does not give it to another process so soon.
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let address = address.context("can't start the ranks")?;
    let mut processes = Processes::start(ranks, job, |rank, command| {
        command.envs([
            ("RDMA_COLLECTIVE_RANK", rank.to_string()),
            ("RDMA_COLLECTIVE_SIZE", ranks.to_string()),
            ("RDMA_COLLECTIVE_ADDRESS", address.to_string()),
        ]);
    })?;
    let (mut running, mut result, mut failed) = (ranks, None, None);
    while running > 0 && failed.as_ref().is_none_or(|(_, since): &(_, Instant)| since.elapsed() < GRACE) {
        match processes.lines.recv_timeout(TICK) {
            Ok((0, Some(line))) => result = Some(line),
            Ok((rank, None)) => {
                running -= 1;
                let status = processes.end(rank).context(format!("can't wait for rank {rank}"))?;
                if !status.success() {
                    failed.get_or_insert((format!("rank {rank} failed: {status}"), Instant::now()));
                }
            }
            _ => {}
        }
    }
    if let Some((reason, _)) = failed {
        return Err(reason.into());
    }
    Ok(serde_json::from_str(&result.unwrap_or_default()).context("rank 0 reported no result")?)
}

impl Processes {
    /// Starts `number` processes that carry out a job. `prepare` adds what is special about each.
    pub(crate) fn start(
        number: usize,
        job: &Options,
        prepare: impl Fn(usize, &mut Command),
    ) -> Result<Self, Failure> {
        let (sender, lines) = channel();
        let mut processes = Self { all: Vec::new(), lines };
        let mut start = || -> Result<(), Error> {
            let text = serde_json::to_string(job)?;
            for number in 0..number {
                let mut command = Command::new(std::env::current_exe()?);
                command.args(["--parent", &std::process::id().to_string(), "--job", &text]).env(THREADS, "1");
                prepare(number, &mut command);
                let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
                let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
                processes.all.push(Process { child, stdin });
                let sender = sender.clone();
                let forward = move || {
                    let lines = stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines());
                    for line in lines.map_while(Result::ok).map(Some).chain([None]) {
                        // This process may have ended the job before.
                        let _ = sender.send((number, line));
                    }
                };
                thread::Builder::new().name(format!("lines of {number}")).spawn(forward)?;
            }
            Ok(())
        };
        start().context("can't start the processes")?;
        Ok(processes)
    }

    /// Returns the id of a process.
    pub(crate) fn id(&self, number: usize) -> u32 {
        self.all.get(number).map_or(0, |process| process.child.id())
    }

    /// Writes a line to the stdin of a process. One that has ended is found by the end of its stdout.
    pub(crate) fn tell(&mut self, number: usize, line: &str) {
        if let Some(stdin) = self.all.get_mut(number).and_then(|process| process.stdin.as_mut()) {
            let _ = writeln!(stdin, "{line}").and_then(|()| stdin.flush());
        }
    }

    /// Ends a process if it still runs. Returns how it ended.
    pub(crate) fn end(&mut self, number: usize) -> io::Result<ExitStatus> {
        let process = self.all.get_mut(number).ok_or(io::ErrorKind::NotFound)?;
        // It may be about to end by itself.
        process.end(Instant::now() + Duration::from_secs(1))
    }
}

impl Process {
    /// Ends the process if it still runs at this time.
    fn end(&mut self, until: Instant) -> io::Result<ExitStatus> {
        self.stdin = None;
        loop {
            match self.child.try_wait()? {
                Some(status) => return Ok(status),
                None if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
                None => {
                    self.child.kill()?;
                    return self.child.wait();
                }
            }
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        // A process whose stdin ends leaves the others in order.
        self.all.iter_mut().for_each(|process| process.stdin = None);
        let until = Instant::now() + Duration::from_secs(5);
        for process in &mut self.all {
            // It can't be helped if it does not end.
            let _ = process.end(until);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Starts a process that does nothing.
    pub(crate) fn sleeping() -> Process {
        let mut child = Command::new("sleep").arg("600").stdin(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take();
        Process { child, stdin }
    }
}
