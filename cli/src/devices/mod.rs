//! `devices`: lists the devices, their limits, and the reasons why a device can't be used.

mod machine;
mod self_test;

use clap::Args;
use comfy_table::{Table, presets};
use machine::Finding;
use self_test::{Test, self_test};
use serde::Serialize;
use tonic_rdma::Config;
use tonic_rdma_commands::process::report_line;
use tonic_rdma_commands::{Context as _, Failure, units};
use tonic_rdma_verbs::{DeviceAttributes, FoundDevice, FoundGid, FoundPort, PathSettings};

/// The options of `devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesOptions {
    /// Test each usable device: SEND, WRITE and READ between two queue pairs of this process
    #[arg(long)]
    check: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The output of the command.
#[derive(Debug, Serialize)]
struct Report {
    devices: Vec<Device>,
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    provider: &'static str,
    usable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
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

#[derive(Debug, Serialize)]
struct Limit {
    what: &'static str,
    value: String,
}

/// Lists the devices. Fails if none is usable, and if RDMA_DEVICE names none of them.
pub(crate) fn run(options: &DevicesOptions) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    let mut devices: Vec<Device> = tonic_rdma_verbs::devices().into_iter().map(Device::new).collect();
    if options.check {
        devices.iter_mut().filter(|device| device.usable).for_each(|device| device.check(config.path()));
    }
    let report = Report { devices, findings: machine::findings() };
    let text = if options.json {
        serde_json::to_string_pretty(&report).context("can't make JSON of the devices")?
    } else {
        report.to_text()
    };
    report_line(text)?;
    if let Some(name) = std::env::var_os("RDMA_DEVICE")
        && report.devices.iter().all(|device| *device.name != *name)
    {
        let names: Vec<&str> = report.devices.iter().map(|device| device.name.as_str()).collect();
        let (name, names) = (name.display(), names.join(", "));
        return Err(Failure::run(format!("RDMA_DEVICE={name} names no device here; there are: {names}")));
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

fn limits(of: &DeviceAttributes) -> Vec<Limit> {
    let limit = |what, value| Limit { what, value };
    let yes = |has| if has { "yes" } else { "no" }.to_owned();
    vec![
        limit("longest message", units::size(of.max_message_size)),
        limit("work requests outstanding on a queue", of.max_work_requests.to_string()),
        limit("segments of a work request", of.max_segments.to_string()),
        limit("inline bytes", units::size(of.max_inline.into())),
        limit("RDMA READs outstanding", of.max_outstanding_reads.to_string()),
        limit("completions of a completion queue", of.max_completions.to_string()),
        limit("memory regions of a protection domain", of.max_memory_regions.to_string()),
        limit("immediate data", yes(of.immediate)),
        limit("shared receive queues", of.max_shared_receive_queues.to_string()),
        limit("memory windows", yes(of.memory_windows)),
        limit("locks the memory that it uses", yes(of.locks_memory)),
    ]
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
                table.add_row(vec![format!("   {}", limit.what), limit.value.clone()]);
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
                let outcome = match (&test.failure, test.micros) {
                    (Some(reason), _) => format!("FAILED: {reason}"),
                    (None, micros) => format!("passed, {} µs", micros.unwrap_or_default()),
                };
                table.add_row(vec![format!("   self-test, {}", test.operation), outcome]);
            }
            if table.row_count() > 0 {
                text.push_str(&format!("{table}\n"));
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
