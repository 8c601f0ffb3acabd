//! The receiver of the modes that place tensors: the service that controls it, and a task for each trial,
//! which takes and checks tensors.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use clap::ValueEnum as _;
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status};
use tonic_rdma_commands::payload::content::{SHARE, check_all, check_stamps, check_stamps_of};
use tonic_rdma_commands::payload::reduce::{Reduced, Reduction, reduce};
use tonic_rdma_commands::payload::seeded::mix;
use tonic_rdma_proto::placement::placement_server::Placement;
use tonic_rdma_proto::placement::prepare_request::Load as Wanted;
use tonic_rdma_proto::placement::{
    BeginReply, BeginRequest, EndReply, EndRequest, PrepareReply, PrepareRequest, ReleaseReply,
    ReleaseRequest,
};
use tonic_rdma_tensor::{
    Arrived, Channel, DynamicReceiver, ExportedRegion, NamedReply, NamedRequest, RdmaDevice, Rights,
    SharedRegion, StaticReceiver, StaticSender, Tensor, TensorError, TensorErrorKind,
};

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::mode::Mode;
use crate::compare::modes::placement::geometry::{
    self, Batch, BufferSeeds, Geometry, MAX_DEPTH, Record, YieldTimer, identify,
};
use crate::compare::operations::Layout;
use crate::measure::settings::Consume;
use crate::workload::Workload;

/// Receives the tensors of a trial until `end` is dropped or nothing more can arrive, by polling or by
/// futures. Returns the sink.
async fn receive(mut sink: Sink, awaits: bool, end: oneshot::Receiver<()>) -> (Sink, Result<(), CallError>) {
    let result = tokio::select! {
        biased;
        result = sink.receive_all(awaits) => result,
        _ = end => Ok(()),
    };
    sink.end();
    (sink, result)
}

/// The receivers of all modes that place tensors. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct PlacementService {
    device: RdmaDevice,
    consume: Consume,
    receivers: Arc<Mutex<HashMap<&'static str, Receiver>>>,
}

/// The receiver of a mode.
#[derive(Debug)]
struct Receiver {
    /// Absent during a trial, whose task has it.
    sink: Option<Sink>,
    trial: Option<Trial>,
}

/// A trial: it ends when `end` is dropped.
#[derive(Debug)]
struct Trial {
    end: oneshot::Sender<()>,
    task: JoinHandle<(Sink, Result<(), CallError>)>,
}

impl PlacementService {
    /// Makes a service whose tensors arrive at `device`.
    pub(crate) fn new(device: RdmaDevice, consume: Consume) -> Self {
        Self { device, consume, receivers: Arc::default() }
    }

    /// Ends the mode's receiver, so that its names are free.
    async fn give_up(receivers: &mut HashMap<&'static str, Receiver>, mode: Mode) {
        if let Some(Receiver { trial: Some(trial), .. }) = receivers.remove(mode.name()) {
            drop(trial.end);
            let _ = trial.task.await;
        }
    }
}

/// Returns the receiver of the mode of this name, if it was prepared.
fn prepared<'a>(
    receivers: &'a mut HashMap<&'static str, Receiver>,
    name: &str,
) -> Result<(Mode, &'a mut Receiver), Status> {
    let mode = placing(name)?;
    match receivers.get_mut(mode.name()) {
        Some(receiver) => Ok((mode, receiver)),
        None => Err(Status::failed_precondition(format!("nothing is prepared for {mode}"))),
    }
}

