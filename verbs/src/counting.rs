//! A provider that counts what a program asks of a device. It wraps the device of any other provider.
//!
//! On a real device a registration costs about as much as a copy of the memory, and each object takes a part
//! of the card. The software device hides both. The counts show both on any device.
//!
//! [`count_all`] counts every device that this process opens from then on, also those that `tonic-rdma`
//! opens. [`wrap`] counts one device. A device that nobody counts is not wrapped, so it costs nothing.
//!
//! A counted device may also have the [limits](Limits) of a card ([`Counter::limit`]), so that a program that
//! needs more than a card has fails without one.
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
use std::collections::BTreeMap;
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

/// The most objects that a device has, and the longest queues, as `ibv_query_device` reports them.
///
/// ```
/// use tonic_rdma_verbs::counting::{Counter, Limits, wrap};
///
/// let counter = Counter::new();
/// let mut limits = Limits::CARD;
/// limits.domains = 1;
/// counter.limit(limits);
/// let device = wrap(tonic_rdma_verbs::open("soft0")?, &counter);
/// let domain = device.alloc_protection_domain()?;
/// let error = device.alloc_protection_domain().unwrap_err();
/// assert_eq!(error.reason(), "protection domains: asked for 2, the device has 1");
/// # drop(domain);
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Memory regions (`max_mr`).
    pub regions: u32,
    /// Memory windows (`max_mw`).
    pub windows: u32,
    /// Protection domains (`max_pd`).
    pub domains: u32,
    /// Completion queues (`max_cq`).
    pub completion_queues: u32,
    /// Completions of one queue (`max_cqe`).
    pub completions: u32,
    /// Queue pairs (`max_qp`).
    pub queue_pairs: u32,
    /// Requests outstanding on a send or receive queue (`max_qp_wr`).
    pub work_requests: u32,
    /// Requests that a queue pair keeps for its windows
    /// ([`window_requests`](DeviceAttributes::window_requests)).
    pub window_requests: u32,
}

impl Limits {
    /// Limits that no device exceeds.
    const NONE: Self = Self {
        regions: u32::MAX,
        windows: u32::MAX,
        domains: u32::MAX,
        completion_queues: u32::MAX,
        completions: u32::MAX,
        queue_pairs: u32::MAX,
        work_requests: u32::MAX,
        window_requests: 0,
    };

    /// The limits of an ordinary card: of each number the lower one of what `ibv_devinfo -v` prints for a
    /// ConnectX-3 (github.com/claudebarthels/infinity, issue 5) and for a ConnectX-5 (github.com/open-mpi/ompi,
    /// pull request 6137). The windows are those of the ConnectX-5, because the other card has none.
    pub const CARD: Self = Self {
        regions: 524_032,
        windows: 16_777_216,
        domains: 32_764,
        completion_queues: 65_408,
        completions: 4_194_303,
        queue_pairs: 131_000,
        work_requests: 16_351,
        window_requests: 128,
    };

    fn check_completions(&self, capacity: u32) -> Result<(), VerbsError> {
        VerbsError::check_limits([("completion queue depth", capacity, self.completions)])
    }

    fn check_requests(&self, capacity: &QueuePairCapacity) -> Result<(), VerbsError> {
        let sends = capacity.send_requests.saturating_add(self.window_requests);
        VerbsError::check_limits([
            ("send queue depth", sends, self.work_requests),
            ("receive queue depth", capacity.receive_requests, self.work_requests),
        ])
    }

    /// Returns the attributes of a device that has these limits, too.
    fn of(&self, device: &DeviceAttributes) -> DeviceAttributes {
        DeviceAttributes {
            max_memory_regions: device.max_memory_regions.min(self.regions),
            max_completions: device.max_completions.min(self.completions),
            max_work_requests: device.max_work_requests.min(self.work_requests),
            window_requests: device.window_requests.max(self.window_requests),
            ..device.clone()
        }
    }
}

/// A kind of objects: its counts and its limit.
#[derive(Clone, Copy, Debug)]
struct Kind {
    name: &'static str,
    objects: fn(&mut Counts) -> &mut Objects,
    limit: fn(&Limits) -> u32,
}

/// Makes the kind of objects that have this field.
macro_rules! kind {
    ($name:literal, $field:ident) => {
        Kind { name: $name, objects: |counts| &mut counts.$field, limit: |limits| limits.$field }
    };
}

const REGIONS: Kind = kind!("memory regions", regions);
const WINDOWS: Kind = kind!("memory windows", windows);
const DOMAINS: Kind = kind!("protection domains", domains);
const COMPLETION_QUEUES: Kind = kind!("completion queues", completion_queues);
const QUEUE_PAIRS: Kind = kind!("queue pairs", queue_pairs);
const SHARED_RECEIVE_QUEUES: Kind = Kind {
    name: "shared receive queues",
    objects: |counts| &mut counts.shared_receive_queues,
    limit: |_| u32::MAX,
};

