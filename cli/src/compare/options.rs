//! The options of `compare` and of the server process that it starts, and the help text.

use std::fmt::Display;
use std::net::IpAddr;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize, Serializer};
use tonic_rdma_commands::cores::Cores;
use tonic_rdma_commands::output::Outputs;
use tonic_rdma_commands::units::{SIZE_FORMS, number, parse_decimal};
use tonic_rdma_commands::{Flavour, List, ValueError, name_list, number_list, parse_set, units};

use crate::compare::modes::mode::Mode;
use crate::compare::plan::{Direction, MAX_BYTES, MAX_CONNECTIONS, MAX_INFLIGHT, MAX_RUNS};
use crate::measure::process::{Allocator, parse_job};
use crate::measure::settings::{Consume, Http2};
use crate::measure::transport::{Encode, parse_provider};
use crate::workload::Workload;

/// The command, as both ends of a run between two hosts name it.
pub(crate) const PROGRAM: &str = "tonic-rdma compare";

pub(crate) const HELP: &str = "\
Lists are separated by commas. A second process is started as the server and ends with this one. Every answer is checked; \
any error makes the exit status 1, bad input makes it 2.

Examples:
  tonic-rdma compare                                       twelve modes, nine cells, within 90 s
  tonic-rdma compare --quick                               fewer cells, within 15 s
  tonic-rdma compare --sizes 64,1MiB --inflight 1,32 --json out.json
  tonic-rdma compare --modes grpc-tcp,grpc-rdma,memcpy --sizes 1GiB --duration 5
  tonic-rdma compare --workload uniform,random,skew        messages of ten buffers
  tonic-rdma compare --workload resnet50 --inflight 1,16   all variables of a model
  tonic-rdma compare --rate 1000,10000,50000               latency under load
  tonic-rdma compare --runtime multi-thread:2 --sizes 64 --inflight 32
  tonic-rdma compare --defaults                            #[tokio::main], not pinned; also rates
  tonic-rdma compare --defaults --runs 5                   five times: medians, spread, outliers
  tonic-rdma compare --container                           the server as another pod
  tonic-rdma compare --connections 100                     cost of connections
  tonic-rdma compare --direction down --sizes 64KiB,16MiB  large replies, small requests
  tonic-rdma compare --listen 10.0.0.1:7000                on one of two hosts: the server
  tonic-rdma compare --server 10.0.0.1:7000                on the other host: the table
  tonic-rdma compare --defaults --quick --at-least 0.5     fails below half of TCP";

