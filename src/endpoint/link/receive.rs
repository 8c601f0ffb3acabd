//! Receive buffers: those of a connection, those that all connections of a completion queue share, and
//! whether the device lets connections that share them have a protection domain each.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::{WorkId, WorkKind};
use crate::endpoint::config::Config;
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::provider::budget;
use crate::protocol;
use tonic_rdma_verbs::memory::{Block, Budget, Pool, PoolSettings, Quota};
use tonic_rdma_verbs::unstable::lock;
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionStatus, Context, LocalSegment, Operation, PathSettings, Payload,
    PostError, ProtectionDomain, QueuePair, QueuePairCapacity, QueuePairNumber, ReceiveRequest, SendRequest,
    SharedReceiveQueue, VerbsError, WorkCompletion,
};

/// The reason why there is no buffer, or no answer.
type Failure = Box<dyn Error + Send + Sync>;

/// The receive buffers of one connection.
#[derive(Debug)]
pub(crate) enum Receives {
    /// Buffers that only this connection uses.
    Own(Ring),
    /// Buffers that all connections of the completion queue use.
    Shared(Share),
}

/// The buffers of one connection, posted to its queue pair.
#[derive(Debug)]
pub(crate) struct Ring {
    block: Block,
    slot_size: usize,
    segments: Vec<LocalSegment>,
}

/// A connection's share of shared buffers.
#[derive(Debug)]
pub(crate) struct Share {
    promise: Promise,
    owner: QueuePairNumber,
    /// Most buffers that the connection may have at a time.
    most: u32,
    /// Messages received since the window last grew.
    received: u32,
}

impl Ring {
    /// Divides `block` into `slots` buffers.
    pub(crate) fn new(block: Block, slots: u32, slot_size: usize) -> Result<Self, VerbsError> {
        let segments = segments(&block, slots, slot_size)?;
        Ok(Self { block, slot_size, segments })
    }
}

impl Share {
    /// Makes the share of the connection with the queue pair `owner`. The share may grow to `most` buffers.
    pub(crate) fn new(promise: Promise, owner: QueuePairNumber, most: u32) -> Self {
        Self { promise, owner, most, received: 0 }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.promise.buffers.post_all_of(self.owner);
    }
}

impl Receives {
    /// Posts the buffers that the peer needs before it may send.
    pub(crate) fn post_first(
        &self,
        queue_pair: &dyn QueuePair,
        connection: u32,
    ) -> Result<(), ConnectionFault> {
        let Self::Own(ring) = self else { return Ok(()) };
        (0..ring.segments.len() as u32).try_for_each(|slot| self.post(slot, queue_pair, connection))
    }

    /// Posts the buffer of `slot` again.
    pub(crate) fn post(
        &self,
        slot: u32,
        queue_pair: &dyn QueuePair,
        connection: u32,
    ) -> Result<(), ConnectionFault> {
        match self {
            Self::Own(ring) => {
                let wr_id = WorkId { kind: WorkKind::Receive, connection, value: slot }.to_bits();
                let into = std::slice::from_ref(&ring.segments[slot as usize]);
                Ok(queue_pair.post_receive(&[ReceiveRequest { wr_id, into }])?)
            }
            Self::Shared(share) => share.promise.buffers.post(slot).map_err(ConnectionFault::local),
        }
    }

    /// Notes that a message has come into the shared buffer `slot`.
    pub(crate) fn hold(&mut self, slot: u32) {
        if let Self::Shared(share) = self {
            share.promise.buffers.hold(slot, share.owner);
            share.received = share.received.saturating_add(1);
        }
    }

    /// Returns the memory of the buffer `slot`, and the offset of the buffer in it.
    pub(crate) fn slot(&self, slot: u32) -> Result<(&Block, usize), ConnectionFault> {
        match self {
            Self::Own(ring) => Ok((&ring.block, slot as usize * ring.slot_size)),
            Self::Shared(share) => {
                let found = share.promise.buffers.slot(slot);
                found.ok_or_else(|| ConnectionFault::local(unknown(slot)))
            }
        }
    }

