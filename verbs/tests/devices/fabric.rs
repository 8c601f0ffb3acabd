//! The properties of a provider that the suite needs, and the two connected sides that most cases start with.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::memory::Lease;
use tonic_rdma_verbs::unstable::{Grant, SlabRegistrations};
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionQueue, CompletionStatus, Context, HostMemory, LocalSegment,
    MemoryRegion, Operation, PathSettings, Payload, PostError, ProtectionDomain, QueuePair,
    QueuePairCapacity, QueuePairState, ReceiveRequest, RemoteSegment, SendRequest, VerbsError,
    WorkCompletion,
};

/// A provider under test.
pub trait Fabric: Sync {
    /// Returns the name by which a child process finds the provider.
    fn name(&self) -> &'static str;

    /// Opens a device.
    fn open(&self) -> Result<Arc<dyn Context>, VerbsError>;

    /// Returns the reason to skip `case`, if the device does not support it or behaves differently.
    fn skips(&self, _case: &str) -> Option<String> {
        None
    }

    /// Returns the status that this device reports in `case`, where other devices report `status`. The suite
    /// calls this function only for faults that the device reports.
    fn reports(&self, _case: &str, status: CompletionStatus) -> CompletionStatus {
        status
    }

    /// Returns the bytes of the largest request to test, if the device accepts it.
    fn large_request(&self) -> u64 {
        1 << 30
    }

    /// Returns whether a send or write completes only after the peer has accepted it. On iWARP, a request
    /// completes when TCP has accepted it. If the peer then refuses the request, the connection ends, and
    /// later requests are flushed.
    fn completes_at_the_peer(&self) -> bool {
        true
    }

    /// Returns whether a send waits for a receive. On iWARP, a send without a receive ends the connection.
    fn sends_wait_for_receives(&self) -> bool {
        true
    }

    /// Returns whether the right of local writing also lets peers write. On iWARP it does, because the device
    /// must open the destination of a READ to the peer.
    fn sinks_are_open(&self) -> bool {
        false
    }

    /// Returns whether a completion queue that overruns moves its queue pairs to Error at the next
    /// completion.
    fn overruns_exactly(&self) -> bool {
        true
    }

    /// Returns whether a queue pair goes to Error as soon as the peer's queue pair is in Error or the peer's
    /// process has died, even if no request is posted.
    fn notices_death_when_idle(&self) -> bool {
        true
    }
}

/// All access rights.
pub const ALL: Access = Access::from_bits_truncate(7);

/// Time after which a wait of the suite fails. Only a hang lasts as long: beside other work, a test may get a
/// small part of the processor.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Options of a side.
#[derive(Clone, Debug)]
pub struct Options {
    pub capacity: QueuePairCapacity,
    pub completions: u32,
    pub settings: PathSettings,
    /// Rights of the peer on the queue pair.
    pub access: Access,
    /// Bytes of each side's region.
    pub memory: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            capacity: QueuePairCapacity {
                send_requests: 128,
                receive_requests: 128,
                send_segments: 4,
                receive_segments: 4,
                inline: 512,
            },
            completions: 1024,
            settings: PathSettings::default(),
            access: ALL,
            memory: 1 << 20,
        }
    }
}

/// One side: a queue pair on a completion queue, and a region with all rights.
#[derive(Debug)]
pub struct Side {
    pub context: Arc<dyn Context>,
    pub domain: Arc<dyn ProtectionDomain>,
    pub queue: Arc<dyn CompletionQueue>,
    pub pair: Arc<dyn QueuePair>,
    pub region: Arc<dyn MemoryRegion>,
    pub settings: PathSettings,
}

/// Makes two connected sides. On a busy machine the answer of the software device may come too late; then two
/// other sides take their place.
pub fn connected(fabric: &dyn Fabric, options: &Options) -> (Side, Side) {
    let mut tries = 10;
    loop {
        let (a, b) = (Side::new(fabric, options), Side::new(fabric, options));
        match try_to_connect_pairs(&a.pair, &b.pair, &a.settings) {
            Err(error)
                if tries > 1 && error.system().map(|cause| cause.kind()) == Some(ErrorKind::TimedOut) =>
            {
                tries -= 1
            }
            connected => {
                connected.unwrap();
                return (a, b);
            }
        }
    }
}

/// Makes two connected sides with the default options.
pub fn default_pair(fabric: &dyn Fabric) -> (Side, Side) {
    connected(fabric, &Options::default())
}