/// The options of `compare`.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub(crate) struct CompareOptions {
    /// Modes to compare, which --list-modes explains
    ///
    /// [default: all but grpc-tcp-shared, grpc-reference-tcp and memcpy; with --runtime multi-thread not grpc-tcp-busy; with
    /// --defaults neither grpc-tcp-busy nor grpc-tcp-tuned]
    #[arg(long, value_name = "LIST", value_parser = name_list::<Mode>("mode"))]
    pub(crate) modes: Option<List<Mode>>,
    /// Show each mode with its meaning, and measure nothing
    #[arg(long)]
    #[serde(skip)]
    pub(crate) list_modes: bool,
    /// Payload sizes, such as 64,4k,1MiB [default: 64 to 64MiB]
    ///
    /// Units are binary. gRPC modes take less than 2GiB.
    #[arg(long, value_name = "LIST", value_parser = parse_sizes)]
    pub(crate) sizes: Option<List<u64>>,
    /// Traffic of deep learning, such as skew,resnet50
    ///
    /// Beside or in place of sizes. uniform, random, skew: a message of ten buffers. resnet50, alexnet, inception-v3,
    /// vgg16, lstm, gru, fcn5: one operation sends a message for each of the model's variables. blocks: one operation sends 4096 blocks of 16 KiB
    /// that are scattered in memory.
    #[arg(long, value_name = "LIST", value_parser = parse_workloads)]
    pub(crate) workload: Option<List<Workload>>,
    /// Direction of payloads: up or down
    ///
    /// up: in the request; down: in the reply. The receiver checks them, just as thoroughly in both directions. Modes of tensors without RPC have no direction
    /// down.
    #[arg(long, value_name = "up|down", hide_possible_values = true, default_value = "up")]
    pub(crate) direction: Direction,
    /// Numbers of calls in flight at once, such as 1,32
    ///
    /// With --rate, the largest number of them. [default: 1 to 512, by size]
    #[arg(long, value_name = "LIST", value_parser = number_list::<usize>("number of calls in flight", 1..=MAX_INFLIGHT))]
    pub(crate) inflight: Option<List<usize>>,
    /// Open loop: operations offered a second, such as 1000,20000
    ///
    /// They begin even if answers are late, and latency counts from the time when each was due. [default size: 64]
    #[arg(long, value_name = "LIST", value_parser = parse_rates)]
    pub(crate) rate: Option<List<f64>>,
    /// Cost of connections: latency and memory with 1 to N of them
    ///
    /// With 1, 2, 4 to N, in place of the comparison of sizes. All of them are busy, or all but one idle. --inflight is for each
    /// busy connection. [default modes: grpc-tcp, grpc-rdma, grpc-native; default size: 64]
    #[arg(long, value_name = "N", value_parser = number::<usize>("number of connections", 1..=MAX_CONNECTIONS), conflicts_with_all = ["workload", "rate", "at_least"])]
    pub(crate) connections: Option<usize>,
    /// Time for each cell in each mode, in seconds or with a unit (2m)
    ///
    /// Such as 300ms. [default: such that the run ends within 90 s]
    #[arg(short = 't', long, value_name = "TIME", value_parser = units::parse_time)]
    pub(crate) duration: Option<Duration>,
    /// Measure all cells N times, and show medians and spread
    ///
    /// The spread is that from the least to the largest run. Each run has a new server and new connections. Ratios are medians of the ratios of each run, also for --at-least.
    /// Operations and errors are those of all runs, and the times of the other options are for one run. Warns of a first
    /// run that was slower, and from 5 runs on of runs that stand out.
    #[arg(short = 'r', long, alias = "rounds", value_name = "N", value_parser = number::<u32>("number of runs", 1..=MAX_RUNS), default_value = "1", conflicts_with = "connections")]
    #[serde(skip)]
    pub(crate) runs: u32,
    /// RDMA provider: auto, soft, ibverbs, or a device
    #[arg(short = 'd', long, value_name = "NAME", value_parser = parse_provider, default_value = "auto")]
    pub(crate) provider: String,
    /// RDMA provider of the server, if it differs from the client's [default: as --provider]
    #[arg(long, hide_short_help = true, value_name = "NAME", value_parser = parse_provider)]
    pub(crate) server_provider: Option<String>,
    /// HTTP/2 windows and frames, such as default,tuned
    ///
    /// default, tuned, or STREAM/CONNECTION/FRAME sizes; default is tonic's own, tuned what is best for grpc-tcp. With several
    /// settings each mode over HTTP/2 is measured with each of them, and compared with grpc-tcp of the same setting.
    #[arg(long, value_name = "LIST", value_parser = Http2::parse_list, default_value = "default")]
    pub(crate) http2: List<Http2>,
    /// Encoding of messages: copy or gather
    ///
    /// copy: into one buffer, as generated code does. gather: by reference with tonic_rdma::gather, in all modes.
    #[arg(long, value_name = "copy|gather", hide_possible_values = true, default_value = "copy")]
    pub(crate) encode: Encode,
    /// Use of payloads by receivers: auto, reduce-max, none
    ///
    /// After its check and before its answer. auto: modes that carry tensors find the largest element, gRPC modes leave the
    /// bytes as they are. reduce-max: all modes find the largest element. none: no mode does.
    #[arg(long, value_name = "USE", hide_possible_values = true, default_value = "auto")]
    pub(crate) consume: Consume,
    /// Tokio runtime of both processes [default: idle-polling]
    ///
    /// idle-polling, current-thread or multi-thread[:WORKERS]. idle-polling is current-thread, built with tonic_rdma::runtime::idle_polling; current-thread and multi-thread are as
    /// tokio builds them. Without WORKERS there are as many workers as cores.
    #[arg(long, value_name = "RUNTIME", value_parser = Flavour::parse)]
    pub(crate) runtime: Option<Flavour>,
    /// Keep each process on a core of its own [default: yes]
    ///
    /// Only if both have one thread and there are two cores.
    #[arg(long, value_name = "yes|no", value_parser = parse_yes_or_no)]
    pub(crate) pin: Option<bool>,
    /// Allocator of both: system or mimalloc [default: mimalloc]
    ///
    /// A Rust program has the system's by default.
    #[arg(long, value_name = "NAME", hide_possible_values = true)]
    pub(crate) allocator: Option<Allocator>,
    /// Start the server in a container, as another pod of this node
    ///
    /// It has another user, pid, ipc and mount namespace. The software device then copies bytes through a ring, as between
    /// processes that don't trust one another. Needs unshare (util-linux).
    #[arg(long, conflicts_with = "connections")]
    pub(crate) container: bool,
    /// Record metrics in both processes, as a service does
    ///
    /// A recorder for Prometheus, without a port to read it. With RDMA_HISTOGRAMS=yes native calls have histograms, too.
    #[arg(long, hide_short_help = true)]
    pub(crate) with_metrics: bool,
    /// Settings of a program that chooses none; also calls at rates
    ///
    /// --runtime multi-thread --pin no --allocator system, and cells of its own, among them 1000, 10000 and 30000 calls a second (with --quick 1000), there without --modes in
    /// grpc-tcp, grpc-uds, grpc-rdma and grpc-native. Each of the three options takes precedence if it is given too, and
    /// --sizes, --workload, --inflight or --rate in place of all of these cells.
    #[arg(long, alias = "newcomer")]
    pub(crate) defaults: bool,
    /// Fail if RDMA has less than RATIO times grpc-tcp's throughput
    ///
    /// The exit status is 1 then. Counts operations a second of each mode that uses RDMA, and of grpc-tcp-shared, in each cell without a rate. The
    /// message names mode, cell and ratio.
    #[arg(long, value_name = "RATIO", value_parser = parse_ratio)]
    pub(crate) at_least: Option<f64>,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) outputs: Outputs,
    /// Fewer cells: ends within 15 s, with --defaults within 20 s
    #[arg(short = 'q', long)]
    pub(crate) quick: bool,
    /// Be the server of comparisons that another host runs
    ///
    /// Until a signal comes, and for one caller at a time. Takes --provider and --limit; the caller has the other options. The server of each caller
    /// listens on free ports of the address that was called.
    #[arg(short = 's', long, value_name = "HOST:PORT", conflicts_with_all = [
        "modes", "list_modes", "sizes", "workload", "direction", "inflight", "rate", "connections", "duration", "runs", "server_provider", "http2", "encode", "consume", "runtime", "pin", "allocator", "container", "with_metrics", "defaults", "at_least", "json", "csv", "markdown", "quick", "server"
    ])]
    #[serde(skip)]
    pub(crate) listen: Option<String>,
    /// With --listen: the most memory of a caller's server
    ///
    /// And as much registered memory.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, requires = "listen", default_value = "4GiB")]
    #[serde(skip)]
    pub(crate) limit: u64,
    /// Measure between this host and that where --listen runs
    ///
    /// At this address. --provider is of this end. The modes lack grpc-uds, whose sockets are of one host.
    #[arg(short = 'c', long, value_name = "HOST:PORT", conflicts_with_all = ["connections", "container", "server_provider"])]
    #[serde(skip)]
    pub(crate) server: Option<String>,
}

