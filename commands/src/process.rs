//! Child processes, as the parent and as the child see them. The parent starts and ends children, sends
//! commands, and gets reports. The child gets commands, sends reports, and ends with its parent.
//!
//! A report is a line on the child's stdout. A command is a line on the child's stdin, which closes when the
//! parent ends. A thread for each child reads the reports and hands them to a closure, so that they may go to
//! a channel of std or of tokio, which several children may share.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Child as Process, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic_rdma_verbs::unstable::lock;

use crate::failure::{Context as _, Failure};
#[cfg(feature = "remote")]
use crate::remote::RemoteProcess;

pub use rustix::process::Signal;

/// The longest line of a report, in bytes: the losses of three million steps.
const LONGEST: usize = 64 << 20;
/// Characters of a line that is no report, as it is shown.
const SHOWN: usize = 200;
/// Lines that wait for [`Child::line`]. More are forgotten.
const UNREAD: usize = 1024;
/// Bytes that are kept of an output.
const KEPT: usize = 256 << 10;
/// How long a process that has closed its output may take to end.
const GRACE: Duration = Duration::from_secs(5);
/// Time between two checks of a process.
const PERIOD: Duration = Duration::from_millis(2);

/// What a child did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<T> {
    /// The child wrote a report.
    Report(T),
    /// The child wrote something else: the beginning of that line.
    Garbage(String),
    /// The child has closed its stdout. Without a status, it runs on.
    Ended(Option<ExitStatus>),
    /// The connection to the host of the child has ended, for this reason.
    Lost(String),
    /// The host did not start the child.
    Refused {
        /// Why.
        reason: String,
        /// Whether the command line is wrong.
        usage: bool,
    },
}

impl Event<String> {
    /// Reads the JSON of a report.
    pub fn parse<T: DeserializeOwned>(self) -> Event<T> {
        match self {
            Self::Report(line) => match serde_json::from_str(&line) {
                Ok(report) => Event::Report(report),
                Err(_) => Event::Garbage(line.chars().take(SHOWN).collect()),
            },
            Self::Garbage(line) => Event::Garbage(line.chars().take(SHOWN).collect()),
            Self::Ended(status) => Event::Ended(status),
            Self::Lost(reason) => Event::Lost(reason),
            Self::Refused { reason, usage } => Event::Refused { reason, usage },
        }
    }
}

/// Says how a process ended: `ended (exit status: 1)`.
pub fn how_ended(status: Option<ExitStatus>) -> String {
    status.map_or_else(|| "runs on".to_owned(), |status| format!("ended ({status})"))
}

/// Returns the command that starts this program again.
///
/// # Errors
///
/// Fails if the system does not know the program's file.
pub fn again() -> Result<Command, Failure> {
    let program = std::env::current_exe();
    program.map(Command::new).context("can't find the program to start")
}

/// Replaces this process by a new run of its program, with the same arguments and with `value` in an
/// environment variable. (Safe code can set a variable only for a program that it starts.) Returns only if
/// the start fails. Call it before any other work, because that work would be lost.
pub fn exec_with(variable: &str, value: &str) -> Failure {
    let failed = Failure::run(format!("can't start again with {variable}={value}"));
    match again() {
        Ok(mut command) => {
            failed.because(command.args(std::env::args_os().skip(1)).env(variable, value).exec())
        }
        Err(error) => failed.because(error),
    }
}

/// Where a child runs.
#[derive(Debug)]
enum Whereabouts {
    Here {
        process: Arc<Mutex<Process>>,
        stdin: Option<ChildStdin>,
    },
    #[cfg(feature = "remote")]
    There(RemoteProcess),
}

/// A running process. The drop of this value kills it. A process that heeds the end of its stdin also ends
/// with this process.
#[derive(Debug)]
pub struct Child {
    name: String,
    whereabouts: Whereabouts,
    /// The lines that the child wrote, unless another closure gets them.
    lines: Option<Receiver<Event<String>>>,
    errors: Arc<Mutex<VecDeque<u8>>>,
    error_reader: Option<JoinHandle<()>>,
}

