//! The state of a trace: the sites that it has learnt, and the pool in which it places their memory.
//!
//! Callers pause the execution ([`Pause`](super::thread::Pause)), because the functions here allocate.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::report::{NodeSite, SentSite, TraceReport};
use crate::memory::PoolError;
use crate::memory::pool::held::HeldPiece;
use crate::memory::pool::{Pool, Purpose};
use crate::memory::settings::Quota;
use crate::sync::lock;

/// Maximum number of sites.
const SITES: usize = 1 << 16;

/// Maximum number of layouts by which the allocations of one node are recognised.
const LAYOUTS: usize = 16;

/// The alignment of every piece of a pool, see `size_class`.
const PIECE_ALIGNMENT: usize = 128;

/// The largest alignment that is placed in the pool.
const LARGEST_ALIGNMENT: usize = 2 << 20;

/// The state of a trace. It lives as long as the process, because a thread may point to it after the program has dropped the
/// trace. It is small after [`close`](Self::close).
#[derive(Debug)]
pub(super) struct TraceState {
    number: u64,
    learned: Mutex<Learned>,
}

#[derive(Debug)]
struct Learned {
    /// `None` once the trace is closed.
    pool: Option<Pool>,
    nodes: BTreeMap<u32, SendingNode>,
    /// Number of sites of all nodes.
    sites: usize,
    placed: u64,
    refused: u64,
    refusal: Option<String>,
    untracked: u64,
}

/// A node with sites whose memory was sent.
#[derive(Debug, Default)]
struct SendingNode {
    /// The sites by ordinal.
    sites: BTreeMap<u32, SentAllocations>,
    /// The layouts that were sent. A node may make fewer or more allocations in its first execution than later, because it
    /// fills a cache. An allocation of a known layout is then placed although its ordinal has changed.
    layouts: Vec<Layout>,
}

/// The allocations of a site that were sent.
#[derive(Debug, Default)]
struct SentAllocations {
    bytes: u64,
    sent: u64,
    registered: u64,
}

/// Memory of the pool for an allocation.
pub(super) struct Place {
    pub(super) piece: HeldPiece,
    pub(super) start: *mut u8,
}

impl TraceState {
    /// Makes the state of a trace whose pool may have `limit` bytes in use.
    pub(super) fn new(limit: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let learned = Learned {
            pool: Some(Pool::for_sending(limit)),
            nodes: BTreeMap::new(),
            sites: 0,
            placed: 0,
            refused: 0,
            refusal: None,
            untracked: 0,
        };
        Self { number: NEXT.fetch_add(1, Ordering::Relaxed), learned: Mutex::new(learned) }
    }

    /// Returns a number that no other trace of the process has.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Ends the trace. Memory that it has placed stays valid until it is freed.
    pub(super) fn close(&self) {
        let mut learned = lock(&self.learned);
        let pool = learned.pool.take();
        let nodes = std::mem::take(&mut learned.nodes);
        drop(learned);
        drop((pool, nodes));
    }

    /// Returns whether allocations of `node` may be placed in the pool.
    pub(super) fn places(&self, node: u32) -> bool {
        let learned = lock(&self.learned);
        learned.pool.is_some() && learned.nodes.contains_key(&node)
    }

    /// Returns memory of the pool for an allocation of `site`, if memory of this site was sent.
    pub(super) fn place(&self, site: NodeSite, layout: Layout) -> Option<Place> {
        let pool = {
            let learned = lock(&self.learned);
            let node = learned.nodes.get(&site.node)?;
            if !node.sites.contains_key(&site.ordinal) && !node.layouts.contains(&layout) {
                return None;
            }
            learned.pool.clone()?
        };
        let place = obtain(&pool, layout);
        let mut learned = lock(&self.learned);
        match place {
            Ok(Some(place)) => {
                learned.placed += 1;
                Some(place)
            }
            Ok(None) => None,
            Err(error) => {
                learned.refused += 1;
                learned.refusal = Some(error.to_string());
                None
            }
        }
    }

    /// Notes that an allocation of `site` was sent.
    pub(super) fn sent(&self, site: NodeSite, layout: Layout, registered: bool) {
        let mut guard = lock(&self.learned);
        let learned = &mut *guard;
        let known = learned.nodes.get(&site.node).is_some_and(|node| node.sites.contains_key(&site.ordinal));
        if !known {
            if learned.sites >= SITES {
                learned.untracked += 1;
                return;
            }
            learned.sites += 1;
        }
        let node = learned.nodes.entry(site.node).or_default();
        if !node.layouts.contains(&layout) {
            if node.layouts.len() == LAYOUTS {
                node.layouts.remove(0);
            }
            node.layouts.push(layout);
        }
        let allocations = node.sites.entry(site.ordinal).or_default();
        allocations.bytes = layout.size() as u64;
        allocations.sent += 1;
        allocations.registered += u64::from(registered);
    }

    /// Returns what the trace has learnt.
    pub(super) fn report(&self) -> TraceReport {
        let learned = lock(&self.learned);
        let sites = learned.nodes.iter().flat_map(|(&node, sending)| {
            sending.sites.iter().map(move |(&ordinal, allocations)| {
                let &SentAllocations { bytes, sent, registered } = allocations;
                SentSite { site: NodeSite { node, ordinal }, bytes, sent, registered }
            })
        });
        let statistics = learned.pool.as_ref().map(Pool::statistics).unwrap_or_default();
        TraceReport {
            sites: sites.collect(),
            placed: learned.placed,
            refused: learned.refused,
            refusal: learned.refusal.clone(),
            untracked: learned.untracked,
            in_use: statistics.leased_send,
            slabs: statistics.registered,
            limit: learned.pool.as_ref().map_or(0, |pool| pool.settings().send_quota),
        }
    }
}

/// Obtains memory of `pool`. Returns `Ok(None)` for an alignment that the pool does not serve.
fn obtain(pool: &Pool, layout: Layout) -> Result<Option<Place>, PoolError> {
    let alignment = layout.align();
    if alignment > LARGEST_ALIGNMENT {
        return Ok(None);
    }
    let padding = if alignment > PIECE_ALIGNMENT { alignment } else { 0 };
    let piece = pool.obtain(layout.size().saturating_add(padding), Quota::Send, Purpose::Buffer)?;
    let start = piece.as_ptr();
    let start = start.wrapping_add(start.addr().next_multiple_of(alignment) - start.addr());
    let place = Place { piece, start };
    Ok(if place.capacity() >= layout.size() { Some(place) } else { None })
}

impl Place {
    /// Returns the number of bytes from the start to the end of the piece.
    pub(super) fn capacity(&self) -> usize {
        room(&self.piece, self.start)
    }
}

/// Returns the number of bytes from `start` to the end of `piece`.
pub(super) fn room(piece: &HeldPiece, start: *mut u8) -> usize {
    piece.capacity().saturating_sub(start.addr() - piece.as_ptr().addr())
}
