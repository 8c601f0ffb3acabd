//! Who calls whom, over what.

use std::fmt;

use clap::ValueEnum;

use crate::peer::Peer;

/// Who calls whom. The first two are the controls: no code of ours carries a byte.
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
        match self {
            Self::TonicTcp | Self::Direct | Self::Bridge | Self::Bridges => Side::Client,
            Self::TcpTonic | Self::FromBridge | Self::Fallback | Self::Ours => Side::Server,
        }
    }

    /// The direction in which a case has to fail as well, if it is not our transport that fails.
    pub(crate) fn control(self) -> Self {
        match self.side() {
            Side::Client => Self::TonicTcp,
            Side::Server => Self::TcpTonic,
        }
    }

    /// Whether the peer takes part: no stock library comes into the last.
    pub(crate) fn suits(self, peer: Peer) -> bool {
        self != Self::Ours || peer == Peer::Tonic
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
