//! `devices`: lists the devices, their limits, and the reasons why a device can't be used.

mod machine;
mod self_test;

use std::path::{Path, PathBuf};

use clap::Args;
use comfy_table::{Table, presets};
use machine::Finding;
use self_test::{Test, self_test};
use serde::{Serialize, Serializer};
use tonic_rdma::Config;
use tonic_rdma_commands::{Failure, output, units};
use tonic_rdma_verbs::{DeviceAttributes, FoundDevice, FoundGid, FoundPort, PathSettings};

/// The options of `devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesOptions {
    /// Test SEND, WRITE and READ on each usable device, within this process
    ///
    /// The times are the shortest ones while one thread polls both ends. They show that the device works, and not how
    /// fast calls are, which `tonic-rdma compare` measures.
    #[arg(long)]
    check: bool,
    /// Write JSON to this file; without FILE, print it in place of the text
    #[arg(short = 'J', long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// The output of the command.
#[derive(Debug, Serialize)]
struct Report {
    devices: Vec<Device>,
    #[serde(serialize_with = "by_name")]
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    provider: &'static str,
    usable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "limits_by_name")]
    limits: Vec<Limit>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ports: Vec<Port>,
    /// The results of the self-test, with `--check`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tests: Vec<Test>,
}

#[derive(Debug, Serialize)]
struct Port {
    number: u8,
    state: String,
    link: &'static str,
    mtu: u16,
    gids: Vec<Gid>,
}

#[derive(Debug, Serialize)]
struct Gid {
    index: u32,
    address: String,
    /// Whether connections use this GID by default, without RDMA_GID_INDEX.
    chosen: bool,
}

/// A limit or an ability of a device, with its names in JSON and in the text.
#[derive(Debug)]
struct Limit {
    name: &'static str,
    what: &'static str,
    value: LimitValue,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum LimitValue {
    Bytes(u64),
    Count(u32),
    Ability(bool),
}

fn by_name<S: Serializer>(findings: &[Finding], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(findings.iter().map(|finding| (finding.name, finding.to_json())))
}

fn limits_by_name<S: Serializer>(limits: &[Limit], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(limits.iter().map(|limit| (limit.name, &limit.value)))
}

/// Lists the devices. Fails if none is usable, and if RDMA_DEVICE names none of them.
pub(crate) fn run(options: &DevicesOptions) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    let json = options.json.as_deref();
    output::check_files(&[("--json", json)])?;
    let mut devices: Vec<Device> = tonic_rdma_verbs::devices().into_iter().map(Device::new).collect();
    if options.check {
        devices.iter_mut().filter(|device| device.usable).for_each(|device| device.check(config.path()));
    }
    let report = Report { devices, findings: machine::findings() };
    show(&report.to_text(), json, &report)?;
    if let Some(name) = std::env::var_os("RDMA_DEVICE")
        && report.devices.iter().all(|device| *device.name != *name)
    {
        let names: Vec<&str> = report.devices.iter().map(|device| device.name.as_str()).collect();
        let (name, names) = (name.display(), names.join(", "));
        return Err(Failure::usage(format!("RDMA_DEVICE={name} names no device here; there are: {names}")));
    }
    if report.devices.iter().any(|device| device.usable) {
        Ok(())
    } else {
        Err(Failure::run("no device is usable; the reasons are above"))
    }
}

impl Device {
    fn new(found: FoundDevice) -> Self {
        let (limits, reason) = match &found.state {
            Ok(attributes) => (limits(attributes), None),
            Err(reason) => (Vec::new(), Some(reason.to_string())),
        };
        let usable = reason.is_none();
        let gid = |gid: FoundGid| Gid { index: gid.index, address: gid.address, chosen: gid.chosen };
        let port = |port: FoundPort| Port {
            number: port.number,
            state: port.state,
            link: port.link,
            mtu: port.mtu,
            gids: port.gids.into_iter().map(gid).collect(),
        };
        let ports = found.ports.into_iter().map(port).collect();
        Self { name: found.name, provider: found.provider, usable, reason, limits, ports, tests: Vec::new() }
    }

