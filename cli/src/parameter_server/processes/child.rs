//! A child process: told what to do, heard through a channel that all children share.

use std::process::{ExitStatus, Stdio};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command as Program};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;

use super::control::{Command, Report};
use crate::failure::Failure;

/// Which process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Server,
    Worker(usize),
}

impl std::fmt::Display for Who {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Server => formatter.write_str("the server process"),
            Self::Worker(number) => write!(formatter, "worker process {number}"),
        }
    }
}

/// What is heard of a process.
#[derive(Debug)]
pub(crate) enum Heard {
    Said(Report),
    /// It said something else.
    Nonsense(String),
    Ended(Option<ExitStatus>),
}

/// A process that runs; killed when dropped, and ending by itself when this process does.
#[derive(Debug)]
pub(crate) struct Child {
    who: Who,
    stdin: ChildStdin,
    listener: AbortHandle,
}

impl Child {
    /// Starts this program once more with `arguments`; what it says goes to `heard`.
    pub(crate) fn start(
        who: Who,
        arguments: &[String],
        heard: UnboundedSender<(Who, Heard)>,
    ) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| Failure::run(format!("can't start {who}: {error}"));
        let program = std::env::current_exe().map_err(failed)?;
        let mut program = Program::new(program);
        // A group of its own: ctrl-c reaches this process alone, which then ends its children.
        program.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = program.kill_on_drop(true).process_group(0).spawn().map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::run(format!("{who} has no pipes")));
        };
        let listener = tokio::spawn(async move {
            listen(who, stdout, &heard).await;
            let _ = heard.send((who, Heard::Ended(child.wait().await.ok())));
        });
        Ok(Self { who, stdin, listener: listener.abort_handle() })
    }

    /// Tells it to do something. One that is gone is heard of by its end.
    pub(crate) async fn tell(&mut self, command: &Command) -> Result<(), Failure> {
        let line = serde_json::to_string(command)
            .map_err(|error| Failure::run(format!("can't tell {}: {error}", self.who)))?;
        let _ = self.stdin.write_all(format!("{line}\n").as_bytes()).await;
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

async fn listen(who: Who, stdout: ChildStdout, heard: &UnboundedSender<(Who, Heard)>) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let said = serde_json::from_str(&line).map_or_else(|_| Heard::Nonsense(line), Heard::Said);
        if heard.send((who, said)).is_err() {
            return;
        }
    }
}
