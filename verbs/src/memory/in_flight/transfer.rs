//! One transfer: the memory it uses, and the requests it becomes.

use std::io::IoSlice;
use std::sync::Arc;

use super::super::pieces::{Block, Lease};
use super::super::region::{MemRegion, RemotePlace};
use super::super::registrations::{LocalRegistrations, segment_of};
use super::ranges::{CopyRange, CopyRanges, Cursor};
use crate::{
    CompletionStatus, LocalSegment, MemoryRegion, Operation, Payload, PostErrorKind, RemoteSegment,
    VerbsError,
};

/// What is to be moved, and what is to be told at its end.
#[derive(Debug)]
pub struct Transfer<T> {
    local: LocalMemory,
    kind: TransferKind,
    ranges: CopyRanges,
    remote: RemotePlace,
    notice: Option<Notice>,
    token: T,
    cursor: Cursor,
    /// Whether the request that ends it was made.
    ended: bool,
    registered: Option<Arc<dyn MemoryRegion>>,
    first: Option<u64>,
    last: Option<u64>,
    status: CompletionStatus,
}

/// The memory of this process that a transfer uses.
#[derive(Debug)]
pub enum LocalMemory {
    /// Read or written.
    Region(MemRegion),
    /// Read.
    Lease(Lease),
    /// Read; a copy of what could not be sent from where it was.
    Block(Block),
    /// Read, and small: it goes inline.
    Bytes(Vec<u8>),
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// A message into the peer's next receive; one block.
    Send,
}

/// What the peer is told when all bytes of a write are where they belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// This 64-bit word is written after them.
    Word(RemoteSegment, u64),
    /// It has a receive completion with this.
    Immediate(u32),
}

/// A transfer that is over.
#[derive(Debug)]
pub struct FinishedTransfer<T> {
    pub token: T,
    pub local: LocalMemory,
    pub status: CompletionStatus,
}

/// What becomes one request.
#[derive(Clone, Copy, Debug)]
pub struct RequestPart {
    bytes: Option<CopyRange>,
    notice: Option<Notice>,
    last: bool,
}

impl RequestPart {
    pub fn bytes(&self) -> u64 {
        self.bytes.map_or(0, |block| block.length)
    }

    pub fn is_last(&self) -> bool {
        self.last
    }
}

impl<T> Transfer<T> {
    /// Moves `ranges` between `local` and `remote`; the caller has seen to it that they lie within both.
    pub fn new(
        local: LocalMemory,
        kind: TransferKind,
        ranges: CopyRanges,
        remote: RemotePlace,
        token: T,
    ) -> Self {
        let (cursor, status) = (Cursor::default(), CompletionStatus::Success);
        let (notice, registered, first, last) = (None, None, None, None);
        Self {
            local,
            kind,
            ranges,
            remote,
            notice,
            token,
            cursor,
            ended: false,
            registered,
            first,
            last,
            status,
        }
    }

    /// Has the peer told when a write is complete.
    pub fn notify(mut self, notice: Notice) -> Self {
        self.notice = Some(notice);
        self
    }

    /// Ends it before it began.
    pub fn refuse(self) -> FinishedTransfer<T> {
        debug_assert!(self.first.is_none());
        FinishedTransfer {
            token: self.token,
            local: self.local,
            status: CompletionStatus::WorkRequestFlushed,
        }
    }

    /// Has the device know the memory.
    pub fn register(&mut self, known: &mut LocalRegistrations) -> Result<(), PostErrorKind> {
        if self.registered.is_none() {
            self.registered = match &self.local {
                LocalMemory::Region(region) => Some(known.region(region).map_err(|error| refused(&error))?),
                LocalMemory::Lease(lease) => Some(known.lease(lease).map_err(|error| refused(&error))?),
                LocalMemory::Block(_) | LocalMemory::Bytes(_) => None,
            };
        }
        Ok(())
    }

    /// The next request's worth; `None` at the end. A transfer of no bytes is one request all the same, so that it completes.
    pub fn next_piece(&mut self, most: u64) -> Option<RequestPart> {
        if self.ended {
            return None;
        }
        let bytes = self.ranges.next(&mut self.cursor, most);
        let over = self.ranges.is_over(&self.cursor);
        // The word is a request of its own, behind the bytes.
        let word_follows = matches!(self.notice, Some(Notice::Word(..))) && bytes.is_some();
        self.ended = over && !word_follows;
        let notice = self.notice.filter(|_| self.ended);
        Some(RequestPart { bytes, notice, last: self.ended })
    }

