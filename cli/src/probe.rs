//! `probe`: what a client of an address gets, and why.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use tokio::runtime::Builder;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic::{Code, Request};
use tonic_rdma::gather::GatherCodec;
use tonic_rdma::{Config, RdmaChannel, Verdict};
use tonic_rdma_commands::statistics::quantile;
use tonic_rdma_commands::{Context as _, Failure, output, units};

use crate::devices::show;

pub(crate) const HELP: &str = "\
The exit status is 0 over RDMA, 3 over TCP, and 1 if there is no connection or no gRPC server. The variables of a client, \
such as RDMA_POLICY and RDMA_DEVICE, hold here too. A round trip is a call of a method that no server has, so it needs no \
service; the server may count it as a failed call.

Examples:
  tonic-rdma probe 10.0.0.7:50051
  tonic-rdma probe --json http://parameters.example:50051
  RDMA_POLICY=require tonic-rdma probe 10.0.0.7:50051     an error with the reason in place of TCP";

/// A method that no server has. Servers answer it without an application's code.
const METHOD: &str = "/tonic_rdma.Probe/RoundTrip";
/// The calls whose times are shown.
const CALLS: usize = 200;

/// The options of `probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeOptions {
    /// The server: HOST:PORT, or an http URL
    #[arg(value_name = "HOST:PORT", required_unless_present = "json")]
    server: Option<String>,
    /// Longest time for connection and all calls, such as 5s or 300ms
    ///
    /// Without a unit it is in seconds.
    #[arg(long, value_name = "TIME", default_value = "30", value_parser = units::parse_time)]
    timeout: Duration,
    /// Write JSON to this file; without FILE, print it in place of the text
    #[arg(short = 'J', long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
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
    let (server, json) = match (&options.server, options.json.as_deref()) {
        (Some(server), json) => (server.clone(), json),
        // In `probe --json HOST:PORT` clap takes the server for the file.
        (None, Some(file)) if file.to_string_lossy().contains(':') => {
            (file.to_string_lossy().into_owned(), Some(Path::new("-")))
        }
        (None, _) => {
            return Err(Failure::usage("the server is missing; accepted: HOST:PORT, or an http URL"));
        }
    };
    output::check_files(&[("--json", json)])?;
    let url = if server.contains("://") { server.clone() } else { format!("http://{server}") };
    if url.starts_with("https:") {
        return Err(Failure::usage(format!("{url}: probe has no certificates for https")));
    }
    let refusal = || Failure::usage(format!("{server:?} is no server; accepted: HOST:PORT, or an http URL"));
    let endpoint = Endpoint::from_shared(url.clone()).map_err(|_| refusal())?;
    // A URL may leave the port out.
    if !url.starts_with("http://") || (url != server && endpoint.uri().port_u16().is_none()) {
        return Err(refusal());
    }
    let runtime = Builder::new_current_thread().enable_all().build().context("can't start a runtime")?;
    let probed = runtime.block_on(async {
        let report = tokio::time::timeout(options.timeout, probe(&url, endpoint, config)).await;
        report.unwrap_or_else(|_| Err(Failure::run(format!("{url}: no answer within {:?}", options.timeout))))
    });
    let report = probed?;
    show(&report.to_text(), json, &report)?;
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
