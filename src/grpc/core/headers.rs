//! Headers and trailers on their way in both directions, which may have several frames.

use std::borrow::Cow;

use super::output::Message;
use crate::grpc::frame::headers::{Decoded, Decoder, Encoder};
use crate::grpc::frame::{CallViolation, FrameHeader, Kind, Limits, MORE};

/// The codec of headers, and the blocks of headers that are under way. No other frame may come between the
/// frames of a block.
#[derive(Debug)]
pub(super) struct HeaderBlocks {
    encoder: Encoder,
    decoder: Decoder,
    /// A block that did not fit into a message.
    unsent: Option<Block>,
    /// A block of which frames are missing.
    partial: Option<Block>,
    scratch: Vec<u8>,
    /// The longest block of the peer, in bytes.
    limit: usize,
}

/// A block, with the header of its first frame.
#[derive(Debug)]
struct Block {
    header: FrameHeader,
    bytes: Vec<u8>,
    sent: usize,
}

impl HeaderBlocks {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            encoder: Encoder::default(),
            decoder: Decoder::new(limits.table_entries, limits.table_bytes, limits.header_bytes),
            unsent: None,
            partial: None,
            scratch: Vec::new(),
            limit: limits.header_bytes as usize,
        }
    }

    /// Sets the limits of the peer.
    pub(super) fn set_peer(&mut self, limits: &Limits) {
        self.encoder.set_room(limits.table_entries, limits.table_bytes);
    }

    /// Prepares what the next blocks need, when no peer waits for it.
    pub(super) fn prepare(&mut self) {
        self.decoder.prepare();
    }

    /// Checks that a frame does not come between the frames of a block.
    pub(super) fn check_order(&self, kind: Kind, stream: u32) -> Result<(), CallViolation> {
        match &self.partial {
            Some(Block { header, .. }) if (header.kind, header.stream) != (kind, stream) => {
                Err(CallViolation::Interleaved { seen: kind, stream, open: header.stream })
            }
            _ => Ok(()),
        }
    }

    /// Adds a frame to its block. Returns the block if it is whole.
    pub(super) fn receive<'a>(
        &mut self,
        header: &FrameHeader,
        payload: &'a [u8],
    ) -> Result<Option<Cow<'a, [u8]>>, CallViolation> {
        // In the compact form a field is shorter than what it counts.
        let before = self.partial.as_ref().map_or(0, |partial| partial.bytes.len());
        if before + payload.len() > self.limit {
            return Err(CallViolation::HeadersTooLong(self.limit));
        }
        let block = match self.partial.take() {
            None => Cow::Borrowed(payload),
            Some(mut partial) => {
                partial.bytes.extend_from_slice(payload);
                Cow::Owned(partial.bytes)
            }
        };
        if !header.has(MORE) {
            return Ok(Some(block));
        }
        self.partial = Some(Block { header: *header, bytes: block.into_owned(), sent: 0 });
        Ok(None)
    }

    /// Reads a whole block. Blocks of closed calls have to be read, too, because they may add to the table.
    pub(super) fn decode(&mut self, block: &[u8]) -> Result<Decoded, CallViolation> {
        self.decoder.decode(block)
    }

    /// Adds the block that `encode` makes to the message. Returns false if the rest has to go with the next
    /// message.
    pub(super) fn write(
        &mut self,
        message: &mut Message,
        mut header: FrameHeader,
        encode: impl FnOnce(&mut Encoder, &mut Vec<u8>),
    ) -> bool {
        self.scratch.clear();
        encode(&mut self.encoder, &mut self.scratch);
        if self.scratch.len() <= message.payload_left() {
            header.length = self.scratch.len() as u32;
            message.frame(&header, &self.scratch);
            return true;
        }
        let bytes = std::mem::take(&mut self.scratch);
        self.unsent = Some(Block { header, bytes, sent: 0 });
        self.write_rest(message)
    }

    /// Goes on with a block that did not fit. Returns whether no block is left.
    pub(super) fn write_rest(&mut self, message: &mut Message) -> bool {
        let Some(block) = &mut self.unsent else { return true };
        let rest = &block.bytes[block.sent..];
        let length = rest.len().min(message.payload_left());
        if length == 0 {
            return false;
        }
        let is_last = length == rest.len();
        // The first frame of a block says whether the call ends with it, as its last does.
        let flags = block.header.flags | if is_last { 0 } else { MORE };
        let header = FrameHeader { flags, length: length as u32, ..block.header };
        message.frame(&header, &rest[..length]);
        block.sent += length;
        if is_last {
            self.unsent = None;
        }
        is_last
    }

    /// Returns whether a block did not fit into a message.
    pub(super) fn has_unsent(&self) -> bool {
        self.unsent.is_some()
    }

    /// Drops the blocks that are under way, because the connection has ended.
    pub(super) fn end(&mut self) {
        (self.unsent, self.partial) = (None, None);
    }
}
