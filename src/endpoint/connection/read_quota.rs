//! Fairness of reading: how many bytes a task reads before other tasks run.

/// The number of bytes that a task has read since other tasks last ran.
///
/// HTTP/2 reads all bytes that have arrived before it does anything else. If 32 small calls arrive together, it reads all, then
/// serves all, then sends all answers. Meanwhile the other end has nothing to do. So a reader of small messages goes to the end
/// of the runtime's queue after each [`QUANTUM`](Self::QUANTUM): the calls that it read are served and answered before it reads
/// the next calls (`compare`, 64 B × 32 in flight: more than twice the calls per second).
///
/// A reader of large messages does so after each [`LARGE_QUANTUM`](Self::LARGE_QUANTUM). Otherwise, a client that sends many large
/// messages delays the calls of the other clients by all of them (`cargo bench --bench neighbours`, a busy neighbour).
#[derive(Debug, Default)]
pub(super) struct ReadQuota {
    /// Of small messages.
    taken: usize,
    /// Of large messages.
    large: usize,
    /// There is no quota, because the reader only passes bytes on.
    unlimited: bool,
}

impl ReadQuota {
    /// Bytes of small messages that are read before other tasks run: two or three small calls with their headers.
    const QUANTUM: usize = 512;
    /// The last bytes of a message, up to this many, are read in pieces, because calls end and begin there.
    const TAIL: usize = 4096;
    /// Longer messages have a quantum of their own. They are parts of a large message, so their reader gains little from a wait. The
    /// value is most of an HTTP/2 frame of the default size.
    const SMALL: usize = 12 * 1024;
    /// Bytes of large messages that are read before other tasks run: more than a call of 64 KiB, which so has no wait.
    const LARGE_QUANTUM: usize = 72 * 1024;

    /// Notes that other tasks have run.
    pub(super) fn renew(&mut self) {
        (self.taken, self.large) = (0, 0);
    }

    /// Ends the limit for good.
    pub(super) fn disable(&mut self) {
        *self = Self { unlimited: true, ..Self::default() };
    }

    /// Returns whether other tasks should run now.
    pub(super) fn is_used_up(&self) -> bool {
        self.taken >= Self::QUANTUM || self.large >= Self::LARGE_QUANTUM
    }

    /// Returns how many of the next bytes may be read now, at most `room`, and counts them. They belong to a message of
    /// `whole` bytes of which `left` have not been read.
    pub(super) fn take(&mut self, left: usize, whole: usize, room: usize) -> usize {
        let mut count = left.min(room);
        if self.unlimited {
            return count;
        }
        if whole > Self::SMALL {
            self.large += count;
            return count;
        }
        if left <= Self::TAIL {
            count = count.min(Self::QUANTUM.saturating_sub(self.taken).max(1));
        }
        self.taken += count;
        count
    }
}
