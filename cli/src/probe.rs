//! `probe`: what a client of an address gets, and why.

use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use tokio::runtime::Builder;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic::{Code, Request};
use tonic_rdma::gather::GatherCodec;
use tonic_rdma::{Config, RdmaChannel, Verdict};
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::statistics::quantile;
use tonic_rdma_commands::{Context as _, Failure, units};

pub(crate) const HELP: &str = "\
The exit status is 0 over RDMA, 3 over TCP, and 1 if there is no connection or no gRPC server. The variables of a client, \
such as RDMA_POLICY and RDMA_DEVICE, hold here too. A round trip is a call of a method that no server has, so it needs no \
service; the server may count it as a failed call.

Examples:
  tonic-rdma probe 10.0.0.7:50051
  tonic-rdma probe --json http://parameters.example:50051";

/// A method that no server has. Servers answer it without an application's code.
const METHOD: &str = "/tonic_rdma.Probe/RoundTrip";
/// The calls whose times are shown.
const CALLS: usize = 200;

/// The options of `probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeOptions {
    /// The server: HOST:PORT, or an http URL
    #[arg(value_name = "HOST:PORT")]
    server: String,
    /// The longest time for the connection and all calls, in seconds or with a unit (300ms, 2m)
    #[arg(long, value_name = "TIME", default_value = "30", value_parser = units::parse_time)]
    timeout: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a client gets.
#[derive(Debug, Serialize)]
struct Report {
    server: String,
    peer: String,
    verdict: String,
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    provider: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    native: bool,
    /// The version of the protocol that both ends use.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    /// Negotiation and TCP connection, in milliseconds.
    connect_ms: f64,
    round_trip_p50_us: f64,
    round_trip_p99_us: f64,
}

/// Connects as a client does, and shows what the connection is. Fails if it is not RDMA.
pub(crate) fn run(options: &ProbeOptions) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    let url = match options.server.contains("://") {
        true => options.server.clone(),
        false => format!("http://{}", options.server),
    };
    if url.starts_with("https:") {
        return Err(Failure::usage(format!("{url}: probe has no certificates for https")));
    }
    let endpoint = Endpoint::from_shared(url.clone())
        .map_err(|error| Failure::usage(format!("{:?} is no HOST:PORT", options.server)).because(error))?;
    let runtime = Builder::new_current_thread().enable_all().build().context("can't start a runtime")?;
    let probed = runtime.block_on(async {
        let report = tokio::time::timeout(options.timeout, probe(&url, endpoint, config)).await;
        report.unwrap_or_else(|_| Err(Failure::run(format!("{url}: no answer within {:?}", options.timeout))))
    });
    let report = probed?;
    let text = match options.json {
        true => serde_json::to_string_pretty(&report).context("can't make JSON of the report")?,
        false => report.to_text(),
    };
    report_line(text)?;
    if report.verdict == Verdict::Rdma.to_string() {
        return Ok(());
    }
    Err(Failure::unmet(format!("calls to {url} go over TCP")))
}

async fn probe(url: &str, endpoint: Endpoint, config: Config) -> Result<Report, Failure> {
    let start = Instant::now();
    let channel = RdmaChannel::builder(endpoint).config(config).connect().await;
    let channel = channel.context(format!("can't connect to {url}"))?;
    let connect_ms = start.elapsed().as_secs_f64() * 1e3;
    let mut client = tonic::client::Grpc::new(channel.clone());
    let mut times = Vec::with_capacity(CALLS);
    // The first calls are slower: both ends get memory, and the kernel its caches.
    for call in 0..CALLS + CALLS / 4 {
        let start = Instant::now();
        client.ready().await.context(format!("{url} closed the connection"))?;
        let path = PathAndQuery::from_static(METHOD);
        let answer = client.unary(Request::new(()), path, GatherCodec::<(), ()>::default()).await;
        if let Err(status) = answer
            && !matches!(status.code(), Code::Unimplemented | Code::Unauthenticated | Code::PermissionDenied)
        {
            return Err(Failure::run(format!("{url} does not answer calls")).because(status));
        }
        if call >= CALLS / 4 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    let info = channel.last_connection().ok_or_else(|| Failure::run(format!("{url}: no connection")))?;
    Ok(Report {
        server: url.to_owned(),
        peer: info.peer_addr().to_string(),
        verdict: info.verdict().to_string(),
        reason: info.reason().to_owned(),
        provider: info.provider(),
        device: info.device().map(str::to_owned),
        native: info.is_native(),
        version: info.version(),
        connect_ms,
        round_trip_p50_us: quantile(times.iter().copied(), 0.5),
        round_trip_p99_us: quantile(times, 0.99),
    })
}

impl Report {
    fn to_text(&self) -> String {
        let device = match (&self.device, self.provider) {
            (Some(device), Some(provider)) => format!("\n      device: {device} ({provider})"),
            _ => String::new(),
        };
        let version =
            self.version.map_or_else(String::new, |version| format!("\n    protocol: version {version}"));
        let calls = if self.native { "native" } else { "HTTP/2" };
        format!(
            "      server: {} at {}\n     verdict: {}\n      reason: {}{device}{version}\n       calls: {calls}\n  connecting: {:.1} ms\n  round trip: {} (p50), {} (p99), with a runtime of one thread",
            self.server,
            self.peer,
            self.verdict,
            self.reason,
            self.connect_ms,
            units::micros(self.round_trip_p50_us),
            units::micros(self.round_trip_p99_us),
        )
    }
}
