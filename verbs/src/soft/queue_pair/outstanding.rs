//! Requests of this side: those that wait in the send queue, and those that were started and whose
//! completions have not been taken.

use std::io::IoSlice;

use super::source::{self, Stores};
use crate::soft::device::PAST_CACHES;
use crate::soft::domain::Domain;
use crate::{Access, CompletionOpcode, CompletionStatus, LocalSegment, Operation, Payload, SendRequest};

/// A request that was started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outstanding {
    pub(super) wr_id: u64,
    pub(super) opcode: CompletionOpcode,
    pub(super) signaled: bool,
    pub(super) progress: Progress,
}

/// The progress of a request that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// All its bytes are in the ring, which reaches up to `end`.
    InRing {
        end: u64,
    },
    /// The peer takes its bytes from our memory. The record reaches up to `end` in the ring.
    Pulled {
        end: u64,
    },
    /// The peer puts the bytes of the READ into its ring. The request reaches up to `end` in our ring.
    Reading {
        end: u64,
    },
    /// All bytes of the READ have come.
    Read,
    Failed(CompletionStatus),
    /// The queue pair ended before the request began.
    Flushed,
}

/// A READ whose bytes come through the peer's ring.
#[derive(Debug)]
pub(super) struct Reading {
    into: Vec<LocalSegment>,
    total: u64,
    done: u64,
}

impl Reading {
    pub(super) fn new(into: &[LocalSegment]) -> Self {
        Self { into: into.to_vec(), total: LocalSegment::total(into), done: 0 }
    }

    /// Stores the next bytes. Returns whether the READ is complete.
    ///
    /// # Errors
    /// The status of the READ; [`Fatal`](CompletionStatus::Fatal) if the peer sent other bytes than asked
    /// for.
    ///
    /// # Safety
    /// - `from` must be valid for reading `length` bytes.
    /// - The send queue must be locked.
    pub(super) unsafe fn store(
        &mut self,
        domain: &Domain,
        from: *const u8,
        length: u64,
        last: bool,
    ) -> Result<bool, CompletionStatus> {
        if length > self.total - self.done || last != (self.done + length == self.total) {
            return Err(CompletionStatus::Fatal);
        }
        if !source::are_registered(&self.into, domain, Access::LOCAL_WRITE) {
            return Err(CompletionStatus::LocalProtection);
        }
        let stores = Stores { ends_a_word: last, past_caches: self.total >= PAST_CACHES };
        // SAFETY:
        // - `from` is valid, as the caller promises; and
        // - the segments have these bytes, as checked above, and are registered while the send queue is
        //   locked.
        unsafe { source::scatter(&self.into, self.done, from, length, stores) };
        self.done += length;
        Ok(last)
    }
}

/// A request that waits, with a copy of its segments or of its inline payload.
#[derive(Debug)]
pub(super) struct Waiting {
    wr_id: u64,
    /// Whether a completion of the request's success is wanted.
    pub(super) signaled: bool,
    /// Bytes that are in the ring already.
    done: u64,
    /// The operation without its bytes.
    operation: Operation<'static>,
    segments: Vec<LocalSegment>,
    /// The payload, if it was inline.
    inline: Option<Vec<u8>>,
}

impl Waiting {
    /// Copies a request of which `done` bytes are in the ring.
    pub(super) fn new(request: &SendRequest<'_>, done: u64) -> Self {
        let none = Payload::Inline(&[]);
        let (operation, data) = match request.operation {
            Operation::Send { data, immediate } => (Operation::Send { data: none, immediate }, data),
            Operation::Write { data, remote, immediate } => {
                (Operation::Write { data: none, remote, immediate }, data)
            }
            Operation::Read { into, remote } => {
                (Operation::Read { into: &[], remote }, Payload::Registered(into))
            }
        };
        let (segments, inline) = match data {
            Payload::Registered(segments) => (segments.to_vec(), None),
            Payload::Inline(slices) => {
                // Slice by slice: an iterator over bytes would copy one at a time.
                let mut whole = Vec::with_capacity(slices.iter().map(|slice| slice.len()).sum());
                slices.iter().for_each(|slice| whole.extend_from_slice(slice));
                (Vec::new(), Some(whole))
            }
        };
        Self { wr_id: request.wr_id, signaled: request.signaled, done, operation, segments, inline }
    }

    /// Calls `then` with the posted request and the number of bytes that are in the ring, which `then` may
    /// change.
    pub(super) fn with_request<T>(&mut self, then: impl FnOnce(&SendRequest<'_>, &mut u64) -> T) -> T {
        let slice = [IoSlice::new(self.inline.as_deref().unwrap_or_default())];
        let data = match self.inline {
            Some(_) => Payload::Inline(&slice),
            None => Payload::Registered(&self.segments),
        };
        let operation = match self.operation {
            Operation::Send { immediate, .. } => Operation::Send { data, immediate },
            Operation::Write { remote, immediate, .. } => Operation::Write { data, remote, immediate },
            Operation::Read { remote, .. } => Operation::Read { into: &self.segments, remote },
        };
        then(&SendRequest { wr_id: self.wr_id, operation, signaled: self.signaled }, &mut self.done)
    }
}
