//! The allocator that a program holds.

use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::SiteBuf;
use super::record::SiteRecord;
use super::report::{SitePlacement, SiteReport};
use super::table::SiteTable;
use super::unsent::SHORTEST;
use crate::memory::pieces::RegisteredBuf;
use crate::memory::pool::Pool;

/// Settings of a [`SiteAllocator`].
///
/// ```
/// use tonic_rdma_verbs::memory::sites::SiteSettings;
///
/// // Only buffers of 64 KiB and more are worth registered memory; a site goes back to the heap after two idle iterations.
/// let settings = SiteSettings { minimum: 64 << 10, patience: 2, ..SiteSettings::default() };
/// # assert_eq!(settings.sites, 1 << 16);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteSettings {
    /// Length of the shortest buffer that is placed in registered memory, in bytes, at least [`SHORTEST`]. Shorter ones
    /// are on the heap, whatever their site. Default: [`SHORTEST`].
    pub minimum: usize,
    /// Number of iterations in a row in which a site allocates, and none of its buffers is sent, before the site goes back
    /// to the heap; at least 1. Default: 8.
    pub patience: u32,
    /// Number of sites that are told apart at most. Buffers of further sites are on the heap and counted as untracked.
    /// Default: 65 536, for which the allocator needs some 20 MB.
    pub sites: usize,
}

impl Default for SiteSettings {
    fn default() -> Self {
        Self { minimum: SHORTEST, patience: 8, sites: 1 << 16 }
    }
}

/// Allocates buffers in registered memory or on the heap, depending on whether buffers of their site were sent before: see
/// the [module](super). Clones are the same allocator. Thread-safe; an allocation holds a lock while it looks its site up.
///
/// A site is a place in the source ([`allocate`](Self::allocate), [`with_capacity`](Self::with_capacity)): file, line
/// and column of the call. A function that allocates for its callers passes theirs on with `#[track_caller]`.
///
/// Or it is a name that the program gives ([`allocate_named`](Self::allocate_named),
/// [`with_capacity_named`](Self::with_capacity_named)) and how many allocations the iteration has made under it before.
/// That is for programs in which one line allocates for many, such as an interpreter of a data-flow graph: there the name
/// is the node's. The order of the allocations has to be the same in each iteration: threads that allocate under one name
/// mix its sites up.
///
/// ```
/// use tonic_rdma_verbs::memory::Pool;
/// use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings};
///
/// let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
/// let mut buffer = sites.allocate(1 << 20);
/// buffer.fill(7);
/// let payload: bytes::Bytes = buffer.freeze();
/// # assert_eq!(payload.len(), 1 << 20);
/// sites.next_iteration();
/// ```
#[derive(Clone, Debug)]
pub struct SiteAllocator {
    shared: Arc<AllocatorShared>,
}

#[derive(Debug)]
struct AllocatorShared {
    pool: Pool,
    settings: SiteSettings,
    table: Mutex<SiteTable>,
}

impl SiteAllocator {
    /// Creates an allocator that is in its first iteration, and takes registered memory from `pool`. That is a pool
    /// [`for_sending`](Pool::for_sending) as a rule: connections send from its buffers without a copy.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::Pool;
    /// use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings};
    ///
    /// let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
    /// # assert!(sites.report().sites.is_empty());
    /// ```
    pub fn new(pool: Pool, settings: SiteSettings) -> Self {
        let settings = SiteSettings {
            minimum: settings.minimum.max(SHORTEST),
            patience: settings.patience.max(1),
            ..settings
        };
        let table = Mutex::new(SiteTable::new(settings.sites));
        Self { shared: Arc::new(AllocatorShared { pool, settings, table }) }
    }

    /// Allocates a buffer of `length` bytes to write over, for the site that is the caller's line. Its content is not
    /// specified: the memory keeps what it was last used for; on the heap a debug build fills it with `0xa5`.
    ///
    /// ```
    /// # use tonic_rdma_verbs::memory::Pool;
    /// # use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings};
    /// # let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
    /// let mut gradients = sites.allocate(1 << 20);
    /// gradients.fill(0);
    /// # assert_eq!(gradients.len(), 1 << 20);
    /// ```
    ///
    /// # Panics
    /// As a `Vec` does, if the system has not as much memory.
    #[track_caller]
    pub fn allocate(&self, length: usize) -> SiteBuf {
        self.shared.obtain(self.here(Location::caller()), length, InitialContent::Any)
    }

