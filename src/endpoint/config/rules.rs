//! The settings, in one list: their names, their variables, and the values that they accept. By this list the
//! variables are read, and the values that setters got are checked.

use std::ffi::OsString;
use std::fmt::Display;
use std::time::Duration;

use super::{Config, EagerThreshold, Policy, PollMode, Provider, SharedReceive};
use crate::error::{BadSetting, RdmaError};
use tonic_rdma_verbs::unstable::{soft_takes_directory, units};

/// What is done with the settings.
pub(super) enum Pass<'a> {
    /// Variables that are set give the values.
    Read(&'a dyn Fn(&str) -> Option<OsString>),
    /// The values are checked.
    Check,
}

/// The name of a setting, which is that of a method of `Config`, and its variable, which is empty if there is
/// none.
type Names = (&'static str, &'static str);

/// Reads or checks all settings.
pub(super) fn each(pass: &Pass<'_>, config: &mut Config) -> Result<(), RdmaError> {
    let Config { path, .. } = config;
    pass.number(("qp_timeout", "RDMA_QP_TIMEOUT"), number(0, 31), &mut path.timeout)?;
    pass.number(("qp_retry_count", "RDMA_QP_RETRY_COUNT"), number(0, 7), &mut path.retry_count)?;
    pass.number(("qp_sl", "RDMA_QP_SL"), number(0, 15), &mut path.service_level)?;
    pass.number(("traffic_class", "RDMA_TRAFFIC_CLASS"), number(0, 255), &mut path.traffic_class)?;
    pass.number(("qp_pkey_index", "RDMA_QP_PKEY_INDEX"), number(0, 65_535), &mut path.pkey_index)?;
    pass.mtu(&mut path.mtu)?;
    pass.choice(("policy", "RDMA_POLICY"), POLICIES, &mut config.policy)?;
    pass.choice(("provider", "RDMA_PROVIDER"), PROVIDERS, &mut config.provider)?;
    pass.device(&mut config.device)?;
    pass.optional(("device_port", "RDMA_DEVICE_PORT"), number(1, 255), &mut config.device_port)?;
    pass.optional(("gid_index", "RDMA_GID_INDEX"), number(0, 255), &mut config.gid_index)?;
    pass.choice(("poll_mode", "RDMA_POLL_MODE"), POLL_MODES, &mut config.poll_mode)?;
    pass.cpus(&mut config.poll_cpus)?;
    let spin = Times { least: 0, most: Duration::from_secs(1), unit: MICROSECOND };
    pass.time(("spin_limit", "RDMA_SPIN_LIMIT"), spin, &mut config.spin_limit)?;
    let queues = &mut config.completion_queues;
    pass.number(("completion_queues", "RDMA_COMPLETION_QUEUES"), number(1, 64), queues)?;
    let pairs = &mut config.queue_pairs_per_peer;
    pass.number(("queue_pairs_per_peer", "RDMA_QUEUE_PAIRS_PER_PEER"), number(1, 64), pairs)?;
    pass.threshold(&mut config.eager_threshold)?;
    let chunks = Numbers { auto: true, ..size(4096, 16 << 20) };
    pass.optional(("chunk_size", "RDMA_CHUNK_SIZE"), chunks, &mut config.chunk_size)?;
    pass.number(("receive_slots", "RDMA_RECEIVE_SLOTS"), number(16, 1024), &mut config.receive_slots)?;
    pass.number(("slot_size", "RDMA_SLOT_SIZE"), size(1024, 64 << 10), &mut config.slot_size)?;
    pass.choice(("shared_receive", "RDMA_SHARED_RECEIVE"), SHARED_RECEIVE, &mut config.shared_receive)?;
    pass.optional(("max_inline", "RDMA_MAX_INLINE"), size(0, u32::MAX.into()), &mut config.max_inline)?;
    pass.number(("qp_queue_depth", "RDMA_QP_QUEUE_DEPTH"), number(64, 4096), &mut config.qp_queue_depth)?;
    pass.optional(("pinned_limit", "RDMA_PINNED_LIMIT"), size(1 << 20, 1 << 50), &mut config.pinned_limit)?;
    let limit = &mut config.connection_limit;
    pass.number(("connection_limit", "RDMA_CONNECTION_LIMIT"), size(1 << 20, 1 << 50), limit)?;
    pass.optional(("held_limit", "RDMA_HELD_LIMIT"), size(1 << 20, 1 << 50), &mut config.held_limit)?;
    let tensors = &mut config.plaintext_tensors;
    pass.choice(("plaintext_tensors", "RDMA_PLAINTEXT_TENSORS"), PLAINTEXT_TENSORS, tensors)?;
    pass.in_process(&mut config.in_process)?;
    pass.choice(("histograms", "RDMA_HISTOGRAMS"), YES_OR_NO, &mut config.histograms)?;
    let handshake = Times { most: Duration::from_secs(600), ..up_to_a_day(1) };
    pass.time(("handshake_timeout", "RDMA_HANDSHAKE_TIMEOUT"), handshake, &mut config.handshake_timeout)?;
    let (connect, day) = (&mut config.connect_timeout, up_to_a_day(1));
    pass.time(("connect_timeout", "RDMA_CONNECT_TIMEOUT"), day, connect)?;
    pass.time(("ping_interval", "RDMA_PING_INTERVAL"), day, &mut config.ping_interval)?;
    pass.time(("ping_timeout", "RDMA_PING_TIMEOUT"), day, &mut config.ping_timeout)?;
    pass.time(("linger", ""), up_to_a_day(0), &mut config.linger)?;
    // The software device reads these variables itself, because a process has one such device and may have many
    // configurations.
    pass.choice((SOFT, "RDMA_SOFT_PEERS"), &["user", "trusted-user", "any"].map(|name| (name, ())), &mut ())?;
    let accepted = |_| "takes the absolute path of a directory".into();
    let parse = |text: &str| soft_takes_directory(text).then_some(());
    pass.setting((SOFT, "RDMA_SOFT_DIR"), &mut (), accepted, parse, |()| None)
}

