//! The client half of the modes that place tensors: the sender of a cell's tensors, with the memory that they
//! are sent from and the slots and regions that they are sent to; and the caller, which sends one operation,
//! or a stream of operations, several in flight at once.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Mutex;
use tonic::transport::Channel as Grpc;
use tonic_rdma_commands::Failure;
use tonic_rdma_commands::payload::content::{Content, VARIANTS, offset_of, variant_seed};
use tonic_rdma_proto::placement::placement_client::PlacementClient;
use tonic_rdma_proto::placement::prepare_request::Load as Wanted;
use tonic_rdma_proto::placement::{BeginRequest, EndRequest, PrepareRequest, ReleaseRequest};
use tonic_rdma_proto::transfer::Check;
use tonic_rdma_tensor::{
    BlockCopy, Channel, DynamicSender, MemRegion, Memcpy, NamedOffer, RdmaDevice, RemoteRegion,
    StaticReceiver, StaticSender, Tensor, TensorError, TensorErrorKind, TransferError,
};

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::mode::Mode;
use crate::compare::modes::placement::geometry::{
    self, Batch, BufferSeeds, Geometry, MAX_DEPTH, Record, YieldTimer, identify, seeds_in_order,
};
use crate::compare::operations::{Done, Layout, Operation, Operations, Position};
use crate::compare::server::tensor_device;
use crate::measure::transport::{Rdma, RdmaConnection};

/// Sends the operations of a cell.
#[derive(Debug)]
pub(crate) struct TensorSender {
    to: Target,
    /// Seed of the first operation's content.
    seed: u64,
    /// Whether tensors of slots are sent from registered memory, if they lie there.
    pub(crate) in_place: bool,
}

#[derive(Debug)]
enum Target {
    Slots {
        slots: Vec<StaticSender>,
        /// A tensor in registered memory for each variant of the content and each slot. Without them each tensor is
        /// copied when it is sent.
        tensors: Vec<Vec<Tensor>>,
    },
    Batch(Box<BatchSender>),
    Passed(Box<PassedSender>),
}

/// Sends operations whose tensors have no place at the receiver beforehand, one tensor after the other.
#[derive(Debug)]
struct PassedSender {
    to: PassedTo,
    /// The content in registered memory, and the tensors of it that were sent before, by seed and length.
    content: Content,
    tensors: HashMap<(u64, usize), Tensor>,
    /// Tensors for which the dynamic slot has had no room yet.
    unsent: VecDeque<Tensor>,
    /// Gets a tensor for each operation that the receiver has consumed.
    acknowledgements: StaticReceiver,
    depth: u64,
    in_flight: u64,
}

#[derive(Debug)]
enum PassedTo {
    Dynamic(DynamicSender),
    /// Offers by the index of a buffer, and the number of the operation, which comes next.
    Named {
        device: RdmaDevice,
        names: Vec<String>,
        next: u64,
    },
}

/// Sends operations as [`Geometry::Batch`] describes.
#[derive(Debug)]
struct BatchSender {
    batch: Batch,
    header: StaticSender,
    remote: RemoteRegion,
    channel: Channel,
    /// Registered memory that the buffers are sent from. It is absent while a batch is in flight from it.
    region: Option<MemRegion>,
    moving: Option<Memcpy>,
    /// Whether the region holds the content itself, and not copies of buffers.
    holds_content: bool,
    depth: u64,
    sent: u64,
}

