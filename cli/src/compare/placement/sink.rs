//! The receiver: places for a cell's tensors, and what is done with those that arrive.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use tonic_rdma_tensor::{
    Arrived, ChannelError, ExportedRegion, RdmaDevice, Rights, SharedRegion, StaticReceiver, TensorError,
};

use super::super::cell::Load;
use super::super::consume::{Reduced, Reduction, reduce};
use super::super::content::{SHARE, check_all, check_stamps, check_stamps_of};
use super::super::mode::Mode;
use super::courtesy::Courtesy;
use super::geometry::{self, Batch, Geometry, identify, seeds_in_order};
use super::record::Record;
use crate::seeded::mix;

/// What a mode's receiver is made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) mode: Mode,
    pub(super) load: Load,
    /// Of the first operation's content.
    pub(super) seed: u64,
    /// Operations that may be on their way at once.
    pub(super) depth: u32,
    /// Whether what arrives is consumed.
    pub(super) reduces: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Sink {
    places: Places,
    inspector: Inspector,
    record: Record,
    seed: u64,
    pub(super) courtesy: Courtesy,
}

#[derive(Debug)]
enum Places {
    Slots { slots: Vec<StaticReceiver>, operation: OfSlots },
    Batch(Batched),
}

/// The operation whose tensors come into slots, one after the other.
#[derive(Debug)]
struct OfSlots {
    lengths: Arc<[u64]>,
    /// The slot whose tensor comes next, and what is known of the operation so far.
    next: usize,
    identity: Option<u64>,
    found: Option<Reduced>,
    /// Seeds of the operation's buffers.
    seeds: Vec<u64>,
}

/// See [`Geometry::Batch`].
#[derive(Debug)]
struct Batched {
    batch: Batch,
    header: StaticReceiver,
    region: ExportedRegion,
    depth: u64,
    taken: u64,
}

/// Looks at what has arrived, where it is: no other copy of it is made than one that stays in the cache.
#[derive(Debug)]
struct Inspector {
    every_byte: bool,
    reduces: bool,
    /// Buffers so far: moves the sampled offsets from one to the next.
    draws: u64,
    scratch: Box<Scratch>,
}

/// Room for a buffer that is copied out at once.
#[derive(Debug)]
#[repr(align(64))]
struct Scratch([u8; SCRATCH]);

const SCRATCH: usize = 8 << 10;

/// Names of a mode's places.
pub(super) fn slot_name(mode: Mode, index: usize) -> String {
    format!("{mode} {index}")
}

pub(super) fn header_name(mode: Mode) -> String {
    format!("{mode} header")
}

pub(super) fn region_name(mode: Mode) -> String {
    format!("{mode} region")
}

impl Sink {
    /// Makes the places that `order` asks for.
    pub(super) fn new(device: &RdmaDevice, order: &Order) -> Result<Self, ChannelError> {
        let Order { mode, load, seed, depth, reduces } = *order;
        let receiver = |name: String, bytes: u64, depth| {
            let spec = geometry::spec(bytes).map_err(TensorError::from)?;
            device.static_receiver(&name, &spec, depth)
        };
        let places = match Geometry::of(load, seed) {
            Geometry::Slots(lengths) => {
                let slots = lengths.iter().enumerate();
                let slots = slots.map(|(index, bytes)| receiver(slot_name(mode, index), *bytes, depth));
                let slots = slots.collect::<Result<_, _>>()?;
                Places::Slots { slots, operation: OfSlots::new(lengths) }
            }
            Geometry::Batch(batch) => {
                let bytes = usize::try_from(batch.room.saturating_mul(depth.into())).unwrap_or(usize::MAX);
                let region = device.export(&region_name(mode), device.allocate(bytes)?, Rights::WRITE)?;
                let header = receiver(header_name(mode), 8 * batch.words() as u64, depth)?;
                Places::Batch(Batched { batch, header, region, depth: depth.into(), taken: 0 })
            }
        };
        let scratch = Box::new(Scratch([0; SCRATCH]));
        let inspector = Inspector { every_byte: false, reduces, draws: 0, scratch };
        Ok(Self { places, inspector, record: Record::default(), seed, courtesy: Courtesy::new() })
    }

    /// A turn begins.
    pub(super) fn begin(&mut self, every_byte: bool) {
        self.inspector.every_byte = every_byte;
        self.record = Record::default();
        self.courtesy = Courtesy::new();
    }

    /// What was in the turn.
    pub(super) fn record(&self) -> Record {
        self.record
    }

    /// Takes what has arrived, if anything has.
    pub(super) fn poll(&mut self) -> Result<(), ChannelError> {
        let Self { places, inspector, record, seed, courtesy } = self;
        let found = match places {
            Places::Slots { slots, operation } => {
                let arrived = slots[operation.next].try_recv()?;
                arrived.map(|arrived| operation.take(arrived, *seed, inspector, record)).is_some()
            }
            Places::Batch(Batched { batch, header, region, depth, taken }) => {
                let start = (*taken % *depth) * batch.room;
                let arrived = header.try_recv()?;
                *taken += u64::from(arrived.is_some());
                let look = |arrived| inspector.look_at_batch(batch, arrived, region.memory(), start, record);
                arrived.map(look).is_some()
            }
        };
        if found {
            courtesy.found(Instant::now())
        } else {
            courtesy.missed()
        }
        Ok(())
    }