/// Counts for the devices that were given it. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<Mutex<CounterState>>);

#[derive(Debug)]
struct CounterState {
    counts: Counts,
    limits: Limits,
    /// What each queue pair sent, that exists.
    sent: BTreeMap<QueuePairNumber, Posts>,
}

impl Default for CounterState {
    fn default() -> Self {
        Self { counts: Counts::default(), limits: Limits::NONE, sent: BTreeMap::new() }
    }
}

impl Counter {
    /// Returns a counter of its own.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the counts up to now.
    pub fn counts(&self) -> Counts {
        lock(&self.0).counts
    }

    /// Returns the sends, writes and reads that each queue pair took, of those that exist.
    pub fn queue_pairs(&self) -> BTreeMap<QueuePairNumber, Posts> {
        lock(&self.0).sent.clone()
    }

    /// Sets the limits of the devices that are counted from now on, for all of them together: they state these
    /// limits in their attributes, and refuse what goes beyond. [`Limits`] has an example.
    pub fn limit(&self, limits: Limits) {
        lock(&self.0).limits = limits;
    }

    fn limits(&self) -> Limits {
        lock(&self.0).limits
    }

    fn add(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut lock(&self.0).counts);
    }

    /// Counts an object that is about to be made, if there may be one more of its kind.
    fn begin(&self, kind: Kind) -> Result<Life, VerbsError> {
        let state = &mut *lock(&self.0);
        let (objects, limit) = ((kind.objects)(&mut state.counts), (kind.limit)(&state.limits).into());
        VerbsError::check_limits([(kind.name, objects.alive() + 1, limit)])?;
        objects.created += 1;
        Ok(Life { counter: self.clone(), kind, is_made: false, device: None })
    }

    fn sent(&self, by: QueuePairNumber, requests: &[SendRequest<'_>], result: &Result<(), PostError>) {
        let state = &mut *lock(&self.0);
        let (counts, of_pair) = (&mut state.counts, state.sent.entry(by).or_default());
        for request in &requests[..posted(requests.len(), result)] {
            let (of, bytes) = match request.operation {
                Operation::Send { data, immediate: None } => (&mut counts.sends, data.length()),
                Operation::Send { data, .. } => (&mut counts.sends_with_immediate, data.length()),
                Operation::Write { data, immediate: None, .. } => (&mut counts.writes, data.length()),
                Operation::Write { data, .. } => (&mut counts.writes_with_immediate, data.length()),
                Operation::Read { into, .. } => (&mut counts.reads, LocalSegment::total(into)),
            };
            of.add(bytes);
            of_pair.add(bytes);
            *if request.signaled { &mut counts.signaled } else { &mut counts.unsignaled } += 1;
        }
    }

    fn received(&self, requests: &[ReceiveRequest<'_>], result: &Result<(), PostError>) {
        let posted = &requests[..posted(requests.len(), result)];
        self.add(|counts| {
            posted.iter().for_each(|request| counts.receives.add(LocalSegment::total(request.into)))
        });
    }
}

/// Returns how many of `requests` requests were posted.
fn posted(requests: usize, result: &Result<(), PostError>) -> usize {
    result.map_or_else(|error| error.index.min(requests), |()| requests)
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
    CountedDevice::new(device, counter)
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
    let counted = CountedDevice::new(device, counter);
    open.push(Arc::downgrade(&counted));
    counted
}

/// Returns the object behind one that is counted, because a provider takes only its own objects. `any` is the
/// same object.
fn own<'a, T: ?Sized + 'static>(object: &'a Arc<T>, any: &'a dyn Any) -> &'a Arc<T> {
    any.downcast_ref::<Counted<T>>().map_or(object, |counted| &counted.inner)
}

/// A device that is counted.
#[derive(Debug)]
struct CountedDevice {
    me: Weak<Self>,
    inner: Arc<dyn Context>,
    attributes: DeviceAttributes,
    counter: Counter,
}

impl CountedDevice {
    fn new(inner: Arc<dyn Context>, counter: &Counter) -> Arc<Self> {
        let attributes = counter.limits().of(inner.attributes());
        Arc::new_cyclic(|me| Self { me: me.clone(), inner, attributes, counter: counter.clone() })
    }

    fn begin(&self, kind: Kind) -> Result<Life, VerbsError> {
        let mut life = self.counter.begin(kind)?;
        life.device = self.me.upgrade();
        Ok(life)
    }
}

/// An object of a device that is counted.
#[derive(Debug)]
struct Counted<T: ?Sized> {
    /// Dropped before its end is counted.
    inner: Arc<T>,
    life: Life,
}

/// Counts the end of an object when it is dropped. An object that was not made does not count.
#[derive(Debug)]
struct Life {
    counter: Counter,
    kind: Kind,
    is_made: bool,
    /// Stays open, under its address, as long as one of its objects is there.
    device: Option<Arc<CountedDevice>>,
}

