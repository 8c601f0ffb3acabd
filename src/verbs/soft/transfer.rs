//! Carrying out a request: checking it, and copying between this process' memory and the peer's.
//!
//! Memory of the peer's that is not shared is reached by process number. Should the peer die, and the kernel give its
//! number to another process of the same user, both between the check and the copy, that one would be written to; the
//! system has no call that excludes it.

use std::sync::Arc;

use super::link::{Delivery, DeliveryKind, LinkState, Piece};
use super::mapping::Mapping;
use super::queue_pair::{Connection, Inner};
use super::send::SendQueue;
use super::system::{self, Direction};
use super::task::{Local, Remote, Task};
use crate::verbs::{Access, CompletionStatus, Operation, copy_bytes};

/// Bytes copied in one section, at most: whoever takes memory back waits for no more.
const SECTION_BYTES: u64 = 1 << 20;

/// Segments that one request maps, at most: no honest receive has more.
const MAX_MAPS: u32 = super::MAX_SEGMENTS;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done(CompletionStatus),
    Wait(Wait),
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// The peer has no receive posted.
    Receive,
    /// The peer has not connected to us yet.
    Connection,
}

/// The peer's segments that a queue pair has mapped, by number.
#[derive(Debug, Default)]
pub(super) struct Segments {
    known: Vec<Known>,
    last: usize,
}

#[derive(Debug)]
struct Known {
    segment: u64,
    /// The key that it was last found under; once that is gone, so may the mapping be.
    key: u32,
    /// `None` if the peer would not share it: the kernel copies instead.
    mapping: Option<Arc<Mapping>>,
}

impl Segments {
    fn find(&mut self, segment: u64, key: u32) -> Option<&Known> {
        if self.known.get(self.last).is_none_or(|known| known.segment != segment) {
            self.last = self.known.iter().position(|known| known.segment == segment)?;
        }
        let known = self.known.get_mut(self.last)?;
        known.key = key;
        Some(known)
    }
}

/// What one section came to.
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

/// Why a place in the peer's memory can't be used.
enum Obstacle {
    /// The key, the range or the rights are wrong.
    Access,
    Map {
        segment: u64,
        key: u32,
    },
}

/// A place in the peer's memory.
enum Place {
    Mapped(*mut u8),
    Process(u64),
}

const END: fn(CompletionStatus) -> Step = |status| Step::End(Outcome::Done(status));

