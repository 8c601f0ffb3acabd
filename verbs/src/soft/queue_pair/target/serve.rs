//! READs of the peer that this end serves through its ring.

use super::super::connection::Connection;
use super::super::left::Left;
use super::super::pulls::Pulls;
use super::super::send::SendQueue;
use super::{Fault, Served, Target, TargetState, VISIT_BYTES};
use crate::soft::limits::{MAX_MESSAGE, MAX_READS};
use crate::soft::shared::attention::Attention;
use crate::soft::shared::end::Failure;
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::ring::Record;
use crate::{Access, CompletionStatus};

impl Target {
    /// Takes a READ of the peer.
    pub(super) fn begin_read(
        &self,
        state: &mut TargetState,
        connection: &Connection,
        record: &Record,
        at: u64,
    ) -> Result<(), Fault> {
        let header = &record.header;
        if header.total > MAX_MESSAGE || state.served.len() == MAX_READS {
            return Err(Fault::Violation);
        }
        if header.total > 0 {
            self.check(header.key, header.address, header.total, Access::REMOTE_READ)?;
            Pulls::offer_for_reads(&self.core, connection, header.key, header.address, header.total);
        }
        state.served.push_back(Served { at, address: header.address, key: header.key, left: header.total });
        Ok(())
    }

    /// Puts bytes for the peer's READs into our ring, as far as there is room, within the limit of a visit. Returns [`Left::Work`] if the
    /// limit ended the visit. There is still room then, so no message of the peer will announce room. Returns
    /// [`Left::Message`] if some bytes went into the ring, and there is no room for the others.
    pub(super) fn serve(&self, state: &mut TargetState, connection: &Connection, sends: &SendQueue) -> Left {
        let mut queue = sends.lock();
        let (mut bytes, mut asked, mut more, mut stuck_at) = (0, false, false, None);
        while let Some(first) = state.served.front_mut() {
            if first.left > 0
                && self.check(first.key, first.address, first.left, Access::REMOTE_READ).is_err()
            {
                // The region was deregistered meanwhile.
                let failure = Failure { at: first.at, status: CompletionStatus::RemoteAccess };
                state.served.clear();
                drop(queue);
                self.core.refuse(failure);
                return Left::Nothing;
            }
            if bytes >= VISIT_BYTES {
                more = true;
                break;
            }
            // Before the look for room: see `SendQueue::run`.
            let taken = sends.taken_by_peer();
            // SAFETY: the range is registered, as just checked with the target locked.
            let put = unsafe { sends.serve(&mut queue, connection, first.address as *const u8, first.left) };
            let Some(count) = put else {
                if asked {
                    stuck_at = Some(taken);
                    break;
                }
                // The peer may have made room just before it could see that this end waits for room. So this thread looks again.
                self.core.want(Attention::STUCK);
                Attention::fence::<Native, Shipping>();
                asked = true;
                continue;
            };
            first.address += count;
            first.left -= count;
            bytes += count;
            if first.left == 0 {
                state.served.pop_front();
            }
        }
        sends.served(&mut queue, !state.served.is_empty(), stuck_at);
        Left::message_if(bytes > 0 && !state.served.is_empty()).max(Left::work_if(more))
    }
}
