//! The sites of a handle: what is known of each of them, the decision where its next memory lies, and the
//! report.
//!
//! Both fronts use it: the handle of a program ([`SiteAllocator`](super::SiteAllocator)), and the global
//! allocator of a graph ([`trace`](crate::memory::trace)). The latter calls it in a pause, because the
//! functions here allocate.

use crate::VerbsError;
use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::memory::PoolStatistics;
use crate::memory::pool::shared::HeldExtent;
use crate::memory::pool::{EXTENT_ALIGNMENT, Pool, Purpose};
use crate::memory::settings::Quota;
use crate::panics::lock;
use crate::units::size;

/// Maximum number of layouts by which the allocations of one node are recognised.
const LAYOUTS: usize = 16;

/// The largest alignment that is placed in the pool.
const LARGEST_ALIGNMENT: usize = 2 << 20;

/// Length in bytes of the shortest slice or buffer that is traced. Connections copy shorter ones.
pub const SHORTEST: usize = 4096;

/// Settings of a [`SiteAllocator`](super::SiteAllocator).
///
/// ```
/// use tonic_rdma_verbs::memory::sites::SiteSettings;
///
/// // Only buffers of 64 KiB and more are worth registered memory; a site goes back to the heap after two idle iterations.
/// let settings = SiteSettings { minimum: 64 << 10, idle_iterations: 2, ..SiteSettings::default() };
/// # assert_eq!(settings.sites, 1 << 16);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteSettings {
    /// Length of the shortest buffer that is placed in registered memory, in bytes, at least [`SHORTEST`].
    /// Shorter buffers of every site are on the heap. Default: [`SHORTEST`].
    pub minimum: usize,
    /// Number of iterations after which an idle site goes back to the heap; at least 1. An idle site
    /// allocates buffers, but sends none of them. Iterations in which the site does not allocate do not
    /// count. Default: 8.
    pub idle_iterations: u32,
    /// Maximum number of sites. Buffers of further sites are on the heap and counted as untracked. Default:
    /// 65 536, for which the allocator needs some 20 MB.
    pub sites: usize,
}

impl Default for SiteSettings {
    fn default() -> Self {
        Self { minimum: SHORTEST, idle_iterations: 8, sites: 1 << 16 }
    }
}

/// The sites of one handle, and the pool for the memory of those that send.
#[derive(Debug)]
pub(in crate::memory) struct SiteTable {
    pub(in crate::memory) settings: SiteSettings,
    state: Mutex<SiteState>,
}

#[derive(Debug)]
struct SiteState {
    /// `None` once the handle is closed.
    pool: Option<Pool>,
    records: BTreeMap<Site, SiteRecord>,
    /// Number of allocations under each name in this iteration.
    ordinals: HashMap<Arc<str>, usize>,
    /// The layouts that each node sent. A node may make fewer or more allocations in its first execution than
    /// later, because it fills a cache. An allocation of a known layout is then placed although its ordinal
    /// has changed.
    layouts: HashMap<u32, Vec<Layout>>,
    /// The current iteration, and what is counted for all sites together.
    totals: SiteReport,
}

/// A site: what users see of it, and the numbers at the last decision.
#[derive(Debug)]
struct SiteRecord {
    status: SiteStatus,
    /// Numbers of buffers and of sent buffers at the last decision.
    decided: (u64, u64),
    /// Number of iterations since the last sent buffer in which the site allocated, but sent nothing.
    idle: u32,
}

/// Memory of the pool for an allocation.
pub(in crate::memory) struct PlacedMemory {
    pub(in crate::memory) extent: HeldExtent,
    /// The first address of the extent that has the alignment.
    pub(in crate::memory) start: *mut u8,
}

impl SiteTable {
    /// Makes an empty table, in the first iteration.
    pub(in crate::memory) fn new(pool: Pool, settings: SiteSettings) -> Self {
        let state = SiteState {
            pool: Some(pool),
            records: BTreeMap::new(),
            ordinals: HashMap::new(),
            layouts: HashMap::new(),
            totals: SiteReport { iteration: 1, ..SiteReport::default() },
        };
        Self { settings, state: Mutex::new(state) }
    }

