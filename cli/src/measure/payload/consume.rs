//! What the receiver does with a payload once it is there and before it answers.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

/// The setting `--consume`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Consume {
    /// As each mode's users have it: a gRPC service gets the bytes as they are, and a receiver of tensors computes with them.
    #[default]
    Auto,
    /// [`reduce`] in every mode: the largest element, as in §5.1 of Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys 2019).
    ReduceMax,
    /// Nothing in any mode.
    None,
}

impl fmt::Display for Consume {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Auto => "auto",
            Self::ReduceMax => "reduce-max",
            Self::None => "none",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_survives_its_way_to_the_other_process() {
        for setting in Consume::value_variants() {
            assert_eq!(Consume::from_str(&setting.to_string(), false), Ok(*setting));
        }
    }
}
