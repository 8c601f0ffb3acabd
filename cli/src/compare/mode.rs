//! What can be compared.

use std::fmt;

/// A way to carry the same call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::enum_variant_names, reason = "modes without gRPC come beside them")]
pub(crate) enum Mode {
    /// tonic over a TCP connection on the loopback interface: what the others are measured against.
    GrpcTcp,
    /// tonic over a Unix domain socket.
    GrpcUds,
    /// tonic over this library's connector, RDMA required.
    GrpcRdma,
    /// The same with payloads that go by reference: `tonic_rdma::gather`.
    GrpcRdmaGather,
}

impl Mode {
    /// Every mode that exists, in the order of the table.
    pub(crate) const ALL: [Self; 4] = [Self::GrpcTcp, Self::GrpcUds, Self::GrpcRdma, Self::GrpcRdmaGather];

    /// The name on the command line and in the JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::GrpcTcp => "grpc-tcp",
            Self::GrpcUds => "grpc-uds",
            Self::GrpcRdma => "grpc-rdma",
            Self::GrpcRdmaGather => "grpc-rdma-gather",
        }
    }

    /// The mode called `name`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Whether the mode needs an RDMA device.
    pub(crate) const fn uses_rdma(self) -> bool {
        matches!(self, Self::GrpcRdma | Self::GrpcRdmaGather)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