impl TensorSender {
    /// Attaches to the slots called `name` that the peer has made for `operations`, and fills registered
    /// memory if the mode copies nothing.
    pub(crate) async fn new(
        mode: Mode,
        name: &str,
        (device, channel): (&RdmaDevice, &Channel),
        operations: &Operations,
        depth: u32,
    ) -> Result<Self, CallError> {
        let content = &operations.content;
        let (seed, zero_copy) = (content.seed(), mode.sends_in_place());
        let to = match Geometry::of(operations.load, seed) {
            Geometry::Slots(lengths) => {
                let tensors = match zero_copy {
                    true => tensors(&operations.registered()?, &lengths)?,
                    false => Vec::new(),
                };
                let mut slots = Vec::with_capacity(lengths.len());
                for (index, length) in lengths.iter().enumerate() {
                    // Slots are spread over the queue pairs.
                    let (channel, name) = (channel.over(index as u32), format!("{name} {index}"));
                    slots.push(channel.static_sender(&name, &geometry::spec(*length)?).await?);
                }
                Target::Slots { slots, tensors }
            }
            Geometry::Batch(batch) => {
                let remote = channel.region(&format!("{name} region")).await?;
                let words = 8 * batch.words() as u64;
                let header =
                    channel.static_sender(&format!("{name} header"), &geometry::spec(words)?).await?;
                let bytes = if zero_copy { content.all().len() } else { length(batch.room)? };
                let mut region = device.allocate(bytes)?;
                if zero_copy {
                    region.copy_from_slice(content.all());
                }
                Target::Batch(Box::new(BatchSender {
                    batch,
                    header,
                    remote,
                    channel: channel.clone(),
                    region: Some(region),
                    moving: None,
                    holds_content: zero_copy,
                    depth: depth.into(),
                    sent: 0,
                }))
            }
        };
        Ok(Self { to, seed, in_place: zero_copy })
    }

    /// Makes the sender of a mode whose tensors have no place at the receiver beforehand. The first operation has the
    /// number `first`.
    async fn passed(
        mode: Mode,
        (device, channel): (&RdmaDevice, &Channel),
        operations: &Operations,
        (depth, first): (u32, u64),
        acknowledgements: StaticReceiver,
    ) -> Result<Self, CallError> {
        let to = match mode {
            Mode::RdmaDynamic => PassedTo::Dynamic(channel.dynamic_sender(mode.name()).await?),
            _ => {
                let names = geometry::names(mode, geometry::buffers(operations.load));
                PassedTo::Named { device: device.clone(), names, next: first }
            }
        };
        let content = operations.registered()?;
        // That of the first buffer.
        let seeds = BufferSeeds::new(Layout::of(operations.load, content.seed()));
        let seed = content.seed().wrapping_add(seeds.origin());
        let (tensors, unsent, depth) = (HashMap::new(), VecDeque::new(), depth.into());
        let passed = PassedSender { to, content, tensors, unsent, acknowledgements, depth, in_flight: 0 };
        Ok(Self { to: Target::Passed(Box::new(passed)), seed, in_place: true })
    }

    /// Returns the identity that the receiver will find for `operation`.
    pub(crate) fn identity(&self, operation: &Operation) -> Option<u64> {
        let (seed, buffer) = operation.buffers().next()?;
        match &self.to {
            Target::Slots { .. } | Target::Passed(_) => identify(self.seed, &buffer[..buffer.len().min(8)]),
            Target::Batch(_) => Some(seed),
        }
    }

