//! The handle: allocates the buffers of sites, tells the tracing allocator which node runs, and learns what
//! is sent. A buffer lies in registered memory or on the heap.

use crate::VerbsError;
use std::alloc::Layout;
use std::fmt;
use std::io::IoSlice;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::{Arc, LazyLock, OnceLock};

use bytes::Bytes;

use super::live::{self, Execution, NodeScope};
use super::table::{NodeSite, SHORTEST, Site, SitePlacement, SiteReport, SiteSettings, SiteTable};
use crate::memory::extents::{Lease, RegisteredBuf};
use crate::memory::index::AddressIndex;
use crate::memory::pool::{Pool, find_sendable};

/// An allocator of buffers. A buffer is in registered memory if buffers of its site were sent before, and
/// otherwise on the heap (described in the [module](super)). Clones are one allocator. Thread-safe: an
/// allocation holds a lock while it looks up its site. When the last clone is dropped, nothing is placed any
/// more. Memory that was placed stays valid until it is freed.
///
/// A site is a position in the source ([`allocate`](Self::allocate)): file, line and column of the call. A
/// function that allocates for its callers passes on their positions with `#[track_caller]`.
///
/// Alternatively, a site is a name that the program gives ([`allocate_named`](Self::allocate_named)),
/// together with the number of earlier allocations under that name in the iteration. This is for programs in
/// which one line allocates for many purposes, such as an interpreter of a data-flow graph, which uses the
/// names of the nodes. The order of the allocations must not change from one iteration to the next. Threads
/// that allocate under one name at once mix up its sites.
///
/// A site of the third kind is a node of a graph ([`enter`](Self::enter)), whose engine allocates from the
/// global allocator ([`trace`](crate::memory::trace)).
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
    handle: Arc<SiteHandle>,
}

#[derive(Debug)]
struct SiteHandle {
    pool: Pool,
    table: Arc<SiteTable>,
    /// The table as executions refer to it. It lives as long as the process, because a thread may point to it
    /// after the program has dropped the handle. It is small after [`close`](SiteTable::close).
    entered: OnceLock<&'static Arc<SiteTable>>,
}

impl Drop for SiteHandle {
    fn drop(&mut self) {
        self.table.close();
    }
}

/// What [`SiteAllocator::crossed`] knows of the bytes that are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crossed {
    /// The site that allocated the bytes, or `None` if no node of this trace allocated them.
    pub site: Option<NodeSite>,
    /// Whether the bytes lie in the memory of a pool, from which devices send without a copy.
    pub registered: bool,
}

/// Whether the global allocator of the program traces: an allocation of an execution then is among the live
/// ones.
static IS_INSTALLED: LazyLock<bool> = LazyLock::new(|| {
    let execution = SiteAllocator::new(Pool::for_sending(0), SiteSettings::default()).enter(0);
    let probe = std::hint::black_box(Box::new(0_u8));
    drop(execution);
    live::find(std::slice::from_ref(&*probe), |_| Some(())).is_some()
});

