//! The environment variables that a configuration can be made of.

use std::ffi::OsString;
use std::time::Duration;

use super::Config;
use super::choices::{EagerThreshold, Policy, PollMode, ProviderChoice, SharedReceive};
use super::error::ConfigError;
use super::tune_cache::TuneCache;
use tonic_rdma_verbs::PathSettings;

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
    /// | `RDMA_SPIN_LIMIT` | microseconds, 0 to 1 000 000 | 120 | [`spin_limit`](Self::spin_limit) |
    /// | `RDMA_CQS` | 1 to 64 | 1 | [`completion_queues`](Self::completion_queues) |
    /// | `RDMA_EAGER_THRESHOLD` | `auto`, or bytes | `auto` | [`eager_threshold`](Self::eager_threshold) |
    /// | `RDMA_CHUNK_SIZE` | `auto`, or bytes, 4096 to 16 777 216 | `auto` | [`chunk_size`](Self::chunk_size) |
    /// | `RDMA_TUNE_CACHE` | a directory, or `off` | the user's cache directory | [`tune_cache`](Self::tune_cache) |
    /// | `RDMA_RECEIVE_SLOTS` | 16 to 1024 | 96 | [`receive_buffers`](Self::receive_buffers) |
    /// | `RDMA_SLOT_SIZE` | bytes, 1024 to 65 536 | 17 408 | [`receive_buffers`](Self::receive_buffers) |
    /// | `RDMA_SHARED_RECEIVE` | `auto`, `always`, `never` | `auto` | [`shared_receive`](Self::shared_receive) |
    /// | `RDMA_MAX_INLINE` | bytes | as many as the device takes | [`max_inline`](Self::max_inline) |
    /// | `RDMA_QP_QUEUE_DEPTH` | requests, 64 to 4096 | 1024 | [`queue_depth`](Self::queue_depth) |
    /// | `RDMA_PINNED_LIMIT` | bytes, from 1 MiB on | 2 GiB | [`pinned_limit`](Self::pinned_limit) |
    /// | `RDMA_HANDSHAKE_TIMEOUT` | milliseconds, 1 to 600 000 | 3000 | [`handshake_timeout`](Self::handshake_timeout) |
    /// | `RDMA_PLAINTEXT_TENSORS` | `refuse`, `allow` | `refuse` | [`plaintext_tensors`](Self::plaintext_tensors) |
    /// | `RDMA_QP_TIMEOUT` | 0 to 31: 4.096 µs × 2^n | 14 | [`path_settings`](Self::path_settings) |
    /// | `RDMA_QP_RETRY_COUNT` | 0 to 7 | 7 | [`path_settings`](Self::path_settings) |
    /// | `RDMA_QP_SL` | service level, 0 to 15 | 0 | [`path_settings`](Self::path_settings) |
    /// | `RDMA_QP_MTU` | 256, 512, 1024, 2048, 4096 | the port's | [`path_settings`](Self::path_settings) |
    /// | `RDMA_QP_PKEY_INDEX` | 0 to 65 535 | 0 | [`path_settings`](Self::path_settings) |
    /// | `RDMA_TRAFFIC_CLASS` | 0 to 255 | 0 | [`path_settings`](Self::path_settings) |
    ///
    /// ```
    /// use tonic_rdma::{Config, RdmaConnector};
    ///
    /// let connector = RdmaConnector::with_config(Config::from_env()?);
    /// # drop(connector);
    /// # Ok::<(), tonic_rdma::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A variable has a value that it does not take. No such value is ignored.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the variables of [`from_env`](Self::from_env) from any source.
    ///
    /// ```
    /// use tonic_rdma::{Config, Policy};
    ///
    /// let config = Config::from_variables(|name| (name == "RDMA_POLICY").then(|| "require".into()))?;
    /// assert_eq!(config, Config::default().policy(Policy::Require));
    /// # Ok::<(), tonic_rdma::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A variable has a value that it does not take. No such value is ignored.
    pub fn from_variables(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let variables = Variables { lookup };
        if let Some(policy) = variables.choice("RDMA_POLICY", POLICIES)? {
            config.policy = policy;
        }
        if let Some(provider) = variables.choice("RDMA_PROVIDER", PROVIDERS)? {
            config.provider = provider;
        }
        config.device = variables.name("RDMA_DEVICE")?;
        config.device_port = variables.number("RDMA_DEVICE_PORT", 1, 255)?.map(|port| port as u8);
        config.gid_index = variables.number("RDMA_GID_INDEX", 0, 255)?.map(|index| index as u8);
        if let Some(mode) = variables.choice("RDMA_POLL_MODE", POLL_MODES)? {
            config.poll_mode = mode;
        }
        if let Some(cpus) = variables.cpus("RDMA_POLL_CPUS")? {
            config.poll_cpus = cpus;
        }
        if let Some(micros) = variables.number("RDMA_SPIN_LIMIT", 0, 1_000_000)? {
            config.spin_limit = Duration::from_micros(micros);
        }
        if let Some(count) = variables.number("RDMA_CQS", 1, 64)? {
            config.completion_queues = count as usize;
        }
        if let Some(threshold) = variables.threshold("RDMA_EAGER_THRESHOLD")? {
            config.eager_threshold = threshold;
        }
        config.chunk_size = variables.chunk_size("RDMA_CHUNK_SIZE")?;
        if let Some(cache) = variables.tune_cache("RDMA_TUNE_CACHE")? {
            config.tune_cache = cache;
        }
        if let Some(slots) = variables.number("RDMA_RECEIVE_SLOTS", 16, 1024)? {
            config.receive_slots = slots as u32;
        }
        if let Some(bytes) = variables.number("RDMA_SLOT_SIZE", 1024, 65536)? {
            config.slot_size = bytes as u32;
        }
        if let Some(shared) = variables.choice("RDMA_SHARED_RECEIVE", SHARED_RECEIVE)? {
            config.shared_receive = shared;
        }
        if let Some(bytes) = variables.number("RDMA_MAX_INLINE", 0, u64::from(u32::MAX))? {
            config.max_inline = Some(bytes as u32);
        }
        if let Some(depth) = variables.number("RDMA_QP_QUEUE_DEPTH", 64, 4096)? {
            config.queue_depth = depth as u32;
        }
        if let Some(bytes) = variables.number("RDMA_PINNED_LIMIT", 1 << 20, 1 << 50)? {
            config.pinned_limit = Some(bytes);
        }
        if let Some(millis) = variables.number("RDMA_HANDSHAKE_TIMEOUT", 1, 600_000)? {
            config.handshake_timeout = Duration::from_millis(millis);
        }
        if let Some(allow) = variables.choice("RDMA_PLAINTEXT_TENSORS", PLAINTEXT_TENSORS)? {
            config.plaintext_tensors = allow;
        }
        variables.path(&mut config.path)?;
        Ok(config)
    }
}

