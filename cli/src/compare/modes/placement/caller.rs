//! The client half of the modes that place tensors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tonic::transport::Channel as Grpc;
use tonic_rdma_commands::Failure;
use tonic_rdma_proto::placement::placement_client::PlacementClient;
use tonic_rdma_proto::placement::prepare_request::Load as Wanted;
use tonic_rdma_proto::placement::{BeginRequest, EndRequest, PrepareRequest, ReleaseRequest};
use tonic_rdma_proto::transfer::Check;
use tonic_rdma_tensor::{Channel, RdmaDevice};

use super::geometry::MAX_DEPTH;
use super::record::Record;
use super::sender::TensorSender;
use super::stream::OperationStream;
use super::yield_timer::YieldTimer;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::sequence::{Done, Position};
use crate::compare::operations::{Operation, Operations};
use crate::compare::plan::cell::Load;
use crate::measure::transport::rdma::{Rdma, RdmaConnection};

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
        let load = match operations.load() {
            Load::Size(bytes) => Wanted::Bytes(bytes),
            Load::Workload(workload) => Wanted::Workload(workload.name().to_owned()),
        };
        let depth = inflight.clamp(1, MAX_DEPTH) as u32;
        let (mode, seed) = (self.mode.name().to_owned(), operations.content().seed());
        self.control.prepare(PrepareRequest { mode, seed, depth, load: Some(load) }).await?;
        let sender = TensorSender::new(self.mode, (&self.device, &self.channel), operations, depth).await?;
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
        let mut state = self.state.lock().await;
        state.failed = true;
        let start = Instant::now();
        let (sender, record) = state.parts()?;
        if self.mode.awaits() {
            sender.send(operation).await?;
            record.add(sender.identity(operation), operation.reduced().filter(|_| self.reduces));
            sender.flush().await?;
            let elapsed = start.elapsed();
            state.failed = false;
            return Ok(elapsed);
        }
        let mut yield_timer = YieldTimer::new();
        let mut started = false;
        loop {
            if !started && sender.is_ready()? {
                sender.start(operation)?;
                record.add(sender.identity(operation), operation.reduced().filter(|_| self.reduces));
                started = true;
            }
            if started && sender.pending()? == 0 {
                break;
            }
            yield_timer.missed();
            if yield_timer.is_due() {
                yield_timer.yield_now().await;
            }
        }
        let elapsed = start.elapsed();
        state.failed = false;
        Ok(elapsed)
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
        let mut state = self.state.lock().await;
        state.failed = true;
        let mut stream = OperationStream::new(operations, position, callers, end, self.reduces);
        let error = match state.parts() {
            Ok((sender, record)) if self.mode.awaits() => {
                stream.run_awaiting(sender, record, callers).await.err()
            }
            Ok((sender, record)) => stream.run(sender, record).await.err(),
            Err(error) => Some(error),
        };
        state.failed = error.is_some();
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

impl SendState {
    fn parts(&mut self) -> Result<(&mut TensorSender, &mut Record), CallError> {
        let sender = self.sender.as_mut().ok_or(CallError::Unprepared)?;
        Ok((sender, &mut self.record))
    }
}
