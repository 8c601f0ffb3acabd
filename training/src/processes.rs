//! The ranks as local processes: this program, started several times with the library's variables for a rank.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::failure::Failure;
use crate::job::{Job, Outcome};

/// The variable that sets the number of threads with which candle and its products of matrices compute.
pub(crate) const THREADS: &str = "RAYON_NUM_THREADS";

/// How long the other ranks may go on after one has failed, so that each can report the lost rank.
const GRACE: Duration = Duration::from_secs(10);

/// How often the processes are looked at.
const PERIOD: Duration = Duration::from_millis(20);

/// The processes of one job. The drop of this value ends those that are left.
struct Processes(Vec<Running>);

struct Running {
    child: Child,
    status: Option<ExitStatus>,
}

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Carries out a job with `ranks` local processes, and returns what rank 0 reports.
pub(crate) fn run(ranks: usize, job: &Job) -> Result<Outcome, Failure> {
    let result = tempfile::NamedTempFile::new()
        .map_err(|error| Failure::run("can't make a temporary file").because(error))?;
    let mut processes = Processes::start(ranks, job, result.path())?;
    processes.wait()?;
    let text = fs::read_to_string(result.path())
        .map_err(|error| Failure::run("can't read the result of rank 0").because(error))?;
    serde_json::from_str(&text).map_err(|error| Failure::run("rank 0 reported no result").because(error))
}

/// Makes this process, a rank, end with the process `parent` that started it.
pub(crate) fn end_with(parent: u32) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::run("can't ask for a signal at the end of the parent").because(error))?;
    // The parent may have ended before.
    let current = getppid().map(|process| process.as_raw_nonzero().get());
    if current != i32::try_from(parent).ok() {
        return Err(Failure::run(format!("the process {parent}, which started this rank, has ended")));
    }
    Ok(())
}

impl Processes {
    fn start(ranks: usize, job: &Job, result: &Path) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| Failure::run("can't start the ranks").because(error);
        let job = serde_json::to_string(job).map_err(|error| failed(error.into()))?;
        // Rank 0 listens on this port a moment later. The kernel does not give it to another process so soon.
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|listener| listener.local_addr())
            .map_err(failed)?;
        let program = std::env::current_exe().map_err(failed)?;
        let mut processes = Self(Vec::new());
        for rank in 0..ranks {
            let child = Command::new(&program)
                .args(["--parent", &std::process::id().to_string(), "--job", &job, "--result"])
                .arg(result)
                .envs([
                    ("RDMA_COLLECTIVE_RANK", rank.to_string()),
                    ("RDMA_COLLECTIVE_SIZE", ranks.to_string()),
                    ("RDMA_COLLECTIVE_ADDRESS", address.to_string()),
                    (THREADS, "1".to_owned()),
                ])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .map_err(failed)?;
            processes.0.push(Running { child, status: None });
        }
        Ok(processes)
    }

    /// Waits until all processes have ended, or until one has failed and the others had time to report.
    fn wait(&mut self) -> Result<(), Failure> {
        let mut failed: Option<(usize, ExitStatus, Instant)> = None;
        loop {
            for (rank, running) in
                self.0.iter_mut().enumerate().filter(|(_, running)| running.status.is_none())
            {
                running.status = running
                    .child
                    .try_wait()
                    .map_err(|error| Failure::run(format!("can't wait for rank {rank}")).because(error))?;
                if let Some(status) = running.status.filter(|status| !status.success()) {
                    failed.get_or_insert((rank, status, Instant::now()));
                }
            }
            let ended = self.0.iter().all(|running| running.status.is_some());
            match failed {
                Some((rank, status, since)) if ended || since.elapsed() > GRACE => {
                    return Err(Failure::run(format!("rank {rank} failed: {status}")));
                }
                None if ended => return Ok(()),
                _ => thread::sleep(PERIOD),
            }
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for running in self.0.iter_mut().filter(|running| running.status.is_none()) {
            // It may have ended by itself.
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
    }
}
