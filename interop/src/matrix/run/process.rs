//! Processes: starts programs, waits for them within a limit, and ends them.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::outcome::printable;
use crate::places::Failure;

/// Time limit for a server to listen. Interpreters start slowly on a slow machine.
const START: Duration = Duration::from_secs(60);
/// Bytes that are kept of a program's standard output, and of its standard error.
const KEPT: usize = 256 << 10;

/// A running program. Dropping it ends the program.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    name: String,
    /// Reader of the standard error, until its result is taken.
    errors: Option<JoinHandle<String>>,
    log: String,
    /// Reader of the standard output. It reads on, because a closed pipe would end the program.
    _output: JoinHandle<String>,
}

impl Running {
    fn new(child: Child, name: &str, errors: JoinHandle<String>, output: JoinHandle<String>) -> Self {
        Self { child, name: name.to_owned(), errors: Some(errors), log: String::new(), _output: output }
    }

    /// Starts a program that prints a line when it is ready. Returns the program and the line.
    pub(crate) async fn start(name: &str, command: &mut Command) -> Result<(Self, String), Failure> {
        let mut child = spawn(name, command)?;
        let errors = keep(child.stderr.take());
        let mut output = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut line = String::new();
        let read = timeout(START, output.read_line(&mut line)).await;
        let mut running = Self::new(child, name, errors, keep(Some(output)));
        match read {
            Ok(Ok(1..)) => Ok((running, line.trim_end().to_owned())),
            Ok(_) => Err(format!("{name} ended before it listened: {}", running.errors().await).into()),
            Err(_) => {
                Err(format!("{name} did not listen within {} s: {}", START.as_secs(), running.errors().await)
                    .into())
            }
        }
    }

    /// Starts a program that prints nothing, and waits until a server listens on the port.
    pub(crate) async fn start_silent(name: &str, command: &mut Command, port: u16) -> Result<Self, Failure> {
        let mut child = spawn(name, command)?;
        let errors = keep(child.stderr.take());
        let output = keep(child.stdout.take());
        let mut running = Self::new(child, name, errors, output);
        let listening = async {
            while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let ended = tokio::select! {
            listening = timeout(START, listening) => listening.is_err(),
            _ = running.child.wait() => true,
        };
        if ended {
            return Err(format!("{name} did not listen on port {port}: {}", running.errors().await).into());
        }
        Ok(running)
    }

    /// Ends the program, and returns the end of its standard error.
    pub(crate) async fn errors(&mut self) -> String {
        let ended = match self.child.try_wait() {
            // `errors` is `None` after this process has killed the program.
            Ok(Some(status)) if self.errors.is_some() => format!("{} ended by itself, {status}; ", self.name),
            _ => String::new(),
        };
        ended + &tail(self.log().await)
    }

    /// Ends the program, and returns its standard error.
    pub(crate) async fn log(&mut self) -> &str {
        if let Some(errors) = self.errors.take() {
            let _ = self.child.kill().await;
            let text = timeout(Duration::from_secs(5), errors).await;
            self.log = text.ok().and_then(Result::ok).unwrap_or_default();
        }
        &self.log
    }
}

/// Exit status and output of a program that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit status, or `None` if the program took too long.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) output: String,
    errors: String,
}

impl Ended {
    pub(crate) fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Returns whether the standard error has these words.
    pub(crate) fn logged(&self, words: &str) -> bool {
        self.errors.contains(words)
    }

    /// Describes the exit status, and quotes the end of the output.
    pub(crate) fn describe(&self) -> String {
        let how =
            self.status.map_or("it took too long and was killed".to_owned(), |status| status.to_string());
        let text = if self.errors.trim().is_empty() { &self.output } else { &self.errors };
        format!("{how}: {}", tail(text))
    }
}

/// Runs a program to its end, or kills it after `limit`.
pub(crate) async fn finish(name: &str, command: &mut Command, limit: Duration) -> Result<Ended, Failure> {
    let mut child = spawn(name, command)?;
    let (output, errors) = (keep(child.stdout.take()), keep(child.stderr.take()));
    let status = match timeout(limit, child.wait()).await {
        Ok(status) => Some(status?),
        Err(_) => {
            child.kill().await?;
            None
        }
    };
    // A child of the program may hold the pipes open, so the wait has a limit.
    let mut texts = Vec::new();
    for text in [output, errors] {
        texts.push(timeout(Duration::from_secs(5), text).await.ok().and_then(Result::ok).unwrap_or_default());
    }
    let errors = texts.pop().unwrap_or_default();
    Ok(Ended { status, output: texts.pop().unwrap_or_default(), errors })
}

/// Runs a program, and returns the lines that it prints.
///
/// # Errors
/// The program can't start, or fails.
pub(crate) async fn lines(command: &mut Command) -> Result<Vec<String>, Failure> {
    let name = format!("{:?}", command.as_std());
    let ended = finish(&name, command, START).await?;
    if !ended.succeeded() {
        return Err(format!("{name}: {}", ended.describe()).into());
    }
    Ok(ended.output.lines().map(str::to_owned).collect())
}

fn spawn(name: &str, command: &mut Command) -> Result<Child, Failure> {
    // The report shows the output without colours.
    command.env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let program = command.as_std().get_program().to_owned();
    command.spawn().map_err(|error| format!("{name}: can't start {}: {error}", program.display()).into())
}

/// Reads to the end, and keeps the last bytes.
fn keep(pipe: Option<impl AsyncRead + Unpin + Send + 'static>) -> JoinHandle<String> {
    tokio::spawn(async move {
        let mut kept = Vec::new();
        let Some(mut pipe) = pipe else { return String::new() };
        let mut buffer = [0; 8192];
        while let Ok(read @ 1..) = pipe.read(&mut buffer).await {
            kept.extend_from_slice(&buffer[..read]);
            if kept.len() > 2 * KEPT {
                kept.drain(..kept.len() - KEPT);
            }
        }
        String::from_utf8_lossy(&kept).into_owned()
    })
}

/// Returns the last lines, or the lines from a panic on. It skips the stack traces of Ruby and C++, which come after the error.
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
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
