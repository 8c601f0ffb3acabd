//! The writing half of a connection: gathers small writes, sends writes eagerly, or offers them by rendezvous.
//!
//! `Limits::coalesce` is the length up to which writes are gathered, and the `Chooser` knows the length from which on writes go by
//! rendezvous.

use std::io::IoSlice;

use super::state::State;
use crate::endpoint::counters::Counters;
use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::link::{Link, source};
use crate::protocol::{Blocked, Chunk, MAX_CHUNKS};
use tonic_rdma_verbs::memory::{Block, Quota};

impl State {
    /// Takes as many bytes of `slices` as there is room for, and returns their number. `None` if there is no room.
    pub(super) fn write(
        &mut self,
        slices: &[IoSlice<'_>],
        counters: &Counters,
    ) -> Result<Option<usize>, ConnectionFault> {
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        if self.staging.len() + length <= self.limits.coalesce {
            counters.coalesced_writes.add(1);
            slices.iter().for_each(|slice| self.staging.extend_from_slice(slice));
            return Ok(Some(length));
        }
        if self.chooser.by_rendezvous(length)
            && !source::lies_in_place(slices, length)
            && self.flush_staging(counters)?
            && let Some(offered) = self.offer(slices, length, counters)?
        {
            return Ok(Some(offered));
        }
        let room = self.protocol.eager_room();
        if room > self.staging.len() {
            return self.send(slices, room, counters).map(Some);
        }
        self.flush_wanted |= !self.staging.is_empty();
        match self.protocol.blocked_on() {
            Some(Blocked::Credits) => counters.credit_stalls.add(1),
            _ => counters.send_stalls.add(1),
        }
        Ok(None)
    }

    /// Sends the gathered writes as one message. Returns false if the message has to wait.
    pub(super) fn flush_staging(&mut self, counters: &Counters) -> Result<bool, ConnectionFault> {
        if self.staging.is_empty() {
            self.flush_wanted = false;
            return Ok(true);
        }
        let room = self.protocol.eager_room();
        if room < self.staging.len() {
            return Ok(false);
        }
        self.send(&[], room, counters)?;
        Ok(true)
    }

    /// Returns whether there is room for a write.
    pub(super) fn has_room(&self) -> bool {
        self.protocol.eager_room() > self.staging.len()
    }

    /// Sends the gathered writes and as many bytes of `slices` as fit into one message of `room` bytes. Returns the number of
    /// bytes taken from `slices`.
    fn send(
        &mut self,
        slices: &[IoSlice<'_>],
        room: usize,
        counters: &Counters,
    ) -> Result<usize, ConnectionFault> {
        /// Slices before those of the caller: the header, and the gathered writes.
        const EXTRA: usize = 2;
        let mut room = room - self.staging.len();
        let mut message = [IoSlice::new(&[]); Link::SLICES];
        let mut count = EXTRA;
        let mut taken = 0;
        for slice in slices.iter().filter(|slice| !slice.is_empty()).take(Link::SLICES - EXTRA) {
            let part = slice.len().min(room);
            if part == 0 {
                break;
            }
            message[count] = IoSlice::new(&slice[..part]);
            (count, taken, room) = (count + 1, taken + part, room - part);
        }
        let payload = self.staging.len() + taken;
        let header = self.protocol.send_eager(payload).map_err(ConnectionFault::local)?;
        message[0] = IoSlice::new(&header);
        message[1] = IoSlice::new(&self.staging);
        // Header and gathered writes were copied, here or by the device.
        let in_place = self.link.post_message(&message[..count])?.min(taken);
        counters.eager_sent.add(1);
        counters.eager_sent_bytes.add(payload as u64);
        counters.work_requests.add(1);
        counters.copies_avoided_bytes.add(in_place as u64);
        self.staging.clear();
        self.flush_wanted = false;
        Ok(taken)
    }

    /// Copies bytes of `slices` into memory that the peer may read, and sends the peer the addresses. Returns the number of
    /// bytes; `None` if there is no memory or no room for the offer.
    fn offer(
        &mut self,
        slices: &[IoSlice<'_>],
        length: usize,
        counters: &Counters,
    ) -> Result<Option<usize>, ConnectionFault> {
        let mut chunks = [Chunk { address: 0, rkey: 0, length: 0 }; MAX_CHUNKS];
        let mut blocks: [Option<Block>; MAX_CHUNKS] = Default::default();
        let (mut count, mut taken) = (0, 0);
        let most =
            self.chooser.sources().saturating_sub(self.sources.len()).min(self.protocol.rendezvous_room());
        while count < most && taken < length {
            let part = (length - taken).min(self.chooser.chunk());
            // Without memory the write goes eagerly, or waits.
            let Ok(mut block) = self.link.pool().lease(part, Quota::Send) else { break };
            copy_range(&mut block, slices, taken, part)?;
            let remote = block.remote(0);
            chunks[count] = Chunk { address: remote.address, rkey: remote.rkey.0, length: part as u64 };
            blocks[count] = Some(block);
            (count, taken) = (count + 1, taken + part);
        }
        if count == 0 {
            return Ok(None);
        }
        let offer = self.protocol.send_rendezvous(&chunks[..count]).map_err(ConnectionFault::local)?;
        self.link.post_message(&[IoSlice::new(offer.as_bytes())])?;
        self.sources.extend(blocks.into_iter().flatten());
        counters.rendezvous_sent.add(1);
        counters.rendezvous_sent_bytes.add(taken as u64);
        counters.work_requests.add(1);
        Ok(Some(taken))
    }
}

/// Copies `length` bytes from position `skip` of the slices' concatenation.
fn copy_range(
    block: &mut Block,
    slices: &[IoSlice<'_>],
    mut skip: usize,
    mut length: usize,
) -> Result<(), ConnectionFault> {
    let mut offset = 0;
    for slice in slices {
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let part = (slice.len() - skip).min(length);
        block.copy_in(offset, &slice[skip..skip + part]).map_err(ConnectionFault::local)?;
        (offset, length, skip) = (offset + part, length - part, 0);
        if length == 0 {
            break;
        }
    }
    Ok(())
}
