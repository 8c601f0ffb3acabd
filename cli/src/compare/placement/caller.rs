//! The client's half.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tonic::transport::Channel as Grpc;
use tonic_rdma_proto::placement::placement_client::PlacementClient;
use tonic_rdma_proto::placement::prepare_request::Load as Wanted;
use tonic_rdma_proto::placement::{BeginRequest, EndRequest, PrepareRequest, ReleaseRequest};
use tonic_rdma_proto::transfer::Check;
use tonic_rdma_tensor::{Channel, RdmaDevice};

use super::super::cell::Load;
use super::super::client::CallError;
use super::super::closed_loop::{Done, Position};
use super::super::mode::Mode;
use super::super::operations::{Operation, Operations};
use super::super::rdma::{Rdma, Verdict};
use super::courtesy::Courtesy;
use super::geometry::MAX_DEPTH;
use super::record::Record;
use super::route::Route;
use crate::failure::Failure;

/// A channel in one of the modes. Clones share it, and one of them at a time sends.
#[derive(Clone, Debug)]
pub(crate) struct PlacementCaller {
    mode: Mode,
    control: PlacementClient<Grpc>,
    device: RdmaDevice,
    channel: Channel,
    /// Whether the receiver consumes what arrives.
    reduces: bool,
    lane: Arc<Mutex<Lane>>,
}

/// What whoever sends has to itself.
#[derive(Debug, Default)]
struct Lane {
    route: Option<Route>,
    record: Record,
    /// Whether an operation did not come to its end, upon which records say nothing.
    failed: bool,
}

impl PlacementCaller {
    /// Opens a channel to the device that listens on `endpoint`; `control` leads to the same process.
    pub(crate) async fn connect(
        mode: Mode,
        control: Grpc,
        endpoint: &str,
        rdma: &Rdma,
        reduces: bool,
    ) -> Result<(Self, Verdict), Failure> {
        let failed = |error| Failure::run(format!("{mode}: {error}"));
        let device = rdma.tensor_device().without_listener().map_err(failed)?;
        let channel = device.channel(endpoint, 0).await.map_err(failed)?;
        let (provider, name) = channel.device();
        let reason = format!("tensors over {name}, arrivals by {:?}", channel.notification());
        let verdict = Verdict { provider: provider.to_owned(), reason };
        let control = PlacementClient::new(control);
        Ok((Self { mode, control, device, channel, reduces, lane: Arc::default() }, verdict))
    }

    /// Has both ends make places for `operations`, of which up to `inflight` are to be on their way.
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
        let route = Route::new(self.mode, (&self.device, &self.channel), operations, depth).await?;
        *self.lane.lock().await = Lane { route: Some(route), ..Lane::default() };
        Ok(())
    }

    /// Begins a turn: from now on the receiver looks.
    pub(crate) async fn begin(&mut self, check: Check) -> Result<(), CallError> {
        let mut lane = self.lane.lock().await;
        (lane.record, lane.failed) = (Record::default(), false);
        let (mode, every_byte) = (self.mode.name().to_owned(), check == Check::All);
        self.control.begin(BeginRequest { mode, every_byte }).await?;
        Ok(())
    }

    /// Ends it, and compares what arrived with what was sent.
    pub(crate) async fn end(&mut self) -> Result<(), CallError> {
        let mode = self.mode.name().to_owned();
        let arrived = Record::from(self.control.end(EndRequest { mode }).await?.into_inner());
        let lane = self.lane.lock().await;
        match arrived.mismatch() {
            Some((buffer, offset)) => Err(CallError::BufferContent { buffer, offset }),
            None if lane.failed => Ok(()),
            None => Ok(lane.record.compare(&arrived)?),
        }
    }

    /// Sends `operation`, and says how long it took until the receiver was done with it.
    pub(crate) async fn run(&mut self, operation: &Operation) -> Result<Duration, CallError> {
        let mut lane = self.lane.lock().await;
        lane.failed = true;
        let start = Instant::now();
        let (route, record) = lane.parts()?;
        if self.mode.awaits() {
            route.send(operation).await?;
            record.add(route.identity(operation), operation.reduced().filter(|_| self.reduces));
            route.flush().await?;
            let elapsed = start.elapsed();
            lane.failed = false;
            return Ok(elapsed);
        }
        let mut courtesy = Courtesy::new();
        let mut started = false;
        loop {
            if !started && route.is_ready()? {
                route.start(operation)?;
                record.add(route.identity(operation), operation.reduced().filter(|_| self.reduces));
                started = true;
            }
            if started && route.pending()? == 0 {
                break;
            }
            courtesy.missed();
            if courtesy.is_due() {
                courtesy.give().await;
            }
        }
        let elapsed = start.elapsed();
        lane.failed = false;
        Ok(elapsed)
    }

    /// Keeps `callers` operations under way until `end`, as many callers would; an error ends it.
    pub(crate) async fn keep_sending(
        self,
        operations: Operations,
        position: Position,
        callers: usize,
        end: Instant,
    ) -> (Vec<Done>, Option<CallError>) {
        let mut lane = self.lane.lock().await;
        lane.failed = true;
        let mut stream = Stream::new(operations, position, callers, end, self.reduces);
        let error = match lane.parts() {
            Ok((route, record)) if self.mode.awaits() => {
                stream.run_awaiting(route, record, callers).await.err()
            }
            Ok((route, record)) => stream.run(route, record).await.err(),
            Err(error) => Some(error),
        };
        lane.failed = error.is_some();
        (stream.done, error)
    }

    /// Whether operations are waited for by futures.
    pub(crate) const fn awaits(&self) -> bool {
        self.mode.awaits()
    }

    /// Gives the places up.
    pub(crate) async fn release(&mut self) {
        *self.lane.lock().await = Lane::default();
        let mode = self.mode.name().to_owned();
        // If the server is gone, so are they.
        let _ = self.control.release(ReleaseRequest { mode }).await;
    }
}

