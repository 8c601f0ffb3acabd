//! The modes: ways to transfer variables and gradients.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TransferMode {
    /// A call for each variable over TCP: the baseline of the other modes.
    GrpcTcp,
    /// A call for each variable over this library's connector, RDMA required.
    GrpcRdma,
    /// As `GrpcRdma`, with values and gradients by reference: `tonic_rdma::gather`.
    GrpcRdmaGather,
    /// A call for each variable over native calls: RDMA without HTTP/2.
    GrpcNative,
    /// As `GrpcNative`, with values and gradients by reference at both ends.
    GrpcNativeGather,
    /// Static slots, copied from ordinary memory to registered memory first (the paper's RDMA.cp).
    RdmaCp,
    /// Static slots, from registered memory.
    RdmaZerocp,
}

impl TransferMode {
    pub(crate) const ALL: [Self; 7] = [
        Self::GrpcTcp,
        Self::GrpcRdma,
        Self::GrpcRdmaGather,
        Self::GrpcNative,
        Self::GrpcNativeGather,
        Self::RdmaCp,
        Self::RdmaZerocp,
    ];

    /// Returns the name on the command line and in the JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::GrpcTcp => "grpc-tcp",
            Self::GrpcRdma => "grpc-rdma",
            Self::GrpcRdmaGather => "grpc-rdma-gather",
            Self::GrpcNative => "grpc-native",
            Self::GrpcNativeGather => "grpc-native-gather",
            Self::RdmaCp => "rdma-cp",
            Self::RdmaZerocp => "rdma-zerocp",
        }
    }

    /// Returns the mode called `name`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Returns whether the mode uses static slots, and not calls.
    pub(crate) const fn uses_slots(self) -> bool {
        matches!(self, Self::RdmaCp | Self::RdmaZerocp)
    }
}

impl fmt::Display for TransferMode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_read_back() {
        for mode in TransferMode::ALL {
            assert_eq!(TransferMode::from_name(mode.name()), Some(mode));
            assert_eq!(serde_json::to_value(mode).ok(), Some(mode.name().into()));
        }
        assert_eq!(TransferMode::from_name("grpc-uds"), None);
    }
}
