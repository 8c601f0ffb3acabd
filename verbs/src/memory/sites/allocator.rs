//! The allocator that places the buffers of sending sites in registered memory.

use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard};

use super::buffer::SiteBuf;
use super::record::SiteRecord;
use super::report::{SitePlacement, SiteReport};
use super::table::SiteTable;
use super::unsent::SHORTEST;
use crate::memory::pieces::RegisteredBuf;
use crate::memory::pool::Pool;
use crate::sync::lock;

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
    /// Length of the shortest buffer that is placed in registered memory, in bytes, at least [`SHORTEST`]. Shorter buffers
    /// of every site are on the heap. Default: [`SHORTEST`].
    pub minimum: usize,
    /// Number of iterations after which an idle site goes back to the heap; at least 1. An idle site allocates buffers, but
    /// sends none of them. Iterations in which the site does not allocate do not count. Default: 8.
    pub patience: u32,
    /// Maximum number of sites. Buffers of further sites are on the heap and counted as untracked. Default: 65 536, for
    /// which the allocator needs some 20 MB.
    pub sites: usize,
}

impl Default for SiteSettings {
    fn default() -> Self {
        Self { minimum: SHORTEST, patience: 8, sites: 1 << 16 }
    }
}

/// An allocator of buffers. A buffer is in registered memory if buffers of its site were sent before, and otherwise on the
/// heap (described in the [module](super)). Clones are one allocator. Thread-safe: an allocation holds a lock while it
/// looks up its site.
///
/// A site is a place in the source ([`allocate`](Self::allocate), [`with_capacity`](Self::with_capacity)): file, line
/// and column of the call. A function that allocates for its callers passes on their places with `#[track_caller]`.
///
/// Alternatively, a site is a name that the program gives ([`allocate_named`](Self::allocate_named),
/// [`with_capacity_named`](Self::with_capacity_named)), together with the number of earlier allocations under that name in
/// the iteration. This is for programs in which one line allocates for many purposes, such as an interpreter of a data-flow
/// graph, which uses the names of the nodes. The order of the allocations must not change from one iteration to the next.
/// Threads that allocate under one name at once mix up its sites.
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
    /// Creates an allocator in its first iteration, which takes registered memory from `pool`. Normally this is a pool
    /// [`for_sending`](Pool::for_sending), because connections send from the buffers of such a pool without a copy.
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

    /// Allocates a buffer of `length` bytes to overwrite, for the site at the caller's line. Its content is not specified:
    /// registered memory keeps its old content, and a debug build fills heap memory with `0xa5`.
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
    /// Panics as a `Vec` does if the system has not enough memory.
    #[track_caller]
    pub fn allocate(&self, length: usize) -> SiteBuf {
        self.shared.obtain(self.here(Location::caller()), length, InitialContent::Any)
    }

    /// Allocates an empty buffer for the site at the caller's line. The program appends up to `capacity` bytes to it by
    /// [`BufMut`](bytes::BufMut) or [`Write`](std::io::Write). The buffer does not grow.
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
    /// Panics as a `Vec` does if the system has not enough memory.
    #[track_caller]
    pub fn with_capacity(&self, capacity: usize) -> SiteBuf {
        self.shared.obtain(self.here(Location::caller()), capacity, InitialContent::None)
    }

    /// Allocates as [`allocate`](Self::allocate) does, for the next site of `name` in this iteration.
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
    /// Panics as a `Vec` does if the system has not enough memory.
    pub fn allocate_named(&self, name: &str, length: usize) -> SiteBuf {
        self.shared.obtain(self.shared.table().named(name), length, InitialContent::Any)
    }

    /// Allocates as [`with_capacity`](Self::with_capacity) does, for the next site of `name` in this iteration.
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
    /// Panics as a `Vec` does if the system has not enough memory.
    pub fn with_capacity_named(&self, name: &str, capacity: usize) -> SiteBuf {
        self.shared.obtain(self.shared.table().named(name), capacity, InitialContent::None)
    }

    /// Ends the iteration. From now on, each site with a buffer that was sent since the last call gets registered memory.
    /// Buffers that are sent later count for the next iteration. Existing buffers stay in place.
    ///
    /// Call this once in each iteration of the program's loop. A program without a loop calls it from time to time.
    pub fn next_iteration(&self) {
        self.shared.table().next_iteration(self.shared.settings.patience);
    }

    /// Returns a report on every site.
    pub fn report(&self) -> SiteReport {
        let table = self.shared.table();
        let sites = table.records().iter().map(|record| record.status()).collect();
        SiteReport::new(table.iteration, table.untracked, sites)
    }

    /// Returns the pool that the buffers of sending sites come from.
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// Returns the settings. Numbers that were too small are raised to their minimum.
    pub fn settings(&self) -> &SiteSettings {
        &self.shared.settings
    }

    /// Returns the record of the site at `location`.
    fn here(&self, location: &'static Location<'static>) -> Option<Arc<SiteRecord>> {
        self.shared.table().at(location)
    }
}

/// The content of a new buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InitialContent {
    /// Unspecified bytes, as many as the capacity.
    Any,
    /// No bytes.
    None,
}

impl AllocatorShared {
    /// Allocates a buffer of `capacity` bytes for the site of `record`, and counts it there.
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

    /// Allocates registered memory, if the site should have it and the pool has some.
    fn registered(&self, record: &SiteRecord, capacity: usize) -> Option<RegisteredBuf> {
        if record.placement() == SitePlacement::Heap {
            return None;
        }
        self.pool.allocate(capacity).map_err(|error| record.refused(error)).ok()
    }

    fn table(&self) -> MutexGuard<'_, SiteTable> {
        lock(&self.table)
    }
}

/// Returns bytes of unspecified content. A release build returns zeros, because fresh zeroed memory costs nothing. A debug
/// build returns other bytes, so that a program that relies on zeros fails at once, and not only when its site gets memory
/// with old content.
fn any(length: usize) -> Vec<u8> {
    vec![if cfg!(debug_assertions) { 0xa5 } else { 0 }; length]
}