    /// Returns whether the next operation can be started.
    pub(crate) fn is_ready(&mut self) -> Result<bool, CallError> {
        match &mut self.to {
            Target::Slots { slots, .. } => {
                for slot in slots {
                    if !slot.is_ready()? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Target::Batch(batched) => Ok(batched.has_region()? && batched.header.is_ready()?),
            Target::Passed(passed) => passed.is_ready(),
        }
    }

    /// Starts an operation. The sender must be ready.
    pub(crate) fn start(&mut self, operation: &Operation) -> Result<(), CallError> {
        match &mut self.to {
            Target::Slots { slots, tensors } => {
                let tensors = tensors.get(variant_of(self.seed, operation)).filter(|_| self.in_place);
                match tensors {
                    Some(tensors) => {
                        slots.iter_mut().zip(tensors).try_for_each(|(slot, tensor)| slot.try_send(tensor))?
                    }
                    None => {
                        let mut each = slots.iter_mut().zip(operation.buffers());
                        each.try_for_each(|(slot, (_, buffer))| slot.try_send_bytes(buffer))?
                    }
                }
                Ok(())
            }
            Target::Batch(batched) => batched.start(operation, self.seed),
            Target::Passed(passed) => passed.start(operation),
        }
    }

    /// Returns the number of operations that were started and not yet released by the receiver.
    pub(crate) fn pending(&mut self) -> Result<u64, CallError> {
        match &mut self.to {
            // Tensors are sent and released in the order of the slots.
            Target::Slots { slots, .. } => Ok(slots.last_mut().map_or(Ok(0), StaticSender::pending)?),
            Target::Batch(batched) => {
                batched.has_region()?;
                Ok(batched.header.pending()?)
            }
            Target::Passed(passed) => passed.progress().map(|()| passed.in_flight),
        }
    }

    /// Waits until the next operation can be started.
    pub(crate) async fn ready(&mut self) -> Result<(), CallError> {
        match &mut self.to {
            Target::Slots { slots, .. } => {
                for slot in slots {
                    slot.ready().await?;
                }
            }
            Target::Batch(batched) => {
                if let Some(moving) = &mut batched.moving {
                    let result = moving.await;
                    batched.moving = None;
                    keep(&mut batched.region, result)?;
                }
                batched.header.ready().await?;
            }
            // These modes poll.
            Target::Passed(passed) => {
                while !passed.is_ready()? {
                    tokio::task::yield_now().await;
                }
            }
        }
        Ok(())
    }

    /// Waits until the receiver has released everything that was sent.
    pub(crate) async fn flush(&mut self) -> Result<(), CallError> {
        match &mut self.to {
            // Tensors are released in the order of the slots.
            Target::Slots { slots, .. } => match slots.last_mut() {
                Some(slot) => Ok(slot.flush().await?),
                None => Ok(()),
            },
            Target::Batch(batched) => Ok(batched.header.flush().await?),
            Target::Passed(passed) => {
                while passed.in_flight > 0 {
                    tokio::task::yield_now().await;
                    passed.progress()?;
                }
                Ok(())
            }
        }
    }
}

impl PassedSender {
    /// Sends what the slot has room for, and counts the operations that the receiver has acknowledged.
    fn progress(&mut self) -> Result<(), CallError> {
        while self.acknowledgements.try_recv()?.is_some() {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        let PassedTo::Dynamic(sender) = &mut self.to else { return Ok(()) };
        // Takes completions of the link, over which nothing else is waited for.
        sender.pending()?;
        while let Some(tensor) = self.unsent.front() {
            match sender.try_send(tensor) {
                Ok(()) => drop(self.unsent.pop_front()),
                Err(error) if error.kind() == TensorErrorKind::Busy => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn is_ready(&mut self) -> Result<bool, CallError> {
        self.progress()?;
        Ok(self.unsent.is_empty() && self.in_flight < self.depth)
    }

    fn start(&mut self, operation: &Operation) -> Result<(), CallError> {
        for (index, (seed, buffer)) in operation.buffers().enumerate() {
            let tensor = match self.tensors.entry((seed, buffer.len())) {
                Entry::Occupied(known) => known.get().clone(),
                Entry::Vacant(new) => {
                    let bytes = self.content.buffer(seed, buffer.len()).ok_or(CallError::Unprepared)?;
                    let tensor = Tensor::from_bytes(geometry::spec(bytes.len() as u64)?, bytes)?;
                    new.insert(tensor).clone()
                }
            };
            match &self.to {
                PassedTo::Dynamic(_) => self.unsent.push_back(tensor),
                PassedTo::Named { device, names, next } => {
                    let name = names.get(index).ok_or(CallError::Unprepared)?;
                    device.put(name, *next, NamedOffer::Tensor(tensor), 1)?;
                }
            }
        }
        if let PassedTo::Named { next, .. } = &mut self.to {
            *next += 1;
        }
        self.in_flight += 1;
        self.progress()
    }
}

impl BatchSender {
    /// Returns whether the region is free.
    fn has_region(&mut self) -> Result<bool, CallError> {
        if let Some(result) = self.moving.as_mut().and_then(Memcpy::try_take) {
            self.moving = None;
            keep(&mut self.region, result)?;
        }
        Ok(self.region.is_some())
    }

    /// Starts the copy of the blocks, and sends the header after it.
    fn start(&mut self, operation: &Operation, origin: u64) -> Result<(), CallError> {
        let Some(mut region) = self.region.take() else { return Err(CallError::Unprepared) };
        let lengths: Vec<u64> = operation.buffers().map(|(_, buffer)| buffer.len() as u64).collect();
        let start = (self.sent % self.depth) * self.batch.room;
        let offsets = self.batch.offsets(&lengths).map(|offset| start + offset);
        let blocks: Vec<BlockCopy> = if self.holds_content {
            let from = operation.buffers().map(|(seed, _)| offset_of(seed, origin));
            blocks(from, offsets, &lengths)
        } else {
            let from: Vec<u64> = Layout::InOrder.offsets(lengths.iter().copied()).collect();
            for ((_, buffer), from) in operation.buffers().zip(&from) {
                region[*from as usize..][..buffer.len()].copy_from_slice(buffer);
            }
            blocks(from, offsets, &lengths)
        };
        self.moving = Some(self.channel.write(&self.remote).blocks_from(region, &blocks));
        self.sent += 1;
        let first = operation.buffers().next().map_or(0, |(seed, _)| seed);
        let words = [first].into_iter().chain(lengths).take(self.batch.words());
        // The header arrives after the blocks, because both use one queue pair.
        Ok(self.header.try_send_bytes(&words.flat_map(u64::to_le_bytes).collect::<Vec<_>>())?)
    }
}

/// Puts the region of an operation into `kept`, whether the operation succeeded or not.
fn keep(kept: &mut Option<MemRegion>, result: Result<MemRegion, TransferError>) -> Result<(), TensorError> {
    let (region, result) = match result {
        Ok(region) => (region, Ok(())),
        Err(failed) => {
            let (region, error) = failed.into_parts();
            (region, Err(error))
        }
    };
    *kept = Some(region);
    result
}

fn blocks(
    from: impl IntoIterator<Item = u64>,
    to: impl Iterator<Item = u64>,
    lengths: &[u64],
) -> Vec<BlockCopy> {
    let each = from.into_iter().zip(to).zip(lengths);
    each.map(|((local, remote), length)| BlockCopy { local, remote, length: *length }).collect()
}

/// Returns the number of the variant that `operation` carries. `seed` is the seed of the first variant.
fn variant_of(seed: u64, operation: &Operation) -> usize {
    let first = operation.buffers().next().map_or(seed, |(seed, _)| seed);
    (0..VARIANTS).find(|it| variant_seed(seed, *it) == first).unwrap_or(0)
}

/// Makes tensors of registered `content`: one of each length, for each variant.
fn tensors(content: &Content, lengths: &[u64]) -> Result<Vec<Vec<Tensor>>, CallError> {
    let tensor = |(seed, bytes): (u64, &u64)| {
        let buffer = content.buffer(seed, length(*bytes)?).ok_or(CallError::Unprepared)?;
        Ok(Tensor::from_bytes(geometry::spec(*bytes)?, buffer)?)
    };
    let variant = |variant| {
        let first = variant_seed(content.seed(), variant);
        seeds_in_order(first, lengths).zip(lengths).map(tensor).collect()
    };
    (0..VARIANTS).map(variant).collect()
}

fn length(bytes: u64) -> Result<usize, CallError> {
    usize::try_from(bytes).map_err(|_| CallError::Memory(bytes))
}

/// A channel in one of the modes. Clones share it, and one clone at a time sends.
#[derive(Clone, Debug)]
pub(crate) struct PlacementCaller {
    mode: Mode,
    control: PlacementClient<Grpc>,
    device: RdmaDevice,
    channel: Channel,
    /// Whether the receiver consumes payloads.
    reduces: bool,
    state: Arc<Mutex<SendState>>,
}

/// The state of the sending: one task at a time holds it.
#[derive(Debug, Default)]
struct SendState {
    sender: Option<TensorSender>,
    record: Record,
    /// Whether an operation failed. The records can't be compared then.
    failed: bool,
}

impl PlacementCaller {
    /// Opens a channel to the device that listens on `endpoint`. `control` must lead to the same process, which reaches
    /// this one at `local`.
    pub(crate) async fn connect(
        mode: Mode,
        control: Grpc,
        endpoint: &str,
        (rdma, local): (&Rdma, IpAddr),
        reduces: bool,
    ) -> Result<(Self, RdmaConnection), Failure> {
        let failed = |error| Failure::run(format!("can't connect in mode {mode}")).because(error);
        let device = match mode.is_passed() {
            true => tensor_device(rdma, local).await?,
            false => rdma.tensor_device().build().map_err(failed)?,
        };
        let channel = device.channel(endpoint, 0).await.map_err(failed)?;
        let (provider, name) = channel.device();
        let reason = format!("tensors over {name}, arrivals by {:?}", channel.notification());
        let verdict = RdmaConnection { provider: provider.to_owned(), reason };
        let control = PlacementClient::new(control);
        Ok((Self { mode, control, device, channel, reduces, state: Arc::default() }, verdict))
    }

    /// Makes slots for `operations` on both sides, up to `inflight` of them at once.
    pub(crate) async fn prepare(
        &mut self,
        operations: &Operations,
        inflight: usize,
    ) -> Result<(), CallError> {
        let load = operations.load;
        let load = match load.name() {
            None => Wanted::Bytes(load.bytes()),
            Some(name) => Wanted::Workload(name.to_owned()),
        };
        let depth = inflight.clamp(1, MAX_DEPTH) as u32;
        let mut state = self.state.lock().await;
        // The names of its slots are free then.
        *state = SendState::default();
        let (mode, ends) = (self.mode, (&self.device, &self.channel));
        let mut request = PrepareRequest {
            mode: mode.name().to_owned(),
            seed: operations.content.seed(),
            depth,
            load: Some(load),
            ..PrepareRequest::default()
        };
        let sender = if mode.is_passed() {
            let spec = geometry::spec(geometry::ACKNOWLEDGEMENT)?;
            let acknowledgements =
                self.device.static_receiver(&geometry::acknowledgements(mode), &spec, depth)?;
            request.device = self.device.endpoint();
            // A number that no earlier operation had: each takes longer than a nanosecond.
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            request.first = now.as_nanos() as u64;
            let depth_and_first = (depth, request.first);
            self.control.prepare(request).await?;
            TensorSender::passed(mode, ends, operations, depth_and_first, acknowledgements).await?
        } else {
            self.control.prepare(request).await?;
            TensorSender::new(mode, mode.name(), ends, operations, depth).await?
        };
        state.sender = Some(sender);
        Ok(())
    }

    /// Begins a trial: from now on the receiver polls for tensors.
    pub(crate) async fn begin(&mut self, check: Check) -> Result<(), CallError> {
        let mut state = self.state.lock().await;
        (state.record, state.failed) = (Record::default(), false);
        let (mode, every_byte) = (self.mode.name().to_owned(), check == Check::All);
        self.control.begin(BeginRequest { mode, every_byte }).await?;
        Ok(())
    }

    /// Ends the trial, and compares the operations that arrived with those that were sent.
    pub(crate) async fn end(&mut self) -> Result<(), CallError> {
        let mode = self.mode.name().to_owned();
        let arrived = Record::from(self.control.end(EndRequest { mode }).await?.into_inner());
        let state = self.state.lock().await;
        match arrived.mismatch {
            Some((buffer, offset)) => Err(CallError::BufferContent { buffer, offset }),
            None if state.failed => Ok(()),
            None => Ok(state.record.compare(&arrived)?),
        }
    }

    /// Sends `operation`. Returns the time until the receiver released it.
    pub(crate) async fn run(&mut self, operation: &Operation) -> Result<Duration, CallError> {
        let stream = OperationStream::new(|| operation.clone(), 1, Instant::now(), self.reduces);
        match self.drive(stream).await {
            (_, Some(error)) => Err(error),
            (done, None) => Ok(done.first().ok_or(CallError::Unprepared)?.0),
        }
    }

    /// Keeps `callers` operations in flight until `end`, like that number of callers in other modes. An error
    /// ends the sending.
    pub(crate) async fn keep_sending(
        self,
        operations: Operations,
        position: Position,
        callers: usize,
        end: Instant,
    ) -> (Vec<Done>, Option<CallError>) {
        let next = || operations.take(position.fetch_add(1, Ordering::Relaxed));
        let mut stream = OperationStream::new(next, callers, end, self.reduces);
        // Room for the results of a trial, so that none is moved in the measured time.
        stream.done.reserve(1 << 12);
        self.drive(stream).await
    }

    /// Sends the operations of `stream`.
    async fn drive(
        &self,
        mut stream: OperationStream<impl FnMut() -> Operation>,
    ) -> (Vec<Done>, Option<CallError>) {
        let mut state = self.state.lock().await;
        let SendState { sender, record, failed } = &mut *state;
        // Also if this future is dropped.
        *failed = true;
        let error = match sender {
            Some(sender) => stream.run(sender, record, self.mode.awaits()).await.err(),
            None => Some(CallError::Unprepared),
        };
        *failed = error.is_some();
        (stream.done, error)
    }

    /// Returns whether the mode waits for operations by futures.
    pub(crate) const fn awaits(&self) -> bool {
        self.mode.awaits()
    }

    /// Releases the slots of both sides.
    pub(crate) async fn release(&mut self) {
        *self.state.lock().await = SendState::default();
        let mode = self.mode.name().to_owned();
        // The request fails only if the server has ended. Its slots are free then.
        let _ = self.control.release(ReleaseRequest { mode }).await;
    }
}

/// A stream of operations, several in flight at once.
struct OperationStream<N> {
    /// Returns the operation to start next.
    next: N,
    end: Instant,
    reduces: bool,
    /// Start times of the operations that wait to be sent: the start of the stream, or the end of the
    /// caller's last operation.
    waiting: VecDeque<Instant>,
    /// Operations in flight, in the order in which they end: start time, bytes and messages.
    under_way: VecDeque<(Instant, u64, u64)>,
    done: Vec<Done>,
}

impl<N: FnMut() -> Operation> OperationStream<N> {
    fn new(next: N, callers: usize, end: Instant, reduces: bool) -> Self {
        let waiting = std::iter::repeat_n(Instant::now(), callers).collect();
        let (under_way, done) = (VecDeque::with_capacity(callers), Vec::with_capacity(callers));
        Self { next, end, reduces, waiting, under_way, done }
    }

    /// Sends the operations, and waits for their ends by futures if it `awaits`, or else by polling.
    async fn run(
        &mut self,
        sender: &mut TensorSender,
        record: &mut Record,
        awaits: bool,
    ) -> Result<(), CallError> {
        let mut yield_timer = YieldTimer::new();
        while !self.waiting.is_empty() || !self.under_way.is_empty() {
            while !self.waiting.is_empty() && sender.is_ready()? {
                let operation = (self.next)();
                sender.start(&operation)?;
                self.started(sender, record, &operation);
            }
            let pending = sender.pending()? as usize;
            if pending < self.under_way.len() {
                let now = Instant::now();
                self.finish(pending, now);
                yield_timer.found(now);
            } else if !awaits {
                yield_timer.missed();
            } else if self.waiting.is_empty() && sender.is_ready()? {
                sender.flush().await?;
            } else {
                // All buffers are in use, and the next one is that of the oldest operation.
                sender.ready().await?;
            }
            if !awaits && yield_timer.is_due() {
                yield_timer.yield_now().await;
            }
        }
        Ok(())
    }

    /// Notes that `operation` was started.
    fn started(&mut self, sender: &TensorSender, record: &mut Record, operation: &Operation) {
        record.add(sender.identity(operation), operation.reduced().filter(|_| self.reduces));
        if let Some(begun) = self.waiting.pop_front() {
            self.under_way.push_back((begun, operation.bytes(), operation.messages()));
        }
    }

    /// Notes that all but the last `pending` operations have ended.
    fn finish(&mut self, pending: usize, now: Instant) {
        let ended = self.under_way.len() - pending;
        for (begun, bytes, messages) in self.under_way.drain(..ended) {
            self.done.push((now - begun, bytes, messages));
            // The caller of the operation begins its next one.
            if now < self.end {
                self.waiting.push_back(now);
            }
        }
    }
}
