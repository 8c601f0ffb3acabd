//! The reading half of a connection: what has arrived, in order, and in turns.

use std::time::{Duration, Instant};

use tokio::io::ReadBuf;

use super::connection::State;
use super::counters::Counters;
use super::fault::ConnectionFault;
use crate::protocol::{AbortCode, Finished, Part};
use tonic_rdma_verbs::memory::{PoolError, Quota};

/// How much a reading task has taken since it last let other tasks run.
///
/// HTTP/2 takes all that has arrived before it does anything else: of 32 small calls that came together it would read
/// all, then have all served, then send all answers, while the other end had nothing to do. So a reader of small
/// messages is sent to the end of the runtime's queue after each [`QUANTUM`](Self::QUANTUM): the calls that it took are
/// served and answered while the next are read (`compare`, 64 B × 32 in flight: more than twice the calls per second).
#[derive(Debug, Default)]
pub(super) struct Turn {
    taken: usize,
    /// The reader passes bytes on and serves nothing: it takes all it can.
    endless: bool,
}

impl Turn {
    /// Bytes of small messages that make a turn: two or three small calls with their headers.
    const QUANTUM: usize = 512;
    /// What is left of a message is taken in pieces from here on: it is where calls end and others begin.
    const TAIL: usize = 4096;
    /// Longer messages are part of something large, whose reader has nothing to gain from waiting: most of an HTTP/2 frame
    /// of the default size.
    const SMALL: usize = 12 * 1024;

    /// Others have run.
    pub(super) fn begin(&mut self) {
        self.taken = 0;
    }

    /// From now on there are no turns.
    pub(super) fn never_end(&mut self) {
        *self = Self { taken: 0, endless: true };
    }

    /// Whether others should run now.
    pub(super) fn is_over(&self) -> bool {
        self.taken >= Self::QUANTUM
    }

    /// Takes from what is `left` of a message that had `whole` bytes: how many may be taken now, of `room` that there
    /// are.
    fn take(&mut self, left: usize, whole: usize, room: usize) -> usize {
        let mut count = left.min(room);
        if self.endless || whole > Self::SMALL {
            return count;
        }
        if left <= Self::TAIL {
            count = count.min(Self::QUANTUM.saturating_sub(self.taken).max(1));
        }
        self.taken += count;
        count
    }
}

/// READs that wait for memory which other connections of the process have.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// Since when, and when to try again.
    times: Option<(Instant, Instant)>,
    is_new: bool,
}

impl Shortage {
    /// Nobody tells us when others give memory back.
    const RETRY: Duration = Duration::from_millis(5);
    /// How long a connection waits before it counts as lost.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// There is none now either. Whether to go on waiting.
    fn goes_on(&mut self, now: Instant) -> bool {
        self.is_new = self.times.is_none();
        let (since, _) = self.times.unwrap_or((now, now));
        self.times = Some((since, now + Self::RETRY));
        now.saturating_duration_since(since) < Self::PATIENCE
    }

    /// When to try again.
    pub(super) fn retry(&self) -> Option<Instant> {
        self.times.map(|(_, retry)| retry)
    }

    /// Whether it began since this was last asked.
    pub(super) fn is_new(&mut self) -> bool {
        std::mem::take(&mut self.is_new)
    }
}

impl State {
    /// Posts READs for what the peer offered, as far as there is memory for it.
    pub(super) fn start_reads(&mut self, counters: &Counters, now: Instant) -> Result<(), ConnectionFault> {
        while let Some(request) = self.protocol.peek_read() {
            let block = match self.link.pool().lease(request.length as usize, Quota::Receive) {
                Ok(block) => block,
                // Delivery of what has landed gives memory back.
                Err(PoolError::QuotaExhausted { .. }) if !self.landings.is_empty() => return Ok(()),
                Err(PoolError::Budget { .. }) if self.shortage.goes_on(now) => return Ok(()),
                Err(error) => return Err(ConnectionFault::Local(error.to_string().into())),
            };
            self.link.post_read(&request, &block)?;
            self.protocol.start_read();
            counters.reads.add(1);
            counters.rendezvous_received_bytes.add(request.length);
            counters.work_requests.add(1);
            self.landings.insert(request.id, block);
        }
        self.shortage = Shortage::default();
        Ok(())
    }

    /// Copies what has arrived into `buffer`, no further than the reader's turn goes; how many bytes that was.
    pub(super) fn read(&mut self, buffer: &mut ReadBuf<'_>) -> Result<usize, ConnectionFault> {
        let before = buffer.remaining();
        while buffer.remaining() > 0
            && !self.turn.is_over()
            && let Some(part) = self.protocol.front()
        {
            let (block, start, offset, length) = match part {
                Part::Eager { slot, offset, length } => {
                    let (buffers, start) = self.link.slot(slot)?;
                    (buffers, start, offset, length)
                }
                Part::Rendezvous { read, offset, length } => match self.landings.get(&read) {
                    Some(block) => (block, 0, offset, length),
                    None => return Err(ConnectionFault::Local("a read without its memory".into())),
                },
            };
            let count = self.turn.take(length, offset + length, buffer.remaining());
            block
                .copy_out_to(start + offset..start + offset + count, buffer)
                .map_err(|error| ConnectionFault::Local(error.to_string().into()))?;
            self.consume(count);
        }
        Ok(before - buffer.remaining())
    }

    /// Throws away what comes after the stream is gone, and tells a peer that goes on sending that nobody listens.
    pub(super) fn discard(&mut self) {
        while let Some(part) = self.protocol.front() {
            let (Part::Eager { length, .. } | Part::Rendezvous { length, .. }) = part;
            self.consume(length);
            self.protocol.abort(AbortCode::CLOSED);
            // An abort says nothing more.
            self.staging.clear();
        }
    }

    fn consume(&mut self, count: usize) {
        if let Some(Finished::Read(read)) = self.protocol.consume(count) {
            self.landings.remove(&read);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_waited_out_for_a_while() {
        let (mut shortage, now) = (Shortage::default(), Instant::now());
        assert_eq!((shortage.retry(), shortage.is_new()), (None, false));
        assert!(shortage.goes_on(now) && shortage.is_new() && !shortage.is_new());
        assert_eq!(shortage.retry(), Some(now + Shortage::RETRY));
        let later = now + Shortage::PATIENCE - Duration::from_millis(1);
        assert!(shortage.goes_on(later) && !shortage.is_new());
        assert_eq!(shortage.retry(), Some(later + Shortage::RETRY));
        assert!(!shortage.goes_on(now + Shortage::PATIENCE));
    }
}