    /// Ends the use of the pool. Memory that was placed stays valid until it is freed.
    pub(in crate::memory) fn close(&self) {
        let mut state = self.lock();
        let freed =
            (state.pool.take(), std::mem::take(&mut state.records), std::mem::take(&mut state.layouts));
        drop(state);
        drop(freed);
    }

    /// Returns the site of the next allocation under `name` in this iteration.
    pub(in crate::memory) fn named(&self, name: &str) -> Site {
        let mut state = self.lock();
        let ordinals = &mut state.ordinals;
        let (name, ordinal) = match ordinals.get_key_value(name) {
            Some((name, &ordinal)) => (Arc::clone(name), ordinal),
            // The site is beyond the limit, too.
            None if ordinals.len() >= self.settings.sites => {
                return Site::Named { name: name.into(), ordinal: 0 };
            }
            None => (name.into(), 0),
        };
        ordinals.insert(Arc::clone(&name), ordinal + 1);
        Site::Named { name, ordinal }
    }

    /// Returns whether a buffer of `length` bytes at `site` is traced: whether it is long enough, and the
    /// site is within the limit.
    pub(in crate::memory) fn admits(&self, site: &Site, length: usize) -> bool {
        let is_short = length < self.settings.minimum;
        let mut state = self.lock();
        let Some(record) = state.record(site, self.settings.sites) else { return false };
        record.status.short += u64::from(is_short);
        !is_short
    }

    /// Returns whether allocations of `node` may be placed.
    pub(in crate::memory) fn places(&self, node: u32) -> bool {
        self.lock().layouts.contains_key(&node)
    }

    /// Counts an allocation of `site`. Returns memory of the pool for it, if memory of the site was sent and
    /// the pool has room.
    pub(in crate::memory) fn place(&self, site: &Site, layout: Layout) -> Option<PlacedMemory> {
        let mut state = self.lock();
        let mut is_wanted = match site {
            Site::Node(NodeSite { node, .. }) => {
                state.layouts.get(node).is_some_and(|known| known.contains(&layout))
            }
            Site::Location(_) | Site::Named { .. } => false,
        };
        if let Some(SiteRecord { status, .. }) = state.records.get_mut(site) {
            status.count(layout);
            is_wanted |= status.placement == SitePlacement::Registered;
        }
        if !is_wanted || layout.align() > LARGEST_ALIGNMENT {
            return None;
        }
        let pool = state.pool.clone()?;
        // A pool that needs another slab makes system calls.
        drop(state);
        let place = obtain(&pool, layout);
        let mut guard = self.lock();
        let state = &mut *guard;
        let record = state.records.get_mut(site).map(|record| &mut record.status);
        match place {
            Ok(place) => {
                state.totals.placed += 1;
                record.into_iter().for_each(|status| status.registered += 1);
                Some(place)
            }
            Err(error) => {
                state.totals.refused += 1;
                state.totals.refusal = Some(error.to_string());
                record.into_iter().for_each(|status| status.refused += 1);
                None
            }
        }
    }

    /// Notes that an allocation of `site` was sent. The decision for a node is made at once, because the next
    /// execution of the node may belong to any step of the graph.
    pub(in crate::memory) fn sent(&self, site: &Site, layout: Layout) {
        let mut state = self.lock();
        let iteration = state.totals.iteration;
        let Some(record) = state.record(site, self.settings.sites) else { return };
        record.status.sent += 1;
        let Site::Node(NodeSite { node, .. }) = site else { return };
        if record.status.sent == 1 {
            record.status.count(layout);
        }
        record.decide(iteration, self.settings.idle_iterations);
        let layouts = state.layouts.entry(*node).or_default();
        if !layouts.contains(&layout) {
            if layouts.len() == LAYOUTS {
                layouts.remove(0);
            }
            layouts.push(layout);
        }
    }

    /// Ends the iteration, and decides where each site's next buffers lie.
    pub(in crate::memory) fn next_iteration(&self) {
        let mut guard = self.lock();
        let state = &mut *guard;
        let iteration = state.totals.iteration;
        state.records.values_mut().for_each(|record| record.decide(iteration, self.settings.idle_iterations));
        state.ordinals.values_mut().for_each(|ordinal| *ordinal = 0);
        state.totals.iteration += 1;
    }

