//! The checks of tensors that have arrived, in the memory where they lie.

use std::ops::Range;

use tonic_rdma_tensor::{Arrived, SharedRegion};

use super::geometry::{Batch, identify};
use super::record::Record;
use tonic_rdma_payload::content::{SHARE, check_all, check_stamps, check_stamps_of};
use tonic_rdma_payload::reduce::{Reduced, Reduction, reduce};
use tonic_rdma_payload::seeded::mix;

/// Checks arrived tensors in place. The only copies are small enough to stay in the cache.
#[derive(Debug)]
pub(super) struct Inspector {
    pub(super) every_byte: bool,
    reduces: bool,
    /// Number of buffers so far. The check derives the sampled offsets from it, so that they differ from buffer to
    /// buffer.
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
    pub(super) fn new(reduces: bool) -> Self {
        Self { every_byte: false, reduces, draws: 0, scratch: Box::new(Scratch([0; SCRATCH])) }
    }

    /// Returns the seed of the operation that begins with the arrived tensor.
    pub(super) fn identify(&self, arrived: &Arrived<'_>, seed: u64) -> Option<u64> {
        let (memory, range) = arrived.memory();
        let mut start = [0; 8];
        let start = &mut start[..range.len().min(8)];
        memory.copy_out(range.start, start).ok()?;
        identify(seed, start)
    }

    /// Checks a buffer, and consumes it if the settings say so.
    pub(super) fn check(
        &mut self,
        memory: &SharedRegion,
        range: Range<usize>,
        seed: u64,
        index: u64,
        record: &mut Record,
    ) -> Option<Reduced> {
        self.draws += 1;
        // Consuming a buffer reads all of it anyway.
        let every_byte = self.every_byte || (!self.reduces && self.draws.is_multiple_of(SHARE));
        let (wrong, reduced) = match range.len() {
            0..=SCRATCH => self.check_copy(memory, range, seed, every_byte),
            _ => self.check_pieces(memory, range, seed, every_byte),
        };
        if let Some(offset) = wrong {
            record.wrong(index, offset);
        }
        reduced
    }

    fn check_copy(
        &mut self,
        memory: &SharedRegion,
        range: Range<usize>,
        seed: u64,
        every_byte: bool,
    ) -> (Option<u64>, Option<Reduced>) {
        let bytes = &mut self.scratch.0[..range.len()];
        // Stamps alone are read in place.
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

    fn check_pieces(
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
        // All pieces but the last have whole words.
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
            // The word lies within the slot. Otherwise it stays zero, and the check fails, because no content has such
            // a word.
            let _ = memory.copy_out(range.start + start, word);
        })
    }

    /// Checks all buffers of an operation that lie at `start`, and then releases the header.
    pub(super) fn check_batch(
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
            let reduced = self.check(memory, begin..begin + *length as usize, seed, index, record);
            found = both(found, reduced);
        }
        drop(header);
        record.add(Some(first), found);
    }
}

pub(super) fn both(one: Option<Reduced>, other: Option<Reduced>) -> Option<Reduced> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.and(other)),
        (one, other) => one.or(other),
    }
}
