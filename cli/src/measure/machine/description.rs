//! The machine that a run was made on.

use std::fs;

use serde::Serialize;

/// The machine of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) kernel: String,
}

impl Machine {
    pub(crate) fn this() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let cpu = model.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim().to_owned());
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu: cpu.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            // All cores, and not only those that this process may use: it has pinned itself to one.
            cores: cpuinfo.lines().filter(|line| line.starts_with("processor")).count().max(1),
            kernel: kernel.trim().to_owned(),
        }
    }
}
