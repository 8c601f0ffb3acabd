//! Moving the bytes: from local memory to the peer's, or back, by a copy of this side's CPU.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::VerbsError;
use super::super::{
    Access, CompletionOpcode, CompletionStatus, HostMemory, LocalSegment, Operation, Payload, RemoteSegment,
};
use super::layout::{pair_page, table};
use super::peer::PeerPair;
use super::queue_pair::{SoftQueuePair, hazard};
use super::receive::Delivery;
use super::send::SendSide;
use super::shared::Imported;

/// Why a request did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Halt {
    /// The peer has no receive posted.
    NotReady,
    /// It never will.
    Failed(CompletionStatus),
}

/// Which way bytes go between local pieces and the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToPeer,
    FromPeer,
}

/// Local memory of one request, in order.
struct Pieces {
    list: [(*mut u8, usize); Pieces::MOST],
    count: usize,
    /// Keeps registered memory mapped for the length of the copy.
    held: [Option<Arc<HostMemory>>; Pieces::MOST],
    /// How far the pieces were used: a piece and a place in it.
    at: (usize, usize),
}

impl Pieces {
    const MOST: usize = 32;

    fn new() -> Self {
        Self {
            list: [(std::ptr::null_mut(), 0); Self::MOST],
            count: 0,
            held: [const { None }; Self::MOST],
            at: (0, 0),
        }
    }

    fn push(&mut self, start: *mut u8, length: usize, held: Option<Arc<HostMemory>>) -> Result<(), Halt> {
        let place = self.list.get_mut(self.count).ok_or(Halt::Failed(CompletionStatus::LocalProtection))?;
        *place = (start, length);
        self.held[self.count] = held;
        self.count += 1;
        Ok(())
    }

    fn length(&self) -> u64 {
        self.list[..self.count].iter().map(|(_, length)| *length as u64).sum()
    }

    /// The next bytes in one piece, `most` of them at most.
    fn take(&mut self, most: usize) -> Option<(*mut u8, usize)> {
        loop {
            let (start, length) = *self.list[..self.count].get(self.at.0)?;
            let left = length - self.at.1;
            if left == 0 {
                self.at = (self.at.0 + 1, 0);
                continue;
            }
            let count = left.min(most);
            let from = start.wrapping_add(self.at.1);
            self.at.1 += count;
            return Some((from, count));
        }
    }
}

/// A place in the peer's memory that was checked.
enum Place {
    /// Mapped here.
    Mapped(*mut u8),
    /// In its process.
    Process(u64),
}

impl SoftQueuePair {
    /// Runs a request.
    pub(super) fn execute(&self, side: &mut SendSide, operation: &Operation<'_>) -> Result<(), Halt> {
        const GONE: Halt = Halt::Failed(CompletionStatus::RetryExceeded);
        let pair = self.peer.get().ok_or(GONE)?;
        match pair.page.at(pair_page::STATE).load(Ordering::SeqCst) {
            _ if pair.peer.is_dead() => return Err(GONE),
            pair_page::OPEN => {}
            // Not connected to us yet.
            0 => return Err(Halt::NotReady),
            _ => return Err(GONE),
        }
        let done = match *operation {
            Operation::Send { data, immediate } => self.send(side, pair, data, immediate),
            Operation::Write { data, remote, immediate } => self.write(side, pair, data, remote, immediate),
            Operation::Read { into, remote } => self.read(side, pair, into, remote),
        };
        // As on a wire, an error that the peer's side finds takes that side down too.
        if let Err(Halt::Failed(CompletionStatus::RemoteAccess | CompletionStatus::RemoteOperation)) = done {
            pair.page.at(pair_page::FATAL).store(1, Ordering::SeqCst);
            let (queue, slot) = &pair.receives;
            queue.mark(*slot);
        }
        done
    }

    fn send(
        &self,
        side: &mut SendSide,
        pair: &PeerPair,
        data: Payload<'_>,
        immediate: Option<u32>,
    ) -> Result<(), Halt> {
        let mut pieces = self.sources(data)?;
        let length = pieces.length();
        let entry = receive_of(side, pair)?;
        let word = |index: usize| pair.page.at(entry + index).load(Ordering::Relaxed);
        let segments = usize::try_from(word(0)).ok().filter(|count| *count <= pair.rings.segments);
        let segments = segments.ok_or(Halt::Failed(CompletionStatus::RemoteOperation))?;
        let room = (0..segments).fold(0_u64, |room, index| room.saturating_add(word(3 + 3 * index)));
        let opcode = CompletionOpcode::Receive;
        if length > room {
            deliver(
                side,
                pair,
                Delivery { opcode, status: CompletionStatus::LocalLength, length, immediate },
            );
            return Err(Halt::Failed(CompletionStatus::RemoteInvalidRequest));
        }
        let mut left = length;
        for index in 0..segments {
            let (key, address) = (word(1 + 3 * index) as u32, word(2 + 3 * index));
            let part = left.min(word(3 + 3 * index));
            let place = RemoteSegment { address, rkey: super::super::Rkey(key) };
            // What the receiver posted is its own affair: an error there is its protection error, not an access error.
            if self
                .copy(side, pair, &mut pieces, place, part, Access::LOCAL_WRITE, Direction::ToPeer)
                .is_err()
            {
                let status = CompletionStatus::LocalProtection;
                deliver(side, pair, Delivery { opcode, status, length, immediate });
                return Err(Halt::Failed(CompletionStatus::RemoteOperation));
            }
            left -= part;
        }
        deliver(side, pair, Delivery { opcode, status: CompletionStatus::Success, length, immediate });
        Ok(())
    }