const POLICIES: &[(&str, Policy)] =
    &[("require", Policy::Require), ("prefer", Policy::Prefer), ("tcp-only", Policy::TcpOnly)];
const PROVIDERS: &[(&str, ProviderChoice)] =
    &[("auto", ProviderChoice::Auto), ("soft", ProviderChoice::Soft), ("ibverbs", ProviderChoice::Ibverbs)];
const SHARED_RECEIVE: &[(&str, SharedReceive)] =
    &[("auto", SharedReceive::Auto), ("always", SharedReceive::Always), ("never", SharedReceive::Never)];
const PLAINTEXT_TENSORS: &[(&str, bool)] = &[("refuse", false), ("allow", true)];
const POLL_MODES: &[(&str, PollMode)] =
    &[("busy", PollMode::Busy), ("adaptive", PollMode::Adaptive), ("event", PollMode::Event)];

/// Reads variables, and says what is wrong with them.
struct Variables<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<OsString>> Variables<F> {
    fn text(&self, name: &str) -> Result<Option<String>, ConfigError> {
        match (self.lookup)(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(raw)) => Err(bad(name, &raw.to_string_lossy(), "takes text in UTF-8".into())),
        }
    }

    /// The name of a device, as the kernel has them.
    fn name(&self, variable: &str) -> Result<Option<String>, ConfigError> {
        const LONGEST: usize = 64;
        let Some(value) = self.text(variable)? else { return Ok(None) };
        let fits = (1..=LONGEST).contains(&value.len())
            && value.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
        if fits {
            Ok(Some(value))
        } else {
            Err(bad(variable, &value, "takes the name of a device, such as mlx5_0".into()))
        }
    }

    fn choice<T: Clone>(&self, name: &str, choices: &[(&str, T)]) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        match choices.iter().find(|(known, _)| known.eq_ignore_ascii_case(&value)) {
            Some((_, choice)) => Ok(Some(choice.clone())),
            None => {
                let known: Vec<&str> = choices.iter().map(|(known, _)| *known).collect();
                Err(bad(name, &value, format!("takes one of {}", known.join(", "))))
            }
        }
    }

    fn number(&self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ConfigError> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        match value.trim().parse() {
            Ok(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(bad(name, &value, format!("takes a number from {least} to {most}"))),
        }
    }

    fn threshold(&self, name: &str) -> Result<Option<EagerThreshold>, ConfigError> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        if value.eq_ignore_ascii_case("auto") {
            return Ok(Some(EagerThreshold::Auto));
        }
        match value.trim().parse() {
            Ok(bytes) => Ok(Some(EagerThreshold::Bytes(bytes))),
            Err(_) => Err(bad(name, &value, "takes auto or a number of bytes".into())),
        }
    }

    fn chunk_size(&self, name: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        if value.eq_ignore_ascii_case("auto") {
            return Ok(None);
        }
        let [least, most] = Config::CHUNKS;
        match value.trim().parse() {
            Ok(bytes) if (least..=most).contains(&bytes) => Ok(Some(bytes)),
            _ => Err(bad(name, &value, format!("takes auto or a number from {least} to {most}"))),
        }
    }

    fn tune_cache(&self, name: &str) -> Result<Option<TuneCache>, ConfigError> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        match TuneCache::parse(&value) {
            Some(cache) => Ok(Some(cache)),
            None => Err(bad(name, &value, "takes off or the path of a directory".into())),
        }
    }

    fn cpus(&self, name: &str) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        let cpus: Result<Vec<usize>, _> = value.split(',').map(|cpu| cpu.trim().parse()).collect();
        match cpus {
            Ok(cpus) if cpus.iter().all(|&cpu| cpu < 1024) => Ok(Some(cpus)),
            _ => Err(bad(name, &value, "takes CPU numbers below 1024, separated by commas".into())),
        }
    }

    fn path(&self, path: &mut PathSettings) -> Result<(), ConfigError> {
        if let Some(code) = self.number("RDMA_QP_TIMEOUT", 0, 31)? {
            path.timeout = code as u8;
        }
        if let Some(count) = self.number("RDMA_QP_RETRY_COUNT", 0, 7)? {
            path.retry_count = count as u8;
        }
        if let Some(level) = self.number("RDMA_QP_SL", 0, 15)? {
            path.service_level = level as u8;
        }
        if let Some(class) = self.number("RDMA_TRAFFIC_CLASS", 0, 255)? {
            path.traffic_class = class as u8;
        }
        if let Some(index) = self.number("RDMA_QP_PKEY_INDEX", 0, 65535)? {
            path.pkey_index = index as u16;
        }
        let mtus = [256, 512, 1024, 2048, 4096].map(|mtu: u16| (mtu.to_string(), mtu));
        let mtus: Vec<(&str, u16)> = mtus.iter().map(|(text, mtu)| (text.as_str(), *mtu)).collect();
        if let Some(mtu) = self.choice("RDMA_QP_MTU", &mtus)? {
            path.mtu = Some(mtu);
        }
        Ok(())
    }
}

