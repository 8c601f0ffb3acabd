//! The reading half of a connection: what has arrived, in order.

use tokio::io::ReadBuf;

use super::connection::State;
use super::fault::ConnectionFault;
use crate::protocol::{AbortCode, Finished, Part};

impl State {
    /// Copies what has arrived into `buffer`; how many bytes that was.
    pub(super) fn read(&mut self, buffer: &mut ReadBuf<'_>) -> Result<usize, ConnectionFault> {
        let before = buffer.remaining();
        while buffer.remaining() > 0
            && let Some(part) = self.protocol.front()
        {
            let (block, offset, length) = match part {
                Part::Eager { slot, offset, length } => {
                    let (ring, start) = self.link.slot(slot);
                    (ring, start + offset, length)
                }
                Part::Rendezvous { read, offset, length } => match self.landings.get(&read) {
                    Some(block) => (block, offset, length),
                    None => return Err(ConnectionFault::Local("a read without its memory".into())),
                },
            };
            let count = length.min(buffer.remaining());
            block
                .copy_out_to(offset..offset + count, buffer)
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
        }
    }

    fn consume(&mut self, count: usize) {
        if let Some(Finished::Read(read)) = self.protocol.consume(count) {
            self.landings.remove(&read);
        }
    }
}
