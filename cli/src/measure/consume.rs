//! The setting `--consume`: the use of a payload by its receiver, before the answer.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::Named as _;

/// The setting `--consume`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Consume {
    /// The usual behaviour in each mode: a gRPC service leaves the bytes as they are, and a receiver of tensors
    /// computes with them.
    #[default]
    Auto,
    /// The largest element in every mode, as in §5.1 of Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys
    /// 2019).
    ReduceMax,
    /// Nothing in any mode.
    None,
}

impl fmt::Display for Consume {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for setting in Consume::value_variants() {
            assert_eq!(Consume::from_str(&setting.to_string(), false), Ok(*setting));
        }
    }
}
