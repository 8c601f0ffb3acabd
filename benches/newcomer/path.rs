//! The measured paths, and the cells of the measurement.

use std::fmt;

use super::runtimes::Flavour;

/// A path by which bytes go to the other process and an acknowledgement comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Path {
    /// A call of the greeter over tonic's own transport.
    GrpcTcp,
    /// A call of the greeter over RDMA.
    GrpcRdma,
    /// A put of a `Bytes` field over tonic's own transport.
    PutTcp,
    /// A put over RDMA, by reference: `gather::requests`.
    Gather,
    /// A put over RDMA from a buffer of `Pool::for_sending`.
    Pool,
    /// `static_sender` and `recv().await`, one buffer.
    Static,
    /// `static_sender` with two buffers, both in flight.
    Static2,
    Dynamic,
    /// `Channel::request`.
    Rendezvous,
    /// A write into a region: `Channel::write` and `from`.
    Memcpy,
    /// A write of scattered blocks with a notice: `blocks_from`. The region's owner waits by `ExportedRegion::notice`, and answers with
    /// a notice.
    Notice,
}

impl Path {
    pub(crate) const ALL: [Self; 11] = [
        Self::GrpcTcp,
        Self::GrpcRdma,
        Self::PutTcp,
        Self::Gather,
        Self::Pool,
        Self::Static,
        Self::Static2,
        Self::Dynamic,
        Self::Rendezvous,
        Self::Memcpy,
        Self::Notice,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::GrpcTcp => "grpc-tcp",
            Self::GrpcRdma => "grpc-rdma",
            Self::PutTcp => "put-tcp",
            Self::Gather => "gather",
            Self::Pool => "pool",
            Self::Static => "static",
            Self::Static2 => "static-2",
            Self::Dynamic => "dynamic",
            Self::Rendezvous => "rendezvous",
            Self::Memcpy => "memcpy",
            Self::Notice => "notice",
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|path| path.name() == name);
        found.unwrap_or_else(|| panic!("no path {name:?}: {}", Self::ALL.map(Self::name).join(", ")))
    }

    /// Returns whether the path is a small call, which is also measured with many calls in flight.
    pub(crate) fn is_greeter(self) -> bool {
        matches!(self, Self::GrpcTcp | Self::GrpcRdma)
    }

    /// Returns the path that moves as many bytes over TCP. A greeter's bytes are text, which both ends check for UTF-8.
    fn over_tcp(self) -> Self {
        if self.is_greeter() { Self::GrpcTcp } else { Self::PutTcp }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// One measurement: a path with its conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cell {
    pub(crate) runtime: Flavour,
    pub(crate) bytes: usize,
    pub(crate) inflight: usize,
    pub(crate) path: Path,
}

impl Cell {
    /// Returns the cell to compare with.
    pub(crate) fn over_tcp(self) -> Self {
        Self { path: self.path.over_tcp(), ..self }
    }
}