impl Inner {
    /// Carries `operation` out, if it need not wait.
    pub(super) fn transfer(
        &self,
        connection: &Connection,
        queue: &mut SendQueue,
        operation: &Operation<'_>,
    ) -> Outcome {
        let mut task = Task::new(operation);
        loop {
            let section = self.link.enter(&self.section);
            let step = self.step(connection, queue, &mut task);
            drop(section);
            match step {
                Step::More => {}
                Step::Map { .. } if task.maps == MAX_MAPS => {
                    connection.fail_peer();
                    return Outcome::Done(CompletionStatus::RemoteOperation);
                }
                Step::Map { segment, key } => {
                    task.maps += 1;
                    self.map(connection, queue, segment, key);
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

    /// One section's worth.
    fn step(&self, connection: &Connection, queue: &mut SendQueue, task: &mut Task<'_>) -> Step {
        if connection.peer.is_dead() {
            return END(CompletionStatus::RetryExceeded);
        }
        match connection.link.state() {
            LinkState::Waiting => return Step::End(Outcome::Wait(Wait::Connection)),
            LinkState::Ready => {}
            LinkState::Ended => return END(CompletionStatus::RetryExceeded),
        }
        if !task.checked {
            if let Err(step) = self.check(connection, queue, task) {
                return step;
            }
            task.checked = true;
        }
        let mut budget = SECTION_BYTES;
        while task.left > 0 && budget > 0 {
            match self.copy_piece(connection, queue, task, budget) {
                Ok(copied) => {
                    budget -= copied;
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
            deliver(connection, queue, task, kind);
        }
        END(CompletionStatus::Success)
    }

    /// Checks the whole request before a byte of it is moved.
    fn check(&self, connection: &Connection, queue: &mut SendQueue, task: &mut Task<'_>) -> Result<(), Step> {
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
            let Ok(posted) = connection.link.posted(queue.receive) else {
                return Err(END(CompletionStatus::RemoteOperation));
            };
            let Some(segments) = posted else { return Err(Step::End(Outcome::Wait(Wait::Receive))) };
            task.receive = Some(segments);
            if task.remote == Remote::Receive {
                let room = (0..segments).fold(0u64, |sum, index| {
                    sum.saturating_add(connection.link.piece(queue.receive, index).length)
                });
                if room < task.length {
                    deliver(connection, queue, task, DeliveryKind::TooLong);
                    return Err(END(CompletionStatus::RemoteInvalidRequest));
                }
            }
        }
        Ok(())
    }

    /// Copies as much as is contiguous at both ends, up to `budget`.
    fn copy_piece(
        &self,
        connection: &Connection,
        queue: &mut SendQueue,
        task: &mut Task<'_>,
        budget: u64,
    ) -> Result<u64, Step> {
        let remote = task.remote_piece(connection, queue);
        let (here, here_length, key) = task.local_piece();
        let length = here_length.min(remote.length).min(budget).min(task.left);
        if length == 0 {
            // The lists end before the message does: the peer changed its receive under us.
            if task.remote == Remote::Receive {
                deliver(connection, queue, task, DeliveryKind::Protection);
            }
            return Err(END(CompletionStatus::RemoteOperation));
        }
        if let Some(segment) = key
            && !self.domain.find_local(segment.lkey(), here as u64, length, task.local_access())
        {
            return Err(END(CompletionStatus::LocalProtection));
        }
        let access = task.remote_access();
        let place = match locate(connection, &mut queue.segments, &Piece { length, ..remote }, access) {
            Ok(place) => place,
            Err(Obstacle::Map { segment, key }) => return Err(Step::Map { segment, key }),
            Err(Obstacle::Access) if task.remote == Remote::Receive => {
                deliver(connection, queue, task, DeliveryKind::Protection);
                return Err(END(CompletionStatus::RemoteOperation));
            }
            Err(Obstacle::Access) => return Err(END(CompletionStatus::RemoteAccess)),
        };
        // SAFETY:
        // - `here` is either a piece of a slice that the caller lent us, or lies in a region of our own domain, which
        //   was just found valid in a section, and so stays until the section ends; and
        // - bytes go into it only if that region may be written, as `local_access` asked.
        let copied = unsafe { copy(connection, here, &place, length, task.direction) }.map_err(END)?;
        task.local_at.offset += copied;
        task.remote_at.offset += copied;
        Ok(copied)
    }

    /// Maps a segment of the peer's, and lets go of those whose keys are gone.
    fn map(&self, connection: &Connection, queue: &mut SendQueue, segment: u64, key: u32) {
        let mapping = connection.peer.segment(&connection.address, segment);
        if let Err(error) = &mapping {
            tracing::warn!(%error, queue_pair = self.number(), "copying through the kernel instead");
        }
        let known = &mut queue.segments.known;
        known.retain(|known| connection.table.holds(known.key));
        known.push(Known { segment, key, mapping: mapping.ok() });
    }
}

/// Reports the receive done that the request consumes.
fn deliver(connection: &Connection, queue: &mut SendQueue, task: &Task<'_>, kind: DeliveryKind) {
    connection
        .link
        .deliver(queue.receive, &Delivery { kind, length: task.length, immediate: task.immediate });
    queue.receive = queue.receive.wrapping_add(1);
    queue.unannounced = true;
}

/// Finds where a piece of the peer's memory is to be had.
fn locate(
    connection: &Connection,
    segments: &mut Segments,
    piece: &Piece,
    access: Access,
) -> Result<Place, Obstacle> {
    let entry = connection.table.find(piece.key).ok_or(Obstacle::Access)?;
    if entry.domain != connection.domain || !entry.access.contains(access) {
        return Err(Obstacle::Access);
    }
    let offset = entry.offset(piece.address, piece.length).ok_or(Obstacle::Access)?;
    if entry.segment == 0 {
        return Ok(Place::Process(piece.address));
    }
    match segments.find(entry.segment, piece.key) {
        None => Err(Obstacle::Map { segment: entry.segment, key: piece.key }),
        Some(Known { mapping: None, .. }) => Ok(Place::Process(piece.address)),
        Some(Known { mapping: Some(mapping), .. }) => match mapping.range(offset, piece.length) {
            Some(place) => Ok(Place::Mapped(place.as_ptr())),
            None => Err(Obstacle::Access),
        },
    }
}

/// Copies between `here` and a place in the peer's memory; returns how many bytes went.
///
/// # Safety
/// - `here` must be valid for `length` bytes, for writing if they come from the peer.
unsafe fn copy(
    connection: &Connection,
    here: *mut u8,
    place: &Place,
    length: u64,
    direction: Direction,
) -> Result<u64, CompletionStatus> {
    let bytes = length as usize;
    match *place {
        Place::Mapped(there) => {
            let (from, to) = match direction {
                Direction::ToPeer => (here.cast_const(), there),
                Direction::FromPeer => (there.cast_const(), here),
            };
            // SAFETY:
            // - `here` is valid by this function's contract, `there` because its mapping has these bytes; and
            // - they do not overlap as addresses: a peer's segment is mapped for this module alone.
            unsafe { copy_bytes(from, to, bytes) };
            Ok(length)
        }
        Place::Process(there) => {
            // SAFETY: `here` is valid by this function's contract.
            match unsafe { system::process_copy(connection.peer.process(), here, there, bytes, direction) } {
                Ok(copied) if copied > 0 => Ok(copied as u64),
                Ok(_) => Err(CompletionStatus::RemoteOperation),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                    Err(CompletionStatus::RetryExceeded)
                }
                Err(error) => {
                    tracing::warn!(%error, "the kernel can't copy to or from the peer's memory");
                    Err(CompletionStatus::RemoteOperation)
                }
            }
        }
    }
}
