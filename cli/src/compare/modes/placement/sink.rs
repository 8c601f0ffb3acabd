//! The receiver of a cell's tensors: the slots and regions that they arrive in.

use std::sync::Arc;
use std::time::Instant;

use tonic_rdma_tensor::{Arrived, ChannelError, ExportedRegion, RdmaDevice, Rights, StaticReceiver};

use super::geometry::{self, Batch, Geometry, header_name, region_name, seeds_in_order, slot_name};
use super::inspector::{Inspector, both};
use super::record::Record;
use super::yield_timer::YieldTimer;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::mode::Mode;
use crate::compare::plan::cell::Load;
use tonic_rdma_payload::reduce::Reduced;

/// The settings of a mode's receiver.
#[derive(Clone, Copy, Debug)]
pub(super) struct SinkSettings {
    pub(super) mode: Mode,
    pub(super) load: Load,
    /// Seed of the first operation's content.
    pub(super) seed: u64,
    /// Number of operations that may be in flight at once.
    pub(super) depth: u32,
    /// Whether the receiver consumes payloads.
    pub(super) reduces: bool,
}

/// Receives the tensors of a cell.
#[derive(Debug)]
pub(super) struct Sink {
    places: Places,
    inspector: Inspector,
    record: Record,
    seed: u64,
    pub(super) yield_timer: YieldTimer,
}

#[derive(Debug)]
enum Places {
    Slots { slots: Vec<StaticReceiver>, operation: SlotOperation },
    Batch(BatchSlot),
}

/// The operation whose tensors arrive in slots, one after the other.
#[derive(Debug)]
struct SlotOperation {
    lengths: Arc<[u64]>,
    /// Index of the slot of the next tensor. The two fields below have the findings in the operation so far.
    next: usize,
    identity: Option<u64>,
    found: Option<Reduced>,
    /// Seeds of the operation's buffers.
    seeds: Vec<u64>,
}

/// The places of [`Geometry::Batch`].
#[derive(Debug)]
struct BatchSlot {
    batch: Batch,
    header: StaticReceiver,
    region: ExportedRegion,
    depth: u64,
    taken: u64,
}

impl Sink {
    /// Makes the places that `settings` ask for.
    pub(super) fn new(device: &RdmaDevice, settings: &SinkSettings) -> Result<Self, CallError> {
        let SinkSettings { mode, load, seed, depth, reduces } = *settings;
        let receiver = |name: String, bytes: u64, depth| {
            let spec = geometry::spec(bytes)?;
            Ok(device.static_receiver(&name, &spec, depth)?)
        };
        let places = match Geometry::of(load, seed) {
            Geometry::Slots(lengths) => {
                let slots = lengths.iter().enumerate();
                let slots = slots.map(|(index, bytes)| receiver(slot_name(mode, index), *bytes, depth));
                let slots = slots.collect::<Result<_, CallError>>()?;
                Places::Slots { slots, operation: SlotOperation::new(lengths) }
            }
            Geometry::Batch(batch) => {
                let bytes = usize::try_from(batch.room.saturating_mul(depth.into())).unwrap_or(usize::MAX);
                let region = device.export(&region_name(mode), device.allocate(bytes)?, Rights::WRITE)?;
                let header = receiver(header_name(mode), 8 * batch.words() as u64, depth)?;
                Places::Batch(BatchSlot { batch, header, region, depth: depth.into(), taken: 0 })
            }
        };
        let inspector = Inspector::new(reduces);
        Ok(Self { places, inspector, record: Record::default(), seed, yield_timer: YieldTimer::new() })
    }

    /// Begins a turn.
    pub(super) fn begin(&mut self, every_byte: bool) {
        self.inspector.every_byte = every_byte;
        self.record = Record::default();
        self.yield_timer = YieldTimer::new();
    }

    /// Returns the record of the turn.
    pub(super) fn record(&self) -> Record {
        self.record
    }

    /// Takes the next tensor, if it has arrived.
    pub(super) fn poll(&mut self) -> Result<(), ChannelError> {
        let Self { places, inspector, record, seed, yield_timer } = self;
        let found = match places {
            Places::Slots { slots, operation } => {
                let arrived = slots[operation.next].try_recv()?;
                arrived.map(|arrived| operation.take(arrived, *seed, inspector, record)).is_some()
            }
            Places::Batch(BatchSlot { batch, header, region, depth, taken }) => {
                let start = (*taken % *depth) * batch.room;
                let arrived = header.try_recv()?;
                *taken += u64::from(arrived.is_some());
                let check = |arrived| inspector.check_batch(batch, arrived, region.memory(), start, record);
                arrived.map(check).is_some()
            }
        };
        if found {
            yield_timer.found(Instant::now())
        } else {
            yield_timer.missed()
        }
        Ok(())
    }

    /// Waits for the next tensor and takes it. A dropped future loses nothing.
    pub(super) async fn recv(&mut self) -> Result<(), ChannelError> {
        let Self { places, inspector, record, seed, .. } = self;
        match places {
            Places::Slots { slots, operation } => {
                let arrived = slots[operation.next].recv().await?;
                operation.take(arrived, *seed, inspector, record);
            }
            Places::Batch(BatchSlot { batch, header, region, depth, taken }) => {
                let start = (*taken % *depth) * batch.room;
                let arrived = header.recv().await?;
                *taken += 1;
                inspector.check_batch(batch, arrived, region.memory(), start, record);
            }
        }
        Ok(())
    }
}

impl SlotOperation {
    fn new(lengths: Arc<[u64]>) -> Self {
        let seeds = vec![0; lengths.len()];
        Self { lengths, next: 0, identity: None, found: None, seeds }
    }

    /// Checks the tensor that has arrived in the next slot, and releases the slot.
    fn take(&mut self, arrived: Arrived<'_>, seed: u64, inspector: &mut Inspector, record: &mut Record) {
        let Self { lengths, next, identity, found, seeds } = self;
        if *next == 0 {
            *identity = inspector.identify(&arrived, seed);
            *found = None;
            let first = identity.unwrap_or(seed);
            seeds.iter_mut().zip(seeds_in_order(first, lengths)).for_each(|(to, seed)| *to = seed);
        }
        let (memory, range) = arrived.memory();
        let reduced = inspector.check(memory, range, seeds[*next], *next as u64, record);
        *found = both(*found, reduced);
        drop(arrived);
        *next += 1;
        if *next == lengths.len() {
            *next = 0;
            record.add(*identity, *found);
        }
    }
}
