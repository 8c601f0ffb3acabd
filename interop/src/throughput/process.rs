//! The processes of a measurement: servers, and a client for each run.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tokio::runtime::Builder;
use tonic_rdma_commands::cores::{self, Cores};
use tonic_rdma_commands::process::{self, Child, again};

use super::options::ServedOptions;
use crate::output;
use crate::server::routes;
use crate::transport::{Listener, Transport};
use tonic_rdma_commands::Failure;

/// Time limit for a process to start, and to end after its measured time.
const SLACK: Duration = Duration::from_secs(20);

/// Starts this program once more as a server, and waits until it serves. Returns the process and the port. The server also ends by itself
/// when this process ends.
pub(super) fn server(transport: Transport, cores: Option<Cores>) -> Result<(Child, u16), Failure> {
    let mut command = again()?;
    command.args(["throughput-server", "--transport", &transport.to_string()]);
    command.args(cores.map(|cores| format!("--core={}", cores.server)));
    let (child, line) = Child::ready(format!("the server process ({transport})"), command, SLACK)?;
    match line.parse() {
        Ok(port) => Ok((child, port)),
        Err(_) => Err(Failure::run(format!("{}: expected its port, found {line:?}", child.name()))),
    }
}

/// Serves for `throughput` until the standard input ends.
pub(crate) fn serve(options: &ServedOptions) -> Result<(), Failure> {
    options.core.map_or(Ok(()), pin)?;
    process::end_with_stdin(|| ())?;
    let mut builder = Builder::new_current_thread();
    if options.transport != Transport::Tcp {
        // This is recommended for servers behind our listener.
        tonic_rdma::runtime::idle_polling(&mut builder);
    }
    crate::runtime::start(&mut builder)?.block_on(async {
        let listener = Listener::bind(options.transport, "127.0.0.1", 0).await?;
        output::line(&listener.port().to_string())?;
        listener.serve(None, routes().await?, std::future::pending()).await
    })
}

/// Calls the server on `port` by `program`, or by our client without one, and returns the calls per second.
pub(super) fn client(
    program: Option<&Path>,
    core: Option<usize>,
    port: u16,
    bytes: u32,
    inflight: u32,
    duration: Duration,
) -> Result<f64, Failure> {
    let mut command = program.map_or_else(again, |program| Ok(Command::new(program)))?;
    command.args(program.is_none().then_some("throughput-client"));
    command.args([format!("--server_port={port}"), format!("--bytes={bytes}")]);
    command.args([format!("--inflight={inflight}"), format!("--seconds={}", duration.as_secs_f64())]);
    // The child inherits the affinity of the thread that starts it.
    core.map_or(Ok(()), pin)?;
    let name = program.map_or("the client".to_owned(), |program| program.display().to_string());
    let ended = process::run(&name, command, duration + SLACK)?;
    let how = match ended.status {
        None => format!("did not end within {} s", (duration + SLACK).as_secs()),
        Some(status) if !status.success() => format!("ended with {status}"),
        Some(_) => {
            let last = ended.output.lines().last().unwrap_or_default();
            let rate = last.trim().parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
            return rate.ok_or_else(|| {
                format!("{name}: expected calls per second as its last line, found {last:?}").into()
            });
        }
    };
    Err(Failure::run(format!("{name}: it {how}: {}", ended.errors.trim())))
}

fn pin(core: usize) -> Result<(), Failure> {
    cores::pin(core).map_err(|error| Failure::run(format!("can't run on core {core}")).because(error))
}
