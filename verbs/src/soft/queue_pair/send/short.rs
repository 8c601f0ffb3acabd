//! Short messages: one record, put into the ring at once. Most messages are short, so this way has nothing but what they need.

use super::super::outstanding::Progress;
use super::super::source::Local;
use super::attempt::{PULL, Target};
use super::{SendQueue, SendState};
use crate::soft::shared::end::EndState;
use crate::soft::shared::ring::{Flags, Kind, Place};
use crate::{Operation, SendRequest};

impl SendQueue {
    /// Puts a message of `total` bytes into the ring. Returns false if the message is not short, or something stands in its way; then
    /// no record was published, and [`attempt`](Self::attempt) finds the reason. (What this end knows of the peer's receives may be newer.)
    #[inline]
    pub(super) fn post_short(&self, queue: &mut SendState, request: &SendRequest<'_>, total: u64) -> bool {
        let (data, target) = match request.operation {
            Operation::Send { data, immediate } => {
                (data, Target { kind: Kind::Send, remote: Target::NOWHERE, immediate })
            }
            Operation::Write { data, remote, immediate } => {
                (data, Target { kind: Kind::Write, remote, immediate })
            }
            Operation::Read { .. } => return false,
        };
        let Some(connection) = self.core.connection() else { return false };
        let goes = total < PULL
            && queue.waiting.is_empty()
            && !queue.stopped
            && !self.core.has_failed()
            && connection.end.state() == EndState::Ready
            && !connection.peer.is_dead()
            && (!target.takes_receive() || queue.has_receive(connection));
        let data = Local::from(data);
        if !goes || data.check(&self.core.domain).is_err() {
            return false;
        }
        let Some(place) = queue.writer.reserve(self.core.end.ring(), total) else { return false };
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
        let flags = Flags::FIRST.with(Flags::LAST).with_if(Flags::AWAITED, request.signaled);
        queue.publish(&self.core.end, &place, &target.header(flags, total, total));
        queue.started(request, Progress::InRing { end: queue.writer.head() });
        true
    }
}
