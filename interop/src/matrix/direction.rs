//! Who calls whom, over what.

use std::fmt;

use clap::ValueEnum;

/// Who calls whom. The first two are controls, and so are the first two with TLS: no code of ours carries a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Direction {
    /// Stock client, plain TCP, tonic's own transport.
    TonicTcp,
    /// tonic's own transport, plain TCP, stock server.
    TcpTonic,
    /// Stock client, plain TCP, the port that our server has for all.
    Direct,
    /// Stock client, bridge, RDMA, our server.
    Bridge,
    /// Stock client, bridge, RDMA, bridge, tonic's own transport.
    Bridges,
    /// Our client, RDMA, bridge, stock server.
    FromBridge,
    /// Our client, which looks for RDMA and finds none, stock server.
    Fallback,
    /// Our client, RDMA, our server.
    Ours,
    /// The same with TLS, from the client to the server: a bridge carries it and reads nothing.
    TonicTls,
    TlsTonic,
    DirectTls,
    BridgeTls,
    FromBridgeTls,
    FallbackTls,
    OursTls,
}

/// What the peer is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// It calls.
    Client,
    /// It is called.
    Server,
}

impl Direction {
    /// What the peer does in it.
    pub(crate) fn side(self) -> Side {
        match self.without_tls() {
            Self::TonicTcp | Self::Direct | Self::Bridge | Self::Bridges => Side::Client,
            _ => Side::Server,
        }
    }

    /// Who calls whom over what, TLS left out.
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

    /// Returns the direction in which each case has to come out alike, as no code of ours is in it.
    pub(crate) fn control(self) -> Self {
        match (self.side(), self.has_tls()) {
            (Side::Client, false) => Self::TonicTcp,
            (Side::Server, false) => Self::TcpTonic,
            (Side::Client, true) => Self::TonicTls,
            (Side::Server, true) => Self::TlsTonic,
        }
    }

    pub(crate) fn is_control(self) -> bool {
        self.control() == self
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::TonicTcp => "tonic-tcp",
            Self::TcpTonic => "tcp-tonic",
            Self::Direct => "direct",
            Self::Bridge => "bridge",
            Self::Bridges => "bridges",
            Self::FromBridge => "from-bridge",
            Self::Fallback => "fallback",
            Self::Ours => "ours",
            Self::TonicTls => "tonic-tls",
            Self::TlsTonic => "tls-tonic",
            Self::DirectTls => "direct-tls",
            Self::BridgeTls => "bridge-tls",
            Self::FromBridgeTls => "from-bridge-tls",
            Self::FallbackTls => "fallback-tls",
            Self::OursTls => "ours-tls",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl fmt::Display for Side {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Client => "client",
            Self::Server => "server",
        })
    }
}