impl Child {
    /// Starts `command`. Each event goes to `sink`, whose result says whether it wants more. The child's
    /// stdin and stdout are pipes. The end of its stderr is kept if the command has a pipe for that;
    /// otherwise it goes where this process's stderr goes.
    ///
    /// # Errors
    ///
    /// Fails if the program can't be started.
    pub fn start(
        name: impl Display,
        mut command: Command,
        sink: impl FnMut(Event<String>) -> bool + Send + 'static,
    ) -> Result<Self, Failure> {
        let name = name.to_string();
        let program = command.get_program().to_owned();
        let failed =
            |error| Failure::run(format!("can't start {name} ({})", program.display())).because(error);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let (stdin, stdout, stderr) = (process.stdin.take(), process.stdout.take(), process.stderr.take());
        let process = Arc::new(Mutex::new(process));
        let whereabouts = Whereabouts::Here { process: Arc::clone(&process), stdin };
        let mut child = Self { name, whereabouts, lines: None, errors: Arc::default(), error_reader: None };
        let failed = |error| Failure::run(format!("can't read from {}", child.name)).because(error);
        let reader = thread::Builder::new().name(child.name.clone());
        reader.spawn(move || read_lines(stdout, &process, sink)).map_err(failed)?;
        child.error_reader = match stderr {
            Some(stderr) => Some(keep(stderr, &child.errors).map_err(failed)?),
            None => None,
        };
        Ok(child)
    }

    /// Makes the child that `process` is at another host.
    #[cfg(feature = "remote")]
    pub(crate) fn at(name: String, process: RemoteProcess) -> Self {
        let whereabouts = Whereabouts::There(process);
        Self { name, whereabouts, lines: None, errors: Arc::default(), error_reader: None }
    }

    /// Starts `command`, whose lines [`line`](Self::line) and [`report`](Self::report) return.
    ///
    /// # Errors
    ///
    /// Fails as [`start`](Self::start) does.
    pub fn with_lines(name: impl Display, command: Command) -> Result<Self, Failure> {
        let (sender, lines) = sync_channel(UNREAD);
        let sink = move |event| !matches!(sender.try_send(event), Err(TrySendError::Disconnected(_)));
        let mut child = Self::start(name, command, sink)?;
        child.lines = Some(lines);
        Ok(child)
    }

    /// Starts `command`, and waits for its first line.
    ///
    /// # Errors
    ///
    /// Fails as [`start`](Self::start) and [`line`](Self::line) do.
    pub fn ready(name: impl Display, command: Command, limit: Duration) -> Result<(Self, String), Failure> {
        let mut child = Self::with_lines(name, command)?;
        let line = child.line(limit)?;
        Ok((child, line))
    }

    /// Waits for the next line of the child's stdout.
    ///
    /// # Errors
    ///
    /// Fails if the child writes no line within `limit`, or ends. The error has the end of its stderr, if
    /// that is kept.
    pub fn line(&mut self, limit: Duration) -> Result<String, Failure> {
        let event = self
            .lines
            .as_ref()
            .map_or(Err(RecvTimeoutError::Disconnected), |lines| lines.recv_timeout(limit));
        let fault = match event {
            Ok(Event::Report(line)) => return Ok(line),
            Ok(Event::Garbage(line)) => {
                format!("wrote no line of text: {}", line.chars().take(SHOWN).collect::<String>())
            }
            Ok(Event::Ended(status)) => how_ended(status),
            Ok(Event::Lost(reason) | Event::Refused { reason, .. }) => format!("is not there: {reason}"),
            Err(RecvTimeoutError::Timeout) => format!("wrote nothing within {limit:?}"),
            Err(RecvTimeoutError::Disconnected) => "has closed its output".to_owned(),
        };
        let errors = self.errors();
        let said = if errors.is_empty() { String::new() } else { format!(": {errors}") };
        Err(Failure::run(format!("{} {fault}{said}", self.name)))
    }

    /// Waits for the next report, a line of JSON.
    ///
    /// # Errors
    ///
    /// Fails as [`line`](Self::line) does, and if the line is no report.
    pub fn report<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T, Failure> {
        let line = self.line(limit)?;
        serde_json::from_str(&line).map_err(|error| {
            let shown: String = line.chars().take(SHOWN).collect();
            Failure::run(format!("{} wrote a line that is no report: {shown}", self.name)).because(error)
        })
    }