    /// Names the local bytes of a piece; nothing if they go inline.
    pub fn segment(&self, piece: &RequestPart) -> Option<LocalSegment> {
        let block = piece.bytes?;
        let range = block.local as usize..(block.local + block.length) as usize;
        match (&self.local, &self.registered) {
            (LocalMemory::Region(region), Some(by)) => {
                debug_assert!(self.kind == TransferKind::Read || self.kind == TransferKind::Write);
                // SAFETY: this transfer owns the region from before the request is posted until it has completed, or its
                // queue pair is gone: `InFlight` gives it out in `FinishedTransfer` alone.
                Some(unsafe { segment_of(region, &**by, range) })
            }
            (LocalMemory::Lease(lease), Some(by)) => Some(lease.segment_in(&**by, range)),
            (LocalMemory::Block(block), _) => block.segment(range).ok(),
            (LocalMemory::Region(_) | LocalMemory::Lease(_) | LocalMemory::Bytes(_), _) => None,
        }
    }

    /// Lends the requests that `pieces` become to `then`.
    pub fn with_requests<R>(
        &self,
        pieces: &[(RequestPart, Option<LocalSegment>)],
        then: impl FnOnce(&[Operation<'_>]) -> R,
    ) -> R {
        let words: Vec<[u8; 8]> = pieces.iter().map(|(piece, _)| word(piece)).collect();
        let slices: Vec<[IoSlice<'_>; 1]> =
            pieces.iter().zip(&words).map(|((piece, _), word)| [self.inline(piece, word)]).collect();
        let operations: Vec<_> = pieces
            .iter()
            .zip(&slices)
            .map(|((piece, segment), slices)| self.operation(piece, segment, slices))
            .collect();
        then(&operations)
    }

    /// What of a piece goes inline.
    fn inline<'a>(&'a self, piece: &RequestPart, word: &'a [u8]) -> IoSlice<'a> {
        IoSlice::new(match (&self.local, piece.bytes) {
            (LocalMemory::Bytes(bytes), Some(block)) => {
                bytes.get(block.local as usize..(block.local + block.length) as usize).unwrap_or_default()
            }
            (_, None) if matches!(piece.notice, Some(Notice::Word(..))) => word,
            _ => &[],
        })
    }

    fn operation<'a>(
        &self,
        piece: &RequestPart,
        segment: &'a Option<LocalSegment>,
        slices: &'a [IoSlice<'a>],
    ) -> Operation<'a> {
        let data = match segment {
            Some(segment) => Payload::Registered(std::slice::from_ref(segment)),
            None => Payload::Inline(slices),
        };
        let immediate = match piece.notice {
            Some(Notice::Immediate(value)) => Some(value),
            _ => None,
        };
        let offset = piece.bytes.map_or(0, |block| block.remote);
        let remote = RemoteSegment {
            address: self.remote.start.address.wrapping_add(offset),
            rkey: self.remote.start.rkey,
        };
        match (self.kind, piece.notice) {
            (TransferKind::Send, _) => Operation::Send { data, immediate },
            (TransferKind::Read, _) => {
                let into = segment.as_ref().map_or(&[][..], std::slice::from_ref);
                Operation::Read { into, remote }
            }
            (TransferKind::Write, Some(Notice::Word(place, _))) if piece.bytes.is_none() => {
                Operation::Write { data, remote: place, immediate: None }
            }
            (TransferKind::Write, _) => Operation::Write { data, remote, immediate },
        }
    }

    /// Requests `first..=last` were made of it.
    pub fn posted(&mut self, first: u64, last: u64) {
        self.first.get_or_insert(first);
        if self.ended {
            self.last = Some(last);
        }
    }

    /// Number of its last request, once that was posted.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Whether a request of it is among those up to `number`.
    pub fn began_before(&self, number: u64) -> bool {
        self.first.is_some_and(|first| first <= number)
    }

    /// Whether request `number` is one of its own.
    pub fn covers(&self, number: u64) -> bool {
        self.began_before(number) && self.last.is_none_or(|last| number <= last)
    }

    /// It did not succeed; the first reason stays.
    pub fn fail(&mut self, status: CompletionStatus) {
        if self.status == CompletionStatus::Success {
            self.status = status;
        }
    }

    /// The device is done with it.
    pub fn finish(self) -> FinishedTransfer<T> {
        FinishedTransfer { token: self.token, local: self.local, status: self.status }
    }
}

/// The word that a piece writes, if it does.
fn word(piece: &RequestPart) -> [u8; 8] {
    match piece.notice {
        Some(Notice::Word(_, value)) => value.to_ne_bytes(),
        _ => [0; 8],
    }
}

/// Logs why the device refuses the memory of a transfer, and returns the error of the transfer.
fn refused(error: &VerbsError) -> PostErrorKind {
    crate::throttled!(warn, %error, "memory for a transfer can't be registered");
    PostErrorKind::Refused(libc::ENOMEM)
}
