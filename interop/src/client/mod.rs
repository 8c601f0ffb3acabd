//! The client: runs cases one after the other, each on its own connection, and prints the outcomes.

mod case;
mod cases;

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::{Failure, one_line};

use crate::tls::ClientTlsOptions;
use crate::transport::{Target, Transport};

pub(crate) use self::case::{CaseError, Session, SoakOptions};
pub(crate) use self::cases::{Case, all, find};

/// Time limit of a case. Soaks have additional time.
const LIMIT: Duration = Duration::from_secs(if cfg!(test) { 120 } else { 30 });

/// Runs the cases, or lists them. Returns the exit code of failure if a case fails.
pub(crate) async fn run(options: &ClientOptions) -> Result<ExitCode, Failure> {
    if options.list {
        list(options.all)?;
        return Ok(ExitCode::SUCCESS);
    }
    let target = Target {
        host: options.server_host.clone(),
        port: options.server_port.ok_or_else(|| Failure::run("--server_port is missing"))?,
        transport: options.transport,
        require: options.require,
        host_override: options.server_host_override.clone(),
        tls: options.tls.load()?,
        require_device: options.require_device.clone(),
    };
    // Errors in the options end the program before the first case.
    target.endpoint()?;
    // An unknown name ends the program before the first case.
    let mut wanted = Vec::new();
    for name in &options.test_case {
        match name.as_str() {
            "all" => wanted.extend(all().map(Ok)),
            name => wanted.push(find(name)?),
        }
    }

    let mut failed = false;
    let (mut verdict, mut printed) = (String::new(), String::new());
    for case in wanted {
        let (name, result) = match case {
            Ok(case) => (case.name, attempt(case, &target, options.soak, &mut verdict).await),
            Err(absent) => (absent.name, Err(CaseError::Skipped(absent.reason.to_owned()))),
        };
        // Most runs have one verdict for all cases.
        if verdict != printed {
            // stderr may be closed. Scripts don't read it.
            let _ = writeln!(std::io::stderr(), "connected over {verdict}");
            printed.clone_from(&verdict);
        }
        failed |= matches!(result, Err(CaseError::Failed(_)));
        print_outcome(name, &result)?;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Connects, and runs one case. Sets `verdict` to the transport of the connection.
async fn attempt(
    case: &Case,
    target: &Target,
    soak: SoakOptions,
    verdict: &mut String,
) -> Result<(), CaseError> {
    let limit = if case.soaks { LIMIT + cases::soak_timeout(&soak) } else { LIMIT };
    let running = async {
        let connected = target.connect().await.map_err(|error| CaseError::Failed(error.with_causes()))?;
        *verdict = connected.verdict;
        (case.run)(Session::new(connected.channel, target.clone(), soak)).await
    };
    let ended = tokio::time::timeout(limit, running).await;
    ended.unwrap_or_else(|_| Err(CaseError::Failed(format!("it did not end within {} s", limit.as_secs()))))
}

/// Prints the outcome of a case. Reasons quote peers, and must not look like lines of this program.
fn print_outcome(name: &str, result: &Result<(), CaseError>) -> Result<(), Failure> {
    report_line(match result {
        Ok(()) => format!("{name} ok"),
        Err(CaseError::Skipped(reason)) => format!("{name} skipped: {}", one_line(reason)),
        Err(CaseError::Failed(reason)) => format!("{name} failed: {}", one_line(reason)),
    })
}

fn list(absent: bool) -> Result<(), Failure> {
    for case in all() {
        report_line(case.name)?;
    }
    for case in cases::ABSENT.iter().filter(|_| absent) {
        report_line(format!("{} not here: {}", case.name, case.reason))?;
    }
    Ok(())
}

/// Options of `client`.
#[derive(Debug, Args)]
pub(crate) struct ClientOptions {
    /// Host to connect to
    #[arg(long = "server_host", default_value = "127.0.0.1")]
    pub(crate) server_host: String,
    /// Port to connect to
    #[arg(long = "server_port", required_unless_present = "list")]
    pub(crate) server_port: Option<u16>,
    /// Host in certificates and in the requests' authority [default: the one of --server_host]
    #[arg(long = "server_host_override", value_name = "HOST")]
    pub(crate) server_host_override: Option<String>,
    /// Cases to run, in this order, or `all`; --list names them
    #[arg(
        long = "test_case",
        value_name = "NAME[,NAME...]",
        value_delimiter = ',',
        required_unless_present = "list"
    )]
    pub(crate) test_case: Vec<String>,
    /// List the cases, one on each line
    #[arg(long)]
    pub(crate) list: bool,
    /// With --list: also list the official cases that are missing here, with the reason
    #[arg(long, requires = "list")]
    pub(crate) all: bool,
    /// Transport of the calls: ours, ours with native calls, or tonic's own TCP as a control
    #[arg(long, default_value = "rdma")]
    pub(crate) transport: Transport,
    /// Fail unless the connection uses this transport
    #[arg(long)]
    pub(crate) require: Option<Transport>,
    /// Fail unless the connection uses this RDMA device, such as rxe0
    #[arg(long, value_name = "NAME")]
    pub(crate) require_device: Option<String>,
    #[command(flatten)]
    pub(crate) tls: ClientTlsOptions,
    #[command(flatten)]
    pub(crate) soak: SoakOptions,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Runs one case for tests, which do not check latency.
    pub(crate) async fn run_case(case: &Case, target: &Target) -> Result<(), CaseError> {
        let slow = LIMIT.as_secs() as u32;
        let soak = SoakOptions {
            iterations: 10,
            threads: 2,
            max_failures: 0,
            max_latency_ms: slow * 1000,
            overall_timeout_seconds: Some(slow),
            request_size: 271_828,
            response_size: 314_159,
        };
        attempt(case, target, soak, &mut String::new()).await
    }
}