#[tonic::async_trait]
impl Placement for PlacementService {
    async fn prepare(&self, request: Request<PrepareRequest>) -> Result<Response<PrepareReply>, Status> {
        let caller = request.remote_addr().map(|address| address.ip());
        let PrepareRequest { mode, load, seed, depth, device, first } = request.into_inner();
        let mode = placing(&mode)?;
        let load = wanted(load)?;
        let address = device.parse::<SocketAddr>().ok().filter(|address| Some(address.ip()) == caller);
        if mode.is_passed() && address.is_none() {
            let text =
                format!("{mode}: the sender's device {device:?} does not listen at the caller's address");
            return Err(Status::invalid_argument(text));
        }
        let mut receivers = self.receivers.lock().await;
        Self::give_up(&mut receivers, mode).await;
        let reduces = mode.reduces(self.consume);
        let sink = match mode.is_passed() {
            true => Sink::passed(&self.device, mode, (load, seed), (depth, first, &device), reduces).await,
            false => Sink::new(&self.device, mode.name(), (load, seed), depth, reduces),
        };
        let sink = sink.map_err(|error| refusal(&error))?;
        receivers.insert(mode.name(), Receiver { sink: Some(sink), trial: None });
        Ok(Response::new(PrepareReply {}))
    }

    async fn begin(&self, request: Request<BeginRequest>) -> Result<Response<BeginReply>, Status> {
        let BeginRequest { mode, every_byte } = request.into_inner();
        let mut receivers = self.receivers.lock().await;
        let (mode, receiver) = prepared(&mut receivers, &mode)?;
        let in_trial = || Status::aborted(format!("the receiver of {mode} is in another trial"));
        let mut sink = receiver.sink.take().ok_or_else(in_trial)?;
        sink.begin(every_byte);
        let (end, ended) = oneshot::channel();
        let task = tokio::spawn(receive(sink, mode.awaits(), ended));
        receiver.trial = Some(Trial { end, task });
        Ok(Response::new(BeginReply {}))
    }

