//! A child process: commands go to its stdin, and its reports come through a channel that all children share.

use std::process::{ExitStatus, Stdio};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command as Program};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;
use tonic_rdma_commands::Failure;

use super::control::{ChildCommand, Report};

/// The name of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessName {
    /// One of this number of servers.
    Server {
        number: usize,
        of: usize,
    },
    Worker(usize),
}

impl std::fmt::Display for ProcessName {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Server { of: 1, .. } => formatter.write_str("the server process"),
            Self::Server { number, .. } => write!(formatter, "server process {number}"),
            Self::Worker(number) => write!(formatter, "worker process {number}"),
        }
    }
}

/// An event of a child process.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there are few, and none is kept")]
pub(crate) enum ChildEvent {
    Report(Report),
    /// The process wrote a line that is no report.
    Unreadable(String),
    Ended(Option<ExitStatus>),
}

/// A running child process. The drop of this value kills the child. The child ends by itself when this process ends.
#[derive(Debug)]
pub(crate) struct Child {
    name: ProcessName,
    stdin: ChildStdin,
    listener: AbortHandle,
}

impl Child {
    /// Starts this program again with `arguments`. Its reports go to `events`.
    pub(crate) fn start(
        name: ProcessName,
        arguments: &[String],
        events: UnboundedSender<(ProcessName, ChildEvent)>,
    ) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| Failure::run(format!("can't start {name}")).because(error);
        let program = std::env::current_exe().map_err(failed)?;
        let mut program = Program::new(program);
        // The child gets a process group of its own. So ctrl-c reaches this process alone, which then ends its
        // children.
        program.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = program.kill_on_drop(true).process_group(0).spawn().map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::run(format!("{name} has no pipes")));
        };
        let listener = tokio::spawn(async move {
            listen(name, stdout, &events).await;
            let _ = events.send((name, ChildEvent::Ended(child.wait().await.ok())));
        });
        Ok(Self { name, stdin, listener: listener.abort_handle() })
    }

    /// Sends a command. If the child has ended, an event reports the end.
    pub(crate) async fn send(&mut self, command: &ChildCommand) -> Result<(), Failure> {
        let line = serde_json::to_string(command)
            .map_err(|error| Failure::run(format!("can't send a command to {}", self.name)).because(error))?;
        let _ = self.stdin.write_all(format!("{line}\n").as_bytes()).await;
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

async fn listen(name: ProcessName, stdout: ChildStdout, events: &UnboundedSender<(ProcessName, ChildEvent)>) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let report =
            serde_json::from_str(&line).map_or_else(|_| ChildEvent::Unreadable(line), ChildEvent::Report);
        if events.send((name, report)).is_err() {
            return;
        }
    }
}
