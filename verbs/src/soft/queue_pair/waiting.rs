//! Requests that wait in the send queue.

use std::io::IoSlice;

use crate::{LocalSegment, Operation, Payload, RemoteSegment, SendRequest};

/// A request that waits, with a copy of its segments or of its inline payload.
#[derive(Debug)]
pub(super) struct Waiting {
    wr_id: u64,
    signaled: bool,
    /// Bytes that are in the ring already.
    done: u64,
    kind: WaitingKind,
    segments: Vec<LocalSegment>,
    /// The payload, if it was inline.
    inline: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug)]
enum WaitingKind {
    Send { immediate: Option<u32> },
    Write { remote: RemoteSegment, immediate: Option<u32> },
    Read { remote: RemoteSegment },
}

impl Waiting {
    /// Copies a request of which `done` bytes are in the ring.
    pub(super) fn new(request: &SendRequest<'_>, done: u64) -> Self {
        let (kind, data) = match request.operation {
            Operation::Send { data, immediate } => (WaitingKind::Send { immediate }, data),
            Operation::Write { data, remote, immediate } => (WaitingKind::Write { remote, immediate }, data),
            Operation::Read { into, remote } => (WaitingKind::Read { remote }, Payload::Registered(into)),
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
        Self { wr_id: request.wr_id, signaled: request.signaled, done, kind, segments, inline }
    }

    /// Returns whether a completion of the request's success is wanted.
    pub(super) fn is_signaled(&self) -> bool {
        self.signaled
    }

    /// Calls `then` with the posted request and the number of bytes that are in the ring, which `then` may change.
    pub(super) fn with_request<T>(&mut self, then: impl FnOnce(&SendRequest<'_>, &mut u64) -> T) -> T {
        let slice = [IoSlice::new(self.inline.as_deref().unwrap_or_default())];
        let data = match self.inline {
            Some(_) => Payload::Inline(&slice),
            None => Payload::Registered(&self.segments),
        };
        let operation = match self.kind {
            WaitingKind::Send { immediate } => Operation::Send { data, immediate },
            WaitingKind::Write { remote, immediate } => Operation::Write { data, remote, immediate },
            WaitingKind::Read { remote } => Operation::Read { into: &self.segments, remote },
        };
        then(&SendRequest { wr_id: self.wr_id, operation, signaled: self.signaled }, &mut self.done)
    }
}