    async fn end(&self, request: Request<EndRequest>) -> Result<Response<EndReply>, Status> {
        let mode = request.into_inner().mode;
        let mut receivers = self.receivers.lock().await;
        let (mode, receiver) = prepared(&mut receivers, &mode)?;
        let in_none = || Status::aborted(format!("the receiver of {mode} is in no trial"));
        let Trial { end, task } = receiver.trial.take().ok_or_else(in_none)?;
        drop(end);
        let (sink, result) = task.await.map_err(|crash| refusal(&crash.into()))?;
        let record = sink.record;
        receiver.sink = Some(sink);
        result.map(|()| Response::new(record.into())).map_err(|error| refusal(&error))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseReply>, Status> {
        let mode = placing(&request.into_inner().mode)?;
        Self::give_up(&mut *self.receivers.lock().await, mode).await;
        Ok(Response::new(ReleaseReply {}))
    }
}

/// Returns the mode of this name, if it places tensors.
fn placing(name: &str) -> Result<Mode, Status> {
    let mode = Mode::from_str(name, false).ok().filter(|mode| mode.carries_tensors());
    mode.ok_or_else(|| Status::invalid_argument(format!("{name:?} is no mode that places tensors")))
}

fn wanted(load: Option<Wanted>) -> Result<Workload, Status> {
    match load {
        Some(Wanted::Bytes(bytes @ 1..)) => Ok(Workload::Size(bytes)),
        Some(Wanted::Workload(name)) => Workload::from_name(&name)
            .ok_or_else(|| Status::invalid_argument(format!("unknown workload {name:?}"))),
        Some(Wanted::Bytes(0)) | None => Err(Status::invalid_argument("nothing is to be placed")),
    }
}

fn refusal(error: &CallError) -> Status {
    match error {
        CallError::Tensor(error) if error.kind() == TensorErrorKind::NoMemory => {
            Status::resource_exhausted(error.to_string())
        }
        _ => Status::internal(error.to_string()),
    }
}

/// Receives the tensors of a cell.
#[derive(Debug)]
pub(crate) struct Sink {
    targets: Targets,
    inspector: Inspector,
    /// The record of the trial.
    pub(crate) record: Record,
    seed: u64,
    yield_timer: YieldTimer,
}

#[derive(Debug)]
enum Targets {
    Slots { slots: Vec<StaticReceiver>, operation: ArrivingOperation },
    Batch(BatchSlot),
    Passed { source: PassedTensors, acknowledgements: Box<StaticSender>, operation: ArrivingOperation },
}

/// The operation whose tensors arrive one after the other.
#[derive(Debug)]
struct ArrivingOperation {
    /// Number of its tensors.
    count: usize,
    /// Index of the next tensor.
    next: usize,
    /// The seed of the operation, found by its first tensor, or `None` if no operation has this content.
    identity: Option<u64>,
    /// The result of consuming the tensors that have arrived.
    found: Option<Reduced>,
    seeds: BufferSeeds,
}

/// Tensors that have no place at the receiver beforehand.
#[derive(Debug)]
enum PassedTensors {
    Dynamic(DynamicReceiver),
    Named(NamedTensors),
}

/// Tensors that the receiver asks for by name and step: the buffer's index in an operation, and the number of the
/// operation.
#[derive(Debug)]
struct NamedTensors {
    /// The queue pairs to the sender.
    channels: Vec<Channel>,
    names: Vec<String>,
    /// The number of the first operation.
    first: u64,
    /// Number of tensors that were taken.
    taken: u64,
    /// The requests for those that follow, and the largest number of them.
    requests: VecDeque<NamedRequest>,
    most: usize,
}

/// The slots of [`Geometry::Batch`].
#[derive(Debug)]
struct BatchSlot {
    batch: Batch,
    header: StaticReceiver,
    region: ExportedRegion,
    depth: u64,
    taken: u64,
}

impl Sink {
    /// Makes slots called `name` for the operations of `load`, of which the content of the first has the seed
    /// `seed`. Up to `depth` of them may be in flight at once. The receiver consumes payloads if it
    /// `reduces`.
    pub(crate) fn new(
        device: &RdmaDevice,
        name: &str,
        (load, seed): (Workload, u64),
        depth: u32,
        reduces: bool,
    ) -> Result<Self, CallError> {
        let receiver = |name: String, bytes: u64, depth| {
            let spec = geometry::spec(bytes)?;
            Ok(device.static_receiver(&name, &spec, depth)?)
        };
        let targets = match Geometry::of(load, seed) {
            Geometry::Slots(lengths) => {
                let slots = lengths.iter().enumerate();
                let slots = slots.map(|(index, bytes)| receiver(format!("{name} {index}"), *bytes, depth));
                let slots = slots.collect::<Result<_, CallError>>()?;
                Targets::Slots { slots, operation: ArrivingOperation::new(lengths.len(), Layout::InOrder) }
            }
            Geometry::Batch(batch) => {
                let bytes = usize::try_from(batch.room.saturating_mul(depth.into())).unwrap_or(usize::MAX);
                let region =
                    device.export(&format!("{name} region"), device.allocate(bytes)?, Rights::WRITE)?;
                let header = receiver(format!("{name} header"), 8 * batch.words() as u64, depth)?;
                Targets::Batch(BatchSlot { batch, header, region, depth: depth.into(), taken: 0 })
            }
        };
        Ok(Self::over(targets, seed, reduces))
    }

    /// Makes what receives the operations of `load` in a mode whose tensors have no place beforehand. Up to `depth` of
    /// them may be in flight at once. The first has the number `first`, and the sender's device listens at `sender`.
    async fn passed(
        device: &RdmaDevice,
        mode: Mode,
        (load, seed): (Workload, u64),
        (depth, first, sender): (u32, u64, &str),
        reduces: bool,
    ) -> Result<Self, CallError> {
        /// Most requests at once: half of what a link accepts, because cancelled ones count until they are answered.
        const REQUESTS: u32 = 512;
        let channel = device.channel(sender, 0).await?;
        let spec = geometry::spec(geometry::ACKNOWLEDGEMENT)?;
        let acknowledgements =
            Box::new(channel.static_sender(&geometry::acknowledgements(mode), &spec).await?);
        let count = geometry::buffers(load);
        let tensors = depth.saturating_mul(count as u32);
        let source = match mode {
            Mode::RdmaDynamic => {
                let slots = tensors.min(MAX_DEPTH as u32);
                PassedTensors::Dynamic(device.dynamic_receiver(mode.name(), slots)?)
            }
            _ => PassedTensors::Named(NamedTensors {
                channels: (0..channel.queue_pairs()).map(|pair| channel.over(pair)).collect(),
                names: geometry::names(mode, count),
                first,
                taken: 0,
                requests: VecDeque::new(),
                most: tensors.clamp(1, REQUESTS) as usize,
            }),
        };
        let operation = ArrivingOperation::new(count, Layout::of(load, seed));
        Ok(Self::over(Targets::Passed { source, acknowledgements, operation }, seed, reduces))
    }

