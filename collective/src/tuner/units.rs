//! Sizes and times in texts.

use std::fmt;
use std::time::Duration;

use tonic_rdma::internal::units;

/// A number of bytes: `64 B`, `4 KiB`, `1 MiB`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bytes(pub(super) usize);

impl Bytes {
    /// Returns the size without a space: `4KiB`.
    pub(super) fn compact(self) -> String {
        self.to_string().replace(' ', "")
    }

    /// Parses a number of bytes, or a number with a unit.
    pub(super) fn parse(text: &str) -> Option<usize> {
        usize::try_from(units::parse_size(text).ok()?).ok()
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&units::size(self.0 as u64))
    }
}

/// A time with three digits: `31.0 µs`, `1.70 ms`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Time(pub(super) Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_secs_f64() * 1e6;
        let (value, unit) = match micros {
            micros if micros >= 999_500.0 => (micros / 1e6, "s"),
            micros if micros >= 999.5 => (micros / 1e3, "ms"),
            micros => (micros, "µs"),
        };
        match value {
            value if value >= 99.95 => write!(f, "{value:.0} {unit}"),
            value if value >= 9.995 => write!(f, "{value:.1} {unit}"),
            value => write!(f, "{value:.2} {unit}"),
        }
    }
}
