//! Pulls: the bytes of a reference, piece by piece.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tonic_rdma_tensor::{Channel, MemRegion, Memcpy, RdmaDevice, RegionView, RemoteRegion};

use crate::lane::remote::message::Reference;
use crate::lane::remote::scratch::Scratch;
use crate::lane::remote::settings::LaneCounters;
use crate::lane::{LaneFault, violation};

/// The state of the pull of one peer's message, and memory for READs, which later pulls use again.
pub(super) struct Pull {
    device: RdmaDevice,
    /// The most bytes of one call, and of one READ.
    piece: usize,
    /// The most READs at once.
    ahead: usize,
    /// Bytes that READs were begun for.
    asked: usize,
    /// Bytes that were given.
    given: usize,
    reads: VecDeque<(Memcpy, usize)>,
    idle: Vec<MemRegion>,
    /// Since when the peer's memory is gone.
    gone: Option<Instant>,
}

/// How long the memory of a peer may be gone before that is the peer's fault. A peer that was killed is gone too, and its channel
/// closes a moment later: that is the better reason.
const GONE: Duration = Duration::from_secs(1);

/// The receiver of bytes.
pub(super) enum Sink<'a> {
    /// Takes pieces: the offset in the message, and the bytes.
    Pieces(&'a mut dyn FnMut(usize, &[u8])),
    /// Memory for the whole message.
    Memory(&'a mut [u8]),
}

impl Pull {
    pub(super) fn new(device: RdmaDevice, piece: usize, ahead: usize) -> Self {
        Self {
            device,
            piece,
            ahead,
            asked: 0,
            given: 0,
            reads: VecDeque::new(),
            idle: Vec::new(),
            gone: None,
        }
    }

    /// Returns how many bytes of the message were given.
    pub(super) fn given(&self) -> usize {
        self.given
    }

    /// Begins anew, for the next message.
    pub(super) fn reset(&mut self) {
        (self.asked, self.given) = (0, 0);
        self.gone = None;
    }

    /// Gives the next bytes from a view. Returns whether all bytes were given.
    pub(super) fn give_from_view(
        &mut self,
        view: &RegionView,
        reference: Reference,
        sink: &mut Sink<'_>,
        scratch: &mut Scratch,
    ) -> Result<bool, LaneFault> {
        let (start, length) = range(reference, view.len() as u64)?;
        let count = self.piece.min(length - self.given);
        let outside = |_| out_of_range(reference, view.len() as u64);
        match sink {
            Sink::Memory(into) => {
                if let Some(into) = into.get_mut(self.given..self.given + count) {
                    view.copy_out(start + self.given, into).map_err(outside)?;
                }
            }
            Sink::Pieces(then) => {
                scratch.pieces(
                    count,
                    |at, piece| view.copy_out(start + self.given + at, piece).map_err(outside),
                    |at, piece| then(self.given + at, piece),
                )?;
            }
        }
        self.given += count;
        let ended = self.given == length;
        if ended && !view.is_current() {
            if self.gone.get_or_insert_with(Instant::now).elapsed() > GONE {
                return Err(violation("it withdrew memory while this rank read it"));
            }
            return Ok(false);
        }
        Ok(ended)
    }

    /// Gives the next bytes that READs have brought, and begins further READs. Returns whether all bytes were given.
    pub(super) fn give_from_remote(
        &mut self,
        channel: &Channel,
        remote: &RemoteRegion,
        reference: Reference,
        sink: &mut Sink<'_>,
        counters: &mut LaneCounters,
    ) -> Result<bool, LaneFault> {
        let (start, length) = range(reference, remote.len())?;
        self.read_ahead(channel, remote, start, length)?;
        let Some((read, count)) = self.reads.front_mut() else { return Ok(self.given == length) };
        let (result, count) = (read.try_take(), *count);
        let Some(result) = result else { return Ok(false) };
        self.reads.pop_front();
        let region = result.map_err(|failed| LaneFault::Lost(failed.into()))?;
        let bytes = region.get(..count).unwrap_or_default();
        match sink {
            Sink::Pieces(then) => then(self.given, bytes),
            Sink::Memory(into) => {
                counters.copied_bytes += count as u64;
                if let Some(into) = into.get_mut(self.given..self.given + count) {
                    into.copy_from_slice(bytes);
                }
            }
        }
        self.given += count;
        self.idle.push(region);
        self.read_ahead(channel, remote, start, length)?;
        Ok(self.given == length)
    }

    fn read_ahead(
        &mut self,
        channel: &Channel,
        remote: &RemoteRegion,
        start: usize,
        length: usize,
    ) -> Result<(), LaneFault> {
        while self.asked < length && self.reads.len() < self.ahead {
            let count = self.piece.min(length - self.asked);
            let region = match self.idle.pop() {
                Some(region) => region,
                None => self.device.allocate(self.piece).map_err(LaneFault::Lost)?,
            };
            let read = channel.read(remote).at((start + self.asked) as u64).into(region, ..count);
            self.reads.push_back((read, count));
            self.asked += count;
        }
        Ok(())
    }
}

/// Returns the offset and length of a reference, if it lies within a region of `available` bytes.
fn range(reference: Reference, available: u64) -> Result<(usize, usize), LaneFault> {
    let Reference { offset, length, .. } = reference;
    if offset.checked_add(length).is_none_or(|end| end > available) {
        return Err(out_of_range(reference, available));
    }
    match (usize::try_from(offset), usize::try_from(length)) {
        (Ok(offset), Ok(length)) => Ok((offset, length)),
        _ => Err(out_of_range(reference, available)),
    }
}

#[cold]
fn out_of_range(reference: Reference, available: u64) -> LaneFault {
    let Reference { number, offset, length } = reference;
    violation(format!(
        "it refers to {length} bytes at offset {offset} of its memory {number} of {available} bytes"
    ))
}
