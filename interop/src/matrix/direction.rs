//! Directions: client, server, and the transport between them.

use clap::ValueEnum;

/// Client, transport and server of a run. `tonic-tcp`, `tcp-tonic` and these two with TLS are controls: none
/// of our code carries their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Direction {
    /// Stock client, plain TCP, tonic's own transport.
    TonicTcp,
    /// tonic's own transport, plain TCP, stock server.
    TcpTonic,
    /// Stock client, plain TCP, the one port of our server.
    Direct,
    /// The same, with native calls. Only our package for Python has such a client.
    DirectNative,
    /// Stock client, bridge, RDMA, our server.
    Bridge,
    /// Stock client, bridge, RDMA, bridge, tonic's own transport.
    Bridges,
    /// Our client, RDMA, bridge, stock server.
    FromBridge,
    /// Our client, which asks for RDMA and falls back to TCP, stock server.
    Fallback,
    /// Our client, RDMA, a server of ours: in Rust, or by our package for Python.
    Ours,
    /// Our channel, native calls, a server of ours.
    OursNative,
    /// Like `tonic-tcp`, with TLS. In all directions TLS reaches from client to server, so a bridge can't
    /// read the calls.
    TonicTls,
    /// Like `tcp-tonic`, with TLS.
    TlsTonic,
    /// Like `direct`, with TLS.
    DirectTls,
    /// Like `bridge`, with TLS.
    BridgeTls,
    /// Like `from-bridge`, with TLS.
    FromBridgeTls,
    /// Like `fallback`, with TLS.
    FallbackTls,
    /// Like `ours`, with TLS.
    OursTls,
}

/// The role of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// The peer calls.
    Client,
    /// The peer is called.
    Server,
}

impl Direction {
    /// Returns the role of the peer.
    pub(crate) fn role(self) -> Role {
        match self.without_tls() {
            Self::TonicTcp | Self::Direct | Self::DirectNative | Self::Bridge | Self::Bridges => Role::Client,
            _ => Role::Server,
        }
    }

    /// Returns the direction without TLS.
    pub(crate) fn without_tls(self) -> Self {
        match self {
            Self::TonicTls => Self::TonicTcp,
            Self::TlsTonic => Self::TcpTonic,
            Self::DirectTls => Self::Direct,
            Self::BridgeTls => Self::Bridge,
            Self::FromBridgeTls => Self::FromBridge,
            Self::FallbackTls => Self::Fallback,
            Self::OursTls => Self::Ours,
            plain => plain,
        }
    }

    pub(crate) fn has_tls(self) -> bool {
        self.without_tls() != self
    }

    /// Returns the control of this direction: each case has to have the outcome of the control, which runs
    /// none of our code.
    pub(crate) fn control(self) -> Self {
        match (self.role(), self.has_tls()) {
            (Role::Client, false) => Self::TonicTcp,
            (Role::Server, false) => Self::TcpTonic,
            (Role::Client, true) => Self::TonicTls,
            (Role::Server, true) => Self::TlsTonic,
        }
    }

    pub(crate) fn is_control(self) -> bool {
        self.control() == self
    }
}

tonic_rdma_commands::displayed_by_name!(Direction, Role);