    /// Sends a line. If the child has ended, its events say so.
    pub fn send_line(&mut self, line: impl Display) {
        match &mut self.whereabouts {
            Whereabouts::Here { stdin: Some(stdin), .. } => {
                let _ = stdin.write_all(format!("{line}\n").as_bytes());
            }
            Whereabouts::Here { stdin: None, .. } => {}
            #[cfg(feature = "remote")]
            Whereabouts::There(process) => process.send_line(line.to_string()),
        }
    }

    /// Sends a command as a line of JSON, as [`send_line`](Self::send_line) does.
    ///
    /// # Errors
    ///
    /// Fails if the command has no JSON form.
    pub fn send(&mut self, command: &impl Serialize) -> Result<(), Failure> {
        let line =
            serde_json::to_string(command).context(format!("can't send a command to {}", self.name))?;
        self.send_line(line);
        Ok(())
    }

    /// Returns the name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the process, if it is one of this host.
    pub fn id(&self) -> Option<u32> {
        self.process().map(|process| lock(process).id())
    }

    /// Says where the process is: its number, or the address of its host.
    pub fn place(&self) -> String {
        match &self.whereabouts {
            Whereabouts::Here { process, .. } => format!("process {}", lock(process).id()),
            #[cfg(feature = "remote")]
            Whereabouts::There(process) => format!("a process at {}", process.address()),
        }
    }

    fn process(&self) -> Option<&Arc<Mutex<Process>>> {
        match &self.whereabouts {
            Whereabouts::Here { process, .. } => Some(process),
            #[cfg(feature = "remote")]
            Whereabouts::There(_) => None,
        }
    }

    /// Sends a signal.
    ///
    /// # Errors
    ///
    /// Fails if the process may not be signalled, or has been waited for.
    pub fn signal(&self, signal: Signal) -> Result<(), Failure> {
        let failed = || Failure::run(format!("can't send a signal to {}", self.name));
        let process = self.process().ok_or_else(|| failed().because("it is at another host"))?;
        let mut process = lock(process);
        // A process that has been waited for has given its number back.
        if let Ok(Some(status)) = process.try_wait() {
            return Err(failed().because(how_ended(Some(status))));
        }
        kill_process(Pid::from_child(&process), signal).map_err(|error| failed().because(error))
    }