    /// Gives back promised buffers beyond the protocol's window, and widens the window of a peer that sends a
    /// lot.
    pub(crate) fn adjust_window(&mut self, protocol: &mut protocol::Connection) {
        let Self::Shared(share) = self else { return };
        let window = protocol.window();
        share.promise.shrink_to(window);
        if share.received < window || window >= share.most {
            return;
        }
        share.received = 0;
        let more = window.min(share.most - window);
        // Without more buffers the window stays as it is.
        if share.promise.grow(more).is_ok() {
            protocol.widen(more);
        }
    }
}

/// A queue that takes buffers: a shared receive queue of a device, or a list in tests.
pub(crate) trait ReceiveQueue: Debug + Send + Sync {
    /// Returns the number of receives that may be outstanding.
    fn capacity(&self) -> u32;

    /// Posts receives.
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError>;
}

impl ReceiveQueue for Arc<dyn SharedReceiveQueue> {
    fn capacity(&self) -> u32 {
        (**self).capacity()
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        (**self).post_receive(requests)
    }
}

/// The shared receive buffers of one completion queue.
///
/// Each connection is promised a number of buffers (its window), so that its peer's credits are always valid.
/// The number of buffers that exist follows their use: those that hold unread messages, and enough free ones
/// for the messages that may come between two polls. So a thousand idle connections take no more memory than
/// a few. If more messages come at once than buffers are free, the senders' devices wait for a moment and try
/// again (receiver not ready), and the next poll adds buffers.
#[derive(Debug)]
pub(crate) struct SharedBuffers<Q: ReceiveQueue = Arc<dyn SharedReceiveQueue>> {
    /// Declared before the memory, so that it is dropped first.
    queue: Q,
    /// The domain of the buffers, if connections have to use it, too.
    common_domain: Option<Arc<dyn ProtectionDomain>>,
    slot_size: usize,
    pool: Pool,
    steps: Box<[OnceLock<Step>]>,
    counts: Mutex<Counts>,
}

/// Buffers that are added at a time.
const STEP: u32 = 64;

/// Free buffers, if as many are promised: the messages that may come between two polls.
const SLACK: u32 = 256;

/// Most buffers.
const MOST: u32 = 1 << 14;

/// Buffers that were added together.
#[derive(Debug)]
struct Step {
    block: Block,
    segments: Vec<LocalSegment>,
    /// For each buffer, the number of the queue pair whose connection holds the buffer; 0 while the buffer is
    /// posted.
    owners: [AtomicU32; STEP as usize],
}

#[derive(Debug, Default)]
struct Counts {
    /// Buffers that exist.
    slots: u32,
    /// Buffers that hold messages.
    held: u32,
    /// Buffers that are promised to connections.
    promised: u32,
    /// The last attempt to add buffers found no memory.
    starved: bool,
}

impl SharedBuffers {
    /// Creates buffers of the length that `config` sets. `separate_domains`: connections of other domains can
    /// use the buffers.
    pub(crate) fn new(
        context: &dyn Context,
        config: &Config,
        separate_domains: bool,
    ) -> Result<Arc<Self>, VerbsError> {
        let attributes = context.attributes();
        let limit = MOST.min(attributes.max_shared_receives) / STEP * STEP;
        let domain = context.alloc_protection_domain()?;
        let queue = domain.create_shared_receive_queue(limit, 1)?;
        let common_domain = (!separate_domains).then(|| Arc::clone(&domain));
        let budget = budget(attributes.locks_memory, config);
        Ok(Self::with(queue, domain, common_domain, config.slot_size as usize, budget))
    }

    /// Returns the queue to create queue pairs with.
    pub(crate) fn queue(&self) -> &Arc<dyn SharedReceiveQueue> {
        &self.queue
    }
}

impl<Q: ReceiveQueue> SharedBuffers<Q> {
    fn with(
        queue: Q,
        domain: Arc<dyn ProtectionDomain>,
        common_domain: Option<Arc<dyn ProtectionDomain>>,
        slot_size: usize,
        budget: Arc<Budget>,
    ) -> Arc<Self> {
        let settings = PoolSettings {
            access: Access::LOCAL_WRITE,
            slab_size: 2 * STEP as usize * slot_size,
            ..PoolSettings::default()
        };
        let steps = (0..queue.capacity() / STEP).map(|_| OnceLock::new()).collect();
        let pool = Pool::new(domain, settings, budget);
        Arc::new(Self { queue, common_domain, slot_size, pool, steps, counts: Mutex::default() })
    }

