//! Carrying out a request: the check of its keys, rights and ranges, and the copy between the memory of this process and the
//! peer's memory. The last word is copied last.

use std::time::Instant;

use super::connection::Connection;
use super::core::Core;
use super::place::{Obstacle, Place, Segments, WORD};
use super::stores::Chooser;
use super::task::{Local, Remote, Task};
use crate::soft::limits::MAX_SEGMENTS;
use crate::soft::shared::link::{Delivery, DeliveryKind, LinkState, Piece};
use crate::{CompletionStatus, LocalSegment, Operation, VerbsError, copy_bytes};

/// Most bytes copied in one section. A thread that takes memory back waits for the copy of at most this many bytes.
const SECTION_BYTES: u64 = 1 << 20;

/// Most segments that one request maps. No receive of a well-behaved peer has more.
const MAX_MAPS: u32 = MAX_SEGMENTS;

/// The state of a send queue as the initiator of transfers: the peer's next receive, and the peer's memory.
#[derive(Debug, Default)]
pub(super) struct Initiator {
    /// Number of the peer's next receive.
    receive: u32,
    /// The peer's shared memory that this queue pair has used.
    segments: Segments,
    /// The faster kind of stores, by length of the request.
    stores: Chooser,
    /// Whether receives were filled for which the peer was not rung yet.
    pub(super) unannounced: bool,
}

/// The outcome of an attempt to carry out a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done(CompletionStatus),
    Wait(Wait),
}

/// The reason why a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// The peer has no receive posted.
    Receive,
    /// The peer has not connected to us yet.
    Connection,
}

/// The outcome of one section.
enum Step {
    /// There is more to copy.
    More,
    /// The peer's segment must be mapped first.
    Map {
        segment: u64,
        key: u32,
    },
    End(Outcome),
}

const END: fn(CompletionStatus) -> Step = |status| Step::End(Outcome::Done(status));

impl Core {
    /// Carries out `operation`, unless it must wait.
    pub(super) fn transfer(
        &self,
        connection: &Connection,
        initiator: &mut Initiator,
        operation: &Operation<'_>,
    ) -> Outcome {
        let mut task = Task::new(operation);
        let chosen = task.is_write().then(|| initiator.stores.choose(task.length)).flatten();
        let Some(stores) = chosen else { return self.carry_out(connection, initiator, &mut task) };
        task.stores = stores;
        let start = Instant::now();
        let outcome = self.carry_out(connection, initiator, &mut task);
        if outcome == Outcome::Done(CompletionStatus::Success) {
            initiator.stores.record(task.length, start.elapsed());
        }
        outcome
    }

    fn carry_out(&self, connection: &Connection, initiator: &mut Initiator, task: &mut Task<'_>) -> Outcome {
        loop {
            let section = self.link.enter(&self.section);
            let step = self.step(connection, initiator, task);
            drop(section);
            match step {
                Step::More => {}
                Step::Map { .. } if task.maps == MAX_MAPS => {
                    connection.fail_peer();
                    return Outcome::Done(CompletionStatus::RemoteOperation);
                }
                Step::Map { segment, key } => {
                    task.maps += 1;
                    self.map(connection, initiator, segment, key);
                }
                Step::End(Outcome::Done(status)) => {
                    if matches!(
                        status,
                        CompletionStatus::RemoteAccess
                            | CompletionStatus::RemoteInvalidRequest
                            | CompletionStatus::RemoteOperation
                    ) {
                        connection.fail_peer();
                    }
                    return Outcome::Done(status);
                }
                Step::End(outcome) => return outcome,
            }
        }
    }

