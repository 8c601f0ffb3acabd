//! The names of the settings and the values that they accept. Setters and environment variables share these
//! rules.

use std::fmt::Display;
use std::time::Duration;

use crate::error::{BadSetting, RdmaError};
use tonic_rdma_verbs::unstable::{soft_takes_directory, units};

/// A setting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    /// The method of `Config`.
    pub(super) name: &'static str,
    /// The environment variable. Empty if there is none.
    pub(super) variable: &'static str,
}

/// A setting of numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Number {
    pub(super) setting: Setting,
    least: u64,
    most: u64,
    /// The variable also takes `auto`.
    auto: bool,
    /// The number is one of bytes, so the variable takes units.
    is_size: bool,
}

/// A setting of a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Time {
    pub(super) setting: Setting,
    least: Duration,
    most: Duration,
    /// The unit of a number without one.
    unit: Duration,
    unit_name: &'static str,
}

pub(super) const POLICY: Setting = setting("policy", "RDMA_POLICY");
pub(super) const PROVIDER: Setting = setting("provider", "RDMA_PROVIDER");
pub(super) const DEVICE: Setting = setting("device", "RDMA_DEVICE");
pub(super) const DEVICE_PORT: Number = number("device_port", "RDMA_DEVICE_PORT", 1, 255);
pub(super) const GID_INDEX: Number = number("gid_index", "RDMA_GID_INDEX", 0, 255);
pub(super) const POLL_MODE: Setting = setting("poll_mode", "RDMA_POLL_MODE");
pub(super) const POLL_CPUS: Setting = setting("poll_cpus", "RDMA_POLL_CPUS");
pub(super) const SPIN_LIMIT: Time = Time {
    setting: setting("spin_limit", "RDMA_SPIN_LIMIT"),
    least: Duration::ZERO,
    most: Duration::from_secs(1),
    unit: Duration::from_micros(1),
    unit_name: "microseconds",
};
pub(super) const COMPLETION_QUEUES: Number = number("completion_queues", "RDMA_COMPLETION_QUEUES", 1, 64);
pub(super) const QUEUE_PAIRS: Number = number("queue_pairs_per_peer", "RDMA_QUEUE_PAIRS_PER_PEER", 1, 64);
pub(super) const EAGER_THRESHOLD: Setting = setting("eager_threshold", "RDMA_EAGER_THRESHOLD");
pub(super) const CHUNK_SIZE: Number =
    Number { auto: true, ..size("chunk_size", "RDMA_CHUNK_SIZE", 4096, 16 << 20) };
pub(super) const RECEIVE_SLOTS: Number = number("receive_slots", "RDMA_RECEIVE_SLOTS", 16, 1024);
pub(super) const SLOT_SIZE: Number = size("slot_size", "RDMA_SLOT_SIZE", 1024, 64 * 1024);
pub(super) const SHARED_RECEIVE: Setting = setting("shared_receive", "RDMA_SHARED_RECEIVE");
pub(super) const MAX_INLINE: Number = size("max_inline", "RDMA_MAX_INLINE", 0, u32::MAX as u64);
pub(super) const QP_QUEUE_DEPTH: Number = number("qp_queue_depth", "RDMA_QP_QUEUE_DEPTH", 64, 4096);
pub(super) const PINNED_LIMIT: Number = size("pinned_limit", "RDMA_PINNED_LIMIT", 1 << 20, 1 << 50);
pub(super) const PLAINTEXT_TENSORS: Setting = setting("plaintext_tensors", "RDMA_PLAINTEXT_TENSORS");
pub(super) const IN_PROCESS: Setting = setting("in_process", "RDMA_IN_PROCESS");
pub(super) const HANDSHAKE_TIMEOUT: Time =
    Time { most: Duration::from_secs(600), ..up_to_a_day("handshake_timeout", "RDMA_HANDSHAKE_TIMEOUT", 1) };