    /// Returns the domain that connections have to use, if there is one.
    pub(crate) fn common_domain(&self) -> Option<&Arc<dyn ProtectionDomain>> {
        self.common_domain.as_ref()
    }

    /// Promises a new connection `slots` buffers.
    pub(crate) fn promise(self: &Arc<Self>, slots: u32) -> Result<Promise<Q>, Failure> {
        let mut promise = Promise { buffers: Arc::clone(self), slots: 0 };
        promise.grow(slots)?;
        Ok(promise)
    }

    /// Notes that a message for the connection of the queue pair `owner` has come into `slot`.
    pub(crate) fn hold(&self, slot: u32, owner: QueuePairNumber) {
        if let Some((step, index)) = self.step(slot)
            && step.owners[index].swap(owner.0, Ordering::Relaxed) == 0
        {
            let mut counts = lock(&self.counts);
            counts.held += 1;
            if let Err(reason) = self.provide(&mut counts)
                && !std::mem::replace(&mut counts.starved, true)
            {
                tonic_rdma_verbs::unstable::throttled!(warn, %reason, held = counts.held, "peers may have to wait for shared receive buffers");
            }
        }
    }

    /// Posts a buffer again that holds a message.
    pub(crate) fn post(&self, slot: u32) -> Result<(), Failure> {
        let (step, index) = self.step(slot).ok_or_else(|| unknown(slot))?;
        if step.owners[index].swap(0, Ordering::Relaxed) != 0 {
            lock(&self.counts).held -= 1;
        }
        Ok(self.queue.post_receive(&[request(slot, &step.segments[index])])?)
    }

    /// Posts every buffer again that the connection of the queue pair `owner` holds, because the connection
    /// has ended.
    pub(crate) fn post_all_of(&self, owner: QueuePairNumber) {
        let mut lost = None;
        for (number, step) in self.steps.iter().map_while(OnceLock::get).enumerate() {
            let of_owner = |index: &usize| step.owners[*index].load(Ordering::Relaxed) == owner.0;
            for index in (0..step.owners.len()).filter(of_owner) {
                lost = self.post(number as u32 * STEP + index as u32).err().or(lost);
            }
        }
        if let Some(reason) = lost {
            tonic_rdma_verbs::unstable::throttled!(warn, %reason, "shared receive buffers are lost");
        }
    }

    /// Returns the memory of the buffer `slot`, and the offset of the buffer in it.
    pub(crate) fn slot(&self, slot: u32) -> Option<(&Block, usize)> {
        let (step, index) = self.step(slot)?;
        Some((&step.block, index * self.slot_size))
    }

    fn step(&self, slot: u32) -> Option<(&Step, usize)> {
        let step = self.steps.get((slot / STEP) as usize)?.get()?;
        Some((step, (slot % STEP) as usize))
    }

    /// Adds buffers until their number suffices for the promises and for the use.
    fn provide(&self, counts: &mut Counts) -> Result<(), Failure> {
        while counts.slots < counts.promised.min(counts.held + SLACK) {
            let added = self.add_step(counts.slots / STEP);
            added.map_err(|error| format!("no memory for shared receive buffers: {error}"))?;
            counts.slots += STEP;
            counts.starved = false;
            metrics::gauge!("tonic_rdma_shared_receive_buffers").increment(STEP);
        }
        Ok(())
    }

    fn add_step(&self, number: u32) -> Result<(), Failure> {
        let block = self.pool.lease(STEP as usize * self.slot_size, Quota::Receive)?;
        let segments = segments(&block, STEP, self.slot_size)?;
        let owners = std::array::from_fn(|_| AtomicU32::new(0));
        let place = self.steps.get(number as usize).ok_or("there are as many as there can be")?;
        let step = place.get_or_init(|| Step { block, segments, owners });
        let first = number * STEP;
        let requests: Vec<_> =
            (first..).zip(&step.segments).map(|(slot, segment)| request(slot, segment)).collect();
        Ok(self.queue.post_receive(&requests)?)
    }
}