    fn write(
        &self,
        side: &mut SendSide,
        pair: &PeerPair,
        data: Payload<'_>,
        remote: RemoteSegment,
        immediate: Option<u32>,
    ) -> Result<(), Halt> {
        let mut pieces = self.sources(data)?;
        let length = pieces.length();
        if immediate.is_some() {
            receive_of(side, pair)?;
        }
        if length > 0 {
            permitted(pair, Access::REMOTE_WRITE)?;
            self.copy(side, pair, &mut pieces, remote, length, Access::REMOTE_WRITE, Direction::ToPeer)?;
        }
        if immediate.is_some() {
            let (opcode, status) = (CompletionOpcode::ReceiveWriteWithImmediate, CompletionStatus::Success);
            deliver(side, pair, Delivery { opcode, status, length, immediate });
        }
        Ok(())
    }

    fn read(
        &self,
        side: &mut SendSide,
        pair: &PeerPair,
        into: &[LocalSegment],
        remote: RemoteSegment,
    ) -> Result<(), Halt> {
        let mut pieces = self.registered(into, Access::LOCAL_WRITE)?;
        let length = pieces.length();
        if length == 0 {
            return Ok(());
        }
        permitted(pair, Access::REMOTE_READ)?;
        self.copy(side, pair, &mut pieces, remote, length, Access::REMOTE_READ, Direction::FromPeer)
    }

    fn sources(&self, data: Payload<'_>) -> Result<Pieces, Halt> {
        match data {
            Payload::Registered(segments) => self.registered(segments, Access::LOCAL_READ),
            Payload::Inline(slices) => {
                let mut pieces = Pieces::new();
                for slice in slices {
                    pieces.push(slice.as_ptr().cast_mut(), slice.len(), None)?;
                }
                Ok(pieces)
            }
        }
    }

    fn registered(&self, segments: &[LocalSegment], access: Access) -> Result<Pieces, Halt> {
        let mut pieces = Pieces::new();
        for segment in segments {
            let found = self.domain.resolve(segment, access);
            let (memory, offset) = found.ok_or(Halt::Failed(CompletionStatus::LocalProtection))?;
            let start = memory.as_ptr().as_ptr().wrapping_add(offset);
            pieces.push(start, segment.length() as usize, Some(memory))?;
        }
        Ok(pieces)
    }

    /// Moves `length` bytes between the pieces and one place of the peer's. While it does, the hazard word keeps the
    /// peer from taking the region away.
    #[expect(clippy::too_many_arguments, reason = "the parts of one copy, named")]
    fn copy(
        &self,
        side: &mut SendSide,
        pair: &PeerPair,
        pieces: &mut Pieces,
        remote: RemoteSegment,
        length: u64,
        access: Access,
        direction: Direction,
    ) -> Result<(), Halt> {
        if length == 0 {
            return Ok(());
        }
        // SYNC: before the key is looked up; see `SoftDomain::remove`.
        pair.page.at(pair_page::HAZARD).store(hazard(remote.rkey.0), Ordering::SeqCst);
        let moved = match side.place(pair, remote, length, access) {
            Ok(Place::Mapped(start)) => {
                copy_mapped(pieces, start, length as usize, direction);
                Ok(())
            }
            Ok(Place::Process(address)) => copy_process(pair.peer.pid(), pieces, address, length, direction),
            Err(halt) => Err(halt),
        };
        pair.page.at(pair_page::HAZARD).store(0, Ordering::Release);
        moved
    }
}

impl SendSide {
    /// Looks a place of the peer's up and checks everything about it.
    fn place(
        &mut self,
        pair: &PeerPair,
        remote: RemoteSegment,
        length: u64,
        access: Access,
    ) -> Result<Place, Halt> {
        const DENIED: Halt = Halt::Failed(CompletionStatus::RemoteAccess);
        let entry = table::index_of(remote.rkey.0) * table::ENTRY;
        let word = |field: usize| pair.table.at(entry + field).load(Ordering::SeqCst);
        let key = word(table::KEY);
        let rights = Access::from_bits_truncate((key >> 32) as u8);
        if key != table::key_word(remote.rkey.0, rights.bits()) || !rights.contains(access) {
            return Err(DENIED);
        }
        let (base, size, number) = (word(table::ADDRESS), word(table::LENGTH), word(table::SEGMENT));
        let offset = remote.address.checked_sub(base).ok_or(DENIED)?;
        let end = offset.checked_add(length).filter(|end| *end <= size).ok_or(DENIED)?;
        if number == 0 {
            return Ok(Place::Process(remote.address));
        }
        let segment =
            self.segment(pair, number).map_err(|_| Halt::Failed(CompletionStatus::RemoteOperation))?;
        // The table is the peer's word; the mapping's length is the kernel's.
        if end > segment.len() as u64 {
            return Err(DENIED);
        }
        Ok(Place::Mapped(segment.base().as_ptr().wrapping_add(offset as usize)))
    }

