//! Where the bytes of a message come from: memory of the application that the device can read, or a copy.

use std::io::IoSlice;

use super::fault::ConnectionFault;
use super::link::Link;
use tonic_rdma_verbs::internal::{SlabRegistrations, find_sendable};
use tonic_rdma_verbs::memory::{Block, Lease, Pool, Quota};
use tonic_rdma_verbs::{LocalSegment, OutOfBounds};

/// What a message that is on its way holds on to.
#[derive(Debug)]
pub(super) enum Source {
    /// The copy of what could not be sent from where it was.
    Copy(#[expect(dead_code, reason = "held for its drop")] Block),
    /// The application's memory.
    Lease(#[expect(dead_code, reason = "held for its drop")] Lease),
}

/// A message in memory that the device can read.
#[derive(Debug)]
pub(super) struct Gathered {
    segments: [LocalSegment; Link::SLICES],
    count: usize,
    /// Bytes that were not copied.
    pub(super) in_place: usize,
}

/// Shorter slices are copied: a segment costs the device more.
const SMALLEST: usize = 1024;

/// Whether most of `length` bytes lie in memory that could be sent from where it is.
pub(super) fn lies_in_place(slices: &[IoSlice<'_>], length: usize) -> bool {
    let found = slices.iter().filter(|slice| slice.len() >= SMALLEST && find_sendable(slice).is_some());
    found.map(|slice| slice.len()).sum::<usize>() > length / 2
}

/// Has `slices` in as few segments as can be, up to `most`: those in memory for sending where they are, the others copied
/// into a block of `pool`. What has to be kept until the message was sent is given to `keep`.
pub(super) fn gather(
    slices: &[IoSlice<'_>],
    most: usize,
    pool: &Pool,
    registrations: &mut SlabRegistrations,
    mut keep: impl FnMut(Source),
) -> Result<Gathered, ConnectionFault> {
    let mut placed = [None; Link::SLICES];
    let mut in_place = 0;
    // A segment for what lies before each, one for each, and one for what follows the last.
    let mut room = most.min(Link::SLICES).saturating_sub(1) / 2;
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
    let mut block = pool.lease(length - in_place, Quota::Send).map_err(local)?;
    let segments = arrange(slices, &placed, &mut block).map_err(local)?;
    keep(Source::Copy(block));
    Ok(Gathered { in_place, ..segments })
}

/// Copies into `block` what has no place, and names all of it in order.
fn arrange(
    slices: &[IoSlice<'_>],
    placed: &[Option<LocalSegment>],
    block: &mut Block,
) -> Result<Gathered, OutOfBounds> {
    let nothing = block.segment(0..0)?;
    let mut gathered = Gathered { segments: [nothing; Link::SLICES], count: 0, in_place: 0 };
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

fn local(error: impl std::fmt::Display) -> ConnectionFault {
    ConnectionFault::Local(error.to_string().into())
}