impl<Q: ReceiveQueue> Drop for SharedBuffers<Q> {
    fn drop(&mut self) {
        metrics::gauge!("tonic_rdma_shared_receive_buffers").decrement(lock(&self.counts).slots);
    }
}

/// Divides `block` into `count` buffers of `size` bytes.
pub(super) fn segments(block: &Block, count: u32, size: usize) -> Result<Vec<LocalSegment>, VerbsError> {
    (0..count as usize).map(|index| block.segment(index * size..(index + 1) * size)).collect()
}

fn unknown(slot: u32) -> Failure {
    format!("no receive buffer {slot}").into()
}

fn request(slot: u32, segment: &LocalSegment) -> ReceiveRequest<'_> {
    let id = WorkId { kind: WorkKind::SharedReceive, connection: 0, value: slot };
    ReceiveRequest { wr_id: id.to_bits(), into: std::slice::from_ref(segment) }
}

/// The number of buffers that a connection may hold at a time.
#[derive(Debug)]
pub(crate) struct Promise<Q: ReceiveQueue = Arc<dyn SharedReceiveQueue>> {
    pub(super) buffers: Arc<SharedBuffers<Q>>,
    slots: u32,
}

impl<Q: ReceiveQueue> Promise<Q> {
    /// Promises `more` buffers.
    pub(crate) fn grow(&mut self, more: u32) -> Result<(), Failure> {
        let mut counts = lock(&self.buffers.counts);
        let limit = self.buffers.steps.len() as u32 * STEP;
        if counts.promised + more > limit {
            return Err(format!(
                "all {limit} receive buffers that connections share are promised; RDMA_COMPLETION_QUEUES adds queues"
            )
            .into());
        }
        counts.promised += more;
        if let Err(error) = self.buffers.provide(&mut counts) {
            counts.promised -= more;
            return Err(error);
        }
        self.slots += more;
        Ok(())
    }

    /// Takes back the promise of buffers beyond `slots`.
    pub(crate) fn shrink_to(&mut self, slots: u32) {
        if slots < self.slots {
            lock(&self.buffers.counts).promised -= self.slots - slots;
            self.slots = slots;
        }
    }
}

