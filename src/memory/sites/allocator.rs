//! The allocator that a program holds.

use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::SiteBuf;
use super::record::Record;
use super::report::{Placement, SiteReport};
use super::table::Table;
use super::unsent::SHORTEST;
use crate::memory::{Pool, RegisteredBuf};

/// What a [`SiteAllocator`] is made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteSettings {
    /// Shortest buffer, in bytes, that is placed in registered memory, at least [`SHORTEST`].
    /// Shorter ones are on the heap, whatever their site. Default: [`SHORTEST`].
    pub minimum: usize,
    /// After how many iterations in a row, in which it allocated and nothing of it was sent, a site goes back to the
    /// heap; at least 1. Default: 8.
    pub patience: u32,
    /// Most sites that are told apart; buffers of others are on the heap and counted as untracked. Default: 65 536,
    /// which are some 20 MB if there are as many.
    pub sites: usize,
}

impl Default for SiteSettings {
    fn default() -> Self {
        Self { minimum: SHORTEST, patience: 8, sites: 1 << 16 }
    }
}

/// Allocates buffers in registered memory or on the heap, by whether the buffers of their site were sent before: see
/// the [module](super). Clones are the same allocator. Thread-safe; an allocation holds a lock while it looks its site up.
///
/// A site is a place in the source ([`allocate`](Self::allocate), [`with_capacity`](Self::with_capacity)): file, line
/// and column of the call. A function that allocates for its callers passes theirs on with `#[track_caller]`.
///
/// Or it is a name that the program gives ([`allocate_named`](Self::allocate_named),
/// [`with_capacity_named`](Self::with_capacity_named)) and how many allocations the iteration has made under it before.
/// For programs that interpret, such as a data-flow graph, where one line allocates for all nodes: there the name is the
/// node's. It takes an order that does not change: threads that allocate under one name mix its sites up.
#[derive(Clone, Debug)]
pub struct SiteAllocator {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    pool: Pool,
    settings: SiteSettings,
    table: Mutex<Table>,
}

impl SiteAllocator {
    /// An allocator that places in `pool` what is sent, and is in its first iteration. Connections send from where it is
    /// what lies in a pool [`for_sending`](Pool::for_sending).
    pub fn new(pool: Pool, settings: SiteSettings) -> Self {
        let settings = SiteSettings {
            minimum: settings.minimum.max(SHORTEST),
            patience: settings.patience.max(1),
            ..settings
        };
        let table = Mutex::new(Table::new(settings.sites));
        Self { shared: Arc::new(Shared { pool, settings, table }) }
    }

    /// A buffer of `length` bytes to write over. Its content is not specified: what the memory was last used for, in a
    /// debug build `0xa5` if it is on the heap.
    ///
    /// # Panics
    /// As a `Vec` does, if there is not as much memory in the world.
    #[track_caller]
    pub fn allocate(&self, length: usize) -> SiteBuf {
        self.shared.obtain(self.here(Location::caller()), length, Content::Any)
    }

    /// An empty buffer to append `capacity` bytes to, by [`BufMut`](bytes::BufMut) or [`Write`](std::io::Write). It does
    /// not grow.
    ///
    /// # Panics
    /// As a `Vec` does, if there is not as much memory in the world.
    #[track_caller]
    pub fn with_capacity(&self, capacity: usize) -> SiteBuf {
        self.shared.obtain(self.here(Location::caller()), capacity, Content::None)
    }

    /// As [`allocate`](Self::allocate), for the site that is the next of `name` in this iteration.
    pub fn allocate_named(&self, name: &str, length: usize) -> SiteBuf {
        self.shared.obtain(self.shared.table().named(name), length, Content::Any)
    }

    /// As [`with_capacity`](Self::with_capacity), for the site that is the next of `name` in this iteration.
    pub fn with_capacity_named(&self, name: &str, capacity: usize) -> SiteBuf {
        self.shared.obtain(self.shared.table().named(name), capacity, Content::None)
    }

    /// Ends the iteration: sites of which a buffer was sent since the last call are in registered memory from now on.
    /// What is sent later counts for the next one. Buffers that exist stay where they are.
    ///
    /// For whoever runs the loop, once for each turn of it. A program without a loop calls it now and then.
    pub fn next_iteration(&self) {
        self.shared.table().next_iteration(self.shared.settings.patience);
    }

    /// What was learnt, site by site.
    pub fn report(&self) -> SiteReport {
        let table = self.shared.table();
        let sites = table.records().iter().map(|record| record.status()).collect();
        SiteReport::new(table.iteration, table.untracked, sites)
    }

    /// Where the buffers of sites that send are.
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// What it was made with, or the least that there is.
    pub fn settings(&self) -> &SiteSettings {
        &self.shared.settings
    }

    fn here(&self, location: &'static Location<'static>) -> Option<Arc<Record>> {
        self.shared.table().at(location)
    }
}

/// What is in a new buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Any,
    None,
}

impl Shared {
    fn obtain(&self, record: Option<Arc<Record>>, capacity: usize, content: Content) -> SiteBuf {
        let record = record.filter(|record| {
            let traced = capacity >= self.settings.minimum;
            if !traced {
                record.short();
            }
            traced
        });
        let registered = record.as_ref().and_then(|record| self.registered(record, capacity));
        if let Some(record) = &record {
            let placement = if registered.is_some() { Placement::Registered } else { Placement::Heap };
            record.allocated(capacity, placement);
        }
        match (registered, content) {
            (Some(buffer), Content::Any) => SiteBuf::registered(buffer, capacity, record),
            (Some(buffer), Content::None) => SiteBuf::registered(buffer, 0, record),
            (None, Content::Any) => SiteBuf::heap(any(capacity), capacity, record),
            (None, Content::None) => SiteBuf::heap(Vec::with_capacity(capacity), capacity, record),
        }
    }

    /// Registered memory, if the site is to have it and there is some.
    fn registered(&self, record: &Record, capacity: usize) -> Option<RegisteredBuf> {
        if record.placement() == Placement::Heap {
            return None;
        }
        self.pool.allocate(capacity).map_err(|error| record.refused(error)).ok()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that nobody should rely on. Zeros cost nothing where the system has just made them; that they are not promised
/// shows in a debug build at once, rather than when the site gets memory that was used before.
fn any(length: usize) -> Vec<u8> {
    vec![if cfg!(debug_assertions) { 0xa5 } else { 0 }; length]
}
