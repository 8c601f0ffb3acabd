//! A provider that counts what a program asks of a device. It wraps the device of any other provider.
//!
//! On a real device a registration costs about as much as a copy of the memory, and each object takes a part
//! of the card. The software device hides both. The counts show both on any device.
//!
//! [`count_all`] counts every device that this process opens from then on, also those that `tonic-rdma`
//! opens. [`wrap`] counts one device. A device that nobody counts is not wrapped, so it costs nothing.
//!
//! ```
//! use std::sync::Arc;
//! use tonic_rdma_verbs::{Access, HostMemory, counting};
//!
//! let counter = counting::count_all();
//! let domain = tonic_rdma_verbs::open("soft0")?.alloc_protection_domain()?;
//! let before = counter.counts();
//! drop(domain.register(Arc::new(HostMemory::shared(4096, 4096)?), Access::LOCAL_WRITE)?);
//! let counts = counter.counts().since(&before);
//! assert_eq!((counts.regions.created, counts.regions.destroyed, counts.registered_bytes), (1, 1, 4096));
//! # Ok::<(), tonic_rdma_verbs::VerbsError>(())
//! ```

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::panics::lock;
use crate::sealed::Sealed;
use crate::{
    Access, CompletionQueue, CompletionStatus, Context, DeviceAttributes, DeviceMemoryRegion, DmaBuf,
    HostMemory, Lkey, LocalQueuePair, LocalSegment, MemoryRegion, MemoryWindow, Operation, PathSettings,
    PostError, Probe, ProtectionDomain, QueuePair, QueuePairAddress, QueuePairCapacity, QueuePairNumber,
    QueuePairState, ReceiveRequest, RemoteSegment, RemoteView, Rkey, SendRequest, SharedReceiveQueue,
    VerbsError, WorkCompletion,
};

/// What was asked of the devices of a [`Counter`] since its first one was opened. What a device refuses is not
/// counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Memory regions, of the host's memory and of other devices: registrations and deregistrations.
    pub regions: Objects,
    /// Bytes of all registrations.
    pub registered_bytes: u64,
    /// Memory windows: rights of a peer to a part of a region.
    pub windows: Objects,
    /// Protection domains.
    pub domains: Objects,
    /// Completion queues.
    pub completion_queues: Objects,
    /// Queue pairs.
    pub queue_pairs: Objects,
    /// Shared receive queues.
    pub shared_receive_queues: Objects,
    /// Sends without immediate data.
    pub sends: Posts,
    /// Sends with immediate data.
    pub sends_with_immediate: Posts,
    /// Writes without immediate data.
    pub writes: Posts,
    /// Writes with immediate data.
    pub writes_with_immediate: Posts,
    /// Reads that were posted.
    pub reads: Posts,
    /// Receives, on queue pairs and on shared receive queues; the bytes are those of the buffers.
    pub receives: Posts,
    /// Reads that the calling thread carried out itself, without a request
    /// ([`LocalQueuePair::read_at_once`]).
    pub reads_at_once: Posts,
    /// Sends, writes and reads whose success the device reports.
    pub signaled: u64,
    /// Sends, writes and reads whose success the device does not report.
    pub unsignaled: u64,
    /// Completions that were polled.
    pub completions: u64,
    /// Those of them that are failures.
    pub failures: u64,
    /// Views of a peer's memory ([`LocalQueuePair::view`]).
    pub views: u64,
}

/// The numbers of objects of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Objects {
    /// How many were created.
    pub created: u64,
    /// How many of them are gone: their last reference was dropped.
    pub destroyed: u64,
}

/// The requests of a kind that a device took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Posts {
    /// How many.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Objects {
    /// Returns how many exist. This has a meaning for counts since the start only.
    pub fn alive(&self) -> u64 {
        self.created.saturating_sub(self.destroyed)
    }
}

impl Posts {
    fn add(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes += bytes;
    }
}

impl Counts {
    /// Returns what was added after `earlier`.
    #[must_use]
    pub fn since(mut self, earlier: &Self) -> Self {
        let mut earlier = *earlier;
        for (now, then) in self.numbers().zip(earlier.numbers()) {
            *now = now.wrapping_sub(*then);
        }
        self
    }

    /// Returns the number of requests that were posted, receives included.
    pub fn posts(&self) -> u64 {
        self.signaled + self.unsignaled + self.receives.requests
    }

