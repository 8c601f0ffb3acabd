//! READs through the rings: the bytes of ours come through the peer's ring, and those of the peer go through ours.

use std::sync::atomic::Ordering::Relaxed;

use super::super::connection::Connection;
use super::super::outstanding::Progress;
use super::super::source;
use super::{NOT_STUCK, SendQueue, SendState};
use crate::soft::limits::MAX_MESSAGE;
use crate::soft::shared::end::EndState;
use crate::soft::shared::ring::{Flags, Header, Kind};
use crate::{Access, CompletionStatus, LocalSegment, RemoteSegment};

impl SendQueue {
    /// Carries out a READ if this end can copy the bytes now, and no earlier request waits. Returns whether the bytes have arrived.
    pub(in crate::soft::queue_pair) fn read_at_once(
        &self,
        into: &[LocalSegment],
        remote: RemoteSegment,
    ) -> bool {
        let mut queue = self.lock();
        let queue = &mut *queue;
        let Some(connection) = self.core.connection() else { return false };
        self.core.is_ready_to_send()
            && !self.core.domain.device().is_forked()
            && into.len() <= self.core.capacity.send_segments as usize
            && source::total(into) <= MAX_MESSAGE
            && queue.waiting.is_empty()
            && !queue.stopped
            && !self.core.has_failed()
            && connection.end.state() == EndState::Ready
            && !connection.peer.is_dead()
            && source::check(into, &self.core.domain, Access::LOCAL_WRITE).is_ok()
            && self.sees_writes(queue, connection)
            && queue.pulls.read(&self.core, connection, into, remote)
    }

    /// Returns whether the peer has taken the WRITEs of this end, so that a READ sees them.
    pub(super) fn sees_writes(&self, queue: &mut SendState, connection: &Connection) -> bool {
        if queue.last_write > queue.writer.freed()
            && queue.writer.reclaim(connection.end.taken_word()).is_err()
        {
            self.violation();
        }
        queue.last_write <= queue.writer.freed()
    }

    /// Stores the bytes of a record with data of a READ. Returns false if no READ waits for them.
    ///
    /// # Safety
    /// - `from` must be valid for reading `length` bytes.
    pub(crate) unsafe fn store_read(&self, from: *const u8, length: u64, last: bool) -> bool {
        let mut queue = self.lock();
        let queue = &mut *queue;
        let Some(reading) = queue.reading.front_mut() else { return false };
        // SAFETY: `from` is valid, as the caller promises.
        let stored = unsafe { reading.store(&self.core.domain, from, length, last) };
        match stored {
            Ok(complete) => {
                if complete {
                    queue.finish_read();
                    self.ended.store(true, Relaxed);
                    // The poller of sends may sleep: it did not look since, or it is another one than that of the records.
                    self.core.send_queue.notify();
                }
                true
            }
            Err(status) => {
                if let Some(first) =
                    queue.outstanding.iter_mut().find(|it| matches!(it.progress, Progress::Reading { .. }))
                {
                    first.progress = Progress::Failed(status);
                    queue.reading.pop_front();
                    self.ended.store(true, Relaxed);
                }
                self.core.fail();
                status != CompletionStatus::Fatal
            }
        }
    }

    /// Puts bytes for a READ of the peer into the ring: a piece of `left` bytes at `from`. Returns the number of bytes; `None` if
    /// there is no room now.
    ///
    /// # Safety
    /// - `from` must be valid for reading `left` bytes.
    pub(crate) unsafe fn serve(
        &self,
        queue: &mut SendState,
        connection: &Connection,
        from: *const u8,
        left: u64,
    ) -> Option<u64> {
        let chunk = self.chunk(queue, connection, left)?;
        let place = queue.writer.reserve(self.core.end.ring(), chunk)?;
        let to = self.core.end.payload(place.payload(), chunk)?;
        // SAFETY:
        // - `to` is in the ring of our own end, which only this thread writes while the send queue is locked; and
        // - `from` is valid, as the caller promises.
        unsafe { crate::copy_bytes(from, to, chunk as usize) };
        let header = Header {
            kind: Kind::ReadData,
            flags: Flags::default().with_if(Flags::LAST, chunk == left),
            length: chunk as u32,
            immediate: 0,
            address: 0,
            key: 0,
            total: left,
        };
        queue.publish(&self.core.end, &place, &header);
        Some(chunk)
    }

    /// Tells the peer of the bytes that [`serve`](Self::serve) put into the ring. `left`: whether READs of the peer have bytes left.
    /// `stuck_at`: the position that the peer had taken before the ring had no room for them, if that is the reason.
    pub(crate) fn served(&self, queue: &mut SendState, left: bool, stuck_at: Option<u64>) {
        queue.serves = left;
        self.reads_stuck_at.store(stuck_at.unwrap_or(NOT_STUCK), Relaxed);
        self.want_no_needless_progress(queue);
        self.after(queue);
    }
}