pub(super) const CONNECT_TIMEOUT: Time = up_to_a_day("connect_timeout", "", 1);
pub(super) const PING_INTERVAL: Time = up_to_a_day("ping_interval", "", 1);
pub(super) const PING_TIMEOUT: Time = up_to_a_day("ping_timeout", "", 1);
pub(super) const LINGER: Time = up_to_a_day("linger", "", 0);
pub(super) const QP_TIMEOUT: Number = number("qp_timeout", "RDMA_QP_TIMEOUT", 0, 31);
pub(super) const QP_RETRY_COUNT: Number = number("qp_retry_count", "RDMA_QP_RETRY_COUNT", 0, 7);
pub(super) const QP_SL: Number = number("qp_sl", "RDMA_QP_SL", 0, 15);
pub(super) const TRAFFIC_CLASS: Number = number("traffic_class", "RDMA_TRAFFIC_CLASS", 0, 255);
pub(super) const QP_PKEY_INDEX: Number = number("qp_pkey_index", "RDMA_QP_PKEY_INDEX", 0, 65_535);
pub(super) const QP_MTU: Setting = setting("qp_mtu", "RDMA_QP_MTU");

/// The software device reads this variable itself, because a process has one such device and may have many
/// configurations.
pub(super) const SOFT_DIRECTORY: Setting = setting("from_env (software device)", "RDMA_SOFT_DIR");
/// As [`SOFT_DIRECTORY`].
pub(super) const SOFT_PEERS: Setting = setting("from_env (software device)", "RDMA_SOFT_PEERS");

/// Path MTUs that exist, in bytes (IBA vol. 1, 9.4.3).
const MTUS: [u16; 5] = [256, 512, 1024, 2048, 4096];
/// Limit of CPU numbers, which are below it.
const CPUS: usize = 1024;

const fn setting(name: &'static str, variable: &'static str) -> Setting {
    Setting { name, variable }
}

const fn number(name: &'static str, variable: &'static str, least: u64, most: u64) -> Number {
    Number { setting: setting(name, variable), least, most, auto: false, is_size: false }
}

const fn size(name: &'static str, variable: &'static str, least: u64, most: u64) -> Number {
    Number { is_size: true, ..number(name, variable, least, most) }
}

/// Returns the rule of a time in milliseconds, from `least` of them on.
const fn up_to_a_day(name: &'static str, variable: &'static str, least: u64) -> Time {
    Time {
        setting: setting(name, variable),
        least: Duration::from_millis(least),
        most: Duration::from_secs(24 * 3600),
        unit: Duration::from_millis(1),
        unit_name: "milliseconds",
    }
}

impl Setting {
    /// Returns the error for a value of the variable.
    pub(super) fn refuse_text(&self, value: &str, accepted: impl Into<String>) -> RdmaError {
        self.error(value.into(), accepted.into(), true)
    }

    /// Returns the error for a value that a setter got.
    fn refuse(&self, value: impl Display, accepted: impl Into<String>) -> RdmaError {
        self.error(value.to_string(), accepted.into(), false)
    }

    fn error(&self, value: String, accepted: String, from_environment: bool) -> RdmaError {
        BadSetting { setting: self.name, variable: self.variable, value, accepted, from_environment }.into()
    }
}

impl Number {
    /// Reads a value of the variable.
    pub(super) fn parse<T: TryFrom<u64>>(&self, text: &str) -> Result<T, RdmaError> {
        let value = if self.is_size { units::parse_size(text).ok() } else { text.trim().parse().ok() };
        let value = value.filter(|value| self.takes(*value)).and_then(|value| T::try_from(value).ok());
        value.ok_or_else(|| self.setting.refuse_text(text, self.accepted()))
    }

    /// Checks a value that a setter got.
    pub(super) fn check(&self, value: u64) -> Result<(), RdmaError> {
        if self.takes(value) { Ok(()) } else { Err(self.setting.refuse(value, self.accepted())) }
    }

    fn takes(&self, value: u64) -> bool {
        (self.least..=self.most).contains(&value)
    }

