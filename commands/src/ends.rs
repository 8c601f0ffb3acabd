//! The two ends of a run between two hosts: how each describes itself, what the caller's options are at the
//! listening end, and what its processes may take there.

use std::process::Command;
use std::sync::Arc;
use std::{fmt, fs};

use clap::{Args, CommandFactory as _, FromArgMatches as _};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use tonic_rdma::unstable::Processors;
use tonic_rdma_verbs::FoundDevice;

use crate::failure::{Context as _, Failure, one_line};
use crate::process::report_line;
use crate::remote::{ClockOffset, Host, Listener, Request};
use crate::start::{prepared, split_color};
use crate::units;

/// The machine of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    cpu: String,
    cores: usize,
    kernel: String,
    /// The CPU time that control groups allow this process, in CPUs; absent without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpu_limit: Option<f64>,
}

impl fmt::Display for Machine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cores, kernel, cpu_limit } = self;
        write!(formatter, "{cpu}, {cores} cores, Linux {kernel}")?;
        match cpu_limit {
            Some(cpus) => write!(formatter, ", limited to {} CPUs", units::digits(*cpus)),
            None => Ok(()),
        }
    }
}

impl Machine {
    /// Returns the number of cores, also of those that this process may not use.
    pub fn cores(&self) -> usize {
        self.cores
    }

    /// Describes this machine.
    pub fn this() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let cpu = model.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim().to_owned());
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu: cpu.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            // All cores, and not only those that this process may use: it has pinned itself to one.
            cores: cpuinfo.lines().filter(|line| line.starts_with("processor")).count().max(1),
            kernel: kernel.trim().to_owned(),
            cpu_limit: Processors::current().limit.map(|thousandths| f64::from(thousandths) / 1e3),
        }
    }
}

/// One of the two hosts of a run between hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct End {
    version: String,
    machine: Machine,
    devices: Vec<String>,
    /// All of it, for people.
    text: String,
}

impl End {
    /// Describes this host.
    fn this() -> Self {
        let machine = Machine::this();
        let device = |found: FoundDevice| {
            let port = found.ports.iter().find(|port| port.state.contains("active")).or(found.ports.first());
            let link = port.map(|port| format!(", {}, MTU {}", port.link, port.mtu)).unwrap_or_default();
            let fault = found.state.err().map(|reason| format!(", can't be used: {reason}"));
            format!("{} ({}{link}{})", found.name, found.provider, fault.unwrap_or_default())
        };
        let devices: Vec<String> = tonic_rdma_verbs::devices().into_iter().map(device).collect();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let text = format!("tonic-rdma {version}; {machine}; {}", devices.join("; "));
        Self { version, machine, devices, text }
    }
}

/// Both ends of a run between two hosts.
#[derive(Clone, Debug, Serialize)]
pub struct Ends {
    client: End,
    server: End,
    server_address: String,
    clock: ClockOffset,
}

impl Ends {
    /// Returns the lines of both, for people.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { client, server, server_address, clock } = self;
        vec![
            ("this end", client.text.clone()),
            ("other end", format!("{server_address}: {}", one_line(&server.text))),
            ("clocks", clock.to_string()),
        ]
    }
}

/// Calls `server`, `HOST:PORT`, where the same program listens, if there is one.
///
/// # Errors
///
/// Fails as [`Host::call`] does.
pub fn call(program: &str, server: Option<&str>) -> Result<Option<(Arc<Host>, Ends)>, Failure> {
    server.map(|address| call_host(program, "--server", address)).transpose()
}

/// Calls `address`, `HOST:PORT`, where the same program listens. `option` gave it.
///
/// # Errors
///
/// Fails as [`Host::call`] does.
pub fn call_host(program: &str, option: &str, address: &str) -> Result<(Arc<Host>, Ends), Failure> {
    let client = End::this();
    let (host, server, clock) = Host::call(program, option, address, &client)?;
    Ok((host, Ends { client, server, server_address: address.to_owned(), clock }))
}

/// Parses the options that a caller of another host has given, as its command line is parsed, so that the same
/// bounds hold.
///
/// # Errors
///
/// Fails if an option is unknown here, or out of its bounds.
pub fn parse_arguments<O: Args>(arguments: &[String]) -> Result<O, Failure> {
    #[derive(clap::Parser)]
    struct Line<O: Args> {
        #[command(flatten)]
        options: O,
    }
    let line = ["caller"].into_iter().chain(arguments.iter().map(String::as_str));
    let matches = prepared(Line::<O>::command()).try_get_matches_from(line);
    let parsed = matches.and_then(|mut matches| Line::<O>::from_arg_matches_mut(&mut matches));
    parsed.map(|line| line.options).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        Failure::usage(format!("the caller's options can't be used here: {first}"))
    })
}

/// Returns the arguments of this process, without `--color` and the first ones: the names of the program and of a
/// subcommand.
///
/// # Errors
///
/// Fails if an argument is no text.
pub fn own_arguments(first: usize) -> Result<Vec<String>, Failure> {
    let text = |argument: std::ffi::OsString| {
        argument.into_string().map_err(|argument| {
            Failure::usage(format!("{} is no text, and can't go to another host", argument.display()))
        })
    };
    split_color(std::env::args_os()).0.into_iter().skip(first).map(text).collect()
}

/// Limits the memory of this process, so that an allocation beyond the limit ends it.
///
/// # Errors
///
/// Fails if the system does not know such a limit.
pub fn limit_memory(bytes: u64) -> Result<(), Failure> {
    /// Address space that the allocator and threads reserve, and mostly don't use.
    const RESERVED: u64 = 4 << 30;
    let hardest = getrlimit(Resource::Data).maximum.unwrap_or(u64::MAX);
    let bytes = Some(bytes.saturating_add(RESERVED).min(hardest));
    let limit = Rlimit { current: bytes, maximum: bytes };
    setrlimit(Resource::Data, limit).context("can't limit the memory of this process")
}

/// Listens on `address` and serves callers until a signal comes. Each of their processes may take `limit` bytes.
///
/// # Errors
///
/// Fails if the limit is too low, and as [`Listener::bind`] and [`Listener::serve`] do.
pub fn listen(
    program: &'static str,
    address: &str,
    limit: u64,
    admit: impl FnMut(&Request) -> Result<(String, Command), Failure>,
) -> Result<(), Failure> {
    let listener = Listener::bind(program, address, &End::this())?;
    // Registered memory has this least limit.
    if limit < 1 << 20 {
        return Err(Failure::usage(format!("--limit: {limit} B is less than 1MiB")));
    }
    let (address, limit) = (listener.address(), units::rough_size(limit));
    if address.ip().is_unspecified() {
        tracing::warn!(
            "{address} is every address of this host: anybody who reaches it can use this host's processor and memory"
        );
    }
    report_line(format!(
        "listening on {address} for {program} --server {address}: one caller at a time, messages and registered memory up to {limit} for each of its processes"
    ))?;
    listener.serve(admit)
}