    fn numbers(&mut self) -> impl Iterator<Item = &mut u64> {
        #[rustfmt::skip]
        let Self {
            regions, windows, domains, completion_queues, queue_pairs, shared_receive_queues,
            sends, sends_with_immediate, writes, writes_with_immediate, reads, receives, reads_at_once,
            registered_bytes, signaled, unsignaled, completions, failures, views,
        } = self;
        let objects = [regions, windows, domains, completion_queues, queue_pairs, shared_receive_queues];
        let posts =
            [sends, sends_with_immediate, writes, writes_with_immediate, reads, receives, reads_at_once];
        let others = [registered_bytes, signaled, unsignaled, completions, failures, views];
        let objects = objects.into_iter().flat_map(|of| [&mut of.created, &mut of.destroyed]);
        let posts = posts.into_iter().flat_map(|of| [&mut of.requests, &mut of.bytes]);
        objects.chain(posts).chain(others)
    }
}

/// Counts for the devices that were given it. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<Mutex<Counts>>);

impl Counter {
    /// Returns a counter of its own.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the counts up to now.
    pub fn counts(&self) -> Counts {
        *lock(&self.0)
    }

    fn add(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut lock(&self.0));
    }

    fn sent(&self, requests: &[SendRequest<'_>], result: &Result<(), PostError>) {
        self.add(|counts| {
            for request in &requests[..posted(requests.len(), result)] {
                let (of, bytes) = match request.operation {
                    Operation::Send { data, immediate: None } => (&mut counts.sends, data.length()),
                    Operation::Send { data, .. } => (&mut counts.sends_with_immediate, data.length()),
                    Operation::Write { data, immediate: None, .. } => (&mut counts.writes, data.length()),
                    Operation::Write { data, .. } => (&mut counts.writes_with_immediate, data.length()),
                    Operation::Read { into, .. } => (&mut counts.reads, length(into)),
                };
                of.add(bytes);
                *if request.signaled { &mut counts.signaled } else { &mut counts.unsignaled } += 1;
            }
        });
    }

    fn received(&self, requests: &[ReceiveRequest<'_>], result: &Result<(), PostError>) {
        let posted = &requests[..posted(requests.len(), result)];
        self.add(|counts| posted.iter().for_each(|request| counts.receives.add(length(request.into))));
    }
}

/// Returns how many of `requests` requests were posted.
fn posted(requests: usize, result: &Result<(), PostError>) -> usize {
    result.map_or_else(|error| error.index.min(requests), |()| requests)
}

fn length(segments: &[LocalSegment]) -> u64 {
    segments.iter().map(LocalSegment::length).sum()
}

/// The counter of [`count_all`], and the devices that it counts, while they are open.
static ALL: OnceLock<(Counter, Mutex<Vec<Weak<CountedDevice>>>)> = OnceLock::new();

/// Returns the counter of this process. Every device that is opened after the first call is counted. A device
/// that was open before is counted when it is opened again; what was made on it earlier is not.
pub fn count_all() -> Counter {
    ALL.get_or_init(Default::default).0.clone()
}

/// Returns `device`, wrapped so that `counter` counts what is asked of it. Objects of the device itself, such
/// as completion queues, also work with the wrapped device.
pub fn wrap(device: Arc<dyn Context>, counter: &Counter) -> Arc<dyn Context> {
    Arc::new(CountedDevice { inner: device, counter: counter.clone() })
}

/// Wraps a device that was opened, if the process counts all devices. A device that is open keeps its address
/// here too, by which its users recognise it.
pub(crate) fn if_asked(device: Arc<dyn Context>) -> Arc<dyn Context> {
    let Some((counter, open)) = ALL.get() else { return device };
    let mut open = lock(open);
    open.retain(|known| known.strong_count() > 0);
    let is_it =
        |known: &Arc<CountedDevice>| std::ptr::addr_eq(Arc::as_ptr(&known.inner), Arc::as_ptr(&device));
    if let Some(known) = open.iter().filter_map(Weak::upgrade).find(is_it) {
        return known;
    }
    let counted = Arc::new(CountedDevice { inner: device, counter: counter.clone() });
    open.push(Arc::downgrade(&counted));
    counted
}

/// Returns the queue pair behind one that is counted.
#[cfg(feature = "ibverbs")]
pub(crate) fn uncounted(pair: &dyn QueuePair) -> &dyn QueuePair {
    (pair as &dyn Any).downcast_ref::<CountedPair>().map_or(pair, |counted| &*counted.inner)
}

/// Returns the queue behind one that is counted, because a provider takes only its own queues.
fn own_queue(queue: &Arc<dyn CompletionQueue>) -> &Arc<dyn CompletionQueue> {
    let counted = (&**queue as &dyn Any).downcast_ref::<Counted<dyn CompletionQueue>>();
    counted.map_or(queue, |counted| &counted.inner)
}

/// Does the same for regions.
fn own_region(region: &Arc<dyn MemoryRegion>) -> &Arc<dyn MemoryRegion> {
    let counted = (&**region as &dyn Any).downcast_ref::<Counted<dyn MemoryRegion>>();
    counted.map_or(region, |counted| &counted.inner)
}

/// Does the same for shared receive queues.
fn own_receives(queue: &Arc<dyn SharedReceiveQueue>) -> &Arc<dyn SharedReceiveQueue> {
    let counted = (&**queue as &dyn Any).downcast_ref::<Counted<dyn SharedReceiveQueue>>();
    counted.map_or(queue, |counted| &counted.inner)
}

/// A device that is counted.
#[derive(Debug)]
struct CountedDevice {
    inner: Arc<dyn Context>,
    counter: Counter,
}

/// An object of a device that is counted.
#[derive(Debug)]
struct Counted<T: ?Sized> {
    /// Dropped before its end is counted.
    inner: Arc<T>,
    life: Life,
}

/// Counts the end of an object when it is dropped.
#[derive(Debug)]
struct Life {
    counter: Counter,
    objects: fn(&mut Counts) -> &mut Objects,
}

impl Life {
    fn new(counter: &Counter, objects: fn(&mut Counts) -> &mut Objects) -> Self {
        counter.add(|counts| objects(counts).created += 1);
        Self { counter: counter.clone(), objects }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.counter.add(|counts| (self.objects)(counts).destroyed += 1);
    }
}

impl<T: ?Sized> Counted<T> {
    fn new(inner: Arc<T>, counter: &Counter, objects: fn(&mut Counts) -> &mut Objects) -> Self {
        Self { inner, life: Life::new(counter, objects) }
    }
}

/// Hands calls on to the object behind this one.
macro_rules! forward {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)+) => {
        $(fn $name(&self, $($argument: $type),*) $(-> $result)? {
            self.inner.$name($($argument),*)
        })+
    };
}

