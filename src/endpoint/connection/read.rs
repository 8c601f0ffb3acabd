//! The reading half of a connection: delivers arrived bytes in order.

use std::time::Instant;

use tokio::io::ReadBuf;

use super::shortage::Shortage;
use super::state::State;
use crate::endpoint::counters::Counters;
use crate::endpoint::fault::ConnectionFault;
use crate::protocol::{AbortCode, Finished, Part};
use tonic_rdma_verbs::memory::{PoolError, Quota};

impl State {
    /// Posts READs for the chunks that the peer offered, as far as there is memory for them.
    pub(super) fn start_reads(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        while let Some(request) = self.protocol.peek_read() {
            let block = match self.link.pool().lease(request.length as usize, Quota::Receive) {
                Ok(block) => block,
                // Delivery of the READs in progress frees memory.
                Err(PoolError::QuotaExhausted { .. }) if !self.landings.is_empty() => return Ok(()),
                Err(PoolError::Budget { .. }) if self.shortage.keep_waiting(Instant::now()) => return Ok(()),
                Err(error) => return Err(ConnectionFault::local(error)),
            };
            self.link.post_read(&request, &block)?;
            self.protocol.start_read();
            counters.reads.add(1);
            counters.work_requests.add(1);
            self.landings.insert(request.id, block);
        }
        self.shortage = Shortage::default();
        Ok(())
    }

    /// Copies arrived bytes into `buffer`, as many as the reader's quota allows. Returns their number.
    pub(super) fn read(&mut self, buffer: &mut ReadBuf<'_>) -> Result<usize, ConnectionFault> {
        let before = buffer.remaining();
        while buffer.remaining() > 0
            && !self.quota.is_used_up()
            && let Some(part) = self.protocol.front()
        {
            let (block, start, offset, length) = match part {
                Part::Eager { slot, offset, length } => {
                    let (buffers, start) = self.link.receives.slot(slot.0)?;
                    (buffers, start, offset, length)
                }
                Part::Rendezvous { read, offset, length } => match self.landings.get(&read) {
                    Some(block) => (block, 0, offset, length),
                    None => return Err(ConnectionFault::local("a read without its memory")),
                },
            };
            let count = self.quota.take(length, offset + length, buffer.remaining());
            block
                .copy_out_to(start + offset..start + offset + count, buffer)
                .map_err(ConnectionFault::local)?;
            self.consume(count);
        }
        Ok(before - buffer.remaining())
    }

    /// Discards bytes that arrive after the stream was dropped, and sends the peer an abort.
    pub(super) fn discard(&mut self) {
        while let Some(part) = self.protocol.front() {
            let (Part::Eager { length, .. } | Part::Rendezvous { length, .. }) = part;
            self.consume(length);
            self.protocol.abort(AbortCode::CLOSED);
            // After an abort nothing more is sent.
            self.staging.clear();
        }
    }

    fn consume(&mut self, count: usize) {
        if let Some(Finished::Read(read)) = self.protocol.consume(count) {
            self.landings.remove(&read);
        }
    }
}