impl<Q: ReceiveQueue> Drop for Promise<Q> {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// Answers by the device's name. An attempt that failed gave no answer, so the next call makes another one.
#[derive(Debug, Default)]
struct Answers(Mutex<HashMap<String, bool>>);

static KNOWN: LazyLock<Answers> = LazyLock::new(Answers::default);

/// Returns whether queue pairs of one domain can take receives from a queue of another domain, so that the
/// device keeps the memory of connections apart although they share a receive queue.
///
/// A peer may READ all memory that is registered for that in the protection domain of its queue pair. So each
/// connection has a domain of its own, and a shared receive queue has one, too. Some devices look up the
/// queue's buffers in the queue's domain. Others, such as Soft-RoCE, look them up in the domain of the queue
/// pair, so that all connections need one common domain. No attribute says which kind a device is, so a test
/// on the device finds out, once.
///
/// The first call for a device may take some milliseconds, and up to a second if the device does not answer.
pub(crate) fn separate_domains(context: &dyn Context) -> bool {
    KNOWN.get_or_ask(&context.attributes().name, || attempt(context))
}

impl Answers {
    /// Returns the answer of the device `name`. Asks by `attempt` if there is no answer yet. Returns false if
    /// the attempt fails.
    fn get_or_ask(&self, name: &str, attempt: impl FnOnce() -> Result<bool, Failure>) -> bool {
        let mut known = lock(&self.0);
        if let Some(&separate) = known.get(name) {
            return separate;
        }
        match attempt() {
            Ok(separate) => {
                tracing::debug!(device = %name, separate, "receive queues shared across protection domains");
                known.insert(name.to_owned(), separate);
                separate
            }
            Err(error) => {
                tonic_rdma_verbs::unstable::throttled!(warn, device = %name, %error, "can't find out whether receive queues can be shared");
                false
            }
        }
    }
}

/// Sends a message from the device to itself, into a buffer whose domain is not that of the receiving queue
/// pair.
fn attempt(context: &dyn Context) -> Result<bool, Failure> {
    const MESSAGE: [u8; 8] = *b"separate";
    const TIMEOUT: Duration = Duration::from_secs(1);
    let budget = Budget::new(1 << 20);
    let settings = || PoolSettings {
        access: Access::LOCAL_WRITE,
        slab_size: 64 << 10,
        huge_pages: false,
        ..PoolSettings::default()
    };
    let (theirs, ours) = (context.alloc_protection_domain()?, context.alloc_protection_domain()?);
    let shared = theirs.create_shared_receive_queue(1, 1)?;
    let into = Pool::new(theirs, settings(), budget.clone()).lease(MESSAGE.len(), Quota::Receive)?;
    shared.post_receive(&[ReceiveRequest { wr_id: 0, into: &[into.segment(0..MESSAGE.len())?] }])?;
    let mut from = Pool::new(ours.clone(), settings(), budget).lease(MESSAGE.len(), Quota::Send)?;
    from.copy_in(0, &MESSAGE)?;

    let completions = context.create_completion_queue(8)?;
    let capacity = QueuePairCapacity {
        send_requests: 1,
        receive_requests: 1,
        send_segments: 1,
        receive_segments: 1,
        inline: 0,
    };
    let receiver = ours.create_sharing_queue_pair(&completions, &completions, &shared, &capacity)?;
    let sender = ours.create_queue_pair(&completions, &completions, &capacity)?;
    // A time-out of 4 ms, and one more attempt.
    let path = PathSettings { timeout: 10, retry_count: 1, rnr_retry: 1, ..PathSettings::default() };
    for pair in [&receiver, &sender] {
        pair.to_init(Access::LOCAL_WRITE)?;
    }
    for (pair, peer) in [(&receiver, &sender), (&sender, &receiver)] {
        pair.to_rtr(&peer.local_address(), &path)?;
        pair.to_rts(&path)?;
    }
    let segments = [from.segment(0..MESSAGE.len())?];
    let operation = Operation::Send { data: Payload::Registered(&segments), immediate: None };
    sender.post_send(&[SendRequest { wr_id: 1, operation, signaled: true }])?;

    let deadline = Instant::now() + TIMEOUT;
    let mut completion = [WorkCompletion::EMPTY; 1];
    while Instant::now() < deadline {
        if completions.poll(&mut completion) == 0 {
            std::thread::yield_now();
            continue;
        }
        match completion[0].status {
            CompletionStatus::Success => {}
            // The device was too busy for an answer.
            status @ (CompletionStatus::RetryExceeded | CompletionStatus::RnrRetryExceeded) => {
                return Err(format!("the device did not answer: {status}").into());
            }
            _ => return Ok(false),
        }
        if completion[0].opcode == CompletionOpcode::Receive {
            let mut arrived = [0; MESSAGE.len()];
            into.copy_out(0, &mut arrived)?;
            return Ok(arrived == MESSAGE);
        }
    }
    Err(format!("the device did not answer within {TIMEOUT:?}").into())
}

#[cfg(test)]
mod shared_receive_tests {
    use std::collections::VecDeque;

    use super::*;

    const SLOT: usize = 1024;

    /// A queue that keeps the posted slots.
    #[derive(Debug, Default)]
    struct Queue(Mutex<VecDeque<u32>>);

    impl ReceiveQueue for Arc<Queue> {
        fn capacity(&self) -> u32 {
            1024
        }

        fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
            lock(&self.0).extend(requests.iter().map(|request| WorkId::from_bits(request.wr_id).value));
            Ok(())
        }
    }

    fn buffers(budget: u64) -> (Arc<Queue>, Arc<SharedBuffers<Arc<Queue>>>) {
        let queue = Arc::new(Queue::default());
        let domain = tonic_rdma_verbs::soft::open().unwrap().alloc_protection_domain().unwrap();
        let buffers = SharedBuffers::with(Arc::clone(&queue), domain, None, SLOT, Budget::new(budget));
        (queue, buffers)
    }

    fn posted(queue: &Queue) -> usize {
        lock(&queue.0).len()
    }