    /// Allocates an empty buffer to append up to `capacity` bytes to, by [`BufMut`](bytes::BufMut) or
    /// [`Write`](std::io::Write), for the site that is the caller's line. It does not grow.
    ///
    /// ```
    /// use bytes::BufMut as _;
    /// # use tonic_rdma_verbs::memory::Pool;
    /// # use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings};
    /// # let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
    /// let mut records = sites.with_capacity(1 << 20);
    /// records.put_u64_le(17);
    /// # assert_eq!(records.len(), 8);
    /// ```
    ///
    /// # Panics
    /// As a `Vec` does, if the system has not as much memory.
    #[track_caller]
    pub fn with_capacity(&self, capacity: usize) -> SiteBuf {
        self.shared.obtain(self.here(Location::caller()), capacity, InitialContent::None)
    }

    /// Allocates as [`allocate`](Self::allocate) does, for the site that is the next one of `name` in this iteration.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::sites::Site;
    /// # use tonic_rdma_verbs::memory::Pool;
    /// # use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings};
    /// # let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
    /// for layer in ["conv1", "conv2", "conv2"] {
    ///     let _weights = sites.allocate_named(layer, 1 << 20);
    /// }
    /// let report = sites.report();
    /// let second = Site::Named { name: "conv2".into(), ordinal: 1 };
    /// assert!(report.sites.iter().any(|status| status.site == second));
    /// ```
    ///
    /// # Panics
    /// As a `Vec` does, if the system has not as much memory.
    pub fn allocate_named(&self, name: &str, length: usize) -> SiteBuf {
        self.shared.obtain(self.shared.table().named(name), length, InitialContent::Any)
    }

    /// Allocates as [`with_capacity`](Self::with_capacity) does, for the site that is the next one of `name` in this
    /// iteration.
    ///
    /// ```
    /// use std::io::Write as _;
    /// # use tonic_rdma_verbs::memory::Pool;
    /// # use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings};
    /// # let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
    /// let mut log = sites.with_capacity_named("log", 4096);
    /// writeln!(log, "step 1")?;
    /// # assert_eq!(&*log, b"step 1\n");
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Panics
    /// As a `Vec` does, if the system has not as much memory.
    pub fn with_capacity_named(&self, name: &str, capacity: usize) -> SiteBuf {
        self.shared.obtain(self.shared.table().named(name), capacity, InitialContent::None)
    }

    /// Ends the iteration: sites of which a buffer was sent since the last call get registered memory from now on. What is
    /// sent later counts for the next iteration. Buffers that exist stay where they are.
    ///
    /// Call it once in each turn of the program's loop. A program without a loop calls it now and then.
    pub fn next_iteration(&self) {
        self.shared.table().next_iteration(self.shared.settings.patience);
    }

    /// Returns what was learnt, site by site.
    pub fn report(&self) -> SiteReport {
        let table = self.shared.table();
        let sites = table.records().iter().map(|record| record.status()).collect();
        SiteReport::new(table.iteration, table.untracked, sites)
    }

    /// Returns the pool that buffers of sites that send come from.
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// Returns the settings, with numbers that were too small raised to the least possible.
    pub fn settings(&self) -> &SiteSettings {
        &self.shared.settings
    }

    fn here(&self, location: &'static Location<'static>) -> Option<Arc<SiteRecord>> {
        self.shared.table().at(location)
    }
}

/// What is in a new buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InitialContent {
    Any,
    None,
}

impl AllocatorShared {
    fn obtain(&self, record: Option<Arc<SiteRecord>>, capacity: usize, content: InitialContent) -> SiteBuf {
        let record = record.filter(|record| {
            let traced = capacity >= self.settings.minimum;
            if !traced {
                record.short();
            }
            traced
        });
        let registered = record.as_ref().and_then(|record| self.registered(record, capacity));
        if let Some(record) = &record {
            let placement =
                if registered.is_some() { SitePlacement::Registered } else { SitePlacement::Heap };
            record.allocated(capacity, placement);
        }
        match (registered, content) {
            (Some(buffer), InitialContent::Any) => SiteBuf::registered(buffer, capacity, record),
            (Some(buffer), InitialContent::None) => SiteBuf::registered(buffer, 0, record),
            (None, InitialContent::Any) => SiteBuf::heap(any(capacity), capacity, record),
            (None, InitialContent::None) => SiteBuf::heap(Vec::with_capacity(capacity), capacity, record),
        }
    }

    /// Registered memory, if the site is to have it and there is some.
    fn registered(&self, record: &SiteRecord, capacity: usize) -> Option<RegisteredBuf> {
        if record.placement() == SitePlacement::Heap {
            return None;
        }
        self.pool.allocate(capacity).map_err(|error| record.refused(error)).ok()
    }

    fn table(&self) -> MutexGuard<'_, SiteTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that nobody should rely on. Zeros cost nothing where the system has just made them; that they are not promised
/// shows in a debug build at once, rather than when the site gets memory that was used before.
fn any(length: usize) -> Vec<u8> {
    vec![if cfg!(debug_assertions) { 0xa5 } else { 0 }; length]
}