impl Lane {
    fn parts(&mut self) -> Result<(&mut Route, &mut Record), CallError> {
        let route = self.route.as_mut().ok_or(CallError::Unprepared)?;
        Ok((route, &mut self.record))
    }
}

/// Operations that follow one another, several on their way.
pub(super) struct Stream {
    operations: Operations,
    position: Position,
    end: Instant,
    reduces: bool,
    /// When those began whose operation is to be started: at once, or when the one before had ended.
    pub(super) waiting: VecDeque<Instant>,
    /// Those on their way, which end in this order: when they began, bytes and messages.
    pub(super) under_way: VecDeque<(Instant, u64, u64)>,
    done: Vec<Done>,
}

impl Stream {
    fn new(operations: Operations, position: Position, callers: usize, end: Instant, reduces: bool) -> Self {
        let waiting = std::iter::repeat_n(Instant::now(), callers).collect();
        let (under_way, done) = (VecDeque::with_capacity(callers), Vec::with_capacity(1 << 12));
        Self { operations, position, end, reduces, waiting, under_way, done }
    }

    async fn run(&mut self, route: &mut Route, record: &mut Record) -> Result<(), CallError> {
        let mut courtesy = Courtesy::new();
        while !self.waiting.is_empty() || !self.under_way.is_empty() {
            while !self.waiting.is_empty() && route.is_ready()? {
                self.start(route, record)?;
            }
            let pending = route.pending()? as usize;
            if pending < self.under_way.len() {
                let now = Instant::now();
                self.finish(pending, now);
                courtesy.found(now);
            } else {
                courtesy.missed();
            }
            if courtesy.is_due() {
                courtesy.give().await;
            }
        }
        Ok(())
    }

    fn start(&mut self, route: &mut Route, record: &mut Record) -> Result<(), CallError> {
        let operation = self.take();
        route.start(&operation)?;
        self.started(route, record, &operation);
        Ok(())
    }

    /// The operation that is to be started next.
    pub(super) fn take(&self) -> Operation {
        self.operations.take(self.position.fetch_add(1, Ordering::Relaxed))
    }

    /// `operation` was started.
    pub(super) fn started(&mut self, route: &Route, record: &mut Record, operation: &Operation) {
        record.add(route.identity(operation), operation.reduced().filter(|_| self.reduces));
        if let Some(begun) = self.waiting.pop_front() {
            self.under_way.push_back((begun, operation.bytes(), operation.messages()));
        }
    }

    /// All but the last `pending` have ended.
    pub(super) fn finish(&mut self, pending: usize, now: Instant) {
        let ended = self.under_way.len() - pending;
        for (begun, bytes, messages) in self.under_way.drain(..ended) {
            self.done.push((now - begun, bytes, messages));
            // Its caller makes another.
            if now < self.end {
                self.waiting.push_back(now);
            }
        }
    }
}