impl Side {
    /// Makes a side in Init.
    pub fn new(fabric: &dyn Fabric, options: &Options) -> Self {
        Self::in_context(fabric.open().unwrap(), options)
    }

    /// Makes a side in Init, on an open device.
    pub fn in_context(context: Arc<dyn Context>, options: &Options) -> Self {
        let domain = context.alloc_protection_domain().unwrap();
        let queue = context.create_completion_queue(options.completions).unwrap();
        let pair = domain.create_queue_pair(&queue, &queue, &options.capacity).unwrap();
        pair.to_init(options.access).unwrap();
        let memory = Arc::new(HostMemory::shared(options.memory, 4096).unwrap());
        let region = domain.register(memory, ALL).unwrap();
        Self { context, domain, queue, pair, region, settings: options.settings.clone() }
    }

    /// Makes another queue pair in Init, on the completion queue of this side.
    pub fn another_pair(&self, options: &Options) -> Arc<dyn QueuePair> {
        let pair = self.domain.create_queue_pair(&self.queue, &self.queue, &options.capacity).unwrap();
        pair.to_init(options.access).unwrap();
        pair
    }

    /// Connects this side and `other`.
    pub fn connect(&self, other: &Self) {
        connect_pairs(&self.pair, &other.pair, &self.settings);
    }

    /// Registers memory that is not shared with other processes.
    pub fn private_region(&self, length: usize) -> Arc<dyn MemoryRegion> {
        self.domain.register(Arc::new(HostMemory::from_vec(vec![0; length])), ALL).unwrap()
    }

    /// Names a part of this side's region for a local request.
    pub fn segment(&self, offset: usize, length: usize) -> LocalSegment {
        segment(&self.region, offset, length)
    }

    /// Names this side's region for the peer, from `offset` on.
    pub fn remote(&self, offset: usize) -> RemoteSegment {
        remote(&self.region, offset)
    }

    pub fn fill(&self, offset: usize, bytes: &[u8]) {
        self.region.memory().copy_in(offset, bytes).unwrap();
    }

    pub fn content(&self, offset: usize, length: usize) -> Vec<u8> {
        content(&self.region, offset, length)
    }

    pub fn post_receive(&self, wr_id: u64, offset: usize, length: usize) {
        self.try_post_receive(wr_id, &[self.segment(offset, length)]).unwrap();
    }

    pub fn try_post_receive(&self, wr_id: u64, into: &[LocalSegment]) -> Result<(), PostError> {
        self.pair.post_receive(&[ReceiveRequest { wr_id, into }])
    }

    pub fn try_post(&self, wr_id: u64, operation: Operation<'_>) -> Result<(), PostError> {
        self.pair.post_send(&[SendRequest { wr_id, operation, signaled: true }])
    }

    pub fn post(&self, wr_id: u64, operation: Operation<'_>) {
        self.try_post(wr_id, operation).unwrap();
    }

    pub fn post_unsignaled(&self, wr_id: u64, operation: Operation<'_>) {
        self.pair.post_send(&[SendRequest { wr_id, operation, signaled: false }]).unwrap();
    }

    /// Sends a part of this side's region.
    pub fn send(&self, wr_id: u64, offset: usize, length: usize) {
        let segments = [self.segment(offset, length)];
        self.post(wr_id, Operation::Send { data: Payload::Registered(&segments), immediate: None });
    }

    pub fn write(&self, wr_id: u64, from: LocalSegment, remote: RemoteSegment) {
        self.post(wr_id, Operation::Write { data: Payload::Registered(&[from]), remote, immediate: None });
    }

    pub fn read(&self, wr_id: u64, into: LocalSegment, remote: RemoteSegment) {
        self.post(wr_id, Operation::Read { into: &[into], remote });
    }

    /// Returns `value` as immediate data, if the device supports it.
    pub fn immediate(&self, value: u32) -> Option<u32> {
        self.context.attributes().immediate.then_some(value)
    }

    /// Returns `length`, or the inline capacity if that is smaller.
    pub fn inline(&self, length: usize) -> usize {
        length.min(self.pair.capacity().inline as usize)
    }

    /// Waits for the next completion.
    pub fn wait(&self) -> WorkCompletion {
        wait(&*self.queue)
    }

    /// Waits for the next completion, which must be a success of `wr_id`.
    pub fn expect(&self, wr_id: u64, opcode: CompletionOpcode) -> WorkCompletion {
        let completion = self.wait();
        assert_eq!(
            (completion.wr_id, completion.status, completion.opcode),
            (wr_id, CompletionStatus::Success, opcode)
        );
        completion
    }