    /// Runs one section of the request.
    fn step(&self, connection: &Connection, initiator: &mut Initiator, task: &mut Task<'_>) -> Step {
        if connection.peer.is_dead() {
            return END(CompletionStatus::RetryExceeded);
        }
        match connection.link.state() {
            LinkState::Waiting => return Step::End(Outcome::Wait(Wait::Connection)),
            LinkState::Ready => {}
            LinkState::Ended => return END(CompletionStatus::RetryExceeded),
        }
        if !task.checked {
            if let Err(step) = self.check(connection, initiator, task) {
                return step;
            }
            task.checked = true;
        }
        let mut budget = SECTION_BYTES;
        while task.left > 0 && budget > 0 {
            match self.copy_piece(connection, initiator, task, budget) {
                Ok(copied) => {
                    // The last word is copied even if less than a word is left of the budget.
                    budget = budget.saturating_sub(copied);
                    task.left -= copied;
                }
                Err(step) => return step,
            }
        }
        if task.left > 0 {
            return Step::More;
        }
        if task.receive.is_some() {
            let kind = match task.remote {
                Remote::Receive => DeliveryKind::Send,
                Remote::Segment(_) => DeliveryKind::Write,
            };
            deliver(connection, initiator, task, kind);
        }
        END(CompletionStatus::Success)
    }

    /// Checks the whole request before the first byte moves.
    fn check(
        &self,
        connection: &Connection,
        initiator: &mut Initiator,
        task: &mut Task<'_>,
    ) -> Result<(), Step> {
        if let Local::Segments(segments) = task.local {
            let access = task.local_access();
            for segment in segments.iter().filter(|segment| segment.length() > 0) {
                if !self.domain.find_local(segment.lkey(), segment.address(), segment.length(), access) {
                    return Err(END(CompletionStatus::LocalProtection));
                }
            }
        }
        if let Remote::Segment(remote) = task.remote
            && task.length > 0
        {
            let access = task.remote_access();
            let found =
                connection.access.contains(access).then(|| connection.table.find(remote.rkey.0)).flatten();
            let good = found.is_some_and(|entry| {
                entry.domain == connection.domain
                    && entry.access.contains(access)
                    && entry.offset(remote.address, task.length).is_some()
            });
            if !good {
                return Err(END(CompletionStatus::RemoteAccess));
            }
        }
        if task.remote == Remote::Receive || task.immediate.is_some() {
            let Ok(posted) = connection.link.posted(initiator.receive) else {
                return Err(END(CompletionStatus::RemoteOperation));
            };
            let Some(segments) = posted else { return Err(Step::End(Outcome::Wait(Wait::Receive))) };
            task.receive = Some(segments);
            if task.remote == Remote::Receive {
                let room = (0..segments).fold(0u64, |sum, index| {
                    sum.saturating_add(connection.link.piece(initiator.receive, index).length)
                });
                if room < task.length {
                    deliver(connection, initiator, task, DeliveryKind::TooLong);
                    return Err(END(CompletionStatus::RemoteInvalidRequest));
                }
            }
        }
        Ok(())
    }

    /// Copies the bytes that are contiguous at both ends, up to `budget`. Returns their number.
    fn copy_piece(
        &self,
        connection: &Connection,
        initiator: &mut Initiator,
        task: &mut Task<'_>,
        budget: u64,
    ) -> Result<u64, Step> {
        let remote = task.remote_piece(connection, initiator.receive);
        let (here, here_length, key) = task.local_piece();
        let contiguous = here_length.min(remote.length).min(task.left);
        if contiguous == 0 {
            // The lists end before the message does, because the peer changed its receive meanwhile.
            if task.remote == Remote::Receive {
                deliver(connection, initiator, task, DeliveryKind::Protection);
            }
            return Err(END(CompletionStatus::RemoteOperation));
        }
        if task.in_order && task.left == WORD && contiguous < WORD {
            return self.gather_word(connection, initiator, task, remote);
        }
        let length = task.cut(contiguous, budget);
        self.check_local(task, here, length, key)?;
        let place = locate(connection, initiator, task, &Piece { length, ..remote })?;
        // SAFETY:
        // - `here` is either a piece of a slice that the caller lent us, or lies in a region of our own domain. That region
        //   was just found valid in this section, so it stays until the section ends;
        // - bytes go into it only if that region may be written, as `local_access` asked;
        // - the place was found in this section, for `length` bytes; and
        // - `cut` leaves at least a word for the end.
        let copied = unsafe {
            if task.in_order && length == task.left {
                place.copy_end(connection, here, length, task.copy_mode())
            } else {
                place.copy(connection, here, length, task.copy_mode())
            }
        };
        let copied = copied.map_err(END)?;
        task.local_at.offset += copied;
        task.remote_at.offset += copied;
        Ok(copied)
    }

