//! `load`: the same calls of the user's service over TCP, HTTP/2 over RDMA and native calls, in short trials
//! of each transport in turn, so that drift affects all of them alike.
//!
//! No call is made beside those that count, because each may have an effect at the server.

mod results;
mod trial;

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use tonic_rdma::Config;
use tonic_rdma_commands::output::Outputs;
use tonic_rdma_commands::units::{number, parse_decimal};
use tonic_rdma_commands::{
    Context as _, Failure, Flavour, List, Named as _, ValueError, number_list, parse_set, units,
};

use crate::call::channel::{Connection, Server, Transport};
use crate::call::load::results::{Facts, Row};
use crate::call::load::trial::{Amount, Expected, Load, Participant};
use crate::call::service::{self, Services};
use crate::call::{Calls, encode, message};
use crate::compare::plan::{MAX_ARRIVALS, MAX_INFLIGHT};
use crate::measure::machine::Costs;
use crate::measure::process::raise_open_files;
use crate::measure::report::progress_bar;

pub(crate) const HELP: &str = "\
Lists are separated by commas. Only calls that ended with OK, and with the answer of --check if it is given, count as calls and \
have a latency; all others are errors, by their gRPC status. Errors, and calls that were given up unsent, make the exit status \
1. Payloads are encoded before the load begins, so the command has no templates: with several values of -d, calls of a method \
that takes one message send them in turn.

Examples:
  tonic-rdma load 10.0.0.7:50051 grpc.health.v1.Health/Check
  tonic-rdma load 10.0.0.7:50051 my.Sums/Add -d '{\"x\": 1}' --check '{\"sum\": 1}' --total 10000
  tonic-rdma load 10.0.0.7:50051 my.Sums/Add -d @sums.json --inflight 1,32 --connections 4 --json out.json
  tonic-rdma load 10.0.0.7:50051 my.Sums/Add -d '{\"x\": 1}' --rate 1000,10000     calls begin when they are due";

/// Most connections of a transport.
const MAX_CONNECTIONS: u64 = 1000;
/// The most calls in flight in an open loop, unless `--inflight` says another number.
const OPEN_INFLIGHT: usize = 512;
/// The longest trial.
const LONGEST_TRIAL: Duration = Duration::from_secs(1);

/// The options of `load`.
#[derive(Clone, Debug, Args)]
pub(crate) struct LoadOptions {
    /// The server: HOST:PORT, or an http URL
    #[arg(value_name = "URL", value_parser = Server::parse)]
    server: Server,
    /// The method, such as my.package.Service/Method
    ///
    /// The package may be left out if one service alone has the name.
    #[arg(value_name = "SERVICE/METHOD")]
    method: String,
    #[command(flatten)]
    calls: Calls,
    /// The expected answer, or answers of a stream
    ///
    /// In JSON. Several values are for several answers of a stream, or for the values of -d in turn. An
    /// answer that differs is an error.
    #[arg(long, value_name = "JSON")]
    check: Option<String>,
    /// Of tcp, drop-in, native
    ///
    /// drop-in is HTTP/2 over RDMA, and native is RDMA without HTTP/2. Calls that go another way say so.
    #[arg(long, value_name = "LIST", value_parser = parse_transports, default_value = "tcp,drop-in,native")]
    transport: List<Transport>,
    /// Numbers of calls in flight at once [default: 1]
    ///
    /// Over all connections of a transport, such as 1,32. With --rate, the largest number of them [default:
    /// 512].
    #[arg(long, value_name = "LIST", value_parser = number_list::<usize>("number of calls in flight", 1..=MAX_INFLIGHT))]
    inflight: Option<List<usize>>,
    /// Open loop: calls offered each second
    ///
    /// Such as 1000,20000. Calls begin when they are due, even if answers are late, and latency counts from
    /// then.
    #[arg(long, value_name = "LIST", value_parser = parse_rates)]
    rate: Option<List<f64>>,
    /// Time for each transport in each row
    ///
    /// In seconds, or with a unit (300ms, 2m).
    #[arg(short = 't', long, value_name = "TIME", allow_negative_numbers = true, value_parser = units::parse_time, default_value = "5")]
    duration: Duration,
    /// Calls for each transport in each row, not a time
    #[arg(short = 'n', long, value_name = "N", value_parser = number::<u64>("number of calls", 1..=1_000_000_000), conflicts_with = "duration")]
    total: Option<u64>,
    /// Connections that share the calls in flight
    #[arg(long, value_name = "N", value_parser = number::<usize>("number of connections", 1..=MAX_CONNECTIONS), default_value = "1")]
    connections: usize,
    /// Measure everything N times, and show medians
    ///
    /// Each run has new connections. Beside the median of p50 its least and largest run is shown. Calls and
    /// errors are those of all runs.
    #[arg(long, value_name = "N", value_parser = number::<u32>("number of runs", 1..=99), default_value = "1")]
    runs: u32,
    /// Tokio runtime [default: multi-thread]
    ///
    /// idle-polling (one thread, which polls for completions when idle), current-thread, multi-thread (as
    /// many workers as cores), or multi-thread:WORKERS.
    #[arg(long, value_name = "NAME", value_parser = Flavour::parse)]
    runtime: Option<Flavour>,
    #[command(flatten)]
    outputs: Outputs,
}