    /// Waits until the process has ended, at most this long. Returns its status, or nothing if it runs on or
    /// nothing more will be heard of it.
    pub fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        match &self.whereabouts {
            Whereabouts::Here { process, .. } => wait(limit, || lock(process).try_wait()),
            #[cfg(feature = "remote")]
            Whereabouts::There(process) => wait(limit, || process.status()),
        }
    }

    /// Closes the child's stdin, so that it may end by itself.
    pub fn close(&mut self) {
        match &mut self.whereabouts {
            Whereabouts::Here { stdin, .. } => *stdin = None,
            #[cfg(feature = "remote")]
            Whereabouts::There(process) => process.close(),
        }
    }

    /// Takes the child's stdin, unless it is closed or at another host.
    #[cfg(feature = "remote")]
    pub(crate) fn take_stdin(&mut self) -> Option<ChildStdin> {
        match &mut self.whereabouts {
            Whereabouts::Here { stdin, .. } => stdin.take(),
            Whereabouts::There(_) => None,
        }
    }

    /// Closes the child's stdin, and waits until it has ended, at most this long. Returns its status, or
    /// kills it and returns nothing.
    pub fn end(&mut self, limit: Duration) -> Option<ExitStatus> {
        self.close();
        let status = self.wait(limit);
        if status.is_none() {
            self.kill();
        }
        status
    }

    /// Kills the process, unless it has ended, and waits for it.
    pub fn kill(&mut self) {
        match &self.whereabouts {
            Whereabouts::Here { process, .. } => {
                let mut process = lock(process);
                // Both fail only if the process is gone.
                let _ = process.kill();
                let _ = process.wait();
            }
            #[cfg(feature = "remote")]
            Whereabouts::There(process) => process.kill(),
        }
    }

    /// Returns the end of the child's stderr so far, if it is kept: all of it once the process has ended.
    pub fn errors(&mut self) -> String {
        if self.error_reader.is_some() && self.wait(Duration::ZERO).is_some() {
            // A child of the process may keep the pipe open.
            let reader = self.error_reader.take();
            join_within(reader, GRACE);
        }
        text_of(&self.errors)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Closes the stdin of all children, and waits until all have ended, for `limit` at most. Then kills those
/// that still run, waits for their end, and returns their indices.
pub fn end_all(children: &mut [Child], limit: Duration) -> Vec<usize> {
    children.iter_mut().for_each(Child::close);
    let end = Instant::now() + limit;
    let runs = |child: &Child| child.wait(end.saturating_duration_since(Instant::now())).is_none();
    let left: Vec<usize> =
        children.iter().enumerate().filter(|(_, child)| runs(child)).map(|(index, _)| index).collect();
    for process in left.iter().filter_map(|index| children[*index].process()) {
        let _ = lock(process).kill();
    }
    left.iter().for_each(|index| children[*index].kill());
    left
}

/// The status and the output of a program that has ended.
#[derive(Debug)]
pub struct Finished {
    /// The status, or nothing if the program took too long and was killed.
    pub status: Option<ExitStatus>,
    /// The end of its stdout.
    pub output: String,
    /// The end of its stderr.
    pub errors: String,
}

impl Finished {
    /// Returns whether the program succeeded.
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

/// Runs a program to its end, or kills it after `limit`. Its stdin is empty.
///
/// # Errors
///
/// Fails if the program can't be started.
pub fn run(name: &str, command: Command, limit: Duration) -> Result<Finished, Failure> {
    run_unless(|| false, name, command, limit)
}

/// Runs a program as [`run`] does, but kills it as soon as `stopped`.
///
/// # Errors
///
/// Fails if the program can't be started.
pub fn run_unless(
    stopped: impl Fn() -> bool,
    name: &str,
    mut command: Command,
    limit: Duration,
) -> Result<Finished, Failure> {
    let failed = |error| Failure::run(format!("can't start {name}")).because(error);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().map_err(failed)?;
    let (stdout, stderr) = (process.stdout.take(), process.stderr.take());
    let [output, errors]: [Arc<Mutex<VecDeque<u8>>>; 2] = Default::default();
    let mut readers = Vec::new();
    if let (Some(stdout), Some(stderr)) = (stdout, stderr) {
        readers = vec![keep(stdout, &output).map_err(failed)?, keep(stderr, &errors).map_err(failed)?];
    }
    let process = Mutex::new(process);
    let status = wait(limit, || match stopped() {
        true => Err(io::ErrorKind::Interrupted.into()),
        false => lock(&process).try_wait(),
    });
    if status.is_none() {
        let mut process = lock(&process);
        let _ = process.kill();
        let _ = process.wait();
    }
    for reader in readers {
        join_within(Some(reader), GRACE);
    }
    Ok(Finished { status, output: text_of(&output), errors: text_of(&errors) })
}

/// Makes the kernel kill this process, even a stuck one, when the thread of `parent` that started it ends. So
/// the parent has to start such children from a thread that lives as long as the parent.
///
/// # Errors
///
/// Fails if the parent has ended already.
pub fn end_with(parent: u32) -> Result<(), Failure> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .context("can't ask for a signal at the end of the parent")?;
    // The parent may have ended before.
    let current = rustix::process::getppid().map(|process| process.as_raw_nonzero().get());
    if current == i32::try_from(parent).ok() {
        return Ok(());
    }
    Err(Failure::run(format!("the process {parent}, which started this one, has ended")))
}

/// Hands each line of stdin to `line`, on a thread of its own. Calls `closed` at the end of stdin.
///
/// # Errors
///
/// Fails if there is no thread.
pub fn on_stdin(
    mut line: impl FnMut(String) + Send + 'static,
    closed: impl FnOnce() + Send + 'static,
) -> Result<(), Failure> {
    let read = move || {
        io::stdin().lock().lines().map_while(Result::ok).for_each(&mut line);
        closed();
    };
    let thread = thread::Builder::new().name("commands".to_owned()).spawn(read);
    thread.map(drop).context("can't start a thread")
}

/// Ends this process when its parent closes the stdin of this process, or ends. First calls `last`.
///
/// # Errors
///
/// Fails as [`on_stdin`] does.
pub fn end_with_stdin(last: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    on_stdin(drop, || {
        last();
        leave()
    })
}

/// Hands each command of the parent to `sink`: a line of JSON. This process ends when the parent closes its
/// stdin or ends, and on a line that is no command.
///
/// # Errors
///
/// Fails as [`on_stdin`] does.
pub fn commands<T: DeserializeOwned>(mut sink: impl FnMut(T) + Send + 'static) -> Result<(), Failure> {
    on_stdin(move |line| serde_json::from_str(&line).map_or_else(|_| leave(), &mut sink), leave)
}

#[expect(clippy::disallowed_methods, reason = "the parent is gone, and nothing waits for an answer")]
fn leave() {
    std::process::exit(0)
}

/// Sends a report to the parent: a line of JSON on stdout.
///
/// # Errors
///
/// Fails if the report has no JSON form, or if stdout is closed.
pub fn report(report: &impl Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(report).context("can't make JSON of a report")?;
    report_line(line)
}

/// Sends a line to the parent.
///
/// # Errors
///
/// Fails if stdout is closed.
pub fn report_line(line: impl Display) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(|error| Failure::output(&error))
}

