//! The message that is being put together.

use std::io::IoSlice;

use bytes::Bytes;

use crate::grpc::frame::FrameHeader;

/// Frames for one message. Long payloads are kept as they are, and the others copied together.
#[derive(Debug, Default)]
pub(super) struct Message {
    bytes: Vec<u8>,
    /// Long payloads, each with its offset in `bytes`.
    long: Vec<(usize, Bytes)>,
    long_bytes: usize,
    room: usize,
}

impl Message {
    /// The shortest payload that is not copied, in bytes. Up to this length the copy costs less than a slice
    /// of its own.
    const LONG: usize = 2048;
    /// The least room for headers that are begun. A shorter rest of a message is left empty.
    pub(super) const LEAST_HEADERS: usize = 64;
    /// Most long payloads.
    const MOST_LONG: usize = 6;

    /// Begins a message of at most `room` bytes.
    pub(super) fn begin(&mut self, room: usize) {
        self.bytes.clear();
        self.long.clear();
        (self.long_bytes, self.room) = (0, room);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns how many bytes still fit.
    pub(super) fn left(&self) -> usize {
        self.room.saturating_sub(self.bytes.len() + self.long_bytes)
    }

    /// Returns how many bytes of payload fit into one more frame.
    pub(super) fn payload_left(&self) -> usize {
        self.left().saturating_sub(FrameHeader::LENGTH)
    }

    /// Adds a frame whose payload is copied. The caller has checked that it fits.
    pub(super) fn frame(&mut self, header: &FrameHeader, payload: &[u8]) {
        self.bytes.extend_from_slice(&header.encode());
        self.bytes.extend_from_slice(payload);
    }

    /// Adds a frame whose payload `encode` makes. The caller has checked that it fits.
    pub(super) fn frame_by(&mut self, mut header: FrameHeader, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len() + FrameHeader::LENGTH;
        self.bytes.resize(start, 0);
        encode(&mut self.bytes);
        header.length = (self.bytes.len() - start) as u32;
        self.bytes[start - FrameHeader::LENGTH..start].copy_from_slice(&header.encode());
    }

    /// Adds a frame of data. The caller has checked that it fits. Returns the data if the message does not
    /// keep it.
    pub(super) fn data(&mut self, header: &FrameHeader, data: Bytes) -> Option<Bytes> {
        self.bytes.extend_from_slice(&header.encode());
        if data.len() < Self::LONG || self.long.len() == Self::MOST_LONG {
            self.bytes.extend_from_slice(&data);
            return Some(data);
        }
        self.long_bytes += data.len();
        self.long.push((self.bytes.len(), data));
        None
    }

    /// Hands the slices of the message to `send`, and the memory of the long ones to `unneeded`.
    pub(super) fn send<T>(&mut self, unneeded: &mut Vec<Bytes>, send: impl FnOnce(&[IoSlice<'_>]) -> T) -> T {
        let sent = if self.long.is_empty() {
            send(&[IoSlice::new(&self.bytes)])
        } else {
            let mut slices = [IoSlice::new(&[]); 2 * Self::MOST_LONG + 1];
            let (mut count, mut at) = (0, 0);
            for (place, long) in &self.long {
                slices[count] = IoSlice::new(&self.bytes[at..*place]);
                slices[count + 1] = IoSlice::new(long);
                (count, at) = (count + 2, *place);
            }
            if at < self.bytes.len() {
                slices[count] = IoSlice::new(&self.bytes[at..]);
                count += 1;
            }
            send(&slices[..count])
        };
        unneeded.extend(self.long.drain(..).map(|(_, data)| data));
        self.begin(0);
        sent
    }
}