    /// Waits for what comes next, and takes it. Dropping the future loses nothing.
    pub(super) async fn recv(&mut self) -> Result<(), ChannelError> {
        let Self { places, inspector, record, seed, .. } = self;
        match places {
            Places::Slots { slots, operation } => {
                let arrived = slots[operation.next].recv().await?;
                operation.take(arrived, *seed, inspector, record);
            }
            Places::Batch(Batched { batch, header, region, depth, taken }) => {
                let start = (*taken % *depth) * batch.room;
                let arrived = header.recv().await?;
                *taken += 1;
                inspector.look_at_batch(batch, arrived, region.memory(), start, record);
            }
        }
        Ok(())
    }
}

impl OfSlots {
    fn new(lengths: Arc<[u64]>) -> Self {
        let seeds = vec![0; lengths.len()];
        Self { lengths, next: 0, identity: None, found: None, seeds }
    }

    /// Looks at what has arrived in the slot whose turn it was, and releases it.
    fn take(&mut self, arrived: Arrived<'_>, seed: u64, inspector: &mut Inspector, record: &mut Record) {
        let Self { lengths, next, identity, found, seeds } = self;
        if *next == 0 {
            *identity = inspector.identify(&arrived, seed);
            *found = None;
            let first = identity.unwrap_or(seed);
            seeds.iter_mut().zip(seeds_in_order(first, lengths)).for_each(|(to, seed)| *to = seed);
        }
        let (memory, range) = arrived.memory();
        let reduced = inspector.look(memory, range, seeds[*next], *next as u64, record);
        *found = both(*found, reduced);
        drop(arrived);
        *next += 1;
        if *next == lengths.len() {
            *next = 0;
            record.add(*identity, *found);
        }
    }
}

impl Inspector {
    /// Which operation it is that begins with what has arrived.
    fn identify(&self, arrived: &Arrived<'_>, seed: u64) -> Option<u64> {
        let (memory, range) = arrived.memory();
        let mut start = [0; 8];
        let start = &mut start[..range.len().min(8)];
        memory.copy_out(range.start, start).ok()?;
        identify(seed, start)
    }

    /// Checks a buffer, and consumes it if it is to be.
    fn look(
        &mut self,
        memory: &SharedRegion,
        range: Range<usize>,
        seed: u64,
        index: u64,
        record: &mut Record,
    ) -> Option<Reduced> {
        self.draws += 1;
        // What is consumed is seen as a whole anyway.
        let every_byte = self.every_byte || (!self.reduces && self.draws.is_multiple_of(SHARE));
        let (wrong, reduced) = match range.len() {
            0..=SCRATCH => self.look_at_copy(memory, range, seed, every_byte),
            _ => self.look_in_pieces(memory, range, seed, every_byte),
        };
        if let Some(offset) = wrong {
            record.wrong(index, offset);
        }
        reduced
    }

    fn look_at_copy(
        &mut self,
        memory: &SharedRegion,
        range: Range<usize>,
        seed: u64,
        every_byte: bool,
    ) -> (Option<u64>, Option<Reduced>) {
        let bytes = &mut self.scratch.0[..range.len()];
        // Stamps alone are read where they are.
        if !every_byte && !self.reduces {
            return (self.stamps(memory, range, seed), None);
        }
        if memory.copy_out(range.start, bytes).is_err() {
            return (Some(0), None);
        }
        let wrong = match every_byte {
            true => check_all(seed, bytes),
            false => check_stamps(seed, bytes, mix(self.draws)),
        };
        (wrong, self.reduces.then(|| reduce(bytes)))
    }

    fn look_in_pieces(
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
        // Pieces are of whole words but for the last.
        let read = memory.for_each_piece(range, |piece| {
            if every_byte && wrong.is_none() {
                wrong = check_all(seed.wrapping_add(done / 8), piece).map(|offset| done + offset);
            }
            if self.reduces {
                reduction.take(piece);
            }
            done += piece.len() as u64;
        });
        if read.is_err() {
            wrong = Some(0);
        }
        (wrong, self.reduces.then(|| reduction.end()))
    }

    fn stamps(&self, memory: &SharedRegion, range: Range<usize>, seed: u64) -> Option<u64> {
        check_stamps_of(seed, range.len(), mix(self.draws), |start, word| {
            // It lies within the slot; if not, the word stays zero, which it is not.
            let _ = memory.copy_out(range.start + start, word);
        })
    }

    /// The same for all buffers of an operation that lie at `start`, and then gives the place back.
    fn look_at_batch(
        &mut self,
        batch: &Batch,
        header: Arrived<'_>,
        memory: &SharedRegion,
        start: u64,
        record: &mut Record,
    ) {
        let mut words = Vec::with_capacity(batch.words());
        header.for_each_piece(|piece| {
            words.extend(piece.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)));
        });
        let (Some(&first), Some(lengths)) = (words.first(), batch.lengths(&words)) else {
            record.wrong(0, 0);
            return record.add(None, None);
        };
        let mut found = None;
        let buffers = batch.places(&lengths).zip(&*lengths).zip(batch.seeds(first, &lengths));
        for (index, ((place, length), seed)) in (0..).zip(buffers) {
            let begin = (start + place) as usize;
            let reduced = self.look(memory, begin..begin + *length as usize, seed, index, record);
            found = both(found, reduced);
        }
        drop(header);
        record.add(Some(first), found);
    }
}

fn both(one: Option<Reduced>, other: Option<Reduced>) -> Option<Reduced> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.and(other)),
        (one, other) => one.or(other),
    }
}