    /// Returns what is known of all sites.
    pub(in crate::memory) fn report(&self) -> SiteReport {
        let state = self.lock();
        let mut sites: Vec<_> = state.records.values().map(|record| record.status.clone()).collect();
        sites.sort_by_key(|status| std::cmp::Reverse(status.bytes));
        let pool = state.pool.as_ref().map(Pool::statistics).unwrap_or_default();
        SiteReport { sites, pool, ..state.totals.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, SiteState> {
        lock(&self.state)
    }
}

impl SiteState {
    /// Returns the record of `site`, or `None` if it would be one more than `limit`.
    fn record(&mut self, site: &Site, limit: usize) -> Option<&mut SiteRecord> {
        if self.records.len() >= limit && !self.records.contains_key(site) {
            self.totals.untracked += 1;
            return None;
        }
        let since = self.totals.iteration;
        Some(self.records.entry(site.clone()).or_insert_with(|| SiteRecord::new(site.clone(), since)))
    }
}

impl SiteRecord {
    /// Makes the record of a site that was first seen in iteration `since`.
    fn new(site: Site, since: u64) -> Self {
        let status = SiteStatus {
            site,
            placement: SitePlacement::Heap,
            why: PlacementReason::Recording { since },
            buffers: 0,
            bytes: 0,
            short: 0,
            sent: 0,
            registered: 0,
            refused: 0,
        };
        Self { status, decided: (0, 0), idle: 0 }
    }

    /// Decides where the site's memory lies from now on, at the end of `iteration`.
    fn decide(&mut self, iteration: u64, idle_iterations: u32) {
        let Self { status, decided, idle } = self;
        let (buffers, sent) = std::mem::replace(decided, (status.buffers, status.sent));
        if status.sent > sent {
            *idle = 0;
            status.why = PlacementReason::Sent { iteration };
            status.placement = SitePlacement::Registered;
        } else if status.buffers > buffers {
            *idle = idle.saturating_add(1);
            match status.why {
                PlacementReason::Sent { .. } if *idle >= idle_iterations => {
                    status.why = PlacementReason::Idle { since: iteration };
                    status.placement = SitePlacement::Heap;
                }
                PlacementReason::Sent { .. } | PlacementReason::Idle { .. } => {}
                _ => status.why = PlacementReason::NotSent,
            }
        } else if status.buffers == 0 && status.short > 0 {
            status.why = PlacementReason::Short;
        }
    }
}

impl SiteStatus {
    fn count(&mut self, layout: Layout) {
        self.buffers += 1;
        self.bytes += layout.size() as u64;
    }
}

/// Obtains memory of `pool`.
fn obtain(pool: &Pool, layout: Layout) -> Result<PlacedMemory, VerbsError> {
    let alignment = layout.align();
    let padding = if alignment > EXTENT_ALIGNMENT { alignment } else { 0 };
    let extent = pool.obtain(layout.size().saturating_add(padding), Quota::Send, Purpose::Buffer)?;
    let start = extent.as_ptr();
    let start = start.wrapping_add(start.addr().next_multiple_of(alignment) - start.addr());
    debug_assert!(extent.capacity() >= start.addr() - extent.as_ptr().addr() + layout.size());
    Ok(PlacedMemory { extent, start })
}

/// Code of a program that allocates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Site {
    /// A position in the source.
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
    /// The node, by the number that the program gave to
    /// [`SiteAllocator::enter`](super::SiteAllocator::enter).
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

/// Where a buffer lies.
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
    /// Nothing is known yet: the site was first seen in this iteration, or has not allocated in a whole
    /// iteration.
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
    /// [`SiteSettings::idle_iterations`](super::SiteSettings::idle_iterations) allows.
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
    /// Where the next buffer lies, if the pool has room.
    pub placement: SitePlacement,
    /// Reason for the placement.
    pub why: PlacementReason,
    /// Number of allocated buffers, without those that were too short. For the site of a node: the first
    /// allocation that was sent, and the later ones.
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
    /// Number of buffers of sites beyond the limit; for nodes, the number of times that memory of such sites
    /// was sent. These sites stay on the heap.
    pub untracked: u64,
    /// Number of allocations that were placed in the pool.
    pub placed: u64,
    /// Number of allocations that should be in the pool, but the pool had no memory for them. They are on the
    /// heap.
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
