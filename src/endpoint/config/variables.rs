//! The environment variables of the settings, and a warning for variables that have the form of settings and
//! are none, such as a misspelt one.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::sync::Mutex;

use super::Config;
use super::rules::{self, Pass};
use crate::error::{BadSetting, RdmaError};
use tonic_rdma_verbs::unstable::lock;

impl Config {
    /// Reads the environment: returns the default settings, changed by these variables where they are set.
    ///
    /// | variable | takes | default | setting |
    /// |---|---|---|---|
    /// | `RDMA_POLICY` | `require`, `prefer`, `tcp-only` | `prefer` | [`policy`](Self::policy) |
    /// | `RDMA_PROVIDER` | `auto`, `soft`, `ibverbs` | `auto` | [`provider`](Self::provider) |
    /// | `RDMA_DEVICE` | a device's name, such as `mlx5_0` | the first with an active port | [`device`](Self::device) |
    /// | `RDMA_DEVICE_PORT` | a port's number, 1 to 255 | the first active one | [`device_port`](Self::device_port) |
    /// | `RDMA_GID_INDEX` | an index, 0 to 255 | RoCE v2, not link-local | [`gid_index`](Self::gid_index) |
    /// | `RDMA_POLL_MODE` | `busy`, `adaptive`, `event` | `adaptive` | [`poll_mode`](Self::poll_mode) |
    /// | `RDMA_POLL_CPUS` | CPU numbers, such as `2,3` | none | [`poll_cpus`](Self::poll_cpus) |
    /// | `RDMA_SPIN_LIMIT` | a time, 0 to 1 s, in microseconds | 120 | [`spin_limit`](Self::spin_limit) |
    /// | `RDMA_COMPLETION_QUEUES` | 1 to 64 | 1 | [`completion_queues`](Self::completion_queues) |
    /// | `RDMA_QUEUE_PAIRS_PER_PEER` | 1 to 64 | 1 | [`queue_pairs_per_peer`](Self::queue_pairs_per_peer) |
    /// | `RDMA_EAGER_THRESHOLD` | `auto`, or a size | `auto` | [`eager_threshold`](Self::eager_threshold) |
    /// | `RDMA_CHUNK_SIZE` | `auto`, or a size, 4 KiB to 16 MiB | `auto` | [`chunk_size`](Self::chunk_size) |
    /// | `RDMA_RECEIVE_SLOTS` | 16 to 1024 | 96 | [`receive_slots`](Self::receive_slots) |
    /// | `RDMA_SLOT_SIZE` | a size, 1 KiB to 64 KiB | 17 408 | [`slot_size`](Self::slot_size) |
    /// | `RDMA_SHARED_RECEIVE` | `auto`, `always`, `never` | `auto` | [`shared_receive`](Self::shared_receive) |
    /// | `RDMA_MAX_INLINE` | a size | as many as the device takes | [`max_inline`](Self::max_inline) |
    /// | `RDMA_QP_QUEUE_DEPTH` | requests, 64 to 4096 | 1024 | [`qp_queue_depth`](Self::qp_queue_depth) |
    /// | `RDMA_PINNED_LIMIT` | a size, from 1 MiB on | 2 GiB | [`pinned_limit`](Self::pinned_limit) |
    /// | `RDMA_CONNECTION_LIMIT` | a size, from 1 MiB on | 256 MiB | [`connection_limit`](Self::connection_limit) |
    /// | `RDMA_HELD_LIMIT` | a size, from 1 MiB on | twice the pinned limit | [`held_limit`](Self::held_limit) |
    /// | `RDMA_CONNECT_TIMEOUT` | a time, 1 ms to a day, in milliseconds | 10 000 | [`connect_timeout`](Self::connect_timeout) |
    /// | `RDMA_PING_INTERVAL` | a time, 1 ms to a day, in milliseconds | 5000 | [`ping_interval`](Self::ping_interval) |
    /// | `RDMA_PING_TIMEOUT` | a time, 1 ms to a day, in milliseconds | 10 000 | [`ping_timeout`](Self::ping_timeout) |
    /// | `RDMA_HANDSHAKE_TIMEOUT` | a time, 1 ms to 600 s, in milliseconds | 3000 | [`handshake_timeout`](Self::handshake_timeout) |
    /// | `RDMA_PLAINTEXT_TENSORS` | `refuse`, `allow` | `refuse` | [`plaintext_tensors`](Self::plaintext_tensors) |
    /// | `RDMA_IN_PROCESS` | `yes`, `no` | `yes` | [`in_process`](Self::in_process) |
    /// | `RDMA_HISTOGRAMS` | `yes`, `no` | `no` | [`histograms`](Self::histograms) |
    /// | `RDMA_QP_TIMEOUT` | 0 to 31: 4.096 µs × 2^n | 14 | [`qp_timeout`](Self::qp_timeout) |
    /// | `RDMA_QP_RETRY_COUNT` | 0 to 7 | 7 | [`qp_retry_count`](Self::qp_retry_count) |
    /// | `RDMA_QP_SL` | service level, 0 to 15 | 0 | [`qp_sl`](Self::qp_sl) |
    /// | `RDMA_QP_MTU` | 256, 512, 1024, 2048, 4096 | the port's | [`qp_mtu`](Self::qp_mtu) |
    /// | `RDMA_QP_PKEY_INDEX` | 0 to 65 535 | 0 | [`qp_pkey_index`](Self::qp_pkey_index) |
    /// | `RDMA_TRAFFIC_CLASS` | 0 to 255 | 0 | [`traffic_class`](Self::traffic_class) |
    /// | `RDMA_SOFT_DIR` | the absolute path of a directory | none | read by the software device |
    /// | `RDMA_SOFT_PEERS` | `user`, `trusted-user`, `any` | `user` | read by the software device |
    ///
    /// A size is a number of bytes, or has a unit: `64k`, `4MiB`, `8G`, where `k`, `K`, `Ki`, `KB` and `KiB`
    /// are all 1024 bytes. A time has a unit (`120us`, `300ms`, `5s`, `2m`), or is a number of the unit that
    /// the table names.
    ///
    /// The software device reads the last two variables itself, because a process has one such device. This
    /// function only checks their values.
    ///
    /// ```
    /// use tonic_rdma::{Config, RdmaConnector};
    ///
    /// let connector = RdmaConnector::new().config(Config::from_env()?);
    /// # drop(connector);
    /// # Ok::<(), tonic_rdma::RdmaError>(())
    /// ```
    ///
    /// Logs a warning for each variable that begins with `RDMA_` and that no package of tonic-rdma reads,
    /// once in a process.
    ///
    /// # Errors
    /// A variable has a value that it does not accept, or a name that was changed.
    pub fn from_env() -> Result<Self, RdmaError> {
        warn_of_unknown_variables();
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the variables of [`from_env`](Self::from_env) from any source.
    ///
    /// ```
    /// use tonic_rdma::{Config, Policy};
    ///
    /// let config = Config::from_variables(|name| (name == "RDMA_POLICY").then(|| "require".into()))?;
    /// assert_eq!(config, Config::default().policy(Policy::Require));
    /// # Ok::<(), tonic_rdma::RdmaError>(())
    /// ```
    ///
    /// # Errors
    /// As those of [`from_env`](Self::from_env).
    pub fn from_variables(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, RdmaError> {
        refuse_renamed(&lookup)?;
        let mut config = Self::default();
        rules::each(&Pass::Read(&lookup), &mut config)?;
        Ok(config)
    }
}

/// Returns what the environment says about calls within this process. A value that
/// [`from_env`](Config::from_env) refuses counts as none.
pub(super) fn in_process_by_environment() -> bool {
    let mut choice = None;
    // The error is for those who read the environment themselves.
    let _ = Pass::Read(&|name| std::env::var_os(name)).in_process(&mut choice);
    choice.unwrap_or(true)
}

/// The beginning of all variables.
const PREFIX: &str = "RDMA_";

/// The variables that packages above this one read. A test compares them with the code.
const ABOVE: [&str; 5] = [
    "RDMA_COLLECTIVE_ADDRESS",
    "RDMA_COLLECTIVE_HOST",
    "RDMA_COLLECTIVE_PLANS",
    "RDMA_COLLECTIVE_RANK",
    "RDMA_COLLECTIVE_SIZE",
];

/// A name of earlier versions, with its setting and the name of today. It is refused, because a setting would be
/// lost without a word otherwise.
const RENAMED: (&str, &str, &str) = ("RDMA_CQS", "completion_queues", "RDMA_COMPLETION_QUEUES");

/// Refuses a variable that has another name today.
fn refuse_renamed(lookup: impl Fn(&str) -> Option<OsString>) -> Result<(), RdmaError> {
    let (variable, setting, name) = RENAMED;
    lookup(variable).map_or(Ok(()), |value| {
        let (value, accepted) =
            (value.to_string_lossy().into(), format!("this variable is called {name} now"));
        Err(BadSetting { setting, variable, value, accepted, from_environment: true }.into())
    })
}

/// Least similarity of a name that was probably meant, from 0 to 1.
const SIMILAR: f64 = 0.8;

/// Returns the names of all variables that any package reads.
pub fn known_variables() -> BTreeSet<String> {
    let known = RefCell::new(BTreeSet::from(ABOVE.map(str::to_owned)));
    // This asks for each variable of a configuration. Without any there is no error.
    let _ = Config::from_variables(|name| {
        known.borrow_mut().insert(name.to_owned());
        None
    });
    let mut known = known.into_inner();
    known.remove(RENAMED.0);
    known
}

/// Logs a warning for each variable of the environment that begins like a setting and is none, once for each
/// name in a process. It is no error, because other software may read the variable.
pub fn warn_of_unknown_variables() {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // A warning that no subscriber takes must not count as logged.
    if !tracing::enabled!(tracing::Level::WARN) {
        return;
    }
    let set = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let mut unknown =
        set.filter(|(name, value)| name.starts_with(PREFIX) && !is_of_others(name, value)).peekable();
    if unknown.peek().is_none() {
        return;
    }
    let known = known_variables();
    for (name, _) in unknown.filter(|(name, _)| !known.contains(name)) {
        if !lock(&SAID).insert(name.clone()) {
            continue;
        }
        match nearest(&name, &known) {
            Some(meant) => tracing::warn!("{name} is not a variable of tonic-rdma; did you mean {meant}?"),
            None => tracing::warn!("{name} is not a variable of tonic-rdma"),
        }
    }
}

/// Returns whether the variable is one that Kubernetes sets for a service named `rdma-…`, or one of this
/// repository's tests.
fn is_of_others(name: &str, value: &OsStr) -> bool {
    let of_service =
        ["_SERVICE_HOST", "_SERVICE_PORT", "_TCP_", "_UDP_"].iter().any(|part| name.contains(part));
    let has_address =
        ["tcp://", "udp://"].iter().any(|scheme| value.as_encoded_bytes().starts_with(scheme.as_bytes()));
    of_service || has_address || name.starts_with("RDMA_TEST_")
}

/// Returns the known name that `name` was probably meant to be.
fn nearest<'a>(name: &str, known: &'a BTreeSet<String>) -> Option<&'a String> {
    let own = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).to_owned();
    let scored = known.iter().map(|each| (strsim::jaro_winkler(&own(name), &own(each)), each));
    let best = scored.max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.filter(|(similarity, _)| *similarity >= SIMILAR).map(|(_, each)| each)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::endpoint::config::{EagerThreshold, Policy, PollMode, Provider, SharedReceive};

    fn with(name: &'static str, value: &'static str) -> Result<Config, RdmaError> {
        Config::from_variables(|asked| (asked == name).then(|| value.into()))
    }

    #[test]
    fn no_variables_mean_the_defaults() {
        assert_eq!(Config::from_variables(|_| None), Ok(Config::default()));
    }

    #[test]
    fn every_variable_is_applied() {
        assert_eq!(with("RDMA_POLICY", "Require").unwrap().policy, Policy::Require);
        assert_eq!(with("RDMA_PROVIDER", "soft").unwrap().provider, Some(Provider::Soft));
        assert_eq!(with("RDMA_PROVIDER", "ibverbs").unwrap().provider, Some(Provider::Ibverbs));
        assert_eq!(with("RDMA_DEVICE", "mlx5_0").unwrap().device.as_deref(), Some("mlx5_0"));
        assert_eq!(with("RDMA_DEVICE_PORT", "2").unwrap().device_port, Some(2));
        assert_eq!(with("RDMA_GID_INDEX", "0").unwrap().gid_index, Some(0));
        assert_eq!(with("RDMA_POLL_MODE", "busy").unwrap().poll_mode, PollMode::Busy);
        assert_eq!(with("RDMA_POLL_CPUS", "0, 3").unwrap().poll_cpus, [0, 3]);
        assert_eq!(with("RDMA_SPIN_LIMIT", "4000").unwrap().spin_limit, Duration::from_millis(4));
        assert_eq!(with("RDMA_COMPLETION_QUEUES", "4").unwrap().completion_queues, 4);
        assert_eq!(with("RDMA_QUEUE_PAIRS_PER_PEER", "4").unwrap().queue_pairs_per_peer, 4);
        assert_eq!(
            with("RDMA_EAGER_THRESHOLD", "4096").unwrap().eager_threshold,
            EagerThreshold::Bytes(4096)
        );
        assert_eq!(with("RDMA_EAGER_THRESHOLD", "auto").unwrap().eager_threshold, EagerThreshold::Auto);
        assert_eq!(with("RDMA_CHUNK_SIZE", "65536").unwrap().chunk_size, Some(65536));
        assert_eq!(with("RDMA_CHUNK_SIZE", "auto").unwrap().chunk_size, None);
        assert_eq!(with("RDMA_RECEIVE_SLOTS", "64").unwrap().receive_slots, 64);
        assert_eq!(with("RDMA_SLOT_SIZE", "4096").unwrap().slot_size, 4096);
        assert_eq!(with("RDMA_SHARED_RECEIVE", "always").unwrap().shared_receive, SharedReceive::Always);
        assert_eq!(with("RDMA_MAX_INLINE", "220").unwrap().max_inline, Some(220));
        assert_eq!(with("RDMA_QP_QUEUE_DEPTH", "256").unwrap().qp_queue_depth, 256);
        let patient = with("RDMA_HANDSHAKE_TIMEOUT", "20000").unwrap();
        assert_eq!(patient.handshake_timeout, Duration::from_secs(20));
        assert_eq!(with("RDMA_CONNECT_TIMEOUT", "20000").unwrap().connect_timeout, Duration::from_secs(20));
        assert_eq!(with("RDMA_PING_INTERVAL", "20000").unwrap().ping_interval, Duration::from_secs(20));
        assert_eq!(with("RDMA_PING_TIMEOUT", "1m").unwrap().ping_timeout, Duration::from_secs(60));
        assert_eq!(with("RDMA_PINNED_LIMIT", "8388608").unwrap().pinned_limit, Some(8_388_608));
        assert_eq!(with("RDMA_CONNECTION_LIMIT", "64M").unwrap().connection_limit, 64 << 20);
        let held = with("RDMA_HELD_LIMIT", "1G").unwrap();
        assert_eq!([held, Config::default()].map(|config| config.most_held()), [1 << 30, 4 << 30]);
        assert!(with("RDMA_PLAINTEXT_TENSORS", "allow").unwrap().plaintext_tensors);
        assert_eq!(with("RDMA_IN_PROCESS", "no").unwrap().in_process, Some(false));
        assert_eq!(with("RDMA_QP_TIMEOUT", "20").unwrap().path.timeout, 20);
        assert_eq!(with("RDMA_QP_RETRY_COUNT", "3").unwrap().path.retry_count, 3);
        assert_eq!(with("RDMA_QP_SL", "5").unwrap().path.service_level, 5);
        assert_eq!(with("RDMA_QP_MTU", "1024").unwrap().path.mtu, Some(1024));
        assert_eq!(with("RDMA_QP_PKEY_INDEX", "1").unwrap().path.pkey_index, 1);
        assert_eq!(with("RDMA_TRAFFIC_CLASS", "104").unwrap().path.traffic_class, 104);
    }

    #[test]
    fn sizes_and_times_have_units() {
        assert_eq!(with("RDMA_PINNED_LIMIT", "8GiB").unwrap().pinned_limit, Some(8 << 30));
        assert_eq!(
            with("RDMA_EAGER_THRESHOLD", "64k").unwrap().eager_threshold,
            EagerThreshold::Bytes(64 << 10)
        );
        assert_eq!(with("RDMA_CHUNK_SIZE", "1MB").unwrap().chunk_size, Some(1 << 20));
        assert_eq!(with("RDMA_SLOT_SIZE", "4K").unwrap().slot_size, 4096);
        assert_eq!(with("RDMA_MAX_INLINE", "1k").unwrap().max_inline, Some(1024));
        assert_eq!(with("RDMA_QP_MTU", "4k").unwrap().path.mtu, Some(4096));
        assert_eq!(with("RDMA_SPIN_LIMIT", "120us").unwrap().spin_limit, Duration::from_micros(120));
        assert_eq!(with("RDMA_SPIN_LIMIT", "1ms").unwrap().spin_limit, Duration::from_millis(1));
        assert_eq!(with("RDMA_HANDSHAKE_TIMEOUT", "2m").unwrap().handshake_timeout, Duration::from_secs(120));
    }

    #[test]
    fn an_old_name_is_refused_with_the_name_of_today() {
        let (old, setting, name) = RENAMED;
        let error = Config::from_variables(|asked| (asked == old).then(|| "4".into())).unwrap_err();
        assert_eq!(error.to_string(), format!("{old}=\"4\": this variable is called {name} now"));
        assert_eq!((error.setting(), error.variable()), (Some(setting), Some(old)));
        let known = known_variables();
        assert!(known.contains(name) && !known.contains(old));
    }

    /// The software device reads these itself.
    #[test]
    fn variables_of_the_software_device_are_checked() {
        for (name, value) in
            [("RDMA_SOFT_DIR", "/run/x"), ("RDMA_SOFT_PEERS", "any"), ("RDMA_SOFT_PEERS", "Trusted-User")]
        {
            assert_eq!(with(name, value), Ok(Config::default()));
        }
    }

    #[test]
    fn a_bad_value_is_named_with_what_is_accepted() {
        for (name, value, accepted) in [
            ("RDMA_POLICY", "always", "takes one of require, prefer, tcp-only"),
            ("RDMA_PROVIDER", "mlx5_0", "takes one of auto, soft, ibverbs"),
            ("RDMA_DEVICE", "../x", "takes the name of a device, such as mlx5_0"),
            ("RDMA_DEVICE", "", "takes the name of a device, such as mlx5_0"),
            ("RDMA_DEVICE_PORT", "0", "takes a number from 1 to 255"),
            ("RDMA_GID_INDEX", "256", "takes a number from 0 to 255"),
            ("RDMA_POLL_MODE", "", "takes one of busy, adaptive, event"),
            ("RDMA_POLL_CPUS", "0;1", "takes CPU numbers below 1024, separated by commas"),
            (
                "RDMA_SPIN_LIMIT",
                "2s",
                "takes a time from 0ns to 1s, in microseconds or with a unit, such as 120us or 5s",
            ),
            ("RDMA_COMPLETION_QUEUES", "0", "takes a number from 1 to 64"),
            ("RDMA_QUEUE_PAIRS_PER_PEER", "65", "takes a number from 1 to 64"),
            (
                "RDMA_EAGER_THRESHOLD",
                "4x",
                "takes auto or a size, in bytes or with a unit, such as 64k or 8GiB",
            ),
            (
                "RDMA_CHUNK_SIZE",
                "1",
                "takes auto or a size from 4 KiB to 16 MiB, in bytes or with a unit, such as 64k or 8GiB",
            ),
            (
                "RDMA_PINNED_LIMIT",
                "8 lots",
                "takes a size from 1 MiB to 1 PiB, in bytes or with a unit, such as 64k or 8GiB",
            ),
            ("RDMA_SOFT_DIR", "run", "takes the absolute path of a directory"),
            ("RDMA_SOFT_PEERS", "all", "takes one of user, trusted-user, any"),
            ("RDMA_SHARED_RECEIVE", "yes", "takes one of auto, always, never"),
            (
                "RDMA_MAX_INLINE",
                "all",
                "takes a size from 0 B to 4294967295 B, in bytes or with a unit, such as 64k or 8GiB",
            ),
            ("RDMA_QP_QUEUE_DEPTH", "-1", "takes a number from 64 to 4096"),
            (
                "RDMA_HANDSHAKE_TIMEOUT",
                "0",
                "takes a time from 1ms to 600s, in milliseconds or with a unit, such as 120us or 5s",
            ),
            ("RDMA_PLAINTEXT_TENSORS", "yes", "takes one of refuse, allow"),
            ("RDMA_IN_PROCESS", "off", "takes one of yes, no"),
            ("RDMA_QP_TIMEOUT", "32", "takes a number from 0 to 31"),
            ("RDMA_QP_MTU", "1500", "takes one of 256, 512, 1024, 2048, 4096"),
        ] {
            let error = with(name, value).unwrap_err();
            assert_eq!(error.to_string(), format!("{name}={value:?}: {accepted}"));
        }
    }
}

