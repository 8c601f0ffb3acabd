//! The client half of the modes that place tensors: one operation, or a stream of operations, several in flight at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tonic::transport::Channel as Grpc;
use tonic_rdma_commands::Failure;
use tonic_rdma_proto::placement::placement_client::PlacementClient;
use tonic_rdma_proto::placement::prepare_request::Load as Wanted;
use tonic_rdma_proto::placement::{BeginRequest, EndRequest, PrepareRequest, ReleaseRequest};
use tonic_rdma_proto::transfer::Check;
use tonic_rdma_tensor::{Channel, RdmaDevice};

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::mode::Mode;
use crate::compare::modes::placement::geometry::{MAX_DEPTH, Record, YieldTimer};
use crate::compare::modes::placement::sender::TensorSender;
use crate::compare::operations::{Done, Operation, Operations, Position};
use crate::measure::transport::{Rdma, RdmaConnection};

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
    /// Opens a channel to the device that listens on `endpoint`. `control` must lead to the same process.
    pub(crate) async fn connect(
        mode: Mode,
        control: Grpc,
        endpoint: &str,
        rdma: &Rdma,
        reduces: bool,
    ) -> Result<(Self, RdmaConnection), Failure> {
        let failed = |error| Failure::run(format!("can't connect in mode {mode}")).because(error);
        let device = rdma.tensor_device().without_listener().map_err(failed)?;
        let channel = device.channel(endpoint, 0).await.map_err(failed)?;
        let (provider, name) = channel.device();
        let reason = format!("tensors over {name}, arrivals by {:?}", channel.notification());
        let verdict = RdmaConnection { provider: provider.to_owned(), reason };
        let control = PlacementClient::new(control);
        Ok((Self { mode, control, device, channel, reduces, state: Arc::default() }, verdict))
    }

    /// Makes places for `operations` at both ends, up to `inflight` of them at once.
    pub(crate) async fn prepare(
        &mut self,
        operations: &Operations,
        inflight: usize,
    ) -> Result<(), CallError> {
        let load = operations.load();
        let load = match load.name() {
            None => Wanted::Bytes(load.bytes()),
            Some(name) => Wanted::Workload(name.to_owned()),
        };
        let depth = inflight.clamp(1, MAX_DEPTH) as u32;
        let (mode, seed) = (self.mode.name().to_owned(), operations.content().seed());
        self.control.prepare(PrepareRequest { mode, seed, depth, load: Some(load) }).await?;
        let sender = {
            let channel = (&self.device, &self.channel);
            TensorSender::new(self.mode, self.mode.name(), channel, operations, depth).await?
        };
        *self.state.lock().await = SendState { sender: Some(sender), ..SendState::default() };
        Ok(())
    }

    /// Begins a turn: from now on the receiver looks for tensors.
    pub(crate) async fn begin(&mut self, check: Check) -> Result<(), CallError> {
        let mut state = self.state.lock().await;
        (state.record, state.failed) = (Record::default(), false);
        let (mode, every_byte) = (self.mode.name().to_owned(), check == Check::All);
        self.control.begin(BeginRequest { mode, every_byte }).await?;
        Ok(())
    }

    /// Ends the turn, and compares the operations that arrived with those that were sent.
    pub(crate) async fn end(&mut self) -> Result<(), CallError> {
        let mode = self.mode.name().to_owned();
        let arrived = Record::from(self.control.end(EndRequest { mode }).await?.into_inner());
        let state = self.state.lock().await;
        match arrived.mismatch() {
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

    /// Keeps `callers` operations in flight until `end`, like that number of callers in other modes. An error ends the
    /// sending.
    pub(crate) async fn keep_sending(
        self,
        operations: Operations,
        position: Position,
        callers: usize,
        end: Instant,
    ) -> (Vec<Done>, Option<CallError>) {
        let next = || operations.take(position.fetch_add(1, Ordering::Relaxed));
        let mut stream = OperationStream::new(next, callers, end, self.reduces);
        // Room for the results of a turn, so that none is moved in the measured time.
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
            Some(sender) if self.mode.awaits() => stream.run_awaiting(sender, record).await.err(),
            Some(sender) => stream.run(sender, record).await.err(),
            None => Some(CallError::Unprepared),
        };
        *failed = error.is_some();
        (stream.done, error)
    }

    /// Returns whether the mode waits for operations by futures.
    pub(crate) const fn awaits(&self) -> bool {
        self.mode.awaits()
    }

    /// Releases the places of both ends.
    pub(crate) async fn release(&mut self) {
        *self.state.lock().await = SendState::default();
        let mode = self.mode.name().to_owned();
        // The request fails only if the server has ended. Its places are free then.
        let _ = self.control.release(ReleaseRequest { mode }).await;
    }
}

/// A stream of operations, several in flight at once.
struct OperationStream<N> {
    /// Returns the operation to start next.
    next: N,
    end: Instant,
    reduces: bool,
    /// The largest number of operations in flight.
    callers: usize,
    /// Start times of the operations that wait to be sent: the start of the stream, or the end of the caller's last
    /// operation.
    waiting: VecDeque<Instant>,
    /// Operations in flight, in the order in which they end: start time, bytes and messages.
    under_way: VecDeque<(Instant, u64, u64)>,
    done: Vec<Done>,
}

impl<N: FnMut() -> Operation> OperationStream<N> {
    fn new(next: N, callers: usize, end: Instant, reduces: bool) -> Self {
        let waiting = std::iter::repeat_n(Instant::now(), callers).collect();
        let (under_way, done) = (VecDeque::with_capacity(callers), Vec::with_capacity(callers));
        Self { next, end, reduces, callers, waiting, under_way, done }
    }

    async fn run(&mut self, sender: &mut TensorSender, record: &mut Record) -> Result<(), CallError> {
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
            } else {
                yield_timer.missed();
            }
            if yield_timer.is_due() {
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

    /// Sends like [`run`](Self::run), but without polling. With one operation at a time, the stream waits for the
    /// release of each operation. With several, an operation that finds no free buffer waits for the release of the
    /// oldest one.
    async fn run_awaiting(
        &mut self,
        sender: &mut TensorSender,
        record: &mut Record,
    ) -> Result<(), CallError> {
        let depth = self.callers.clamp(1, MAX_DEPTH);
        loop {
            while !self.waiting.is_empty() {
                if self.under_way.len() >= depth {
                    self.wait(sender).await?;
                }
                let operation = (self.next)();
                sender.send(&operation).await?;
                self.started(sender, record, &operation);
                self.count_ended(sender)?;
            }
            if self.under_way.is_empty() {
                return Ok(());
            }
            self.wait(sender).await?;
        }
    }

    /// Waits until an operation has ended (the oldest operation if the slot is full). Counts all operations that have
    /// ended.
    async fn wait(&mut self, sender: &mut TensorSender) -> Result<(), CallError> {
        let under_way = self.under_way.len();
        self.count_ended(sender)?;
        if self.under_way.len() < under_way {
            return Ok(());
        }
        if under_way > 1 && !sender.is_ready()? {
            sender.ready().await?;
        } else {
            sender.flush().await?;
        }
        self.count_ended(sender)
    }

    fn count_ended(&mut self, sender: &mut TensorSender) -> Result<(), CallError> {
        let pending = sender.pending()? as usize;
        if pending < self.under_way.len() {
            self.finish(pending, Instant::now());
        }
        Ok(())
    }
}
