//! Sizes and times in texts.

use std::fmt;
use std::time::Duration;

/// A number of bytes: `64 B`, `4 KiB`, `1 MiB`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bytes(pub(super) usize);

impl Bytes {
    fn parts(self) -> (usize, &'static str) {
        match self.0 {
            bytes if bytes > 0 && bytes.is_multiple_of(1 << 30) => (bytes >> 30, "GiB"),
            bytes if bytes > 0 && bytes.is_multiple_of(1 << 20) => (bytes >> 20, "MiB"),
            bytes if bytes > 0 && bytes.is_multiple_of(1 << 10) => (bytes >> 10, "KiB"),
            bytes => (bytes, "B"),
        }
    }

    /// Returns the size without a space: `4KiB`.
    pub(super) fn compact(self) -> String {
        let (number, unit) = self.parts();
        format!("{number}{unit}")
    }

    /// Parses a whole number of bytes, optionally with B, KiB, MiB or GiB.
    pub(super) fn parse(text: &str) -> Option<usize> {
        let text = text.trim();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "kib" => 10,
            "mib" => 20,
            "gib" => 30,
            _ => return None,
        };
        number.parse::<usize>().ok()?.checked_mul(1 << shift)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, unit) = self.parts();
        write!(f, "{number} {unit}")
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