#[cfg(test)]
mod unknown_tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found() {
        let known = known_variables();
        for (name, meant) in [
            ("RDMA_POLCY", Some("RDMA_POLICY")),
            ("RDMA_PINNED_LIMITS", Some("RDMA_PINNED_LIMIT")),
            ("RDMA_EAGER", Some("RDMA_EAGER_THRESHOLD")),
            ("RDMA_POLLMODE", Some("RDMA_POLL_MODE")),
            ("RDMA_TIMEOUT", Some("RDMA_QP_TIMEOUT")),
            ("RDMA_SOFT_PEER", Some("RDMA_SOFT_PEERS")),
            ("RDMA_COLLECTIVE_RNAK", Some("RDMA_COLLECTIVE_RANK")),
            ("RDMA_FORK_SAFE", None),
            ("RDMA_XYZZY", None),
            ("RDMA_", None),
        ] {
            assert_eq!(nearest(name, &known).map(String::as_str), meant, "{name}");
        }
    }

    #[test]
    fn variables_of_services_are_left_alone() {
        let others = |name: &str, value: &str| is_of_others(name, OsStr::new(value));
        for (name, value) in [
            ("RDMA_PS_SERVICE_HOST", "10.0.0.1"),
            ("RDMA_PS_SERVICE_PORT_GRPC", "7000"),
            ("RDMA_PS_PORT", "tcp://10.0.0.1:7000"),
            ("RDMA_PS_PORT_7000_TCP_ADDR", "10.0.0.1"),
            ("RDMA_PS_PORT_4791_UDP", "udp://10.0.0.1:4791"),
            ("RDMA_TEST_DEVICE", "rxe0"),
        ] {
            assert!(others(name, value), "{name}");
        }
        assert!(!others("RDMA_POLCY", "require") && !others("RDMA_POLICIES", "tcp-only"));
    }
}
