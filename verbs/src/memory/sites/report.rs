//! The report on allocation sites, for people and for programs.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use crate::memory::PoolStatistics;
use crate::units::size;

/// A place where a program allocates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Site {
    /// A place in the source.
    Location(&'static Location<'static>),
    /// A name that the program gave.
    Named {
        /// The name.
        name: Arc<str>,
        /// Number of earlier allocations under that name in an iteration.
        ordinal: usize,
    },
    /// A node of a graph ([`trace`](crate::memory::trace)).
    Node(NodeSite),
}

/// The allocation of a node that comes after `ordinal` other allocations of the same execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSite {
    /// The node, by the number that the program gave to [`SiteAllocator::enter`](super::SiteAllocator::enter).
    pub node: u32,
    /// Number of allocations that the execution of the node has made before, from 0.
    pub ordinal: u32,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Location(location) => location.fmt(f),
            Self::Named { name, ordinal } => write!(f, "{name}#{ordinal}"),
            Self::Node(NodeSite { node, ordinal }) => write!(f, "allocation {ordinal} of node {node}"),
        }
    }
}

/// The place of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SitePlacement {
    /// On the heap.
    Heap,
    /// In registered memory, from the allocator's pool.
    Registered,
}

impl fmt::Display for SitePlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Heap => "heap",
            Self::Registered => "registered",
        })
    }
}

/// The reason for the placement of a site's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlacementReason {
    /// Nothing is known yet: the site was first seen in this iteration, or has not allocated in a whole iteration.
    Recording {
        /// The iteration in which the site was first seen.
        since: u64,
    },
    /// A buffer of the site was sent.
    Sent {
        /// The last iteration in which a buffer was sent.
        iteration: u64,
    },
    /// No buffer of the site was ever sent.
    NotSent,
    /// Buffers of the site were sent earlier, but the site has then been idle for as many iterations as
    /// [`SiteSettings::patience`](super::SiteSettings::patience) allows.
    Idle {
        /// The iteration at the end of which the site went back to the heap.
        since: u64,
    },
    /// All buffers of the site are too short for registered memory.
    Short,
}

impl fmt::Display for PlacementReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recording { since } => write!(f, "recording since iteration {since}"),
            Self::Sent { iteration } => write!(f, "sent in iteration {iteration}"),
            Self::NotSent => f.write_str("never sent"),
            Self::Idle { since } => write!(f, "no longer sent, back since iteration {since}"),
            Self::Short => f.write_str("too short"),
        }
    }
}

/// The status of one site since it was first seen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SiteStatus {
    /// The site.
    pub site: Site,
    /// Place of the next buffer, if the pool has room.
    pub placement: SitePlacement,
    /// Reason for the placement.
    pub why: PlacementReason,
    /// Number of allocated buffers, without those that were too short. For the site of a node: the first allocation that was
    /// sent, and the later ones.
    pub buffers: u64,
    /// Bytes of these buffers.
    pub bytes: u64,
    /// Number of buffers that were too short for registered memory.
    pub short: u64,
    /// Number of buffers that were sent. For the site of a node: number of times that its memory was sent.
    pub sent: u64,
    /// Number of buffers in registered memory.
    pub registered: u64,
    /// Number of buffers that should be in registered memory, but the pool had none for them.
    pub refused: u64,
}

/// All sites of a handle. The sites with the most bytes come first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SiteReport {
    /// Number of the current iteration, from 1. A trace of a graph has one iteration.
    pub iteration: u64,
    /// The sites. Sites of nodes are listed once their memory was sent.
    pub sites: Vec<SiteStatus>,
    /// Number of buffers of sites beyond the limit; for nodes, the number of times that memory of such sites was sent. These
    /// sites stay on the heap.
    pub untracked: u64,
    /// Number of allocations that were placed in the pool.
    pub placed: u64,
    /// Number of allocations that should be in the pool, but the pool had no memory for them. They are on the heap.
    pub refused: u64,
    /// Reason of the last refusal by the pool, with advice.
    pub refusal: Option<String>,
    /// The numbers of the pool. [`leased_send`](PoolStatistics::leased_send) are the bytes in use.
    pub pool: PoolStatistics,
}

/// Writes a table with a line for each site.
impl fmt::Display for SiteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "in iteration {}, {} sites", self.iteration, self.sites.len())?;
        writeln!(f, "placement    buffers       bytes      sent  registered  site: why")?;
        for status in &self.sites {
            let SiteStatus { site, placement, why, buffers, bytes, sent, registered, refused, .. } = status;
            let bytes = size(*bytes);
            write!(
                f,
                "{placement:<10}  {buffers:>8}  {bytes:>10}  {sent:>8}  {registered:>10}  {site}: {why}"
            )?;
            if *refused > 0 {
                write!(f, "; {refused} on the heap for lack of memory")?;
            }
            writeln!(f)?;
        }
        if let Some(refusal) = &self.refusal {
            writeln!(f, "last lack of memory: {refusal}")?;
        }
        if self.untracked > 0 {
            writeln!(f, "{} buffers of further sites, on the heap", self.untracked)?;
        }
        Ok(())
    }
}