    fn over(targets: Targets, seed: u64, reduces: bool) -> Self {
        let (inspector, yield_timer) = (Inspector::new(reduces), YieldTimer::new());
        Self { targets, inspector, record: Record::default(), seed, yield_timer }
    }

    /// Begins a trial.
    pub(crate) fn begin(&mut self, every_byte: bool) {
        self.inspector.every_byte = every_byte;
        self.record = Record::default();
        self.yield_timer = YieldTimer::new();
    }

    /// Ends a trial. What the next one sends is asked for in it.
    fn end(&mut self) {
        if let Targets::Passed { source: PassedTensors::Named(named), .. } = &mut self.targets {
            named.requests.clear();
        }
    }

    /// Takes tensors, by polling or by futures, until nothing more can arrive.
    async fn receive_all(&mut self, awaits: bool) -> Result<(), CallError> {
        loop {
            let found = self.take(awaits).await?;
            if awaits {
                continue;
            }
            if found {
                self.yield_timer.found(Instant::now());
            } else {
                self.yield_timer.missed();
            }
            if self.yield_timer.is_due() {
                self.yield_timer.yield_now().await;
            }
        }
    }

    /// Waits for all tensors of the next operation and takes them.
    pub(crate) async fn recv_operation(&mut self) -> Result<(), CallError> {
        let before = self.record.operations;
        while self.record.operations == before {
            self.take(true).await?;
        }
        Ok(())
    }

    /// Takes the next tensor, if it has arrived, or once it has if this `awaits`. Returns whether there was one. A
    /// dropped future loses nothing.
    async fn take(&mut self, awaits: bool) -> Result<bool, CallError> {
        let Self { targets, inspector, record, seed, .. } = self;
        match targets {
            Targets::Slots { slots, operation } => {
                let Some(arrived) = next(&mut slots[operation.next], awaits).await? else { return Ok(false) };
                let (memory, range) = arrived.memory();
                operation.take(Place::Shared(memory, range), *seed, inspector, record);
            }
            Targets::Batch(BatchSlot { batch, header, region, depth, taken }) => {
                let Some(arrived) = next(header, awaits).await? else { return Ok(false) };
                let start = (*taken % *depth) * batch.room;
                *taken += 1;
                inspector.check_batch(batch, arrived, region.memory(), start, record);
            }
            Targets::Passed { source, acknowledgements, operation } => {
                // These modes poll.
                let tensor = loop {
                    match source.next()? {
                        None if awaits => tokio::task::yield_now().await,
                        None => {
                            // Takes completions of the link, over which nothing else is waited for.
                            acknowledgements.pending()?;
                            return Ok(false);
                        }
                        Some(tensor) => break tensor,
                    }
                };
                let is_last = operation.take(Place::Own(tensor.bytes()?), *seed, inspector, record);
                drop(tensor);
                if is_last {
                    acknowledgements.send_bytes(&[0; geometry::ACKNOWLEDGEMENT as usize]).await?;
                }
            }
        }
        Ok(true)
    }
}

async fn next(slot: &mut StaticReceiver, awaits: bool) -> Result<Option<Arrived<'_>>, TensorError> {
    if awaits { slot.recv().await.map(Some) } else { slot.try_recv() }
}

impl PassedTensors {
    /// Takes the next tensor if it is here.
    fn next(&mut self) -> Result<Option<Tensor>, CallError> {
        match self {
            Self::Dynamic(slot) => match slot.try_recv() {
                // The queue has no room for the read yet.
                Err(error) if error.kind() == TensorErrorKind::Busy => Ok(None),
                taken => Ok(taken?),
            },
            Self::Named(named) => named.next(),
        }
    }
}