impl Sealed for CountedDevice {}
impl<T: ?Sized> Sealed for Counted<T> {}

impl Context for CountedDevice {
    forward! {
        attributes() -> &DeviceAttributes;
        async_event_fd() -> Option<BorrowedFd<'_>>;
        handle_events();
    }

    fn alloc_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        let domain = self.inner.alloc_protection_domain()?;
        Ok(Arc::new(Counted::new(domain, &self.counter, |counts| &mut counts.domains)))
    }

    fn create_completion_queue(&self, capacity: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        let queue = self.inner.create_completion_queue(capacity)?;
        Ok(Arc::new(Counted::new(queue, &self.counter, |counts| &mut counts.completion_queues)))
    }
}

impl ProtectionDomain for Counted<dyn ProtectionDomain> {
    forward! {
        opens_sinks() -> bool;
        is_read_by_cores() -> bool;
    }

    fn register_range(
        &self,
        memory: Arc<HostMemory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, VerbsError> {
        let region = self.inner.register_range(memory, range, access)?;
        self.life.counter.add(|counts| counts.registered_bytes += region.range().len() as u64);
        Ok(Arc::new(Counted::new(region, &self.life.counter, |counts| &mut counts.regions)))
    }

    fn register_dmabuf(
        &self,
        memory: &DmaBuf<'_>,
        access: Access,
    ) -> Result<Arc<dyn DeviceMemoryRegion>, VerbsError> {
        let region = self.inner.register_dmabuf(memory, access)?;
        self.life.counter.add(|counts| counts.registered_bytes += region.length());
        Ok(Arc::new(Counted::new(region, &self.life.counter, |counts| &mut counts.regions)))
    }

    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let queues = (own_queue(send_queue), own_queue(receive_queue));
        let pair = self.inner.create_queue_pair(queues.0, queues.1, capacity)?;
        Ok(CountedPair::new(pair, &self.life.counter))
    }

    fn create_shared_receive_queue(
        &self,
        capacity: u32,
        segments: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError> {
        let queue = self.inner.create_shared_receive_queue(capacity, segments)?;
        Ok(Arc::new(Counted::new(queue, &self.life.counter, |counts| &mut counts.shared_receive_queues)))
    }

    fn create_sharing_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        receives: &Arc<dyn SharedReceiveQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let (queues, receives) = ((own_queue(send_queue), own_queue(receive_queue)), own_receives(receives));
        let pair = self.inner.create_sharing_queue_pair(queues.0, queues.1, receives, capacity)?;
        Ok(CountedPair::new(pair, &self.life.counter))
    }
}