    /// Stores the last word of a WRITE whose last word is spread over several pieces of local memory.
    fn gather_word(
        &self,
        connection: &Connection,
        initiator: &mut Initiator,
        task: &mut Task<'_>,
        remote: Piece,
    ) -> Result<u64, Step> {
        let place = locate(connection, initiator, task, &Piece { length: WORD, ..remote })?;
        let mut word = [0; WORD as usize];
        let mut rest = word.as_mut_slice();
        while !rest.is_empty() {
            let (here, here_length, key) = task.local_piece();
            let length = here_length.min(rest.len() as u64);
            if length == 0 {
                return Err(END(CompletionStatus::LocalOperation));
            }
            self.check_local(task, here, length, key)?;
            let (part, after) = rest.split_at_mut(length as usize);
            // SAFETY:
            // - `here` is valid for `length` bytes, for the reasons given in `copy_piece`; and
            // - `part` is ours, and has `length` bytes.
            unsafe { copy_bytes(here, part.as_mut_ptr(), part.len()) };
            rest = after;
            task.local_at.offset += length;
        }
        // SAFETY: the place was found in this section, for a word.
        unsafe { place.store(connection, word) }.map_err(END)?;
        task.remote_at.offset += WORD;
        Ok(WORD)
    }

    /// Checks a piece of local memory, unless the piece is part of a slice that the caller lent us.
    fn check_local(
        &self,
        task: &Task<'_>,
        here: *mut u8,
        length: u64,
        segment: Option<LocalSegment>,
    ) -> Result<(), Step> {
        match segment {
            Some(segment)
                if !self.domain.find_local(segment.lkey(), here as u64, length, task.local_access()) =>
            {
                Err(END(CompletionStatus::LocalProtection))
            }
            _ => Ok(()),
        }
    }

    /// Maps a segment of the peer, and unmaps segments whose keys are gone.
    fn map(&self, connection: &Connection, initiator: &mut Initiator, segment: u64, key: u32) {
        let mapping = connection.peer.segment(&connection.address, segment);
        match &mapping {
            Ok(_) => {}
            // No warning: the connection is about to end, and its end is logged.
            Err(VerbsError::Unreachable(reason)) => {
                tracing::debug!(reason, queue_pair = self.number(), "the peer's memory can't be mapped");
            }
            Err(error) => crate::throttled!(
                warn,
                %error,
                queue_pair = self.number(),
                "the peer's memory can't be mapped: the kernel copies it, which is slower"
            ),
        }
        initiator.segments.add(connection, segment, key, mapping.ok());
    }
}

/// Reports to the peer that the receive which the request consumes is done.
fn deliver(connection: &Connection, initiator: &mut Initiator, task: &Task<'_>, kind: DeliveryKind) {
    connection
        .link
        .deliver(initiator.receive, &Delivery { kind, length: task.length, immediate: task.immediate });
    initiator.receive = initiator.receive.wrapping_add(1);
    initiator.unannounced = true;
}

/// Finds a piece of the peer's memory. Otherwise returns the step to do first, or the end of the request.
fn locate(
    connection: &Connection,
    initiator: &mut Initiator,
    task: &Task<'_>,
    piece: &Piece,
) -> Result<Place, Step> {
    match Place::find(connection, &mut initiator.segments, piece, task.remote_access()) {
        Ok(place) => Ok(place),
        Err(Obstacle::Map { segment, key }) => Err(Step::Map { segment, key }),
        Err(Obstacle::Access) if task.remote == Remote::Receive => {
            deliver(connection, initiator, task, DeliveryKind::Protection);
            Err(END(CompletionStatus::RemoteOperation))
        }
        Err(Obstacle::Access) => Err(END(CompletionStatus::RemoteAccess)),
    }
}