fn bad(variable: &str, value: &str, accepted: String) -> ConfigError {
    ConfigError { variable: variable.into(), value: value.into(), accepted }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &'static str) -> Result<Config, ConfigError> {
        Config::from_variables(|asked| (asked == name).then(|| value.into()))
    }

    #[test]
    fn no_variables_mean_the_defaults() {
        assert_eq!(Config::from_variables(|_| None), Ok(Config::default()));
    }

    #[test]
    fn every_variable_is_applied() {
        assert_eq!(with("RDMA_POLICY", "Require").unwrap().policy, Policy::Require);
        assert_eq!(with("RDMA_PROVIDER", "soft").unwrap().provider, ProviderChoice::Soft);
        assert_eq!(with("RDMA_PROVIDER", "ibverbs").unwrap().provider, ProviderChoice::Ibverbs);
        assert_eq!(with("RDMA_DEVICE", "mlx5_0").unwrap().device.as_deref(), Some("mlx5_0"));
        assert_eq!(with("RDMA_DEVICE_PORT", "2").unwrap().device_port, Some(2));
        assert_eq!(with("RDMA_GID_INDEX", "0").unwrap().gid_index, Some(0));
        assert_eq!(with("RDMA_POLL_MODE", "busy").unwrap().poll_mode, PollMode::Busy);
        assert_eq!(with("RDMA_POLL_CPUS", "0, 3").unwrap().poll_cpus, [0, 3]);
        assert_eq!(with("RDMA_SPIN_LIMIT", "4000").unwrap().spin_limit, Duration::from_millis(4));
        assert_eq!(with("RDMA_CQS", "4").unwrap().completion_queues, 4);
        assert_eq!(
            with("RDMA_EAGER_THRESHOLD", "4096").unwrap().eager_threshold,
            EagerThreshold::Bytes(4096)
        );
        assert_eq!(with("RDMA_EAGER_THRESHOLD", "auto").unwrap().eager_threshold, EagerThreshold::Auto);
        assert_eq!(with("RDMA_CHUNK_SIZE", "65536").unwrap().chunk_size, Some(65536));
        assert_eq!(with("RDMA_CHUNK_SIZE", "auto").unwrap().chunk_size, None);
        assert_eq!(with("RDMA_TUNE_CACHE", "off").unwrap().tune_cache, TuneCache::Off);
        assert_eq!(with("RDMA_TUNE_CACHE", "/c").unwrap().tune_cache, TuneCache::Directory("/c".into()));
        assert_eq!(with("RDMA_RECEIVE_SLOTS", "64").unwrap().receive_slots, 64);
        assert_eq!(with("RDMA_SLOT_SIZE", "4096").unwrap().slot_size, 4096);
        assert_eq!(with("RDMA_SHARED_RECEIVE", "always").unwrap().shared_receive, SharedReceive::Always);
        assert_eq!(with("RDMA_MAX_INLINE", "220").unwrap().max_inline, Some(220));
        assert_eq!(with("RDMA_QP_QUEUE_DEPTH", "256").unwrap().queue_depth, 256);
        let patient = with("RDMA_HANDSHAKE_TIMEOUT", "20000").unwrap();
        assert_eq!(patient.handshake_timeout, Duration::from_secs(20));
        assert_eq!(with("RDMA_PINNED_LIMIT", "8388608").unwrap().pinned_limit, Some(8_388_608));
        assert!(with("RDMA_PLAINTEXT_TENSORS", "allow").unwrap().plaintext_tensors);
        assert_eq!(with("RDMA_QP_TIMEOUT", "20").unwrap().path.timeout, 20);
        assert_eq!(with("RDMA_QP_RETRY_COUNT", "3").unwrap().path.retry_count, 3);
        assert_eq!(with("RDMA_QP_SL", "5").unwrap().path.service_level, 5);
        assert_eq!(with("RDMA_QP_MTU", "1024").unwrap().path.mtu, Some(1024));
        assert_eq!(with("RDMA_QP_PKEY_INDEX", "1").unwrap().path.pkey_index, 1);
        assert_eq!(with("RDMA_TRAFFIC_CLASS", "104").unwrap().path.traffic_class, 104);
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
            ("RDMA_SPIN_LIMIT", "1ms", "takes a number from 0 to 1000000"),
            ("RDMA_CQS", "0", "takes a number from 1 to 64"),
            ("RDMA_EAGER_THRESHOLD", "4k", "takes auto or a number of bytes"),
            ("RDMA_CHUNK_SIZE", "1", "takes auto or a number from 4096 to 16777216"),
            ("RDMA_TUNE_CACHE", "", "takes off or the path of a directory"),
            ("RDMA_SHARED_RECEIVE", "yes", "takes one of auto, always, never"),
            ("RDMA_MAX_INLINE", "all", "takes a number from 0 to 4294967295"),
            ("RDMA_QP_QUEUE_DEPTH", "-1", "takes a number from 64 to 4096"),
            ("RDMA_HANDSHAKE_TIMEOUT", "0", "takes a number from 1 to 600000"),
            ("RDMA_PLAINTEXT_TENSORS", "yes", "takes one of refuse, allow"),
            ("RDMA_QP_TIMEOUT", "32", "takes a number from 0 to 31"),
            ("RDMA_QP_MTU", "1500", "takes one of 256, 512, 1024, 2048, 4096"),
        ] {
            let error = with(name, value).unwrap_err();
            assert_eq!(error.to_string(), format!("{name}={value:?}: {accepted}"));
        }
    }
}