impl MemoryRegion for Counted<dyn MemoryRegion> {
    forward! {
        lkey() -> Lkey;
        rkey() -> Rkey;
        access() -> Access;
        memory() -> &Arc<HostMemory>;
        range() -> Range<usize>;
    }
}

impl MemoryWindow for Counted<dyn MemoryWindow> {
    forward! {
        rkey() -> Rkey;
        keep(owner: Box<dyn Any + Send + Sync>);
    }
}

impl DeviceMemoryRegion for Counted<dyn DeviceMemoryRegion> {
    forward! {
        lkey() -> Lkey;
        rkey() -> Rkey;
        access() -> Access;
        iova() -> u64;
        length() -> u64;
    }
}

impl CompletionQueue for Counted<dyn CompletionQueue> {
    forward! {
        is_moving() -> bool;
        arm() -> Result<(), VerbsError>;
        disarm();
        event_fd() -> BorrowedFd<'_>;
        acknowledge_events();
    }

    fn poll(&self, completions: &mut [WorkCompletion]) -> usize {
        let count = self.inner.poll(completions);
        if count > 0 {
            let failed = |completion: &&WorkCompletion| completion.status != CompletionStatus::Success;
            let failures = completions[..count].iter().filter(failed).count() as u64;
            self.life.counter.add(|counts| {
                counts.completions += count as u64;
                counts.failures += failures;
            });
        }
        count
    }
}

impl SharedReceiveQueue for Counted<dyn SharedReceiveQueue> {
    fn capacity(&self) -> u32 {
        self.inner.capacity()
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let result = self.inner.post_receive(requests);
        self.life.counter.received(requests, &result);
        result
    }
}

/// A queue pair that is counted.
#[derive(Debug)]
struct CountedPair {
    inner: Arc<dyn QueuePair>,
    life: Life,
    local: Option<Arc<dyn LocalQueuePair>>,
}

impl Sealed for CountedPair {}

impl CountedPair {
    fn new(pair: Arc<dyn QueuePair>, counter: &Counter) -> Arc<Self> {
        let local = pair.local().map(|local| -> Arc<dyn LocalQueuePair> {
            Arc::new(CountedLocal { inner: Arc::clone(local), counter: counter.clone() })
        });
        Arc::new(Self { inner: pair, life: Life::new(counter, |counts| &mut counts.queue_pairs), local })
    }
}

impl QueuePair for CountedPair {
    forward! {
        number() -> QueuePairNumber;
        state() -> QueuePairState;
        failure() -> Option<String>;
        capacity() -> &QueuePairCapacity;
        local_address() -> QueuePairAddress;
        to_init(access: Access) -> Result<(), VerbsError>;
        to_rtr(peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError>;
        to_rts(settings: &PathSettings) -> Result<(), VerbsError>;
        to_error();
        places_in_order() -> bool;
        has_windows() -> bool;
    }

    fn open_window(
        &self,
        region: &Arc<dyn MemoryRegion>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Option<Arc<dyn MemoryWindow>>, VerbsError> {
        let window = self.inner.open_window(own_region(region), range, access)?;
        let counted = |window| -> Arc<dyn MemoryWindow> {
            Arc::new(Counted::new(window, &self.life.counter, |counts| &mut counts.windows))
        };
        Ok(window.map(counted))
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        let result = self.inner.post_send(requests);
        self.life.counter.sent(requests, &result);
        result
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let result = self.inner.post_receive(requests);
        self.life.counter.received(requests, &result);
        result
    }

    fn local(&self) -> Option<&Arc<dyn LocalQueuePair>> {
        self.local.as_ref()
    }
}

/// The functions of a counted queue pair that only the software device has.
#[derive(Debug)]
struct CountedLocal {
    inner: Arc<dyn LocalQueuePair>,
    counter: Counter,
}

impl Sealed for CountedLocal {}

impl LocalQueuePair for CountedLocal {
    forward! {
        probe() -> Probe;
        progress() -> bool;
        need_no_events() -> bool;
        need_events();
        reads_by_copy() -> bool;
    }

    fn read_at_once(&self, into: &[LocalSegment], remote: RemoteSegment) -> bool {
        let done = self.inner.read_at_once(into, remote);
        if done {
            self.counter.add(|counts| counts.reads_at_once.add(length(into)));
        }
        done
    }

    fn view(&self, remote: RemoteSegment, length: u64) -> Result<RemoteView, VerbsError> {
        let view = self.inner.view(remote, length)?;
        self.counter.add(|counts| counts.views += 1);
        Ok(view)
    }
}
