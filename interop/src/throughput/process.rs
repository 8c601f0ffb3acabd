//! The processes of a measurement: servers, and a client for each run.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};

use super::cores::{Cores, pin};
use super::options::ServedOptions;
use crate::server::routes;
use crate::transport::{Listener, Transport};
use crate::{Failure, output};

/// Time limit for a process to start, and to end after its measured time.
const SLACK: Duration = Duration::from_secs(20);

/// A running server. Dropping this value kills the server's process. The server also ends by itself when this process ends.
#[derive(Debug)]
pub(super) struct Server {
    _child: Child,
    /// The server's standard input. The server ends when it is closed.
    _stdin: Option<ChildStdin>,
    pub(super) port: u16,
}

impl Server {
    /// Starts this program once more, and waits until it serves.
    pub(super) async fn start(transport: Transport, cores: Option<Cores>) -> Result<Self, Failure> {
        let mut command = Command::new(program()?);
        command.args(["throughput-server", "--transport", &transport.to_string()]);
        if let Some(cores) = cores {
            command.args(["--core", &cores.server.to_string()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let failed = |reason: String| Failure::new(format!("the server process ({transport}): {reason}"));
        let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
        let stdin = child.stdin.take();
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            // A port has at most five digits.
            let mut stdout = BufReader::new(stdout.take(16));
            let read = tokio::time::timeout(SLACK, stdout.read_line(&mut line)).await;
            read.map_err(|_| failed(format!("no output for {} s", SLACK.as_secs())))?
                .map_err(|error| failed(error.to_string()))?;
        }
        let port = line.trim().parse();
        let port = port.map_err(|_| failed(format!("expected its port, found {:?}", line.trim())))?;
        Ok(Self { _child: child, _stdin: stdin, port })
    }
}

/// Serves for `throughput` until the standard input ends.
pub(crate) fn serve(options: &ServedOptions) -> Result<(), Failure> {
    options.core.map_or(Ok(()), pin)?;
    let mut builder = tokio::runtime::Builder::new_current_thread();
    if options.transport != Transport::Tcp {
        // This is recommended for servers behind our listener.
        tonic_rdma::runtime::idle_polling(&mut builder);
    }
    let runtime = builder.enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(format!("can't start a runtime: {error}")))?;
    let served = runtime.block_on(async {
        let listener = Listener::bind(options.transport, "127.0.0.1", 0).await?;
        output::line(&listener.port().to_string())?;
        let parent_is_gone = async {
            // Any result means that the parent is gone.
            let _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
        };
        listener.serve(None, routes().await?, parent_is_gone).await
    });
    // The thread that reads standard input can't be stopped.
    runtime.shutdown_background();
    served
}

/// The program that calls the servers.
#[derive(Debug)]
pub(super) struct Client<'a> {
    /// Program in place of our client.
    pub(super) program: Option<&'a Path>,
    pub(super) core: Option<usize>,
}

impl Client<'_> {
    /// Runs the client once, and returns the calls per second.
    pub(super) async fn run(
        &self,
        port: u16,
        bytes: u32,
        inflight: u32,
        duration: Duration,
    ) -> Result<f64, Failure> {
        let mut command = match self.program {
            Some(program) => Command::new(program),
            None => {
                let mut command = Command::new(program()?);
                command.arg("throughput-client");
                command
            }
        };
        command.args([format!("--server_port={port}"), format!("--bytes={bytes}")]);
        command.args([format!("--inflight={inflight}"), format!("--seconds={}", duration.as_secs_f64())]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        // The child inherits the affinity of the thread that starts it.
        self.core.map_or(Ok(()), pin)?;
        let named = self.program.map_or("the client".to_owned(), |program| program.display().to_string());
        let failed = |reason: String| Failure::new(format!("{named}: {reason}"));
        let limit = duration + SLACK;
        let ended = tokio::time::timeout(limit, command.output()).await;
        let output = ended
            .map_err(|_| failed(format!("it did not end within {} s", limit.as_secs())))?
            .map_err(|error| failed(error.to_string()))?;
        if !output.status.success() {
            return Err(failed(format!("it ended with {}", output.status)));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().last().unwrap_or_default();
        let rate = last.trim().parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
        rate.ok_or_else(|| failed(format!("expected calls per second as its last line, found {last:?}")))
    }
}

fn program() -> Result<std::path::PathBuf, Failure> {
    let program = std::env::current_exe();
    program.map_err(|error| Failure::new(format!("can't find the program to start again: {error}")))
}