fn parse_transports(text: &str) -> Result<List<Transport>, ValueError> {
    const ALL: [Transport; 3] = [Transport::Tcp, Transport::DropIn, Transport::Native];
    parse_set(text, |item| {
        let unknown = || ValueError::unknown_name("transport", item, "tcp, drop-in, native");
        ALL.into_iter().find(|transport| transport.name() == item).ok_or_else(unknown)
    })
}

fn parse_rates(text: &str) -> Result<List<f64>, ValueError> {
    parse_set(text, |item| parse_decimal("number of calls each second", item, 0.1..=1e6))
}

/// What each transport is measured with.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cell {
    inflight: usize,
    /// Calls offered each second, in an open loop.
    rate: Option<f64>,
}

impl LoadOptions {
    fn cells(&self) -> Vec<Cell> {
        let usual = if self.rate.is_some() { OPEN_INFLIGHT } else { 1 };
        let inflight = self.inflight.as_ref().map_or_else(|| vec![usual], |List(numbers)| numbers.clone());
        let rates = self
            .rate
            .as_ref()
            .map_or_else(|| vec![None], |List(rates)| rates.iter().copied().map(Some).collect());
        let of_rate = |rate| inflight.iter().map(move |inflight| Cell { inflight: *inflight, rate });
        rates.into_iter().flat_map(of_rate).collect()
    }

    /// Returns the amount of each trial of a transport in `cell`: a time in a closed loop without `--total`, and
    /// else calls.
    fn trials(&self, cell: Cell) -> Vec<Amount> {
        let few = (self.duration.as_secs_f64() / 0.05).clamp(1.0, 10.0) as u32;
        let of_time = few.max(self.duration.div_duration_f64(LONGEST_TRIAL).ceil() as u32);
        // At a rate, a share of the time might be too short for a call.
        let at_rate = |rate: f64| (rate * self.duration.as_secs_f64()).round().max(1.0) as u64;
        let (total, most) = match (self.total, cell.rate) {
            (Some(total), _) => (total, 10),
            (None, Some(rate)) => (at_rate(rate), of_time.into()),
            (None, None) => return vec![Amount::Time(self.duration / of_time); of_time as usize],
        };
        // Latencies of a trial are kept one by one.
        let trials = total.div_ceil(MAX_ARRIVALS as u64).max(total.min(most));
        let share = |index| total * (index + 1) / trials - total * index / trials;
        (0..trials).map(|index| Amount::Calls(share(index))).collect()
    }
}

/// Measures, and shows the results.
pub(crate) fn run(options: &LoadOptions) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    let data = options.calls.text()?;
    options.outputs.check()?;
    // A connection that fails because the limit is too low is reported.
    let _ = raise_open_files();
    let costs = Costs::measure();
    let flavour = options.runtime.unwrap_or_else(Flavour::multi_thread);
    let runtime = flavour.build().context("can't start a runtime")?;
    let trials: usize = options.cells().into_iter().map(|cell| options.trials(cell).len()).sum();
    let steps = trials * options.transport.0.len();
    let progress = progress_bar(steps as u64 * u64::from(options.runs));
    let measured = runtime.block_on(async {
        tokio::select! {
            biased;
            _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
            measured = measure(options, data.as_deref(), &config, &progress) => measured,
        }
    });
    progress.finish_and_clear();
    let (load, runs) = measured?;
    let rows = results::medians(runs);
    let facts = Facts::new(options, &load, flavour, costs, &rows);
    results::show(options, &facts, &rows)
}

/// Prepares the calls, and measures all cells in each run. Returns the rows of each run.
async fn measure(
    options: &LoadOptions,
    data: Option<&str>,
    config: &Config,
    progress: &ProgressBar,
) -> Result<(Arc<Load>, Vec<Vec<Row>>), Failure> {
    let load = Arc::new(prepare(options, data, config).await?);
    let mut runs = Vec::new();
    for _ in 0..options.runs {
        let mut participants = Vec::new();
        for transport in &options.transport.0 {
            let mut connections = Vec::new();
            for _ in 0..options.connections {
                connections.push(Connection::open(&options.server, *transport, config).await?);
            }
            participants.push(Participant::new(*transport, connections)?);
        }
        let mut rows = Vec::new();
        for cell in options.cells() {
            for (index, amount) in options.trials(cell).into_iter().enumerate() {
                let count = participants.len();
                for turn in 0..count {
                    let participant = &mut participants[(index + turn) % count];
                    progress.set_message(participant.transport.to_string());
                    participant.trial(&load, cell, (index, amount)).await?;
                    progress.inc(1);
                }
            }
            for participant in &mut participants {
                let tally = participant.end_cell()?;
                rows.push(Row::new(participant, cell, tally, &load));
            }
        }
        runs.push(rows);
    }
    Ok((load, runs))
}