impl NamedTensors {
    fn next(&mut self) -> Result<Option<Tensor>, CallError> {
        let Self { channels, names, first, taken, requests, most } = self;
        while requests.len() < *most {
            let (number, count) = (*taken + requests.len() as u64, names.len() as u64);
            let (name, step) = (&names[(number % count) as usize], *first + number / count);
            requests.push_back(channels[0].request(name, step));
        }
        channels.iter().for_each(Channel::poll);
        let Some(request) = requests.front_mut() else { return Ok(None) };
        let Poll::Ready(reply) = Pin::new(request).poll(&mut Context::from_waker(Waker::noop())) else {
            return Ok(None);
        };
        requests.pop_front();
        *taken += 1;
        match reply? {
            NamedReply::Tensor(tensor) => Ok(Some(tensor)),
            NamedReply::Dead => Err(CallError::Unprepared),
        }
    }
}

impl ArrivingOperation {
    fn new(count: usize, layout: Layout) -> Self {
        Self { count, next: 0, identity: None, found: None, seeds: BufferSeeds::new(layout) }
    }

    /// Checks the tensor that has arrived next, in `place`. Returns whether it is the last of the operation.
    fn take(&mut self, place: Place<'_>, seed: u64, inspector: &mut Inspector, record: &mut Record) -> bool {
        if self.next == 0 {
            let seed = seed.wrapping_add(self.seeds.origin());
            (self.identity, self.found) = (place.identify(seed), None);
            self.seeds.begin(self.identity.unwrap_or(seed));
        }
        let seed = self.seeds.next(place.len() as u64);
        let reduced = inspector.check(place, seed, self.next as u64, record);
        self.found = both(self.found, reduced);
        self.next = (self.next + 1) % self.count.max(1);
        if self.next == 0 {
            record.add(self.identity, self.found);
        }
        self.next == 0
    }
}

/// Memory that a buffer has arrived in.
#[derive(Debug)]
pub(crate) enum Place<'a> {
    /// Peers may write there, so the bytes are read by copying.
    Shared(&'a SharedRegion, Range<usize>),
    /// This process has it alone.
    Own(&'a [u8]),
}

impl Place<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Shared(_, range) => range.len(),
            Self::Own(bytes) => bytes.len(),
        }
    }

    /// Returns the seed of the operation that begins with the buffer.
    fn identify(&self, seed: u64) -> Option<u64> {
        let mut start = [0; 8];
        let start = &mut start[..self.len().min(8)];
        match self {
            Self::Shared(memory, range) => memory.copy_out(range.start, start).ok()?,
            Self::Own(bytes) => start.copy_from_slice(&bytes[..start.len()]),
        }
        identify(seed, start)
    }
}

/// Checks arrived tensors in place. The only copies are small enough to stay in the cache.
#[derive(Debug)]
pub(crate) struct Inspector {
    pub(crate) every_byte: bool,
    reduces: bool,
    /// Number of buffers so far. The check derives the sampled offsets from it, so that they differ from
    /// buffer to buffer.
    draws: u64,
    scratch: Box<Scratch>,
}

/// Memory for a buffer that is copied at once.
#[derive(Debug)]
#[repr(align(64))]
struct Scratch([u8; SCRATCH]);

const SCRATCH: usize = 8 << 10;

impl Inspector {
    /// Makes an inspector, which also consumes if `reduces`.
    pub(crate) fn new(reduces: bool) -> Self {
        Self { every_byte: false, reduces, draws: 0, scratch: Box::new(Scratch([0; SCRATCH])) }
    }

