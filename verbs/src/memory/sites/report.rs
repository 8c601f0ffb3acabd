//! The report of what was learnt, for people and for programs.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

/// Where a program allocates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Site {
    /// A place in the source.
    Location(&'static Location<'static>),
    /// A name that the program gave.
    Named {
        /// The name.
        name: Arc<str>,
        /// Allocations under that name that an iteration makes before this one.
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

/// Where a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SitePlacement {
    /// On the heap.
    Heap,
    /// In the allocator's pool.
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

/// PlacementReason a site's buffers go where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlacementReason {
    /// Nothing is known yet: it was first seen in this iteration, or nothing was allocated in a whole one.
    Recording {
        /// The iteration in which it was first seen.
        since: u64,
    },
    /// A buffer of it was sent.
    Sent {
        /// The last iteration in which that was so.
        iteration: u64,
    },
    /// No buffer of it was ever sent.
    NotSent,
    /// Buffers of it were sent once, but none for as many iterations as the allocator is patient.
    Idle {
        /// The iteration at whose end it went back to the heap.
        since: u64,
    },
    /// All its buffers are shorter than what is placed.
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

/// One site, since the allocator was made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SiteStatus {
    /// Which one.
    pub site: Site,
    /// Where its next buffer goes, if there is room.
    pub placement: SitePlacement,
    /// PlacementReason there.
    pub why: PlacementReason,
    /// Buffers that it allocated, without those that were too short.
    pub buffers: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Buffers that were too short to be placed.
    pub short: u64,
    /// Buffers that were sent, each counted once.
    pub sent: u64,
    /// Buffers that came from registered memory.
    pub registered: u64,
    /// Buffers that should have, but the pool had no memory for them.
    pub refused: u64,
    /// What the pool said the last time, and what to do about it.
    pub refusal: Option<String>,
}

/// All sites of an allocator, those with the most bytes first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SiteReport {
    /// The iteration that it is in, from 1.
    pub iteration: u64,
    /// Buffers whose site there was no room for.
    pub untracked: u64,
    /// The sites.
    pub sites: Vec<SiteStatus>,
}

impl SiteReport {
    pub(super) fn new(iteration: u64, untracked: u64, mut sites: Vec<SiteStatus>) -> Self {
        sites.sort_by_key(|site| std::cmp::Reverse(site.bytes));
        Self { iteration, untracked, sites }
    }
}

/// A table, a line for each site.
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

/// A number of bytes for people.
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
