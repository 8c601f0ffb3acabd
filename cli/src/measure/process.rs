//! The processes of a run: their allocator, a container for the server, and limits of a process with many
//! connections. Also child processes that run this program again. A child gets commands on its stdin and
//! writes reports to its stdout, one line of JSON each. It ends by itself when its parent ends.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::Instant;
use tonic_rdma_commands::process::{self as kit, Child, Event, how_ended};
use tonic_rdma_commands::remote::Host;
use tonic_rdma_commands::{Context as _, Failure, Named as _};
use tonic_rdma_verbs::unstable::allocator::{VARIABLE, in_use};

/// The setting `--allocator`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Allocator {
    /// The C library's malloc, which a Rust program has by default.
    System,
    Mimalloc,
}

impl Allocator {
    /// Returns the allocator of this process.
    pub(crate) fn of_this_process() -> Self {
        match in_use() {
            tonic_rdma_verbs::unstable::allocator::Allocator::System => Self::System,
            tonic_rdma_verbs::unstable::allocator::Allocator::Mimalloc => Self::Mimalloc,
        }
    }

    /// Ensures that this process has the allocator. If it has another, replaces the process by a new run of
    /// the program with the same arguments. Call it before any other work, because that work would be lost.
    pub(crate) fn ensure(self) -> Result<(), Failure> {
        // One restart is enough: a program that was started for this allocator and has another is broken.
        let restarted = std::env::var_os(VARIABLE).is_some_and(|value| value == self.name());
        if Self::of_this_process() == self || restarted {
            return self.verify();
        }
        Err(kit::exec_with(VARIABLE, self.name()))
    }

    /// Sets this allocator for a process that is to be started.
    pub(crate) fn choose_for(self, command: &mut Command) {
        command.env(VARIABLE, self.name());
    }

    /// Fails if this process has another allocator.
    pub(crate) fn verify(self) -> Result<(), Failure> {
        let has = Self::of_this_process();
        if has == self {
            return Ok(());
        }
        Err(Failure::run(format!(
            "the allocator is {has} and not {self}, although {VARIABLE} was set to {self}"
        )))
    }
}

tonic_rdma_commands::displayed_by_name!(Allocator);

/// The command of util-linux that makes the namespaces of a container, and its options.
const UNSHARE: &str = "unshare";
const NAMESPACES: [&str; 7] =
    ["--user", "--map-root-user", "--pid", "--ipc", "--mount", "--fork", "--kill-child"];

/// Returns a command that starts `inner` in a container of its own. If the command is killed, so is the
/// program.
pub(crate) fn container(inner: &Command) -> Command {
    let mut command = Command::new(UNSHARE);
    command.args(NAMESPACES).arg(inner.get_program()).args(inner.get_args());
    command
}

/// Fails if this system makes no containers.
pub(crate) fn check_container() -> Result<(), Failure> {
    let failed =
        |reason: String| Failure::run(format!("--container: {UNSHARE} makes no namespaces: {reason}"));
    let tried = container(&Command::new("true")).output().map_err(|error| failed(error.to_string()))?;
    let said = String::from_utf8_lossy(&tried.stderr);
    if tried.status.success() { Ok(()) } else { Err(failed(said.trim().replace('\n', "; "))) }
}

/// Raises the limit on open files as far as this process may.
pub(crate) fn raise_open_files() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some() && limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    }
    Ok(())
}

/// Returns the bytes that the process may register: enough for `connections` busy connections, on each of
/// which `landing` bytes of messages may land, but at most half of the machine's memory. A page takes memory
/// only after its first use.
pub(crate) fn pinned(connections: u32, landing: u64) -> u64 {
    /// Receive buffers, and memory for rendezvous in both directions.
    const EACH: u64 = 8 << 20;
    const LEAST: u64 = 2 << 30;
    // Landed messages leave an eighth of the limit to all else, and are kept where they landed if each
    // connection has at most half of what it leaves to others.
    let landing = landing.saturating_add(landing / 7);
    let half = rustix::system::sysinfo();
    let half = (half.totalram as u64).saturating_mul(u64::from(half.mem_unit)) / 2;
    let shares = u64::from(connections).saturating_add(2);
    let wanted = shares.saturating_mul(EACH.saturating_add(landing)).saturating_add(LEAST);
    wanted.min(half.max(LEAST))
}

/// A line of a child's stdout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line<R> {
    Report(R),
    /// The child can't continue: the reason, and whether the command line is wrong.
    Failed {
        reason: String,
        usage: bool,
    },
}

/// The running children of this process. The drop of this value kills all of them.
#[derive(Debug)]
pub(crate) struct Children<R> {
    running: Vec<Child>,
    sender: UnboundedSender<(usize, Event<Line<R>>)>,
    events: UnboundedReceiver<(usize, Event<Line<R>>)>,
    /// The children that have reported a failure. They end by themselves, and their end explains nothing
    /// more.
    failed: BTreeSet<usize>,
    /// Number of children that have ended.
    ended: usize,
}