/// Reads lines to the end of `stdout`, and then waits a moment for the end of the process.
fn read_lines(
    stdout: Option<impl Read>,
    process: &Mutex<Process>,
    mut sink: impl FnMut(Event<String>) -> bool,
) {
    let mut wanted = true;
    if let Some(stdout) = stdout {
        let mut stdout = BufReader::new(stdout);
        let mut line = Vec::new();
        // Reads on without a sink, because a write to a closed pipe would end the process.
        while stdout.by_ref().take(LONGEST as u64).read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            wanted = wanted && sink(event(&line));
            line.clear();
        }
    }
    if wanted {
        sink(Event::Ended(wait(GRACE, || lock(process).try_wait())));
    }
}

fn event(line: &[u8]) -> Event<String> {
    match std::str::from_utf8(line) {
        Ok(text) if line.len() < LONGEST || text.ends_with('\n') => Event::Report(text.trim_end().to_owned()),
        _ => Event::Garbage(String::from_utf8_lossy(line).trim_end().to_owned()),
    }
}

/// Waits for the end of a process without keeping it locked, so that another thread can signal it.
fn wait(limit: Duration, try_wait: impl Fn() -> io::Result<Option<ExitStatus>>) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        match try_wait() {
            Ok(None) if Instant::now() < end => {}
            Ok(status) => return status,
            Err(_) => return None,
        }
        thread::sleep(PERIOD);
    }
}

/// Reads to the end on a thread of its own, and keeps the last bytes.
fn keep(mut pipe: impl Read + Send + 'static, kept: &Arc<Mutex<VecDeque<u8>>>) -> io::Result<JoinHandle<()>> {
    let kept = Arc::clone(kept);
    thread::Builder::new().name("output".to_owned()).spawn(move || {
        let mut buffer = [0; 8192];
        while let Ok(read @ 1..) = pipe.read(&mut buffer) {
            let mut kept = lock(&kept);
            kept.extend(&buffer[..read]);
            let above = kept.len().saturating_sub(KEPT);
            kept.drain(..above);
        }
    })
}

pub(crate) fn join_within(thread: Option<JoinHandle<()>>, limit: Duration) {
    let end = Instant::now() + limit;
    while thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < end {
        thread::sleep(PERIOD);
    }
}

