//! The memory that a message is sent from: memory of the application that the device can read, or a copy.

use std::io::IoSlice;

use crate::endpoint::fault::ConnectionFault;
use tonic_rdma_verbs::internal::{SlabRegistrations, find_sendable};
use tonic_rdma_verbs::memory::{Block, Lease, Pool, Quota};
use tonic_rdma_verbs::{LocalSegment, OutOfBounds};

/// Memory that is kept until a message was sent.
#[derive(Debug)]
pub(super) enum Source {
    /// The copy of slices that could not be sent in place.
    Copy(#[expect(dead_code, reason = "held for its drop")] Block),
    /// The application's memory.
    Lease(#[expect(dead_code, reason = "held for its drop")] Lease),
}

/// A message in memory that the device can read.
#[derive(Debug)]
pub(super) struct Gathered {
    segments: [LocalSegment; MAX_SLICES],
    count: usize,
    /// Bytes that were not copied.
    pub(super) in_place: usize,
}

/// Most slices of one message.
pub(super) const MAX_SLICES: usize = 16;
/// Shorter slices are copied, because a segment of their own costs the device more.
const SMALLEST: usize = 1024;

/// Returns whether most of `length` bytes lie in memory that can be sent in place.
pub(in crate::endpoint) fn lies_in_place(slices: &[IoSlice<'_>], length: usize) -> bool {
    let found = slices.iter().filter(|slice| slice.len() >= SMALLEST && find_sendable(slice).is_some());
    found.map(|slice| slice.len()).sum::<usize>() > length / 2
}

/// Describes `slices` by as few segments as possible, at most `most`. Slices in memory for sending stay in place; the others
/// are copied into a block of `pool`. Passes the memory that has to be kept until the message was sent to `keep`.
pub(super) fn gather(
    slices: &[IoSlice<'_>],
    most: usize,
    pool: &Pool,
    registrations: &mut SlabRegistrations,
    mut keep: impl FnMut(Source),
) -> Result<Gathered, ConnectionFault> {
    let mut placed = [None; MAX_SLICES];
    let mut in_place = 0;
    // Each slice in place takes two segments: its own, and one for the copied bytes before it. One more segment is for the copied
    // bytes at the end.
    let mut room = most.min(MAX_SLICES).saturating_sub(1) / 2;
    for (slice, place) in slices.iter().zip(&mut placed).filter(|(slice, _)| slice.len() >= SMALLEST) {
        if room > 0
            && let Some(lease) = find_sendable(slice)
            && let Some(segment) = registrations.segment(&lease)
        {
            *place = Some(segment);
            in_place += slice.len();
            room -= 1;
            keep(Source::Lease(lease));
        }
    }
    let length: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut block = pool.lease(length - in_place, Quota::Send).map_err(ConnectionFault::local)?;
    let segments = arrange(slices, &placed, &mut block).map_err(ConnectionFault::local)?;
    keep(Source::Copy(block));
    Ok(Gathered { in_place, ..segments })
}

/// Copies the slices without a place into `block`, and lists all segments in order.
fn arrange(
    slices: &[IoSlice<'_>],
    placed: &[Option<LocalSegment>],
    block: &mut Block,
) -> Result<Gathered, OutOfBounds> {
    let nothing = block.segment(0..0)?;
    let mut gathered = Gathered { segments: [nothing; MAX_SLICES], count: 0, in_place: 0 };
    let (mut from, mut at) = (0, 0);
    for (slice, place) in slices.iter().zip(placed) {
        if let Some(segment) = place {
            gathered.add(block, from..at)?;
            gathered.push(*segment);
            from = at;
        } else {
            block.copy_in(at, slice)?;
            at += slice.len();
        }
    }
    gathered.add(block, from..at)?;
    Ok(gathered)
}

impl Gathered {
    pub(super) fn segments(&self) -> &[LocalSegment] {
        &self.segments[..self.count]
    }

    fn add(&mut self, block: &Block, range: std::ops::Range<usize>) -> Result<(), OutOfBounds> {
        if !range.is_empty() {
            self.push(block.segment(range)?);
        }
        Ok(())
    }

    fn push(&mut self, segment: LocalSegment) {
        self.segments[self.count] = segment;
        self.count += 1;
    }
}
