//! The setting `--servers`.

use std::fmt;

use tonic_rdma_commands::ValueError;
use tonic_rdma_commands::units::parse_number;

/// The largest number of server processes: each of them holds a variable of each model.
const MAX_SERVERS: u64 = 8;

/// The number of server processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Servers {
    Number(usize),
    /// As many as workers: a machine of the paper runs one of each.
    AsWorkers,
}

impl Servers {
    /// Parses a number, or `workers`.
    pub(crate) fn parse(text: &str) -> Result<Self, ValueError> {
        match text {
            "workers" => Ok(Self::AsWorkers),
            _ => match parse_number("number of servers", text, 1..=MAX_SERVERS) {
                Err(ValueError::Number { kind, given, accepted }) => {
                    Err(ValueError::number(kind, &given, format!("{accepted}, or workers")))
                }
                other => other.map(|number| Self::Number(number as usize)),
            },
        }
    }

    /// Returns the number of servers beside this number of workers.
    pub(crate) const fn beside(self, workers: usize) -> usize {
        match self {
            Self::Number(number) => number,
            Self::AsWorkers => workers,
        }
    }
}

impl fmt::Display for Servers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(formatter),
            Self::AsWorkers => formatter.write_str("workers"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn numbers_and_workers_are_read_back() {
        for (text, beside_four) in [("1", 1), ("8", 8), ("workers", 4)] {
            let servers = Servers::parse(text).unwrap();
            assert_eq!((servers.beside(4), servers.to_string()), (beside_four, text.to_owned()));
        }
        for bad in ["0", "9", "", "all"] {
            let reason = Servers::parse(bad).unwrap_err().to_string();
            assert!(reason.contains("1 to 8, or workers"), "{reason}");
        }
    }
}
