//! Requests that this end has started, and whose completions have not been taken.

use super::source::{self, Stores};
use crate::soft::domain::Domain;
use crate::soft::limits::PAST_CACHES;
use crate::{Access, CompletionOpcode, CompletionStatus, LocalSegment};

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
        Self { into: into.to_vec(), total: source::total(into), done: 0 }
    }

    /// Stores the next bytes. Returns whether the READ is complete.
    ///
    /// # Errors
    /// The status of the READ; [`Fatal`](CompletionStatus::Fatal) if the peer sent other bytes than asked for.
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
        if source::check(&self.into, domain, Access::LOCAL_WRITE).is_err() {
            return Err(CompletionStatus::LocalProtection);
        }
        let stores = Stores { ends_a_word: last, past_caches: self.total >= PAST_CACHES };
        // SAFETY:
        // - `from` is valid, as the caller promises; and
        // - the segments have these bytes, as checked above, and are registered while the send queue is locked.
        unsafe { source::scatter(&self.into, self.done, from, length, stores) };
        self.done += length;
        Ok(last)
    }
}