impl SiteAllocator {
    /// Creates an allocator in its first iteration, which takes registered memory from `pool`. Normally this
    /// is a pool [`for_sending`](Pool::for_sending), because connections send from the buffers of such a pool
    /// without a copy.
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
            idle_iterations: settings.idle_iterations.max(1),
            ..settings
        };
        let _pause = NodeScope::pause();
        let table = Arc::new(SiteTable::new(pool.clone(), settings));
        Self { handle: Arc::new(SiteHandle { pool, table, entered: OnceLock::new() }) }
    }

    /// Creates an allocator for the nodes of a graph, whose memory comes from the global allocator of the
    /// program. `limit_bytes` is the number of bytes that may be in its pool at a time. With a limit of 0 it
    /// learns, but places nothing.
    ///
    /// ```
    /// use tonic_rdma_verbs::VerbsErrorKind;
    /// use tonic_rdma_verbs::memory::sites::SiteAllocator;
    ///
    /// // This program has no `#[global_allocator]` that traces.
    /// let error = SiteAllocator::tracing(1 << 30).unwrap_err();
    /// assert_eq!(error.kind(), VerbsErrorKind::Unusable);
    /// ```
    ///
    /// # Errors
    /// The global allocator of the program is not a
    /// [`TracingAllocator`](crate::memory::trace::TracingAllocator).
    pub fn tracing(limit_bytes: u64) -> Result<Self, VerbsError> {
        let _pause = NodeScope::pause();
        if !*IS_INSTALLED {
            return Err(VerbsError::unusable(
                "the global allocator of this program does not trace allocations: declare in its main file \
                 `#[global_allocator] static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);`",
            ));
        }
        Ok(Self::new(Pool::for_sending(limit_bytes), SiteSettings::default()))
    }

    /// Begins an execution of `node` on this thread. Until the guard is dropped, the allocations of this
    /// thread belong to the node, and are numbered from 0. An execution within an execution interrupts it:
    /// drop the guards in the reverse order of their creation.
    ///
    /// Allocations of other threads, such as those of a thread pool that the node uses, do not belong to the
    /// node.
    ///
    /// Some hundred bytes of an allocator that was entered stay in memory for the life of the process, so
    /// programs make few of them.
    #[must_use = "the execution ends when the guard is dropped"]
    pub fn enter(&self, node: u32) -> NodeScope {
        let sites = self.handle.entered.get_or_init(|| {
            let _pause = NodeScope::pause();
            Box::leak(Box::new(Arc::clone(&self.handle.table)))
        });
        let (next, places) = (NodeSite { node, ordinal: 0 }, sites.places(node));
        NodeScope::enter(Execution { sites, next, places })
    }

    /// Notes that `bytes` are sent, and returns the site that allocated them. From the next execution on, the
    /// allocations of this site are placed in the pool. `bytes` may be a part of the allocation.
    pub fn crossed(&self, bytes: &[u8]) -> Crossed {
        let _pause = NodeScope::pause();
        let found =
            live::find(bytes, |live| Some((live.sites, live.site, live.layout, live.extent.is_some())));
        let Some((sites, site, layout, registered)) = found else {
            return Crossed { site: None, registered: find_sendable(bytes).is_some() };
        };
        let is_own = std::ptr::eq(sites, &*self.handle.table);
        if is_own {
            sites.sent(&Site::Node(site), layout);
        }
        Crossed { site: is_own.then_some(site), registered }
    }

    /// Allocates a buffer of `length` bytes to overwrite, for the site at the caller's line. Its content is
    /// not specified: registered memory keeps its old content, and a debug build fills heap memory with
    /// `0xa5`.
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
        self.obtain(Site::Location(Location::caller()), length)
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
        self.obtain(self.handle.table.named(name), length)
    }

    /// Ends the iteration. From now on, each site with a buffer that was sent since the last call gets
    /// registered memory. Buffers that are sent later count for the next iteration. Existing buffers stay in
    /// place.
    ///
    /// Call this once in each iteration of the program's loop. A program without a loop calls it from time to
    /// time.
    pub fn next_iteration(&self) {
        self.handle.table.next_iteration();
    }

    /// Returns a report on every site.
    pub fn report(&self) -> SiteReport {
        let _pause = NodeScope::pause();
        self.handle.table.report()
    }

    /// Returns the pool that the buffers of sending sites come from.
    pub fn pool(&self) -> &Pool {
        &self.handle.pool
    }

    fn obtain(&self, site: Site, length: usize) -> SiteBuf {
        let table = &self.handle.table;
        let is_traced = table.admits(&site, length);
        let layout = Layout::array::<u8>(length).ok().filter(|_| is_traced);
        let memory = match layout.and_then(|layout| table.place(&site, layout)) {
            Some(place) => BufferMemory::Registered(RegisteredBuf::new(place.extent, length)),
            None => BufferMemory::Heap(any(length)),
        };
        SiteBuf { memory, site: is_traced.then(|| (Arc::clone(table), site)) }
    }
}

/// Returns bytes of unspecified content. A release build returns zeros, because fresh zeroed memory costs
/// nothing. A debug build returns other bytes, so that a program that relies on zeros fails at once, and not
/// only when its site gets memory with old content.
fn any(length: usize) -> Vec<u8> {
    vec![if cfg!(debug_assertions) { 0xa5 } else { 0 }; length]
}

/// Finds the traced allocation in a pool that holds all of `bytes`, and returns a lease that keeps the allocation:
/// `share` returns the same bytes, shared. While no traced allocation lies in a pool, a lookup takes one load.
pub fn find_traced(bytes: &[u8], share: impl FnOnce() -> Bytes) -> Option<Lease> {
    if !live::any_placed() {
        return None;
    }
    let _pause = NodeScope::pause();
    let slab = live::find(bytes, |live| Some(Arc::clone(live.extent.as_ref()?.slab())))?;
    Lease::of_traced(slab, share())
}

/// A site, and the table that it belongs to.
type SiteOf = (Arc<SiteTable>, Site);

/// The frozen buffers of all allocators that were not sent yet, because a connection does not know the
/// allocators. A buffer is removed when it is first sent, so that its other slices cost almost nothing, or
/// when it is freed.
static UNSENT: AddressIndex<SiteOf> = AddressIndex::new();