/// In place of the name of a setting for variables without one.
const SOFT: &str = "from_env (software device)";

const POLICIES: &[(&str, Policy)] =
    &[("require", Policy::Require), ("prefer", Policy::Prefer), ("tcp-only", Policy::TcpOnly)];
const PROVIDERS: &[(&str, Option<Provider>)] =
    &[("auto", None), ("soft", Some(Provider::Soft)), ("ibverbs", Some(Provider::Ibverbs))];
const SHARED_RECEIVE: &[(&str, SharedReceive)] =
    &[("auto", SharedReceive::Auto), ("always", SharedReceive::Always), ("never", SharedReceive::Never)];
const PLAINTEXT_TENSORS: &[(&str, bool)] = &[("refuse", false), ("allow", true)];
const YES_OR_NO: &[(&str, bool)] = &[("yes", true), ("no", false)];
const IN_PROCESS: &[(&str, Option<bool>)] = &[("yes", Some(true)), ("no", Some(false))];
const POLL_MODES: &[(&str, PollMode)] =
    &[("busy", PollMode::Busy), ("adaptive", PollMode::Adaptive), ("event", PollMode::Event)];

/// Path MTUs that exist, in bytes (IBA vol. 1, 9.4.3).
const MTUS: [u16; 5] = [256, 512, 1024, 2048, 4096];
/// Limit of CPU numbers, which are below it.
const CPUS: usize = 1024;
const SIZE_UNITS: &str = "in bytes or with a unit, such as 64k or 8GiB";

/// The numbers that a setting accepts.
#[derive(Clone, Copy)]
struct Numbers {
    least: u64,
    most: u64,
    /// The variable also takes `auto`.
    auto: bool,
    /// The number is one of bytes, so the variable takes units.
    is_size: bool,
}

const fn number(least: u64, most: u64) -> Numbers {
    Numbers { least, most, auto: false, is_size: false }
}

const fn size(least: u64, most: u64) -> Numbers {
    Numbers { is_size: true, ..number(least, most) }
}

impl Numbers {
    fn parse(self, text: &str) -> Option<u64> {
        if self.is_size { units::parse_size(text).ok() } else { text.trim().parse().ok() }
    }

    fn take(self, value: u64) -> bool {
        (self.least..=self.most).contains(&value)
    }

    fn accepted(self) -> String {
        let Self { least, most, auto, is_size } = self;
        let auto = if auto { "auto or " } else { "" };
        if is_size {
            format!("takes {auto}a size from {} to {}, {SIZE_UNITS}", units::size(least), units::size(most))
        } else {
            format!("takes {auto}a number from {least} to {most}")
        }
    }
}

/// The times that a setting accepts.
#[derive(Clone, Copy)]
struct Times {
    /// In `unit`s.
    least: u32,
    most: Duration,
    /// The unit of a number without one, and its name.
    unit: (Duration, &'static str),
}

const MICROSECOND: (Duration, &str) = (Duration::from_micros(1), "microseconds");
const MILLISECOND: (Duration, &str) = (Duration::from_millis(1), "milliseconds");

/// Returns the rule of a time from `least` milliseconds on.
const fn up_to_a_day(least: u32) -> Times {
    Times { least, most: Duration::from_secs(24 * 3600), unit: MILLISECOND }
}

impl Pass<'_> {
    /// Reads a setting by `parse`, or checks it: `refused` returns a value that is not accepted, as text.
    /// `accepted` says which values are; its argument is whether they are those of the variable.
    fn setting<T>(
        &self,
        (setting, variable): Names,
        value: &mut T,
        accepted: impl Fn(bool) -> String,
        parse: impl Fn(&str) -> Option<T>,
        refused: impl Fn(&T) -> Option<String>,
    ) -> Result<(), RdmaError> {
        let error = |value, accepted, from_environment| {
            Err(BadSetting { setting, variable, value, accepted, from_environment }.into())
        };
        let lookup = match self {
            Self::Check => {
                return refused(value).map_or(Ok(()), |value| error(value, accepted(false), false));
            }
            Self::Read(_) if variable.is_empty() => return Ok(()),
            Self::Read(lookup) => lookup,
        };
        match lookup(variable).map(OsString::into_string) {
            None => {}
            Some(Ok(text)) => match parse(&text).filter(|value| refused(value).is_none()) {
                Some(parsed) => *value = parsed,
                None => return error(text, accepted(true), true),
            },
            Some(Err(raw)) => return error(raw.to_string_lossy().into(), "takes text in UTF-8".into(), true),
        }
        Ok(())
    }