impl Life {
    /// Counts an object that is about to be made of this one.
    fn begin(&self, kind: Kind) -> Result<Self, VerbsError> {
        let mut life = self.counter.begin(kind)?;
        life.device.clone_from(&self.device);
        Ok(life)
    }

    /// Begins the life of the object that was made.
    fn of<T: ?Sized>(mut self, inner: Arc<T>) -> Counted<T> {
        self.is_made = true;
        Counted { inner, life: self }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.counter.add(|counts| {
            let objects = (self.kind.objects)(counts);
            if self.is_made { objects.destroyed += 1 } else { objects.created -= 1 }
        });
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
        async_event_fd() -> Option<BorrowedFd<'_>>;
        handle_events();
    }

    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn alloc_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        let life = self.begin(DOMAINS)?;
        Ok(Arc::new(life.of(self.inner.alloc_protection_domain()?)))
    }

    fn create_completion_queue(&self, capacity: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        self.counter.limits().check_completions(capacity)?;
        let life = self.begin(COMPLETION_QUEUES)?;
        Ok(Arc::new(life.of(self.inner.create_completion_queue(capacity)?)))
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
        let life = self.life.begin(REGIONS)?;
        let region = self.inner.register_range(memory, range, access)?;
        self.life.counter.add(|counts| counts.registered_bytes += region.range().len() as u64);
        Ok(Arc::new(life.of(region)))
    }

    fn register_dmabuf(
        &self,
        memory: &DmaBuf<'_>,
        access: Access,
    ) -> Result<Arc<dyn DeviceMemoryRegion>, VerbsError> {
        let life = self.life.begin(REGIONS)?;
        let region = self.inner.register_dmabuf(memory, access)?;
        self.life.counter.add(|counts| counts.registered_bytes += region.length());
        Ok(Arc::new(life.of(region)))
    }

    fn create_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let queues = (own(send_queue, &**send_queue), own(receive_queue, &**receive_queue));
        let life = CountedPair::begin(&self.life, capacity)?;
        Ok(CountedPair::new(life.of(self.inner.create_queue_pair(queues.0, queues.1, capacity)?)))
    }

    fn create_shared_receive_queue(
        &self,
        capacity: u32,
        segments: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError> {
        let life = self.life.begin(SHARED_RECEIVE_QUEUES)?;
        Ok(Arc::new(life.of(self.inner.create_shared_receive_queue(capacity, segments)?)))
    }

    fn create_sharing_queue_pair(
        &self,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        receives: &Arc<dyn SharedReceiveQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let queues = (own(send_queue, &**send_queue), own(receive_queue, &**receive_queue));
        let receives = own(receives, &**receives);
        let life = CountedPair::begin(&self.life, capacity)?;
        let pair = self.inner.create_sharing_queue_pair(queues.0, queues.1, receives, capacity)?;
        Ok(CountedPair::new(life.of(pair)))
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

    fn resize(&self, capacity: u32) -> Result<(), VerbsError> {
        self.life.counter.limits().check_completions(capacity)?;
        self.inner.resize(capacity)
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
    /// Counts a queue pair that is about to be made, if the device may have one of this capacity.
    fn begin(domain: &Life, capacity: &QueuePairCapacity) -> Result<Life, VerbsError> {
        domain.counter.limits().check_requests(capacity)?;
        domain.begin(QUEUE_PAIRS)
    }

    fn new(Counted { inner, life }: Counted<dyn QueuePair>) -> Arc<Self> {
        let local = inner.local().map(|local| -> Arc<dyn LocalQueuePair> {
            Arc::new(CountedLocal { inner: Arc::clone(local), counter: life.counter.clone() })
        });
        lock(&life.counter.0).sent.insert(inner.number(), Posts::default());
        Arc::new(Self { inner, life, local })
    }
}

impl Drop for CountedPair {
    fn drop(&mut self) {
        lock(&self.life.counter.0).sent.remove(&self.inner.number());
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
        // A device without room for a window opens none.
        let Ok(life) = self.life.begin(WINDOWS) else { return Ok(None) };
        let window = self.inner.open_window(own(region, &**region), range, access)?;
        Ok(window.map(|window| -> Arc<dyn MemoryWindow> { Arc::new(life.of(window)) }))
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        let result = self.inner.post_send(requests);
        self.life.counter.sent(self.inner.number(), requests, &result);
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
            self.counter.add(|counts| counts.reads_at_once.add(LocalSegment::total(into)));
        }
        done
    }

    fn view(&self, remote: RemoteSegment, length: u64) -> Result<RemoteView, VerbsError> {
        let view = self.inner.view(remote, length)?;
        self.counter.add(|counts| counts.views += 1);
        Ok(view)
    }
}
