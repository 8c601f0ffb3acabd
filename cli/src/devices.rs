//! `devices`: what there is, its limits, and why something can't be used.

use std::io::Write;

use comfy_table::{Table, presets};
use serde::Serialize;
use tonic_rdma::verbs::{self, DeviceAttributes, FoundDevice};

use crate::args::DevicesOptions;
use crate::failure::Failure;
use crate::units;

/// What is printed.
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
}

#[derive(Debug, Serialize)]
struct Limit {
    what: &'static str,
    value: String,
}

/// Something about the machine or this user that matters for RDMA.
#[derive(Debug, Serialize)]
struct Finding {
    what: &'static str,
    found: String,
    /// What to do, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// Lists the devices; fails if none is usable.
pub(crate) fn run(options: &DevicesOptions) -> Result<(), Failure> {
    let report = Report {
        devices: verbs::devices().into_iter().map(Device::new).collect(),
        findings: vec![memlock(), open_files(), kernel_devices()],
    };
    let text = if options.json {
        serde_json::to_string_pretty(&report).map_err(|error| Failure::run(error.to_string()))?
    } else {
        report.to_text()
    };
    writeln!(std::io::stdout(), "{text}").map_err(|error| Failure::output(&error))?;
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
            Err(reason) => (Vec::new(), Some(reason.clone())),
        };
        Self { name: found.name, provider: found.provider, usable: reason.is_none(), reason, limits }
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
            if !device.limits.is_empty() {
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

/// The limit on locked memory, which devices of the kernel's need to register memory.
fn memlock() -> Finding {
    const LITTLE: u64 = 64 << 20;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let found = limit.map_or("unlimited".to_owned(), units::rough_size);
    let advice = limit.filter(|limit| *limit < LITTLE).map(|_| {
        "too little for a hardware device (the software device locks nothing): raise it with `ulimit -l unlimited`, \
         LimitMEMLOCK=infinity in a systemd unit, or memlock in /etc/security/limits.conf"
            .to_owned()
    });
    Finding { what: "locked memory (RLIMIT_MEMLOCK)", found, advice }
}

/// The limit on open files: a connection holds two.
fn open_files() -> Finding {
    const FEW: u64 = 4096;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let found = limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let advice = limit.filter(|limit| *limit < FEW).map(|limit| {
        format!(
            "a connection holds two descriptors, so about {} fit: raise it with `ulimit -n 65536`",
            limit / 2
        )
    });
    Finding { what: "open files (RLIMIT_NOFILE)", found, advice }
}

/// Whether this user may open what the kernel's RDMA devices are used through.
fn kernel_devices() -> Finding {
    let what = "/dev/infiniband";
    let Ok(entries) = std::fs::read_dir(what) else {
        return Finding { what, found: "not there: no RDMA device has a driver loaded".into(), advice: None };
    };
    let closed: Vec<String> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| std::fs::OpenOptions::new().read(true).write(true).open(path).is_err())
        .map(|path| path.display().to_string())
        .collect();
    if closed.is_empty() {
        return Finding { what, found: "there, and open to this user".into(), advice: None };
    }
    let advice = Some("give this user access (group rdma, or a udev rule), or run as one that has it".into());
    Finding { what, found: format!("there, but closed to this user: {}", closed.join(", ")), advice }
}