/// Reports that `bytes` were sent. If they lie in a frozen buffer of a
/// [`SiteAllocator`](super::SiteAllocator), the site of the buffer counts as sending. Programs with their own
/// transport call this. Connections of tonic-rdma report by themselves.
///
/// The call costs one relaxed load while no frozen buffer is unsent, three loads for an address below or
/// above all such buffers, and a short lock otherwise.
///
/// ```
/// use tonic_rdma_verbs::memory::Pool;
/// use tonic_rdma_verbs::memory::sites::{SiteAllocator, SiteSettings, sent};
///
/// let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
/// let payload = sites.allocate(1 << 20).freeze();
/// // A transport of your own has written the first half:
/// sent(&payload[..1 << 19]);
/// assert_eq!(sites.report().sites[0].sent, 1);
/// ```
#[inline]
pub fn sent(bytes: &[u8]) {
    if bytes.len() >= SHORTEST
        && has_unsent()
        && let Some((table, site)) = UNSENT.take(bytes.as_ptr() as usize, bytes.len())
    {
        table.sent(&site, Layout::for_value(bytes));
    }
}

/// Returns whether a frozen buffer of any allocator was not sent yet. Takes one relaxed load.
#[inline]
pub fn has_unsent() -> bool {
    UNSENT.len() > 0
}

/// Reports that the first `taken` bytes of `slices` were sent.
pub fn sent_slices(slices: &[IoSlice<'_>], mut taken: usize) {
    for slice in slices {
        let part = slice.len().min(taken);
        sent(&slice[..part]);
        taken -= part;
    }
}

/// A buffer of a [`SiteAllocator`](super::SiteAllocator). The program fills it as a slice, then calls
/// [`freeze`](Self::freeze) and sends. No alignment is promised. To append, write to `&mut buffer[..]`, which
/// is a [`BufMut`](bytes::BufMut) and a [`Write`](std::io::Write), and [`truncate`](Self::truncate) the
/// buffer.
///
/// All functions work alike on the heap and in registered memory. Write only bytes to be sent into the
/// buffers of a sending site: if the pool has its own protection domain, the peers of that domain may be able
/// to read the bytes.
pub struct SiteBuf {
    memory: BufferMemory,
    /// `None` if the buffer is not traced.
    site: Option<SiteOf>,
}

enum BufferMemory {
    Heap(Vec<u8>),
    Registered(RegisteredBuf),
}

impl SiteBuf {
    /// Returns where the buffer lies: the heap or registered memory.
    pub fn placement(&self) -> SitePlacement {
        match self.memory {
            BufferMemory::Heap(_) => SitePlacement::Heap,
            BufferMemory::Registered(_) => SitePlacement::Registered,
        }
    }

    /// Shortens the buffer to `length` bytes. Does nothing if the buffer is not longer.
    pub fn truncate(&mut self, length: usize) {
        match &mut self.memory {
            BufferMemory::Heap(content) => content.truncate(length),
            BufferMemory::Registered(buffer) => buffer.truncate(length),
        }
    }

    /// Makes the content immutable and shareable. From now on the site counts as sending if a connection
    /// sends the content or a slice of it. When the last reference is dropped, the memory is freed or returns
    /// to the pool.
    pub fn freeze(self) -> Bytes {
        let content = match self.memory {
            BufferMemory::Heap(content) => Bytes::from(content),
            BufferMemory::Registered(buffer) => buffer.freeze(),
        };
        match self.site {
            Some(site) if content.len() >= SHORTEST => {
                UNSENT.insert(content.as_ptr() as usize, content.len(), site);
                Bytes::from_owner(TracedContent(content))
            }
            _ => content,
        }
    }
}

/// Content that is in the index of unsent buffers until it is sent or dropped.
struct TracedContent(Bytes);

impl AsRef<[u8]> for TracedContent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for TracedContent {
    fn drop(&mut self) {
        // The buffer leaves the index before the memory is freed, because the memory may become another
        // buffer at once.
        drop(UNSENT.remove(self.0.as_ptr() as usize));
    }
}

impl Deref for SiteBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            BufferMemory::Heap(content) => content,
            BufferMemory::Registered(buffer) => buffer,
        }
    }
}

impl DerefMut for SiteBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            BufferMemory::Heap(content) => content,
            BufferMemory::Registered(buffer) => buffer,
        }
    }
}

impl fmt::Debug for SiteBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SiteBuf({:p}, {} bytes, {})", self.as_ptr(), self.len(), self.placement())
    }
}
