//! The direction of payloads.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

use crate::compare::modes::mode::Mode;

/// The setting `--direction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Direction {
    /// From the client to the server, which checks the payload: requests carry payloads, and replies are small.
    #[default]
    Up,
    /// From the server to the client, which checks the payload: requests are small, and replies carry payloads.
    Down,
}

impl Direction {
    /// Returns the name on the command line and in the JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
        }
    }

    /// Returns whether `mode` can carry payloads in this direction.
    pub(crate) const fn is_for(self, mode: Mode) -> bool {
        match self {
            Self::Up => true,
            // The sender writes a tensor when it has one. No request asks for it.
            Self::Down => !mode.carries_tensors(),
        }
    }

    /// Describes the direction in words.
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Up => "up: requests carry the payload, the server checks it, replies are small",
            Self::Down => "down: requests are small, replies carry the payload, the client checks it",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for direction in Direction::value_variants() {
            assert_eq!(Direction::from_str(direction.name(), false), Ok(*direction));
        }
    }

    #[test]
    fn only_modes_that_carry_tensors_lack_the_direction_down() {
        for mode in Mode::ALL {
            assert_eq!(Direction::Down.is_for(mode), !mode.carries_tensors(), "{mode}");
            assert!(Direction::Up.is_for(mode));
        }
    }
}
