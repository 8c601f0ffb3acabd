//! What is measured.

use std::fmt;

use super::runtimes::Flavour;

/// A way to move bytes to the other process and to hear that they have been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Path {
    /// A call of the greeter over tonic's own transport.
    GrpcTcp,
    /// The same with the two lines changed.
    GrpcRdma,
    /// A put of a `Bytes` field over tonic's own transport.
    PutTcp,
    /// The same over RDMA, by reference: `gather::requests`.
    Gather,
    /// The same out of a buffer of `Pool::for_sending`.
    Pool,
    /// `static_sender` and `recv().await`, one buffer.
    Static,
    /// The same with two buffers, of which both are on their way.
    Static2,
    Dynamic,
    /// `Channel::request`.
    Rendezvous,
    /// `memcpy` into a region.
    Memcpy,
    /// `memcpy_batch` with a notice, for which the owner waits by `ExportedRegion::notice`; it answers with another one.
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

    /// Whether it is a small call where many at once are of interest.
    pub(crate) fn is_greeter(self) -> bool {
        matches!(self, Self::GrpcTcp | Self::GrpcRdma)
    }

    /// What moves as many bytes over TCP. A greeter's are text, which both ends check for UTF-8.
    fn over_tcp(self) -> Self {
        if self.is_greeter() { Self::GrpcTcp } else { Self::PutTcp }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// What is measured at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cell {
    pub(crate) runtime: Flavour,
    pub(crate) bytes: usize,
    pub(crate) inflight: usize,
    pub(crate) path: Path,
}

impl Cell {
    /// What it is compared with.
    pub(crate) fn over_tcp(self) -> Self {
        Self { path: self.path.over_tcp(), ..self }
    }
}