/// The command line of the server process.
#[derive(Debug, Args)]
pub(crate) struct ServerOptions {
    #[arg(value_parser = parse_job::<ServerJob>)]
    pub(crate) job: ServerJob,
}

/// What the server process needs to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ServerJob {
    /// The options of the process that starts it.
    pub(crate) options: CompareOptions,
    /// Whether it listens for RDMA peers too.
    pub(crate) rdma: bool,
    /// Bytes of the longest payload of a call.
    pub(crate) longest_payload: u64,
    /// The core to run on.
    pub(crate) core: Option<usize>,
    /// What the listening end grants, if the client is on another host.
    pub(crate) grant: Option<Grant>,
    /// The settings of HTTP/2 that it listens with.
    pub(crate) http2: Vec<Http2>,
}

/// What a listening end grants to a server process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// The address to listen on.
    pub(crate) ip: IpAddr,
    /// Bytes of memory, and of registered memory.
    pub(crate) memory: u64,
}

/// What a client asks of a listening end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ServerRequest {
    /// The arguments of its command line.
    pub(crate) arguments: Vec<String>,
    /// Whether it keeps itself on one core.
    pub(crate) pinned: bool,
}

/// Parses payload sizes.
fn parse_sizes(text: &str) -> Result<List<u64>, ValueError> {
    parse_set(text, |item| match units::parse_size(item) {
        Ok(bytes @ 1..=MAX_BYTES) => Ok(bytes),
        Ok(bytes) => {
            let (fault, most) = (if bytes == 0 { "zero" } else { "too large" }, units::size(MAX_BYTES));
            Err(ValueError(format!("size {item:?} is {fault}; accepted: 1 to {most}")))
        }
        Err(reason) => Err(ValueError(format!("bad size {item:?}: {reason}; accepted: {SIZE_FORMS}"))),
    })
}

