//! The limits of native calls.

use std::time::Duration;

use crate::endpoint::ConfigError;

/// The limits of native calls: calls between two peers of this package, without HTTP/2. [`CallConfig::default`] suits most programs.
///
/// A client and a server have one each. Each end announces its own limits when a connection begins, and the peer keeps within them.
/// Setters take any value. Servers and channels check the values before they use them.
///
/// ```
/// use std::time::Duration;
/// use tonic_rdma::CallConfig;
///
/// let calls = CallConfig::default()
///     .max_concurrent_streams(1000)
///     .timeout(Duration::from_secs(30)); // no call takes longer
/// assert!(calls.validate().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct CallConfig {
    pub(crate) max_concurrent_streams: u32,
    pub(crate) max_head_bytes: usize,
    pub(crate) stream_window: usize,
    pub(crate) landing_budget: u64,
    pub(crate) timeout: Option<Duration>,
    pub(crate) max_connection_age: Option<Duration>,
    pub(crate) max_connection_age_grace: Duration,
    pub(crate) max_connection_idle: Option<Duration>,
}

impl Default for CallConfig {
    fn default() -> Self {
        Self {
            max_concurrent_streams: 1 << 16,
            max_head_bytes: 16 * 1024,
            stream_window: 1 << 20,
            landing_budget: 256 << 20,
            timeout: None,
            max_connection_age: None,
            max_connection_age_grace: Duration::from_secs(30),
            max_connection_idle: None,
        }
    }
}

/// The longest time of a setting.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// The shortest time of a setting.
const MILLISECOND: Duration = Duration::from_millis(1);

impl CallConfig {
    /// Checks every setting.
    ///
    /// ```
    /// use tonic_rdma::CallConfig;
    ///
    /// let error = CallConfig::default().max_concurrent_streams(0).validate().unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "CallConfig::max_concurrent_streams is 0: takes a number from 1 to 1048576"
    /// );
    /// ```
    ///
    /// # Errors
    /// A setting has a value that it does not take. The error names the setting and the values that it takes.
    pub fn validate(&self) -> Result<(), ConfigError> {
        number("CallConfig::max_concurrent_streams", self.max_concurrent_streams.into(), 1, 1 << 20)?;
        number("CallConfig::max_head_bytes", self.max_head_bytes as u64, 1 << 10, 1 << 24)?;
        number("CallConfig::stream_window", self.stream_window as u64, 1 << 14, 1 << 30)?;
        number("CallConfig::landing_budget", self.landing_budget, 1 << 20, 1 << 50)?;
        time("CallConfig::timeout", self.timeout, MILLISECOND)?;
        time("CallConfig::max_connection_age", self.max_connection_age, MILLISECOND)?;
        time("CallConfig::max_connection_age_grace", Some(self.max_connection_age_grace), Duration::ZERO)?;
        time("CallConfig::max_connection_idle", self.max_connection_idle, MILLISECOND)
    }

    /// Sets how many calls of one connection a server carries out at a time, 1 to 1 048 576. The client keeps further calls until
    /// others have ended. Default: 65 536.
    pub fn max_concurrent_streams(mut self, streams: u32) -> Self {
        self.max_concurrent_streams = streams;
        self
    }

    /// Sets the most bytes that this end accepts as the head of a request or response, or as its trailers: the sum of names and values,
    /// and 32 bytes for each, as in HTTP/2 (RFC 9113, 10.5.1). 1 KiB to 16 MiB. Default: 16 KiB.
    pub fn max_head_bytes(mut self, bytes: usize) -> Self {
        self.max_head_bytes = bytes;
        self
    }

    /// Sets how many bytes the peer may send ahead of the reader of a call, 16 KiB to 1 GiB. A call whose reader is slow stops at this
    /// limit, and other calls go on. Default: 1 MiB.
    pub fn stream_window(mut self, bytes: usize) -> Self {
        self.stream_window = bytes;
        self
    }

    /// Sets how many bytes of registered memory the large messages of one connection may use at this end, from their arrival until
    /// the application drops them, 1 MiB to 1 PiB. Further messages wait at the sender. A message that is longer than the limit
    /// arrives alone. Default: 256 MiB.
    pub fn landing_budget(mut self, bytes: u64) -> Self {
        self.landing_budget = bytes;
        self
    }

    /// Sets the longest time that a server works on a call, 1 ms to a year. A shorter deadline of the client counts first. Default: no limit.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the age at which a server lets a connection end: it takes no new calls, and the client connects again. 1 ms to a year.
    /// Default: no limit.
    pub fn max_connection_age(mut self, age: Duration) -> Self {
        self.max_connection_age = Some(age);
        self
    }

    /// Sets how long the calls of a connection that has reached its age may go on, up to a year. Default: 30 s.
    pub fn max_connection_age_grace(mut self, grace: Duration) -> Self {
        self.max_connection_age_grace = grace;
        self
    }

    /// Sets how long a connection may be without calls before a server lets it end, 1 ms to a year. Default: no limit.
    pub fn max_connection_idle(mut self, idle: Duration) -> Self {
        self.max_connection_idle = Some(idle);
        self
    }
}

/// Checks a number.
fn number(setting: &'static str, value: u64, least: u64, most: u64) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(refused(setting, value.to_string(), format!("takes a number from {least} to {most}")))
}

/// Checks a time.
fn time(setting: &'static str, value: Option<Duration>, least: Duration) -> Result<(), ConfigError> {
    match value {
        Some(value) if !(least..=YEAR).contains(&value) => {
            Err(refused(setting, format!("{value:?}"), format!("takes a time from {least:?} to 365 days")))
        }
        _ => Ok(()),
    }
}

fn refused(setting: &'static str, value: String, accepted: String) -> ConfigError {
    ConfigError { setting, variable: "", value, accepted, from_environment: false }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn values_that_cannot_work_are_refused_by_name() {
        let good = CallConfig::default();
        good.validate().unwrap();
        for (config, name) in [
            (good.clone().max_concurrent_streams(0), "max_concurrent_streams is 0: takes a number from 1"),
            (good.clone().max_head_bytes(10), "max_head_bytes is 10"),
            (good.clone().stream_window(0), "stream_window is 0"),
            (good.clone().landing_budget(1000), "landing_budget is 1000"),
            (good.clone().timeout(Duration::ZERO), "timeout is 0ns: takes a time from 1ms to 365 days"),
            (good.clone().max_connection_age(Duration::MAX), "max_connection_age is"),
            (good.clone().max_connection_age_grace(Duration::MAX), "max_connection_age_grace is"),
            (good.clone().max_connection_idle(Duration::ZERO), "max_connection_idle is 0ns"),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with(&format!("CallConfig::{name}")), "{error}");
        }
    }
}
