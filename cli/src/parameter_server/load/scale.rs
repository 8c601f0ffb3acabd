//! The setting `--compute-scale`.

use std::fmt;
use std::time::Duration;

use tonic_rdma_commands::ValueError;

/// The least and the largest factor.
const LEAST: f64 = 0.001;
const MOST: f64 = 100.0;

/// What the computing times are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ComputeScale {
    factor: f64,
    /// Whether the number of workers is a factor too.
    by_workers: bool,
}

impl ComputeScale {
    /// Parses `NUMBER`, `workers`, or `NUMBER*workers`.
    pub(crate) fn parse(text: &str) -> Result<Self, ValueError> {
        let (number, by_workers) = match text.strip_suffix("workers") {
            Some("") => return Ok(Self { factor: 1.0, by_workers: true }),
            Some(number) => (number.strip_suffix('*').unwrap_or("no number"), true),
            None => (text, false),
        };
        match number.parse::<f64>() {
            Ok(factor) if (LEAST..=MOST).contains(&factor) => Ok(Self { factor, by_workers }),
            _ => Err(ValueError::number(
                "scale",
                text,
                format!("numbers from {LEAST} to {MOST}, workers, or NUMBER*workers"),
            )),
        }
    }

    /// Returns `time` scaled for a run with this number of workers.
    pub(crate) fn apply(self, time: Duration, workers: usize) -> Duration {
        let workers = if self.by_workers { workers as f64 } else { 1.0 };
        time.mul_f64(self.factor * workers)
    }
}

impl fmt::Display for ComputeScale {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.by_workers { "*workers" } else { "" };
        write!(formatter, "{}{suffix}", self.factor)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn scales_are_read_back_and_multiply() {
        let ten = Duration::from_millis(10);
        for (text, milliseconds) in
            [("1", 10), ("0.5", 5), ("workers", 40), ("1*workers", 40), ("0.25*workers", 10)]
        {
            let scale = ComputeScale::parse(text).unwrap();
            assert_eq!(scale.apply(ten, 4), Duration::from_millis(milliseconds), "{text}");
            assert_eq!(ComputeScale::parse(&scale.to_string()), Ok(scale));
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_accepted_ones() {
        for bad in ["", "0", "-1", "101", "NaN", "inf", "x", "2workers", "*workers", "workers*2", "0*workers"]
        {
            let reason = ComputeScale::parse(bad).unwrap_err().to_string();
            assert!(
                reason.contains("0.001 to 100") && reason.contains("NUMBER*workers"),
                "{bad:?}: {reason}"
            );
        }
    }
}
