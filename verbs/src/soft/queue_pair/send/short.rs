//! Short messages: one record, put into the ring at once. Most messages are short, so this way has nothing but what they need.

use super::super::outstanding::{Outstanding, Progress};
use super::super::source::Local;
use super::attempt::PULL;
use super::{SendQueue, SendState};
use crate::soft::shared::end::EndState;
use crate::soft::shared::ring::{Flags, Header, Kind, Place};
use crate::{CompletionOpcode, Operation, RemoteSegment, Rkey, SendRequest};

impl SendQueue {
    /// Puts a message of `total` bytes into the ring. Returns false if the message is not short, or something stands in its way; then
    /// no record was published, and [`attempt`](Self::attempt) finds the reason. (What this end knows of the peer's receives may be newer.)
    #[inline]
    pub(super) fn post_short(&self, queue: &mut SendState, request: &SendRequest<'_>, total: u64) -> bool {
        const NOWHERE: RemoteSegment = RemoteSegment { address: 0, rkey: Rkey(0) };
        let (kind, opcode, data, remote, immediate) = match request.operation {
            Operation::Send { data, immediate } => {
                (Kind::Send, CompletionOpcode::Send, data, NOWHERE, immediate)
            }
            Operation::Write { data, remote, immediate } => {
                (Kind::Write, CompletionOpcode::Write, data, remote, immediate)
            }
            Operation::Read { .. } => return false,
        };
        let takes_receive = kind == Kind::Send || immediate.is_some();
        let Some(connection) = self.core.connection() else { return false };
        let goes = total < PULL
            && queue.waiting.is_empty()
            && !queue.stopped
            && !self.core.has_failed()
            && connection.end.state() == EndState::Ready
            && !connection.peer.is_dead()
            && (!takes_receive || queue.has_receive(connection));
        let data = Local::from(data);
        if !goes || data.check(&self.core.domain).is_err() {
            return false;
        }
        let ring = self.core.end.ring();
        let Some(place) = queue.writer.reserve(ring, total) else { return false };
        if let Some(to) = self.core.end.payload(place.payload(), total) {
            // SAFETY:
            // - `to` is in the ring of our own end, which only this thread writes while the send queue is locked; and
            // - the segments were checked above, with the send queue locked.
            unsafe {
                let first = total.min(Place::WITH_TAG);
                if total > first {
                    data.copy_out(first, total - first, to.wrapping_add(first as usize));
                }
                data.copy_out(0, first, to);
            }
        }
        let header = Header {
            kind,
            flags: Flags::FIRST
                .with(Flags::LAST)
                .with_if(Flags::AWAITED, request.signaled)
                .with_if(Flags::IMMEDIATE, immediate.is_some()),
            length: total as u32,
            immediate: immediate.unwrap_or(0),
            address: remote.address,
            key: remote.rkey.0,
            total,
        };
        queue.writer.publish(ring, &place, &header);
        let end = queue.writer.head();
        queue.unannounced = true;
        if takes_receive {
            queue.unannounced_news = true;
            queue.receives_taken = queue.receives_taken.wrapping_add(1);
        }
        if kind == Kind::Write {
            queue.last_write = end;
        }
        queue.signaled += usize::from(request.signaled);
        queue.outstanding.push_back(Outstanding {
            wr_id: request.wr_id,
            opcode,
            signaled: request.signaled,
            progress: Progress::InRing { end },
        });
        true
    }
}
