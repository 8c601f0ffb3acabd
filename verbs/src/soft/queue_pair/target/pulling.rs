//! Messages whose bytes this end takes from the peer's memory.

use std::sync::Arc;

use super::super::connection::Connection;
use super::super::message::Pull;
use super::super::source::{Stores, WORD};
use super::{Fault, Output, Target, TargetState, VISIT_BYTES};
use crate::copy_bytes;
use crate::soft::peers::segments::Segment;
use crate::soft::shared::end::EndState;
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::ring::Record;
use crate::soft::shared::states::unless_revoked;

impl Target {
    /// Takes bytes of a message from the peer's memory, within the limit of a visit. Returns the record when the message is
    /// complete.
    pub(super) fn go_on_pulling(
        &self,
        state: &mut TargetState,
        connection: &Connection,
        bytes: &mut u64,
        output: &mut Output<'_, '_>,
    ) -> Result<Option<Record>, Fault> {
        let (Some(mut pull), Some(mut message)) = (state.pull.take(), state.message.take()) else {
            return Err(Fault::Violation);
        };
        // The last word is stored after the check that the memory was valid.
        let body = message.total.saturating_sub(WORD);
        while message.done < body && *bytes < VISIT_BYTES {
            let wanted = (body - message.done).min(VISIT_BYTES);
            let (mapping, offset, length) = self.next_piece(state, &mut pull, wanted)?;
            let from = mapping.range(offset, length).ok_or(Fault::Violation)?.as_ptr().cast_const();
            let stores = Stores { ends_a_word: false, past_caches: message.goes_past_caches() };
            // SAFETY: the mapping has these bytes, and lives until the end of the block.
            unsafe { self.put(state, &mut message, from, length, stores)? };
            *bytes += length;
        }
        if message.done < body {
            (state.pull, state.message) = (Some(pull), Some(message));
            return Ok(None);
        }
        let mut word = [0; WORD as usize];
        let last = &mut word[..(message.total - message.done) as usize];
        let mut at = 0;
        while at < last.len() {
            let (mapping, offset, length) = self.next_piece(state, &mut pull, (last.len() - at) as u64)?;
            let from = mapping.range(offset, length).ok_or(Fault::Violation)?.as_ptr().cast_const();
            // SAFETY: the mapping has these bytes; the part of the word is ours.
            unsafe { copy_bytes(from, last[at..].as_mut_ptr(), length as usize) };
            at += length as usize;
        }
        if !unless_revoked::<Native, Shipping>(|| connection.end.state() != EndState::Ended) {
            self.core.stop_draining();
            self.core.fail();
            return Ok(None);
        }
        let stores = Stores { ends_a_word: true, past_caches: false };
        // SAFETY: `word` is ours.
        unsafe { self.put(state, &mut message, word.as_ptr(), at as u64, stores)? };
        self.finish(state, &message, output)?;
        Ok(Some(pull.record))
    }

    /// Returns the next piece of the peer's memory, at most `wanted` bytes, and goes on behind it.
    fn next_piece(
        &self,
        state: &mut TargetState,
        pull: &mut Pull,
        wanted: u64,
    ) -> Result<(Arc<Segment>, u64, u64), Fault> {
        let (id, offset, length) = pull.next(wanted).ok_or(Fault::Violation)?;
        let mapping = state.pulls.segment(&self.core, id).ok_or(Fault::Violation)?;
        Ok((mapping, offset, length))
    }
}
