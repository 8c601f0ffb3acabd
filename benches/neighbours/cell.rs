//! The cells of the measurement.

/// The transport of all clients of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Transport {
    Tcp,
    Rdma,
}

/// The bad neighbour of the honest client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Neighbour {
    /// No neighbour.
    None,
    /// A client that makes a fixed number of calls a second.
    Paced,
    /// A client that makes a fixed number of calls a second, nearly as many as TCP carries.
    Busy,
    /// A client with as many calls in flight as it can.
    Flooding,
    /// Clients that are stopped in the middle of large calls, and are killed after a while.
    Stopped,
    /// A client that holds 1 000 connections on which it sends nothing.
    HalfOpen,
    /// A client that overwrites all memory that it shares.
    Scribbling,
}

impl Transport {
    pub(crate) const ALL: [Self; 2] = [Self::Tcp, Self::Rdma];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|transport| transport.name() == name);
        found.unwrap_or_else(|| panic!("no transport {name:?}: tcp, rdma"))
    }
}

impl Neighbour {
    pub(crate) const ALL: [Self; 7] = [
        Self::None,
        Self::Paced,
        Self::Busy,
        Self::Flooding,
        Self::Stopped,
        Self::HalfOpen,
        Self::Scribbling,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Paced => "paced",
            Self::Busy => "busy",
            Self::Flooding => "flooding",
            Self::Stopped => "stopped",
            Self::HalfOpen => "half-open",
            Self::Scribbling => "scribbling",
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|neighbour| neighbour.name() == name);
        found.unwrap_or_else(|| panic!("no neighbour {name:?}: {}", Self::ALL.map(Self::name).join(", ")))
    }

    /// Returns whether there is such a neighbour over `transport`. TCP shares no memory.
    pub(crate) fn exists_over(self, transport: Transport) -> bool {
        self != Self::Scribbling || transport == Transport::Rdma
    }
}

/// One measurement: the bytes of an honest call, the neighbour, and the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cell {
    pub(crate) bytes: usize,
    pub(crate) neighbour: Neighbour,
    pub(crate) transport: Transport,
}