fn text_of(bytes: &Mutex<VecDeque<u8>>) -> String {
    String::from_utf8_lossy(lock(bytes).make_contiguous()).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::sync::mpsc::channel;

    use super::*;

    /// A limit that only a test that hangs exceeds.
    const TIMEOUT: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn is_there(process: u32) -> bool {
        std::path::Path::new(&format!("/proc/{process}")).exists()
    }

    #[test]
    fn children_share_a_channel_for_their_reports() {
        let (sender, events) = channel();
        let start = |number: usize, script: &str| {
            let sender = sender.clone();
            let sink = move |event: Event<String>| sender.send((number, event.parse::<Vec<u8>>())).is_ok();
            Child::start(format!("child {number}"), shell(script), sink).unwrap()
        };
        let children = [start(0, "echo [1]; echo hello; exit 3"), start(1, "kill -9 $$")];
        let mut seen: Vec<_> = (0..4).map(|_| events.recv_timeout(TIMEOUT).unwrap()).collect();
        seen.sort_by_key(|(number, _)| *number);
        assert_eq!(seen[0], (0, Event::Report(vec![1])));
        assert_eq!(seen[1], (0, Event::Garbage("hello".to_owned())));
        let ends: Vec<String> = seen[2..]
            .iter()
            .map(
                |(_, event)| {
                    if let Event::Ended(status) = event { how_ended(*status) } else { String::new() }
                },
            )
            .collect();
        assert_eq!(ends, ["ended (exit status: 3)", "ended (signal: 9 (SIGKILL))"]);
        assert!(children[0].signal(Signal::TERM).unwrap_err().with_causes().contains("child 0: ended (exit"));
    }

    #[test]
    fn a_child_answers_lines_and_ends_with_its_stdin() {
        let (mut child, line) = Child::ready("cat", shell("echo ready; cat"), TIMEOUT).unwrap();
        assert_eq!(line, "ready");
        child.send(&[1, 2]).unwrap();
        assert_eq!(child.report::<Vec<u8>>(TIMEOUT).unwrap(), [1, 2]);
        child.send_line("x");
        let error = child.report::<Vec<u8>>(TIMEOUT).unwrap_err().with_causes();
        assert!(error.starts_with("cat wrote a line that is no report: x: "), "{error}");
        assert!(child.end(TIMEOUT).unwrap().success());
        assert_eq!(child.line(TIMEOUT).unwrap_err().to_string(), "cat ended (exit status: 0)");
    }

    #[test]
    fn a_child_that_is_not_ready_is_named_with_its_errors() {
        let mut command = shell("echo no such device >&2; exit 1");
        command.stderr(Stdio::piped());
        let error = Child::ready("the server", command, TIMEOUT).unwrap_err();
        assert_eq!(error.to_string(), "the server ended (exit status: 1): no such device");
        let error = Child::ready("it", shell("exec sleep 600"), Duration::from_millis(1)).unwrap_err();
        assert_eq!(error.to_string(), "it wrote nothing within 1ms");
        let error = Child::ready("it", Command::new("/no/program"), TIMEOUT).unwrap_err().with_causes();
        assert!(error.starts_with("can't start it (/no/program): No such file"), "{error}");
    }

    #[test]
    fn lines_are_bounded() {
        let script = "head -c 70000000 /dev/zero | tr '\\0' x; echo; echo after";
        let error = Child::ready("it", shell(script), TIMEOUT).unwrap_err().to_string();
        assert!(error.starts_with("it wrote no line of text: xxx") && error.len() < 300, "{error}");
    }

    #[test]
    fn children_that_do_not_end_are_killed() {
        let start = |script| Child::with_lines("it", shell(script)).unwrap();
        let mut children = [start("cat"), start("exec sleep 600")];
        let ids = children.each_ref().map(|child| child.id().unwrap());
        assert_eq!(end_all(&mut children[1..], Duration::from_millis(1)), [0]);
        assert_eq!(end_all(&mut children, TIMEOUT), [0; 0]);
        let dropped = start("exec sleep 600");
        let id = dropped.id().unwrap();
        drop(dropped);
        assert!(!ids.into_iter().chain([id]).any(is_there));
    }

    #[test]
    fn a_program_is_run_to_its_end() {
        let ran = run("it", shell("echo out; echo err >&2; exit 2"), TIMEOUT).unwrap();
        assert_eq!((ran.output.as_str(), ran.errors.as_str(), ran.succeeded()), ("out", "err", false));
        let ran = run("it", shell("exec sleep 600"), Duration::from_millis(1)).unwrap();
        assert_eq!(ran.status, None);
        let ran = run_unless(|| true, "it", shell("exec sleep 600"), TIMEOUT).unwrap();
        assert_eq!(ran.status, None);
        let much = run("it", shell("head -c 1000000 /dev/zero | tr '\\0' x; echo end"), TIMEOUT).unwrap();
        assert!(much.succeeded() && much.output.ends_with("xend") && much.output.len() <= KEPT);
    }
}