    /// Runs the self-test. A device that fails is not usable.
    fn check(&mut self, settings: &PathSettings) {
        self.tests = self_test(&self.name, settings);
        let failed = self.tests.iter().find_map(|test| Some((test.operation, test.failure.as_deref()?)));
        if let Some((operation, reason)) = failed {
            self.usable = false;
            self.reason = Some(format!("the self-test failed at {operation}: {reason}"));
        }
    }
}

/// Prints `text` and writes `results` to the file of `--json`, or prints them alone if that is stdout.
pub(crate) fn show(text: &str, json: Option<&Path>, results: &impl Serialize) -> Result<(), Failure> {
    if json != Some(Path::new("-")) {
        output::print(&format!("{text}\n"), None)?;
    }
    json.map_or(Ok(()), |path| output::write_json(path, results))
}

fn limits(of: &DeviceAttributes) -> Vec<Limit> {
    use LimitValue::{Ability, Bytes, Count};
    let limit = |name, what, value| Limit { name, what, value };
    vec![
        limit("max_message_bytes", "longest message", Bytes(of.max_message_size)),
        limit("max_work_requests", "work requests outstanding on a queue", Count(of.max_work_requests)),
        limit("max_segments", "segments of a work request", Count(of.max_segments)),
        limit("max_inline_bytes", "inline bytes", Bytes(of.max_inline.into())),
        limit("max_outstanding_reads", "RDMA READs outstanding", Count(of.max_outstanding_reads)),
        limit("max_completions", "completions of a completion queue", Count(of.max_completions)),
        limit("max_memory_regions", "memory regions of a protection domain", Count(of.max_memory_regions)),
        limit("immediate_data", "immediate data", Ability(of.immediate)),
        limit("max_shared_receive_queues", "shared receive queues", Count(of.max_shared_receive_queues)),
        limit("memory_windows", "memory windows", Ability(of.memory_windows)),
        limit("locks_memory", "locks the memory that it uses", Ability(of.locks_memory)),
    ]
}

impl LimitValue {
    fn to_text(&self) -> String {
        match *self {
            Self::Bytes(bytes) => units::size(bytes),
            Self::Count(count) => count.to_string(),
            Self::Ability(has) => if has { "yes" } else { "no" }.to_owned(),
        }
    }
}

impl Report {
    fn to_text(&self) -> String {
        let mut text = String::new();
        for device in &self.devices {
            let state =
                device.reason.as_deref().map_or("usable".to_owned(), |why| format!("unusable: {why}"));
            text.push_str(&format!("{} ({}): {state}\n", device.name, device.provider));
            let mut table = Table::new();
            table.load_preset(presets::NOTHING);
            for limit in &device.limits {
                table.add_row(vec![format!("   {}", limit.what), limit.value.to_text()]);
            }
            for port in &device.ports {
                let state = format!("{}, {}, path MTU {}", port.state, port.link, port.mtu);
                table.add_row(vec![format!("   port {}", port.number), state]);
                for gid in &port.gids {
                    let chosen = if gid.chosen { ", taken by default" } else { "" };
                    table.add_row(vec![format!("   GID {}", gid.index), format!("{}{chosen}", gid.address)]);
                }
            }
            for test in &device.tests {
                table.add_row(vec![format!("   self-test, {}", test.operation), test.to_text()]);
            }
            if table.row_count() > 0 {
                text.push_str(&format!("{}\n", table.trim_fmt()));
            }
        }
        for finding in &self.findings {
            text.push_str(&format!("\n{}: {}", finding.what, finding.found));
            if let Some(advice) = &finding.advice {
                text.push_str(&format!("\n   {advice}"));
            }
        }
        text
    }
}