    /// A number that may have no value.
    fn optional<T: Copy + Display + TryFrom<u64> + TryInto<u64>>(
        &self,
        names: Names,
        rule: Numbers,
        value: &mut Option<T>,
    ) -> Result<(), RdmaError> {
        let parse = |text: &str| match rule.auto && is_auto(text) {
            true => Some(None),
            false => T::try_from(rule.parse(text)?).ok().map(Some),
        };
        let takes = |value: T| value.try_into().is_ok_and(|value| rule.take(value));
        let refused = |value: &Option<T>| Some(value.filter(|value| !takes(*value))?.to_string());
        self.setting(names, value, |_| rule.accepted(), parse, refused)
    }

    fn number<T: Copy + Display + TryFrom<u64> + TryInto<u64>>(
        &self,
        names: Names,
        rule: Numbers,
        value: &mut T,
    ) -> Result<(), RdmaError> {
        let mut set = Some(*value);
        self.optional(names, rule, &mut set)?;
        *value = set.unwrap_or(*value);
        Ok(())
    }

    fn time(&self, names: Names, rule: Times, value: &mut Duration) -> Result<(), RdmaError> {
        let Times { least, most, unit: (unit, name) } = rule;
        let least = unit * least;
        let accepted = |of_variable| match of_variable {
            true => format!(
                "takes a time from {least:?} to {most:?}, in {name} or with a unit, such as 120us or 5s"
            ),
            false => format!("takes a time from {least:?} to {most:?}"),
        };
        let refused = |value: &Duration| (!(least..=most).contains(value)).then(|| format!("{value:?}"));
        self.setting(names, value, accepted, |text| units::parse_time(text, unit), refused)
    }

    /// One of the `choices`, which have names.
    fn choice<T: Clone>(&self, names: Names, choices: &[(&str, T)], value: &mut T) -> Result<(), RdmaError> {
        let known: Vec<&str> = choices.iter().map(|(known, _)| *known).collect();
        let parse = |text: &str| {
            choices.iter().find(|(known, _)| known.eq_ignore_ascii_case(text)).map(|(_, it)| it.clone())
        };
        self.setting(names, value, |_| format!("takes one of {}", known.join(", ")), parse, |_| None)
    }

    /// Whether calls may stay in this process.
    pub(super) fn in_process(&self, value: &mut Option<bool>) -> Result<(), RdmaError> {
        self.choice(("in_process", "RDMA_IN_PROCESS"), IN_PROCESS, value)
    }

    fn threshold(&self, value: &mut EagerThreshold) -> Result<(), RdmaError> {
        let parse = |text: &str| match is_auto(text) {
            true => Some(EagerThreshold::Auto),
            false => units::parse_size(text).ok().map(EagerThreshold::Bytes),
        };
        let accepted = |_| format!("takes auto or a size, {SIZE_UNITS}");
        self.setting(("eager_threshold", "RDMA_EAGER_THRESHOLD"), value, accepted, parse, |_| None)
    }

    /// The name of a device: the characters are those that the kernel uses.
    fn device(&self, value: &mut Option<String>) -> Result<(), RdmaError> {
        const LONGEST: usize = 64;
        let takes = |name: &str| {
            (1..=LONGEST).contains(&name.len())
                && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
        };
        let accepted = |_| "takes the name of a device, such as mlx5_0".into();
        let refused =
            |value: &Option<String>| Some(format!("{:?}", value.as_deref().filter(|name| !takes(name))?));
        self.setting(("device", "RDMA_DEVICE"), value, accepted, |text| Some(Some(text.into())), refused)
    }

    fn cpus(&self, value: &mut Vec<usize>) -> Result<(), RdmaError> {
        let accepted = |_| "takes CPU numbers below 1024, separated by commas".into();
        let parse = |text: &str| text.split(',').map(|cpu| cpu.trim().parse().ok()).collect();
        let refused = |cpus: &Vec<usize>| cpus.iter().any(|&cpu| cpu >= CPUS).then(|| format!("{cpus:?}"));
        self.setting(("poll_cpus", "RDMA_POLL_CPUS"), value, accepted, parse, refused)
    }

    fn mtu(&self, value: &mut Option<u16>) -> Result<(), RdmaError> {
        let accepted = |_| format!("takes one of {}", MTUS.map(|mtu| mtu.to_string()).join(", "));
        let parse = |text: &str| u16::try_from(units::parse_size(text).ok()?).ok().map(Some);
        let refused = |value: &Option<u16>| Some(value.filter(|mtu| !MTUS.contains(mtu))?.to_string());
        self.setting(("qp_mtu", "RDMA_QP_MTU"), value, accepted, parse, refused)
    }
}

fn is_auto(text: &str) -> bool {
    text.eq_ignore_ascii_case("auto")
}
