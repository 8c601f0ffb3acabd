//! Processes: starts programs, waits for them within a limit, and ends them. After [`stop`] every wait fails,
//! so that each thread that waits drops its processes, which ends them.

use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use tonic_rdma_commands::Failure;
use tonic_rdma_commands::process::{Child, Event, Finished, run_unless};

use crate::outcome::printable;

/// Time limit for a server to listen. Interpreters start slowly on a slow machine.
const START: Duration = Duration::from_secs(60);
/// Time between two checks of a process.
const PERIOD: Duration = Duration::from_millis(20);

/// Whether the user has interrupted this program.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Makes all waits fail, present and future ones.
pub(crate) fn stop() {
    STOPPED.store(true, Ordering::Relaxed);
}

/// Fails after [`stop`].
pub(crate) fn fail_if_stopped() -> Result<(), Failure> {
    if STOPPED.load(Ordering::Relaxed) { Err(Failure::Interrupted) } else { Ok(()) }
}

/// A running program. Dropping it ends the program.
#[derive(Debug)]
pub(crate) struct RunningProgram {
    child: Child,
    /// Whether this process has killed the program.
    killed: bool,
}

impl RunningProgram {
    /// Starts a program that prints a line when it is ready. Returns the program and the line.
    pub(crate) fn start(name: &str, command: Command) -> Result<(Self, String), Failure> {
        let (mut running, events) = spawn(name, command)?;
        let event = wait(START, || match events.recv_timeout(PERIOD) {
            Err(RecvTimeoutError::Timeout) => None,
            event => Some(event.ok()),
        })?;
        let fault = match event {
            Some(Some(Event::Report(line))) => return Ok((running, line.trim_end().to_owned())),
            Some(_) => "ended before it listened".to_owned(),
            None => format!("did not listen within {} s", START.as_secs()),
        };
        Err(format!("{name} {fault}: {}", running.errors()).into())
    }

    /// Starts a program that prints nothing, and waits until a server listens on the port.
    pub(crate) fn start_silent(name: &str, command: Command, port: u16) -> Result<Self, Failure> {
        let (mut running, _) = spawn(name, command)?;
        let listens = wait(START, || {
            let ended = running.child.wait(PERIOD).is_some();
            let listens = TcpStream::connect(("127.0.0.1", port)).is_ok();
            (ended || listens).then_some(listens && !ended)
        })?;
        if listens == Some(true) {
            return Ok(running);
        }
        Err(format!("{name} did not listen on port {port}: {}", running.errors()).into())
    }

    /// Ends the program, and returns the end of its standard error.
    pub(crate) fn errors(&mut self) -> String {
        let ended = match self.child.wait(Duration::ZERO) {
            Some(status) if !self.killed => format!("{} ended by itself, {status}; ", self.child.name()),
            _ => String::new(),
        };
        ended + &tail(&self.log())
    }

    /// Ends the program, and returns its standard error.
    pub(crate) fn log(&mut self) -> String {
        self.child.kill();
        self.killed = true;
        self.child.errors()
    }
}

/// Runs a program to its end, or kills it after `limit`.
pub(crate) fn finish(name: &str, mut command: Command, limit: Duration) -> Result<Finished, Failure> {
    command.env("NO_COLOR", "1");
    let ended = run_unless(|| STOPPED.load(Ordering::Relaxed), name, command, limit)?;
    fail_if_stopped().map(|()| ended)
}

/// Describes the exit status, and quotes the end of the output.
pub(crate) fn describe(ended: &Finished) -> String {
    let how = ended.status.map_or("it took too long and was killed".to_owned(), |status| status.to_string());
    let text = if ended.errors.trim().is_empty() { &ended.output } else { &ended.errors };
    format!("{how}: {}", tail(text))
}

/// Runs a program, and returns the lines that it prints.
///
/// # Errors
/// The program can't start, or fails.
pub(crate) fn lines(command: Command) -> Result<Vec<String>, Failure> {
    let name = format!("{command:?}");
    let ended = finish(&name, command, START)?;
    if !ended.succeeded() {
        return Err(format!("{name}: {}", describe(&ended)).into());
    }
    Ok(ended.output.lines().map(str::to_owned).collect())
}

/// Starts a program with an empty standard input. Returns the program, and the receiver of its lines and
/// its end.
fn spawn(name: &str, mut command: Command) -> Result<(RunningProgram, Receiver<Event<String>>), Failure> {
    // The report shows the output without colours.
    command.env("NO_COLOR", "1").stderr(Stdio::piped());
    let (sender, events) = channel();
    let mut child = Child::start(name, command, move |event| sender.send(event).is_ok())?;
    child.close();
    Ok((RunningProgram { child, killed: false }, events))
}

/// Checks until there is a result, but at most for `limit`.
///
/// # Errors
/// This program was told to [`stop`].
fn wait<T>(limit: Duration, mut check: impl FnMut() -> Option<T>) -> Result<Option<T>, Failure> {
    let end = Instant::now() + limit;
    loop {
        fail_if_stopped()?;
        match check() {
            None if Instant::now() < end => {}
            seen => return Ok(seen),
        }
    }
}

/// Returns the last lines, or the lines from a panic on. It skips the stack traces of Ruby and C++, which
/// come after the error.
fn tail(text: &str) -> String {
    let is_stack_frame =
        |line: &str| ["\tfrom ", "    @ ", "PC: @ "].iter().any(|begins| line.starts_with(begins));
    let is_useful = |line: &&str| !line.trim().is_empty() && !is_stack_frame(line);
    let lines: Vec<_> = text.lines().filter(is_useful).collect();
    let panic = lines.iter().rposition(|line| line.contains("panicked at"));
    let last = lines[panic.unwrap_or(lines.len().saturating_sub(6))..].join(" | ");
    if last.is_empty() { "no output".to_owned() } else { printable(&last) }
}

/// Returns a port that is free now, for programs that can't choose one themselves.
pub(crate) fn free_port() -> Result<u16, Failure> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