/// Parses names of workloads.
fn parse_workloads(text: &str) -> Result<List<Workload>, ValueError> {
    parse_set(text, |item| {
        let accepted = || Workload::all().filter_map(Workload::name).collect::<Vec<_>>().join(", ");
        Workload::from_name(item).ok_or_else(|| ValueError::unknown_name("workload", item, accepted()))
    })
}

/// Parses rates of an open loop, in operations offered each second.
fn parse_rates(text: &str) -> Result<List<f64>, ValueError> {
    parse_set(text, |item| parse_decimal("number of operations each second", item, 0.1..=1e6))
}

/// Parses a ratio of throughputs, such as `0.5`.
pub(crate) fn parse_ratio(text: &str) -> Result<f64, ValueError> {
    parse_decimal("ratio", text, 0.01..=1000.0)
}

/// Parses `yes` or `no`.
fn parse_yes_or_no(text: &str) -> Result<bool, ValueError> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(ValueError::unknown("yes, no")),
    }
}

/// The conditions of a run. All of its modes share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Conditions {
    /// The tokio runtime of both processes: `idle-polling`, `current-thread` or `multi-thread:WORKERS`.
    #[serde(serialize_with = "as_text")]
    pub(crate) runtime: Flavour,
    /// Whether the run asks for a core for each process, if it has one thread and there are two cores.
    pub(crate) pin: bool,
    /// The JSON has the allocator that the process really has.
    #[serde(skip)]
    pub(crate) allocator: Allocator,
    /// Whether runtime, pinning and allocator are those of a program that chooses nothing, except for given
    /// options.
    pub(crate) defaults: bool,
}

fn as_text<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

impl Conditions {
    /// Returns the conditions that `options` ask for. `--defaults` sets the conditions of a program that
    /// chooses nothing. Options that are given beside `--defaults` take precedence.
    pub(crate) fn of(options: &CompareOptions) -> Self {
        let defaults = options.defaults;
        let (runtime, allocator) = match defaults {
            false => (Flavour::IdlePolling, Allocator::Mimalloc),
            true => (Flavour::multi_thread(), Allocator::System),
        };
        Self {
            runtime: options.runtime.unwrap_or(runtime),
            pin: options.pin.unwrap_or(!defaults),
            allocator: options.allocator.unwrap_or(allocator),
            defaults,
        }
    }

    /// Returns a core for each of the two processes, if they are kept on one core each. A multi-thread
    /// runtime gets no core, because its threads need more than one.
    pub(crate) fn cores(&self) -> Option<Cores> {
        (self.pin && self.runtime.is_one_thread()).then(Cores::choose).flatten()
    }

