//! The start and the end of the server process, by the client.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tonic_rdma_commands::Failure;

use super::start_report::{Addresses, StartReport};
use crate::compare::conditions::RunContext;
use crate::compare::options::CompareOptions;
use crate::measure::process::container;

/// Longest time until the server process has started.
const START: Duration = Duration::from_secs(20);
/// Longest time until the server process has ended by itself.
const END: Duration = Duration::from_secs(1);

/// A running server. The drop of this value kills the server. The server ends by itself when this process ends.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    /// The server ends when this pipe closes.
    stdin: Option<ChildStdin>,
    /// The addresses of the server.
    pub(crate) addresses: Addresses,
}

impl ServerProcess {
    /// Starts this program again as the server, and waits until the server has started. `rdma`: it listens for RDMA peers, too.
    pub(crate) async fn start(
        rdma: bool,
        longest_payload: u64,
        options: &CompareOptions,
        context: &RunContext,
    ) -> Result<Self, Failure> {
        let RunContext { conditions, cores, .. } = context;
        let program = std::env::current_exe()
            .map_err(|error| Failure::run("can't find the program to start as the server").because(error))?;
        let mut command = match options.container {
            true => Command::from(container::command(&program)),
            false => Command::new(program),
        };
        let provider = options.server_provider.as_ref().unwrap_or(&options.provider);
        command.args(["compare-server", "--provider", provider, "--http2", &options.http2.name()]);
        let (runtime, allocator) = (conditions.runtime.to_string(), conditions.allocator);
        command.args(["--runtime", &runtime, "--consume", &options.consume.to_string()]);
        command.args(["--allocator", allocator.name(), "--direction", options.direction.name()]);
        command.args(["--encode", options.encode.name()]);
        command.args(["--connections", &options.connections.unwrap_or(1).to_string()]);
        command.args(["--longest-payload", &longest_payload.to_string()]);
        allocator.choose_for(command.as_std_mut());
        if rdma {
            command.arg("--rdma");
        }
        if let Some(cores) = cores {
            command.args(["--core", &cores.server.to_string()]);
        }
        // The server gets a process group of its own. So ctrl-c reaches this process alone, which then ends the server.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).process_group(0);
        let mut child =
            command.spawn().map_err(|error| Failure::run("can't start the server process").because(error))?;

        let stdin = child.stdin.take();
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            let mut stdout = BufReader::new(stdout);
            let read = tokio::time::timeout(START, stdout.read_line(&mut line)).await;
            read.map_err(|_| {
                Failure::run(format!("the server process did not start within {} s", START.as_secs()))
            })?
            .map_err(|error| Failure::run("can't read from the server process").because(error))?;
        }
        match serde_json::from_str(&line) {
            Ok(StartReport::Ready(addresses)) => Ok(Self { child, stdin, addresses }),
            Ok(StartReport::Failed { reason, usage: true }) => Err(Failure::usage(reason)),
            Ok(StartReport::Failed { reason, usage: false }) => Err(Failure::run(reason)),
            Err(_) => Err(match child.wait().await {
                Ok(status) => ended(status),
                Err(error) => Failure::run("the server process did not start").because(error),
            }),
        }
    }

    /// Returns the process's number, unless the process has ended.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for an unexpected end of the server, and returns the failure to report.
    pub(crate) async fn end(&mut self) -> Failure {
        match self.child.wait().await {
            Ok(status) => ended(status),
            Err(error) => Failure::run("lost the server process").because(error),
        }
    }

    /// Returns `result`, or the end of the server if that is the likely reason of a failure.
    pub(crate) async fn explain<T>(&mut self, result: Result<T, Failure>) -> Result<T, Failure> {
        match result {
            // Connections break before the end of the process can be seen. On a busy machine that may take seconds.
            Err(failure @ Failure::Run { .. }) => {
                let end = tokio::time::timeout(Duration::from_secs(5), self.end()).await;
                Err(end.unwrap_or(failure))
            }
            other => other,
        }
    }

    /// Ends the server. In a container, the child that is waited for ends after the server.
    pub(crate) async fn stop(mut self) {
        drop(self.stdin.take());
        if tokio::time::timeout(END, self.child.wait()).await.is_ok() {
            return;
        }
        // Killing fails only if the process has already ended.
        let _ = self.child.kill().await;
    }
}

fn ended(status: ExitStatus) -> Failure {
    Failure::run(format!("the server process ended in the middle of the run ({status})"))
}
