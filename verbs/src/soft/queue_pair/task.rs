//! A request under way: its source, its destination, and its progress.

use std::io::IoSlice;

use super::connection::Connection;
use super::place::{CopyMode, WORD};
use super::stores::{self, Stores};
use crate::soft::shared::link::Piece;
use crate::soft::system::Direction;
use crate::{Access, LocalSegment, Operation, Payload, RemoteSegment};

/// A request under way.
#[derive(Debug)]
pub(super) struct Task<'a> {
    pub(super) local: Local<'a>,
    pub(super) remote: Remote,
    pub(super) direction: Direction,
    pub(super) immediate: Option<u32>,
    /// Whether the last word must be stored last, and at once. This holds if the destination ends at a multiple of a word.
    pub(super) in_order: bool,
    pub(super) left: u64,
    pub(super) length: u64,
    pub(super) local_at: Position,
    pub(super) remote_at: Position,
    /// Number of segments of the receive that the request consumes.
    pub(super) receive: Option<u32>,
    pub(super) checked: bool,
    /// Number of segments mapped for this request.
    pub(super) maps: u32,
    /// The store instructions for a WRITE whose length allows a choice.
    pub(super) stores: Stores,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Local<'a> {
    Segments(&'a [LocalSegment]),
    Slices(&'a [IoSlice<'a>]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remote {
    /// The peer's next receive.
    Receive,
    /// The segment that the request names.
    Segment(RemoteSegment),
}

/// A position in a list of segments or slices.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Position {
    index: usize,
    pub(super) offset: u64,
}

impl<'a> Task<'a> {
    pub(super) fn new(operation: &Operation<'a>) -> Self {
        let (data, remote, direction, immediate) = match *operation {
            Operation::Send { data, immediate } => (data, Remote::Receive, Direction::ToPeer, immediate),
            Operation::Write { data, remote, immediate } => {
                (data, Remote::Segment(remote), Direction::ToPeer, immediate)
            }
            Operation::Read { into, remote } => {
                (Payload::Registered(into), Remote::Segment(remote), Direction::FromPeer, None)
            }
        };
        let local = match data {
            Payload::Registered(segments) => Local::Segments(segments),
            Payload::Inline(slices) => Local::Slices(slices),
        };
        let length = data.length();
        Self {
            local,
            remote,
            direction,
            immediate,
            in_order: ends_with_a_word(operation, length),
            left: length,
            length,
            local_at: Position::default(),
            remote_at: Position::default(),
            receive: None,
            checked: false,
            maps: 0,
            stores: Stores::Cached,
        }
    }

    /// Returns the number of bytes to copy next, at most `contiguous` and within `budget`. If the last word must be stored
    /// last, this function never cuts that word.
    pub(super) fn cut(&self, contiguous: u64, budget: u64) -> u64 {
        if !self.in_order {
            return contiguous.min(budget);
        }
        if contiguous == self.left && contiguous <= budget.max(WORD) {
            return contiguous;
        }
        contiguous.min(budget).min(self.left.saturating_sub(WORD))
    }

    /// Returns whether the request is a WRITE: it writes to a place in the peer's memory that the request names.
    pub(super) fn is_write(&self) -> bool {
        self.direction == Direction::ToPeer && matches!(self.remote, Remote::Segment(_))
    }

    /// Returns the direction and kind of the copies.
    pub(super) fn copy_mode(&self) -> CopyMode {
        let past_caches = self.length >= stores::PAST_CACHES || self.stores == Stores::Streaming;
        CopyMode { direction: self.direction, past_caches }
    }

    /// Returns the right that the local memory must have.
    pub(super) fn local_access(&self) -> Access {
        match self.direction {
            Direction::ToPeer => Access::LOCAL_READ,
            Direction::FromPeer => Access::LOCAL_WRITE,
        }
    }

    /// Returns the right that the peer's memory must have.
    pub(super) fn remote_access(&self) -> Access {
        match (self.remote, self.direction) {
            (Remote::Receive, _) => Access::LOCAL_WRITE,
            (Remote::Segment(_), Direction::ToPeer) => Access::REMOTE_WRITE,
            (Remote::Segment(_), Direction::FromPeer) => Access::REMOTE_READ,
        }
    }

    /// Returns the next piece of local memory: its start, its length, and the segment to check it against.
    pub(super) fn local_piece(&mut self) -> (*mut u8, u64, Option<LocalSegment>) {
        match self.local {
            Local::Segments(segments) => {
                let lengths = segments.iter().map(LocalSegment::length);
                match self.local_at.settle(lengths).and_then(|index| segments.get(index)) {
                    Some(segment) => {
                        let offset = self.local_at.offset;
                        let address = segment.address().wrapping_add(offset);
                        (address as *mut u8, segment.length() - offset, Some(*segment))
                    }
                    None => (std::ptr::null_mut(), 0, None),
                }
            }
            Local::Slices(slices) => {
                let lengths = slices.iter().map(|slice| slice.len() as u64);
                match self.local_at.settle(lengths).and_then(|index| slices.get(index)) {
                    Some(slice) => {
                        let rest = &slice[self.local_at.offset as usize..];
                        (rest.as_ptr().cast_mut(), rest.len() as u64, None)
                    }
                    None => (std::ptr::null_mut(), 0, None),
                }
            }
        }
    }

    /// Returns the next piece of the peer's memory.
    pub(super) fn remote_piece(&mut self, connection: &Connection, receive: u32) -> Piece {
        match self.remote {
            Remote::Segment(remote) => Piece {
                address: remote.address.wrapping_add(self.remote_at.offset),
                length: self.left,
                key: remote.rkey.0,
            },
            Remote::Receive => {
                let link = &connection.link;
                let segments = self.receive.unwrap_or(0);
                let lengths = (0..segments).map(|index| link.piece(receive, index).length);
                match self.remote_at.settle(lengths) {
                    Some(index) => {
                        let piece = link.piece(receive, index as u32);
                        Piece {
                            address: piece.address.wrapping_add(self.remote_at.offset),
                            // The peer may have changed the length meanwhile.
                            length: piece.length.saturating_sub(self.remote_at.offset),
                            ..piece
                        }
                    }
                    None => Piece { address: 0, length: 0, key: 0 },
                }
            }
        }
    }
}

/// Returns whether the destination of `length` bytes ends with a word that is aligned and in one piece.
fn ends_with_a_word(operation: &Operation<'_>, length: u64) -> bool {
    let (address, length) = match *operation {
        Operation::Send { .. } => return false,
        Operation::Write { remote, .. } => (remote.address, length),
        Operation::Read { into, .. } => match into.iter().rfind(|segment| segment.length() > 0) {
            Some(last) => (last.address(), last.length()),
            None => return false,
        },
    };
    length >= WORD && address.wrapping_add(length).is_multiple_of(WORD)
}

impl Position {
    /// Moves to the next entry that has bytes left. Returns its index; `None` at the end.
    fn settle(&mut self, lengths: impl Iterator<Item = u64>) -> Option<usize> {
        for length in lengths.skip(self.index) {
            if self.offset < length {
                return Some(self.index);
            }
            self.index += 1;
            self.offset = 0;
        }
        None
    }
}