    /// Receives a message into the first posted slot.
    fn receive(queue: &Queue, buffers: &SharedBuffers<Arc<Queue>>, owner: u32) -> u32 {
        let slot = lock(&queue.0).pop_front().unwrap();
        buffers.hold(slot, QueuePairNumber(owner));
        slot
    }

    #[test]
    fn idle_connections_share_a_bounded_number_of_buffers() {
        let (queue, buffers) = buffers(1 << 30);
        let promises: Vec<_> = (0..60).map(|_| buffers.promise(16).unwrap()).collect();
        assert_eq!(posted(&queue), 256);
        let error = (0..10).find_map(|_| buffers.promise(16).err().map(|error| error.to_string()));
        assert!(error.is_none(), "a promise that is dropped comes back");
        let last: Vec<_> = (0..4).map(|_| buffers.promise(16).unwrap()).collect();
        let error = buffers.promise(1).unwrap_err().to_string();
        assert_eq!(
            error,
            "all 1024 receive buffers that connections share are promised; RDMA_COMPLETION_QUEUES adds queues"
        );
        drop((promises, last));
        assert_eq!(lock(&buffers.counts).promised, 0);
    }

    #[test]
    fn buffers_are_added_while_messages_are_not_read() {
        let (queue, buffers) = buffers(1 << 30);
        let mut promise = buffers.promise(16).unwrap();
        assert_eq!(posted(&queue), 64);
        promise.grow(984).unwrap();
        assert_eq!(posted(&queue), 256);
        let held: Vec<_> = (0..300).map(|_| receive(&queue, &buffers, 7)).collect();
        assert_eq!(posted(&queue) + held.len(), 576);
        for slot in held {
            buffers.post(slot).unwrap();
        }
        assert_eq!(posted(&queue), 576);
        promise.shrink_to(16);
        assert_eq!((promise.slots, lock(&buffers.counts).promised), (16, 16));
    }

    #[test]
    fn buffers_that_a_connection_holds_are_posted_when_it_ends() {
        let (queue, buffers) = buffers(1 << 30);
        let _promise = buffers.promise(128).unwrap();
        let mine: Vec<_> = (0..70).map(|_| receive(&queue, &buffers, 1)).collect();
        let other = receive(&queue, &buffers, 2);
        buffers.post_all_of(QueuePairNumber(1));
        assert_eq!((posted(&queue), lock(&buffers.counts).held), (127, 1));
        assert!(!lock(&queue.0).contains(&other));
        assert!(mine.iter().all(|slot| lock(&queue.0).contains(slot)));
        buffers.post_all_of(QueuePairNumber(1));
        assert_eq!(posted(&queue), 127, "once");
    }

    #[test]
    fn buffers_do_not_overlap_in_memory() {
        let (_queue, buffers) = buffers(1 << 30);
        let _promise = buffers.promise(128).unwrap();
        let address = |slot| {
            let (block, start) = buffers.slot(slot).unwrap();
            block.segment(start..start + SLOT).unwrap().address()
        };
        let mut addresses: Vec<_> = (0..128).map(address).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|two| two[1] - two[0] >= SLOT as u64));
        assert!(buffers.slot(128).is_none() && buffers.slot(u32::MAX).is_none());
    }

    #[test]
    fn without_memory_there_is_no_promise() {
        let (queue, buffers) = buffers(200 << 10);
        let promise = buffers.promise(64).unwrap();
        let error = buffers.promise(200).unwrap_err().to_string();
        assert!(
            error.starts_with("no memory for shared receive buffers") && error.contains("RDMA_PINNED_LIMIT")
        );
        let counts = lock(&buffers.counts);
        assert_eq!((counts.promised, promise.slots), (64, 64));
        assert_eq!(counts.slots as usize, posted(&queue));
    }
}

#[cfg(test)]
mod isolation_tests {
    use super::*;

    #[test]
    fn a_failed_attempt_is_no_answer() {
        let answers = Answers::default();
        let asked = |attempt: Result<bool, Failure>| answers.get_or_ask("a device", || attempt);
        assert!(!asked(Err("no answer".into())));
        assert!(asked(Ok(true)), "the failed attempt was taken for an answer");
        assert!(asked(Ok(false)), "the first answer counts");
        assert!(!answers.get_or_ask("another device", || Ok(false)));
    }
}