/// Finds the method, and encodes all messages.
async fn prepare(options: &LoadOptions, data: Option<&str>, config: &Config) -> Result<Load, Failure> {
    let services = match &options.calls.descriptor_set {
        Some(file) => Services::read(file)?,
        None => {
            // This connection is closed before the load begins.
            let transport = options.transport.0.first().copied().unwrap_or(Transport::Auto);
            let connection = Connection::open(&options.server, transport, config).await?;
            let wanted = |names: &[String]| service::wanted(names, Some(&options.method));
            Services::of_server(&connection, &options.calls.header, wanted).await?
        }
    };
    let method = services.method(&options.method)?;
    let payloads = encode(&options.calls.messages(&method, data)?);
    let expected = match &options.check {
        Some(text) => message::parse("--check", &method.output(), text)?,
        None => Vec::new(),
    };
    let (name, turns) = (method.full_name(), if method.is_client_streaming() { 1 } else { payloads.len() });
    if !method.is_server_streaming() && ![0, 1, turns].contains(&expected.len()) {
        let due = if turns == 1 { String::new() } else { format!(" or {turns}, one for each of -d") };
        let given = expected.len();
        return Err(Failure::usage(format!(
            "--check: {name} gives one answer; accepted: 1 value{due}, not {given}"
        )));
    }
    if options.check.is_some() && expected.is_empty() {
        return Err(Failure::usage("--check: there is no value; {} is one"));
    }
    Ok(Load {
        path: service::path(&method)?,
        metadata: options.calls.metadata(),
        payloads: payloads.into(),
        together: method.is_client_streaming(),
        expected: expected.into_iter().map(Expected::new).collect(),
        streams: method.is_server_streaming(),
        deadline: options.calls.deadline,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn options(arguments: &[&str]) -> LoadOptions {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            options: LoadOptions,
        }
        let line = ["load", "localhost:1", "a.B/C"].iter().chain(arguments);
        <Line as clap::Parser>::try_parse_from(line).unwrap().options
    }

    const CLOSED: Cell = Cell { inflight: 1, rate: None };

    fn calls_of(amount: &Amount) -> u64 {
        match amount {
            Amount::Calls(calls) => *calls,
            Amount::Time(_) => 0,
        }
    }

    #[test]
    fn trials_make_exactly_the_calls_or_the_time_that_was_asked_for() {
        for total in [1, 7, 10, 13, 999, 2_000_001, 1_000_000_000] {
            let trials = options(&["--total", &total.to_string()]).trials(CLOSED);
            assert_eq!(trials.iter().map(calls_of).sum::<u64>(), total);
            assert!(trials.iter().all(|amount| (1..=1_000_000).contains(&calls_of(amount))), "{total}");
        }
        for (time, count) in [("10ms", 1), ("200ms", 4), ("5", 10), ("1m", 60)] {
            assert_eq!(options(&["--duration", time]).trials(CLOSED).len(), count, "{time}");
        }
        // At a rate: the calls of each trial.
        for (rate, time, calls) in [
            (1.0, "5", vec![1; 5]),
            (2.9, "5", [vec![1; 5], vec![2; 5]].concat()),
            (10.0, "5", vec![5; 10]),
            (1e6, "5", vec![500_000; 10]),
            (0.1, "1m", vec![1; 6]),
            (0.1, "5", vec![1]),
            (1000.0, "10ms", vec![10]),
        ] {
            let trials = options(&["--duration", time]).trials(Cell { inflight: 1, rate: Some(rate) });
            let mut shares: Vec<u64> = trials.iter().map(calls_of).collect();
            shares.sort_unstable();
            assert_eq!(shares, calls, "{rate} for {time}");
        }
    }

    #[test]
    fn cells_are_rates_by_calls_in_flight() {
        let cell = |inflight, rate| Cell { inflight, rate };
        assert_eq!(options(&[]).cells(), [cell(1, None)]);
        assert_eq!(options(&["--inflight", "1,32"]).cells(), [cell(1, None), cell(32, None)]);
        assert_eq!(options(&["--rate", "5,50"]).cells(), [cell(512, Some(5.0)), cell(512, Some(50.0))]);
    }
}
