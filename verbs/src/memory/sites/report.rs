//! The report on allocation sites, for people and for programs.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

/// A place where a program allocates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Location(location) => location.fmt(f),
            Self::Named { name, ordinal } => write!(f, "{name}#{ordinal}"),
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

/// The status of one site since the allocator was made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SiteStatus {
    /// The site.
    pub site: Site,
    /// Place of the next buffer, if the pool has room.
    pub placement: SitePlacement,
    /// Reason for the placement.
    pub why: PlacementReason,
    /// Number of allocated buffers, without those that were too short.
    pub buffers: u64,
    /// Bytes of these buffers.
    pub bytes: u64,
    /// Number of buffers that were too short for registered memory.
    pub short: u64,
    /// Number of buffers that were sent.
    pub sent: u64,
    /// Number of buffers in registered memory.
    pub registered: u64,
    /// Number of buffers that should be in registered memory, but the pool had none for them.
    pub refused: u64,
    /// Reason of the last refusal by the pool, with advice.
    pub refusal: Option<String>,
}

/// All sites of an allocator. The sites with the most bytes come first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SiteReport {
    /// Number of the current iteration, from 1.
    pub iteration: u64,
    /// Number of buffers of sites beyond the limit.
    pub untracked: u64,
    /// The sites.
    pub sites: Vec<SiteStatus>,
}

impl SiteReport {
    /// Makes a report, and sorts the sites.
    pub(super) fn new(iteration: u64, untracked: u64, mut sites: Vec<SiteStatus>) -> Self {
        sites.sort_by_key(|site| std::cmp::Reverse(site.bytes));
        Self { iteration, untracked, sites }
    }
}

/// Writes a table with a line for each site.
impl fmt::Display for SiteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "in iteration {}, {} sites", self.iteration, self.sites.len())?;
        writeln!(
            f,
            "{:<10}  {:>8}  {:>10}  {:>8}  {:>10}  site: why",
            "placement", "buffers", "bytes", "sent", "registered"
        )?;
        for site in &self.sites {
            write!(
                f,
                "{:<10}  {:>8}  {:>10}  {:>8}  {:>10}  {}: {}",
                site.placement,
                site.buffers,
                HumanBytes(site.bytes).to_string(),
                site.sent,
                site.registered,
                site.site,
                site.why
            )?;
            if let Some(refusal) = &site.refusal {
                write!(f, "; {} on the heap for lack of memory: {refusal}", site.refused)?;
            }
            writeln!(f)?;
        }
        if self.untracked > 0 {
            writeln!(f, "{} buffers of further sites, on the heap", self.untracked)?;
        }
        Ok(())
    }
}

/// A number of bytes, displayed with a unit.
struct HumanBytes(u64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let unit = (self.0.max(1).ilog2() / 10).min(4);
        let value = self.0 as f64 / f64::from(1_u32 << 10).powi(unit as i32);
        let digits = usize::from(unit > 0);
        write!(f, "{value:.digits$} {}", UNITS[unit as usize])
    }
}