    /// Checks a buffer, and consumes it if the settings say so.
    fn check(&mut self, place: Place<'_>, seed: u64, index: u64, record: &mut Record) -> Option<Reduced> {
        self.draws += 1;
        // Consuming a buffer reads all of it anyway.
        let every_byte = self.every_byte || (!self.reduces && self.draws.is_multiple_of(SHARE));
        let (wrong, reduced) = match place {
            Place::Own(bytes) => self.check_bytes(bytes, seed, every_byte),
            Place::Shared(memory, range) => match range.len() {
                0..=SCRATCH => self.check_copy(memory, range, seed, every_byte),
                _ => self.check_chunks(memory, range, seed, every_byte),
            },
        };
        if let Some(offset) = wrong {
            record.wrong(index, offset);
        }
        reduced
    }

    fn check_bytes(&self, bytes: &[u8], seed: u64, every_byte: bool) -> (Option<u64>, Option<Reduced>) {
        let wrong = match every_byte {
            true => check_all(seed, bytes),
            false => check_stamps(seed, bytes, mix(self.draws)),
        };
        (wrong, self.reduces.then(|| reduce(bytes)))
    }

    fn check_copy(
        &mut self,
        memory: &SharedRegion,
        range: Range<usize>,
        seed: u64,
        every_byte: bool,
    ) -> (Option<u64>, Option<Reduced>) {
        // Stamps alone are read in place.
        if !every_byte && !self.reduces {
            return (self.stamps(memory, range, seed), None);
        }
        let length = range.len();
        match memory.copy_out(range.start, &mut self.scratch.0[..length]) {
            Ok(()) => self.check_bytes(&self.scratch.0[..length], seed, every_byte),
            Err(_) => (Some(0), None),
        }
    }

    fn check_chunks(
        &self,
        memory: &SharedRegion,
        range: Range<usize>,
        seed: u64,
        every_byte: bool,
    ) -> (Option<u64>, Option<Reduced>) {
        let mut wrong = if every_byte { None } else { self.stamps(memory, range.clone(), seed) };
        if !every_byte && !self.reduces {
            return (wrong, None);
        }
        let (mut done, mut reduction) = (0, Reduction::new());
        // All chunks but the last have whole words.
        let read = memory.for_each_chunk(range, |chunk| {
            if every_byte && wrong.is_none() {
                wrong = check_all(seed.wrapping_add(done / 8), chunk).map(|offset| done + offset);
            }
            if self.reduces {
                reduction.take(chunk);
            }
            done += chunk.len() as u64;
        });
        if read.is_err() {
            wrong = Some(0);
        }
        (wrong, self.reduces.then(|| reduction.end()))
    }

    fn stamps(&self, memory: &SharedRegion, range: Range<usize>, seed: u64) -> Option<u64> {
        check_stamps_of(seed, range.len(), mix(self.draws), |start, word| {
            // The word lies within the slot. Otherwise it stays zero, and the check fails, because no content
            // has such a word.
            let _ = memory.copy_out(range.start + start, word);
        })
    }

    /// Checks all buffers of an operation that lie at `start`, and then releases the header.
    pub(crate) fn check_batch(
        &mut self,
        batch: &Batch,
        header: Arrived<'_>,
        memory: &SharedRegion,
        start: u64,
        record: &mut Record,
    ) {
        let mut words = Vec::with_capacity(batch.words());
        header.for_each_chunk(|chunk| {
            words.extend(chunk.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)));
        });
        let (Some(&first), Some(lengths)) = (words.first(), batch.lengths(&words)) else {
            record.wrong(0, 0);
            return record.add(None, None);
        };
        let mut found = None;
        let buffers = batch.offsets(&lengths).zip(&*lengths).zip(batch.seeds(first, &lengths));
        for (index, ((offset, length), seed)) in (0..).zip(buffers) {
            let begin = (start + offset) as usize;
            let place = Place::Shared(memory, begin..begin + *length as usize);
            let reduced = self.check(place, seed, index, record);
            found = both(found, reduced);
        }
        drop(header);
        record.add(Some(first), found);
    }
}

pub(crate) fn both(one: Option<Reduced>, other: Option<Reduced>) -> Option<Reduced> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.and(other)),
        (one, other) => one.or(other),
    }
}