    fn accepted(&self) -> String {
        let Self { least, most, .. } = *self;
        let auto = if self.auto { "auto or " } else { "" };
        if self.is_size {
            format!("takes {auto}a size from {} to {}, {SIZE_UNITS}", units::size(least), units::size(most))
        } else {
            format!("takes {auto}a number from {least} to {most}")
        }
    }
}

impl Time {
    /// Reads a value of the variable.
    pub(super) fn parse(&self, text: &str) -> Result<Duration, RdmaError> {
        let time = units::parse_time(text, self.unit).filter(|time| self.takes(*time));
        time.ok_or_else(|| {
            let accepted =
                format!("{}, in {} or with a unit, such as 120us or 5s", self.accepted(), self.unit_name);
            self.setting.refuse_text(text, accepted)
        })
    }

    /// Checks a value that a setter got.
    pub(super) fn check(&self, value: Duration) -> Result<(), RdmaError> {
        if self.takes(value) {
            return Ok(());
        }
        Err(self.setting.refuse(format_args!("{value:?}"), self.accepted()))
    }

    fn takes(&self, value: Duration) -> bool {
        (self.least..=self.most).contains(&value)
    }

    fn accepted(&self) -> String {
        format!("takes a time from {:?} to {:?}", self.least, self.most)
    }
}

pub(super) const SIZE_UNITS: &str = "in bytes or with a unit, such as 64k or 8GiB";

/// Checks the name of a device: the characters are those that the kernel uses.
fn is_device_name(name: &str) -> bool {
    const LONGEST: usize = 64;
    (1..=LONGEST).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
}

const A_DEVICE: &str = "takes the name of a device, such as mlx5_0";
const CPU_NUMBERS: &str = "takes CPU numbers below 1024, separated by commas";

/// Reads the name of a device.
pub(super) fn parse_device(text: &str) -> Result<String, RdmaError> {
    if is_device_name(text) { Ok(text.into()) } else { Err(DEVICE.refuse_text(text, A_DEVICE)) }
}

/// Checks the name of a device that a setter got.
pub(super) fn check_device(name: &str) -> Result<(), RdmaError> {
    if is_device_name(name) { Ok(()) } else { Err(DEVICE.refuse(format_args!("{name:?}"), A_DEVICE)) }
}

/// Reads a list of CPU numbers.
pub(super) fn parse_cpus(text: &str) -> Result<Vec<usize>, RdmaError> {
    let cpus: Result<Vec<usize>, _> = text.split(',').map(|cpu| cpu.trim().parse()).collect();
    match cpus {
        Ok(cpus) if cpus.iter().all(|&cpu| cpu < CPUS) => Ok(cpus),
        _ => Err(POLL_CPUS.refuse_text(text, CPU_NUMBERS)),
    }
}

/// Checks CPU numbers that a setter got.
pub(super) fn check_cpus(cpus: &[usize]) -> Result<(), RdmaError> {
    if cpus.iter().all(|&cpu| cpu < CPUS) {
        return Ok(());
    }
    Err(POLL_CPUS.refuse(format_args!("{cpus:?}"), CPU_NUMBERS))
}

/// Checks the directory of the software device.
pub(super) fn check_soft_directory(text: &str) -> Result<(), RdmaError> {
    if soft_takes_directory(text) {
        return Ok(());
    }
    Err(SOFT_DIRECTORY.refuse_text(text, "takes the absolute path of a directory"))
}

/// Reads a path MTU.
pub(super) fn parse_mtu(text: &str) -> Result<u16, RdmaError> {
    let bytes = units::parse_size(text).ok();
    let mtu = MTUS.into_iter().find(|mtu| Some(u64::from(*mtu)) == bytes);
    mtu.ok_or_else(|| QP_MTU.refuse_text(text, accepted_mtus()))
}

/// Checks a path MTU that a setter got.
pub(super) fn check_mtu(mtu: u16) -> Result<(), RdmaError> {
    if MTUS.contains(&mtu) { Ok(()) } else { Err(QP_MTU.refuse(mtu, accepted_mtus())) }
}

fn accepted_mtus() -> String {
    format!("takes one of {}", MTUS.map(|mtu| mtu.to_string()).join(", "))
}