    /// Returns the reason why the processes are not pinned.
    pub(crate) const fn why_not_pinned(&self) -> &'static str {
        match (self.pin, self.runtime.is_one_thread()) {
            (false, _) => "--pin no",
            (true, false) => "both use all cores",
            (true, true) => "there are no two cores to pin to",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    impl CompareOptions {
        /// Returns the options that `arguments` give.
        pub(crate) fn of(arguments: &[&str]) -> Self {
            #[derive(clap::Parser)]
            struct Line {
                #[command(flatten)]
                options: CompareOptions,
            }
            let line = ["compare"].iter().chain(arguments);
            match <Line as clap::Parser>::try_parse_from(line) {
                Ok(line) => line.options,
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn lists() {
        assert_eq!(parse_sizes("64, 4KiB").unwrap().0, [64, 4096]);
        assert_eq!(parse_rates("0.1,1000, 2.5e4").unwrap().0, [0.1, 1000.0, 25_000.0]);
        assert_eq!(
            parse_workloads("vgg16,skew").unwrap().0.iter().map(Workload::to_string).collect::<Vec<_>>(),
            ["vgg16", "skew"]
        );
        let options = CompareOptions::of(&["--inflight", "1,512", "--modes", "grpc-uds,grpc-tcp"]);
        assert_eq!(options.inflight, Some(List(vec![1, 512])));
        assert_eq!(options.modes, Some(List(vec![Mode::GrpcUds, Mode::GrpcTcp])));
    }

    #[test]
    fn bad_lists_name_the_culprit() {
        let sizes = |text| parse_sizes(text).unwrap_err().to_string();
        assert!(sizes("64,1024,1KiB").contains("\"1KiB\" is there twice"));
        assert!(sizes("64,,1").contains("empty"));
        assert!(sizes("").contains("empty"));
        assert!(sizes("0").contains("zero"));
        assert!(sizes("3GiB,2TiB").contains("\"2TiB\""));
        assert!(sizes("1025GiB").contains("too large") && sizes("1025GiB").contains("1 TiB"));
        assert!(sizes("99999999999GiB").contains("64 bits"));
        assert!(sizes("4lots").contains("\"4lots\""));
        let workloads = |text| parse_workloads(text).unwrap_err().to_string();
        assert!(workloads("resnet").contains("\"resnet\"") && workloads("resnet").contains("skew, resnet50"));
        assert!(workloads("gru,gru").contains("twice"));
        for bad in ["0", "-1", "nan", "inf", "2e6", "0.01", "50%", "1k", "1,,2"] {
            assert!(
                parse_rates(bad).unwrap_err().to_string().contains("empty")
                    || parse_rates(bad).unwrap_err().to_string().contains("0.1 to 1000000"),
                "{bad}"
            );
        }
    }

    #[test]
    fn ratios_that_make_no_sense_are_refused() {
        assert_eq!((parse_ratio("0.5"), parse_ratio("2")), (Ok(0.5), Ok(2.0)));
        for bad in ["", "0", "-1", "nan", "inf", "half", "50%", "1e9"] {
            assert!(parse_ratio(bad).unwrap_err().to_string().contains("0.01 to 1000"), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(text in "[0-9a-zA-Z,. -]{0,40}") {
            let _ = parse_sizes(&text);
            let _ = parse_workloads(&text);
            let _ = parse_rates(&text);
            let _ = parse_ratio(&text);
            let _ = parse_yes_or_no(&text);
        }

        #[test]
        fn distinct_sizes_are_all_kept(sizes in proptest::collection::hash_set(1..=MAX_BYTES, 1..9)) {
            let sizes: Vec<u64> = sizes.into_iter().collect();
            let text = sizes.iter().map(|bytes| units::size(*bytes)).collect::<Vec<_>>().join(",");
            prop_assert_eq!(parse_sizes(&text).map(|list| list.0), Ok(sizes));
        }
    }
}

#[cfg(test)]
mod conditions_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    fn of(arguments: &[&str]) -> Conditions {
        Conditions::of(&CompareOptions::of(arguments))
    }

    #[test]
    fn explicit_options_override_the_conditions_of_defaults() {
        let usual = of(&[]);
        assert_eq!((usual.runtime, usual.pin), (Flavour::IdlePolling, true));
        assert_eq!((usual.allocator, usual.defaults), (Allocator::Mimalloc, false));
        let defaults = of(&["--defaults"]);
        assert_eq!((defaults.runtime, defaults.pin), (Flavour::multi_thread(), false));
        assert_eq!((defaults.allocator, defaults.defaults), (Allocator::System, true));
        assert_eq!(of(&["--newcomer"]), defaults, "the former name");
        for (arguments, expected) in [
            (["--runtime", "current-thread"], Conditions { runtime: Flavour::CurrentThread, ..defaults }),
            (["--pin", "yes"], Conditions { pin: true, ..defaults }),
            (["--allocator", "mimalloc"], Conditions { allocator: Allocator::Mimalloc, ..defaults }),
        ] {
            assert_eq!(of(&[&arguments[..], &["--defaults"]].concat()), expected);
            assert_eq!(of(&[&["--defaults"][..], &arguments].concat()), expected);
        }
    }

    #[test]
    fn processes_are_pinned_only_with_one_thread_and_without_pin_no() {
        assert_eq!(of(&[]).cores(), Cores::choose());
        assert_eq!(of(&["--runtime", "current-thread"]).cores(), Cores::choose());
        for (arguments, reason) in [
            (&["--pin", "no"][..], "--pin no"),
            (&["--defaults"], "--pin no"),
            (&["--defaults", "--pin", "yes"], "both use all cores"),
            (&["--runtime", "multi-thread:1"], "both use all cores"),
        ] {
            assert_eq!((of(arguments).cores(), of(arguments).why_not_pinned()), (None, reason));
        }
    }
}