    /// Waits for the next completion, which must be a failure of `wr_id` with `status`.
    pub fn expect_failure(&self, wr_id: u64, status: CompletionStatus) {
        let completion = self.wait();
        assert_eq!((completion.wr_id, completion.status), (wr_id, status));
    }

    /// Waits until the queue pair is in Error.
    pub fn expect_end(&self) {
        wait_until("the Error state", || self.pair.state() == QueuePairState::Error);
    }

    /// Waits for the next completion, which must belong to `wr_id`. The peer has refused this request. If the
    /// fabric reports refusals, the request must have failed with `status`.
    pub fn expect_refusal(&self, fabric: &dyn Fabric, wr_id: u64, status: CompletionStatus) {
        if fabric.completes_at_the_peer() {
            return self.expect_failure(wr_id, status);
        }
        let completion = self.wait();
        assert_eq!(completion.wr_id, wr_id);
        // A READ needs an answer.
        let unreported =
            completion.status == CompletionStatus::Success && completion.opcode != CompletionOpcode::Read;
        assert!(unreported || is_end(completion.status), "{completion:?}");
        self.expect_end();
    }

    /// Asserts that there is nothing to poll.
    pub fn expect_nothing(&self) {
        let mut completions = [WorkCompletion::EMPTY; 1];
        let count = self.queue.poll(&mut completions);
        assert_eq!(count, 0, "unexpected {:?}", completions[0]);
    }
}

/// Waits until the writes of `a` are in the memory of `b`. For this purpose it posts a READ, because a READ
/// sees all earlier writes on every device.
pub fn until_placed(fabric: &dyn Fabric, a: &Side, b: &Side) {
    const WR_ID: u64 = 0x7ead;
    if !fabric.completes_at_the_peer() {
        let end = a.region.memory().len() - 1;
        a.read(WR_ID, a.segment(end, 1), b.remote(end));
        a.expect(WR_ID, CompletionOpcode::Read);
    }
}

/// Returns whether a request may complete with `status` because the connection had ended. (soft-iWARP reports
/// a local operation error if TCP does not accept the request any more.)
pub fn is_end(status: CompletionStatus) -> bool {
    matches!(status, CompletionStatus::WorkRequestFlushed | CompletionStatus::LocalOperation)
}

pub fn connect_pairs(a: &Arc<dyn QueuePair>, b: &Arc<dyn QueuePair>, settings: &PathSettings) {
    try_to_connect_pairs(a, b, settings).unwrap();
}

fn try_to_connect_pairs(
    a: &Arc<dyn QueuePair>,
    b: &Arc<dyn QueuePair>,
    settings: &PathSettings,
) -> Result<(), VerbsError> {
    a.to_rtr(&b.local_address(), settings)?;
    b.to_rtr(&a.local_address(), settings)?;
    a.to_rts(settings)?;
    b.to_rts(settings)
}

pub fn segment(region: &Arc<dyn MemoryRegion>, offset: usize, length: usize) -> LocalSegment {
    // SAFETY: the suite never makes a reference to registered memory; it copies in and out.
    unsafe { LocalSegment::new(&**region, offset..offset + length) }
}

pub fn remote(region: &Arc<dyn MemoryRegion>, offset: usize) -> RemoteSegment {
    RemoteSegment { address: region.memory().address() + offset as u64, rkey: region.rkey() }
}

pub fn content(region: &Arc<dyn MemoryRegion>, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    region.memory().copy_out(offset, &mut bytes).unwrap();
    bytes
}

/// Waits for the next completion of `queue`.
pub fn wait(queue: &dyn CompletionQueue) -> WorkCompletion {
    let mut completions = [WorkCompletion::EMPTY; 1];
    wait_until("a completion", || queue.poll(&mut completions) == 1);
    completions[0]
}

/// Waits until `done` is true. Fails after [`TIMEOUT`].
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !done() {
        assert!(Instant::now() < deadline, "waited {TIMEOUT:?} for {what}");
        std::thread::yield_now();
    }
}

/// Returns bytes that depend on their position and on `seed`.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|index| (index.wrapping_mul(31) ^ (index >> 8) ^ seed.wrapping_mul(101)) as u8)
        .collect()
}

/// Grants the peer of `side` the right to read the bytes of `lease`: by a window if the device has one.
pub fn grant(side: &Side, slabs: &mut SlabRegistrations, lease: &Lease) -> Grant {
    let window = Grant::in_slab(&*side.pair, slabs, lease).unwrap();
    window.unwrap_or_else(|| Grant::of_lease(&*side.domain, lease).unwrap())
}