    /// The peer's memory of that number, mapped; asked for if it is new.
    pub(super) fn segment(&mut self, pair: &PeerPair, number: u64) -> Result<&Arc<Imported>, VerbsError> {
        /// Mappings kept; a peer that registers ever new memory does not make us map ever more.
        const MOST: usize = 64;
        let index = match self.segments.iter().position(|(known, _)| *known == number) {
            Some(index) => index,
            None => {
                let imported = pair.peer.segment(&pair.address, number)?;
                if self.segments.len() >= MOST {
                    self.segments.remove(0);
                }
                self.segments.push((number, imported));
                self.segments.len() - 1
            }
        };
        Ok(&self.segments[index].1)
    }
}

/// Where the ring says what the peer's next receive is.
fn receive_of(side: &SendSide, pair: &PeerPair) -> Result<usize, Halt> {
    // SYNC: pairs with the store after the entry was written.
    let posted = pair.page.at(pair_page::POSTED).load(Ordering::SeqCst);
    match posted.wrapping_sub(side.delivered) {
        0 => Err(Halt::NotReady),
        ready if ready <= pair.rings.entries => Ok(pair.rings.receive(side.delivered)),
        _ => Err(Halt::Failed(CompletionStatus::RemoteOperation)),
    }
}

/// Tells the peer that its next receive is used up.
fn deliver(side: &mut SendSide, pair: &PeerPair, delivery: Delivery) {
    let entry = pair.rings.delivery(side.delivered);
    for (index, word) in delivery.encode().into_iter().enumerate() {
        pair.page.at(entry + index).store(word, Ordering::Relaxed);
    }
    side.delivered += 1;
    // SYNC: after the entry and the bytes.
    pair.page.at(pair_page::DELIVERED).store(side.delivered, Ordering::Release);
    let (queue, slot) = &pair.receives;
    queue.mark(*slot);
}

/// Whether the peer's queue pair lets us do it.
fn permitted(pair: &PeerPair, access: Access) -> Result<(), Halt> {
    let rights = Access::from_bits_truncate(pair.page.at(pair_page::ACCESS).load(Ordering::Acquire) as u8);
    if rights.contains(access) { Ok(()) } else { Err(Halt::Failed(CompletionStatus::RemoteAccess)) }
}

fn copy_mapped(pieces: &mut Pieces, start: *mut u8, length: usize, direction: Direction) {
    let mut offset = 0;
    while offset < length
        && let Some((local, count)) = pieces.take(length - offset)
    {
        let remote = start.wrapping_add(offset);
        let (from, to) = match direction {
            Direction::ToPeer => (local, remote),
            Direction::FromPeer => (remote, local),
        };
        // SAFETY:
        // - the local piece is the caller's slice, borrowed for this call, or registered memory that `Pieces` holds,
        // - the remote one lies in a mapping that `SendSide` holds, whose length was checked, and
        // - the two are different mappings; that they may be the same memory, or that somebody writes to it at the
        //   same time, can garble the bytes and nothing else, since nobody has a reference to them.
        unsafe { std::ptr::copy_nonoverlapping(from, to, count) };
        offset += count;
    }
}

/// Moves bytes to or from memory that only its own process has mapped.
fn copy_process(
    pid: i32,
    pieces: &mut Pieces,
    address: u64,
    length: u64,
    direction: Direction,
) -> Result<(), Halt> {
    let mut offset = 0;
    while offset < length
        && let Some((local, count)) = pieces.take((length - offset) as usize)
    {
        let mut done = 0;
        while done < count {
            let near = libc::iovec { iov_base: local.wrapping_add(done).cast(), iov_len: count - done };
            let far = libc::iovec {
                iov_base: std::ptr::without_provenance_mut((address + offset) as usize + done),
                iov_len: count - done,
            };
            // SAFETY:
            // - `near` is the caller's slice, borrowed for this call, or registered memory that `Pieces` holds, and
            // - `far` is an address of the other process (or of this one), which the kernel checks.
            let moved = unsafe {
                match direction {
                    Direction::ToPeer => libc::process_vm_writev(pid, &near, 1, &far, 1, 0),
                    Direction::FromPeer => libc::process_vm_readv(pid, &near, 1, &far, 1, 0),
                }
            };
            if moved <= 0 {
                return Err(Halt::Failed(CompletionStatus::RemoteOperation));
            }
            done += moved as usize;
        }
        offset += count as u64;
    }
    Ok(())
}
