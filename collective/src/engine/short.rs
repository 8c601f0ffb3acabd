//! The short path: an all-reduce of few elements, in which each rank sends one inline message to every other
//! rank.
//!
//! It does what the plan of [`OneShot`](crate::plan::Algorithm::OneShot) does, with the same messages and the
//! same order of reductions: ((x0 + x1) + x2) + … So the ranks need not agree on whether they take this path.
//! It keeps no plan, allocates nothing, and needs no staging, because inline messages are copies.

use std::ops::DerefMut;

use super::in_flight::{BusyLinks, Context, Fault, MemoryRef, check};
use crate::link::{RankLinks, Tag};
use crate::reduce::Kernel;

/// How far a short operation is.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShortOperation {
    rank: usize,
    ranks: usize,
    /// How many other ranks have been sent to, in the order of the distance.
    sent: usize,
    /// The rank whose elements are reduced next.
    next: usize,
}

impl ShortOperation {
    pub(super) fn new(rank: usize, ranks: usize) -> Self {
        Self { rank, ranks, sent: 0, next: 0 }
    }

    pub(super) fn is_done(&self) -> bool {
        self.next == self.ranks && self.has_sent()
    }

    /// Returns whether all messages of this rank have left.
    pub(super) fn has_sent(&self) -> bool {
        self.sent + 1 >= self.ranks
    }

    /// Sends and receives as far as the links allow. The elements are in `input`, or in `out` if there is no
    /// input.
    pub(super) fn advance<L: RankLinks>(
        &mut self,
        context: &mut Context<'_, L>,
        kernel: Option<&Kernel>,
        tag: Tag,
        input: &MemoryRef<'_, L::Memory>,
        mut out: MemoryRef<'_, L::Memory>,
        length: usize,
    ) -> Result<bool, Fault>
    where
        L::Memory: DerefMut<Target = [u8]>,
    {
        let own = match input {
            MemoryRef::Empty => None,
            input => input.bytes().get(..length),
        };
        let Some(out) = out.bytes_mut().get_mut(..length) else { return Ok(false) };
        let moved = match kernel {
            Some(kernel) => self.poll(context.links, context.sum, kernel, tag, own, out)?,
            None => false,
        };
        self.mark(context.busy);
        Ok(moved)
    }

    /// Sends and receives once as far as the links allow. `own` are the elements of this rank; without it,
    /// they are in `out`.
    #[inline]
    pub(super) fn poll<L: RankLinks>(
        &mut self,
        links: &mut L,
        sum: &mut Vec<u8>,
        kernel: &Kernel,
        tag: Tag,
        own: Option<&[u8]>,
        out: &mut [u8],
    ) -> Result<bool, Fault> {
        let mut moved = false;
        while self.sent + 1 < self.ranks {
            let to = (self.rank + 1 + self.sent) % self.ranks;
            if !links.send(to, tag, own.unwrap_or(out))? {
                return Ok(moved);
            }
            self.sent += 1;
            moved = true;
        }
        if moved && self.ranks == 2 {
            // A poll at once may take the cache line from the peer while the peer writes its message. Then
            // the peer has to fetch the line again. One pause makes that less likely.
            std::hint::spin_loop();
        }
        while self.next < self.ranks {
            let from = self.next;
            if from != self.rank {
                let Some((arrived, length)) = links.peek(from)? else { return Ok(moved) };
                check(from, &tag, &arrived, out.len(), length, self.step(), self.steps())?;
                if self.ranks == 2 {
                    let done = links.receive(from, &mut |offset, chunk| match own {
                        Some(own) => kernel.reduce_into(
                            &mut out[offset..offset + chunk.len()],
                            &own[offset..offset + chunk.len()],
                            chunk,
                        ),
                        None => kernel.reduce(&mut out[offset..offset + chunk.len()], chunk),
                    })?;
                    if !done {
                        return Ok(moved);
                    }
                } else if !receive(links, sum, kernel, from, from == 0, out.len())? {
                    return Ok(moved);
                }
            } else if self.ranks > 2 {
                let own = own.unwrap_or(out);
                if from == 0 {
                    sum.clear();
                    sum.extend_from_slice(own);
                } else {
                    kernel.reduce(sum, own);
                }
            }
            self.next += 1;
            moved = true;
        }
        if self.ranks > 2 {
            out.copy_from_slice(sum);
        }
        kernel.finish(out, self.ranks);
        Ok(true)
    }

    /// Returns whether this operation could move on if its memory were here.
    pub(super) fn could_move<L: RankLinks>(&self, links: &mut L) -> bool {
        self.sent + 1 < self.ranks
            || self.next == self.rank
            || self.next < self.ranks && !matches!(links.peek(self.next), Ok(None))
    }

    pub(super) fn mark(&self, busy: &mut BusyLinks) {
        for other in (0..self.ranks).filter(|other| *other != self.rank) {
            busy.receives[other] |= other >= self.next;
        }
        for distance in self.sent + 1..self.ranks {
            busy.sends[(self.rank + distance) % self.ranks] = true;
        }
    }

    pub(super) fn step(&self) -> u32 {
        (self.sent + self.next) as u32
    }

    pub(super) fn steps(&self) -> u32 {
        (2 * self.ranks - 1) as u32
    }

    pub(super) fn waits_for(&self) -> Option<usize> {
        if self.sent + 1 < self.ranks {
            return Some((self.rank + 1 + self.sent) % self.ranks);
        }
        (self.next..self.ranks).find(|other| *other != self.rank)
    }
}

/// Receives elements of a group of more than two ranks into `sum`. The first ones are copied.
fn receive<L: RankLinks>(
    links: &mut L,
    sum: &mut Vec<u8>,
    kernel: &Kernel,
    from: usize,
    first: bool,
    length: usize,
) -> Result<bool, Fault> {
    if first {
        sum.resize(length, 0);
        return Ok(links.receive_into(from, sum)?);
    }
    Ok(links.receive(from, &mut |offset, chunk| {
        kernel.reduce(&mut sum[offset..offset + chunk.len()], chunk);
    })?)
}