impl<R: DeserializeOwned + Send + 'static> Children<R> {
    pub(crate) fn new() -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        Self { running: Vec::new(), sender, events, failed: BTreeSet::new(), ended: 0 }
    }

    /// Starts a child. Children have numbers, in the order of their starts.
    pub(crate) fn start(&mut self, name: &str, mut command: Command) -> Result<(), Failure> {
        use std::os::unix::process::CommandExt as _;

        // The child gets a process group of its own. So ctrl-c reaches this process alone, which then ends
        // its children.
        command.process_group(0);
        let child = Child::start(name, command, self.sink())?;
        self.running.push(child);
        Ok(())
    }

    /// Starts a child of this `kind` on another host.
    pub(crate) fn start_at(
        &mut self,
        host: &Arc<Host>,
        name: &str,
        job: &impl Serialize,
    ) -> Result<(), Failure> {
        let child = host.start(name, job, self.sink())?;
        self.running.push(child);
        Ok(())
    }

    /// Returns what takes the events of the next child.
    fn sink(&self) -> impl FnMut(Event<String>) -> bool + Send + 'static {
        let (number, events) = (self.running.len(), self.sender.clone());
        move |event| events.send((number, event.parse())).is_ok()
    }

    /// Returns the process number of a child.
    pub(crate) fn id(&self, child: usize) -> Option<u32> {
        self.running.get(child).and_then(Child::id)
    }

    /// Returns the name of a child.
    pub(crate) fn name(&self, child: usize) -> &str {
        self.running.get(child).map_or("an unknown process", Child::name)
    }

    /// Sends a command to some children. If one of them has ended, the wait for its answer fails.
    pub(crate) fn send(&mut self, children: Range<usize>, command: &impl Serialize) -> Result<(), Failure> {
        self.running[children].iter_mut().try_for_each(|child| child.send(command))
    }

    /// Waits until each of `children` has sent a report. The failure or the end of any child is an error.
    /// `grace` is the time to wait for the end of a child that explains the failure of another one.
    pub(crate) async fn receive_reports(
        &mut self,
        children: Range<usize>,
        deadline: Instant,
        grace: Duration,
    ) -> Result<Vec<R>, Failure> {
        let mut reports: Vec<Option<R>> = children.clone().map(|_| None).collect();
        while let Some(missing) = reports.iter().position(Option::is_none) {
            let Ok(event) = tokio::time::timeout_at(deadline, self.events.recv()).await else {
                let name = self.name(children.start + missing);
                return Err(Failure::run(format!("{name} gave no answer in time: it is stuck")));
            };
            let Some((from, event)) = event else { return Err(Failure::run("all processes have ended")) };
            match self.report_in(from, event) {
                Ok(None) => {}
                Ok(Some(report)) => match reports.get_mut(from.wrapping_sub(children.start)) {
                    Some(slot) => *slot = Some(report),
                    None => {
                        let name = self.name(from);
                        return Err(Failure::run(format!("{name} sent a report that nothing waits for")));
                    }
                },
                Err(failure) if self.failed.contains(&from) => {
                    return self.explain(Err(failure), grace).await;
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok(reports.into_iter().flatten().collect())
    }

    /// Returns the report that `event` has. A child that fails or ends is an error, unless it reported a
    /// failure before.
    fn report_in(&mut self, from: usize, event: Event<Line<R>>) -> Result<Option<R>, Failure> {
        let is_first = self.failed.is_empty();
        self.ended += usize::from(!matches!(event, Event::Report(_) | Event::Garbage(_)));
        let text = match event {
            Event::Report(Line::Report(report)) => return Ok(Some(report)),
            Event::Lost(reason) => format!("is lost: {reason}"),
            Event::Report(Line::Failed { reason, usage }) | Event::Refused { reason, usage } => {
                self.failed.insert(from);
                let text = format!("{}: {reason}", self.name(from));
                return match usage {
                    // Peers of a process that failed fail too. The first failure is the one to report.
                    _ if !is_first => Ok(None),
                    true => Err(Failure::usage(text)),
                    false => Err(Failure::run(text)),
                };
            }
            Event::Ended(_) if self.failed.contains(&from) => return Ok(None),
            Event::Garbage(line) => format!("wrote a line that is no report: {line}"),
            Event::Ended(status) => format!("ended in the middle of the run ({})", how_ended(status)),
        };
        Err(Failure::run(format!("{} {text}", self.name(from))))
    }

    /// Waits for the failure or the end of a child, and returns the failure to report, or nothing when all
    /// children have ended.
    pub(crate) async fn end(&mut self) -> Option<Failure> {
        while self.ended < self.running.len() {
            let (from, event) = self.events.recv().await?;
            if let Err(failure) = self.report_in(from, event) {
                return Some(failure);
            }
        }
        None
    }

    /// Returns `result`. If it is a failure and a child ends within `grace`, the end of the child is the
    /// failure, because others fail when their peer ends, and may report it before the end can be seen.
    pub(crate) async fn explain<T>(
        &mut self,
        result: Result<T, Failure>,
        grace: Duration,
    ) -> Result<T, Failure> {
        match result {
            Err(failure @ Failure::Run { .. }) => {
                Err(tokio::time::timeout(grace, self.end()).await.ok().flatten().unwrap_or(failure))
            }
            other => other,
        }
    }
}

/// Parses the argument by which a parent tells a child what it needs to know: JSON.
pub(crate) fn parse_job<J: DeserializeOwned>(text: &str) -> Result<J, serde_json::Error> {
    serde_json::from_str(text)
}

/// Returns the command that starts this program again as a child, with a job as the argument of the
/// subcommand `kind`.
pub(crate) fn command(kind: &str, job: &impl Serialize) -> Result<Command, Failure> {
    let job = serde_json::to_string(job).context("can't make JSON of a job")?;
    let mut command = kit::again()?;
    command.args([kind, &job]);
    Ok(command)
}

/// Receives the commands of the parent. The process ends when the parent does, even if its runtime is busy.
pub(crate) fn commands<C: DeserializeOwned + Send + 'static>() -> Result<UnboundedReceiver<C>, Failure> {
    let (sender, receiver) = mpsc::unbounded_channel();
    kit::commands(move |command| drop(sender.send(command)))?;
    Ok(receiver)
}

/// Sends a report to the parent.
pub(crate) fn report(report: &impl Serialize) -> Result<(), Failure> {
    kit::report(&Line::Report(report))
}

/// Reports a failure to the parent, which shows it. A second report here would repeat it.
pub(crate) fn report_failure(result: Result<(), Failure>) -> Result<(), Failure> {
    match result {
        Err(failure @ (Failure::Run { .. } | Failure::Usage { .. })) => {
            kit::report(&Line::<()>::Failed { usage: failure.is_usage(), reason: failure.with_causes() })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    #[test]
    fn names_are_read_back() {
        for allocator in Allocator::value_variants() {
            assert_eq!(Allocator::from_str(allocator.name(), false), Ok(*allocator));
        }
    }

    #[test]
    fn a_wrong_allocator_is_detected() {
        let this = Allocator::of_this_process();
        this.verify().unwrap();
        this.ensure().unwrap();
        for other in Allocator::value_variants().iter().filter(|other| **other != this) {
            assert!(other.verify().unwrap_err().to_string().contains(this.name()));
        }
    }
}

#[cfg(test)]
mod container_tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

    use std::path::Path;

    use super::*;

    #[test]
    fn a_container_has_namespaces_of_its_own() {
        if check_container().is_err() {
            println!("skipped: a new user namespace is not permitted here");
            return;
        }
        let names = ["user", "pid", "ipc", "mnt", "net"].map(|name| format!("/proc/self/ns/{name}"));
        let output = container(&Command::new("readlink")).args(&names).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let inside: Vec<&str> = text.lines().collect();
        assert_eq!(inside.len(), names.len());
        for (name, inside) in names.iter().zip(inside) {
            let here = std::fs::read_link(name).unwrap();
            assert_eq!(here == Path::new(inside), name.ends_with("net"), "{name}");
        }
    }
}

#[cfg(test)]
mod child_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    /// A time that only a wait without an end exceeds.
    const LIMIT: Duration = Duration::from_secs(60);

    /// Starts children, each of which runs a script.
    fn children(scripts: &[&str]) -> Children<u32> {
        let mut children = Children::new();
        for script in scripts {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            children.start("the child", command).unwrap();
        }
        children
    }

    #[tokio::test]
    async fn a_reported_failure_is_not_waited_for_when_no_child_is_left_to_explain_it() {
        let mut children = children(&[r#"echo '{"failed":{"reason":"no memory","usage":false}}'"#]);
        let receiving = children.receive_reports(0..1, Instant::now() + LIMIT, 100 * LIMIT);
        let heard = tokio::time::timeout(LIMIT, receiving)
            .await
            .expect("it waits for the end of a child that has ended");
        assert_eq!(heard.unwrap_err().to_string(), "the child: no memory");
    }

    #[tokio::test]
    async fn a_child_that_ends_in_the_middle_of_a_run_is_named_whatever_its_status() {
        for (status, named) in [("0", "(exit status: 0)"), ("3", "(exit status: 3)")] {
            let mut children = children(&[&format!("echo '{{\"report\":7}}'; exit {status}")]);
            assert_eq!(children.receive_reports(0..1, Instant::now() + LIMIT, LIMIT).await.unwrap(), [7]);
            let ended = tokio::time::timeout(LIMIT, children.end()).await.expect("its end is not noticed");
            assert!(format!("{ended:?}").contains(named), "{ended:?}");
        }
    }

    #[tokio::test]
    async fn the_end_of_another_child_explains_a_reported_failure() {
        let failed = r#"echo '{"failed":{"reason":"lost","usage":false}}'"#;
        let mut children = children(&[failed, "sleep 0.1; kill -9 $$"]);
        let error =
            children.receive_reports(0..2, Instant::now() + LIMIT, LIMIT).await.unwrap_err().to_string();
        assert!(error.contains("in the middle of the run (ended (signal: 9"), "{error}");
    }
}
