//! Copies from memory of the other process, which the copying process has mapped for reading.
//!
//! The owner of the memory can take it back at any time, without waiting: it makes the key invalid, or ends
//! its queue pair. The process that copies checks this after the copy, and discards the bytes then.

use std::sync::{Arc, Weak};

use super::core::{Connection, Core};
use super::source::{self, Stores, WORD};
use crate::remote_view::NoView;
use crate::soft::closer;
use crate::soft::device::{MAX_SEGMENTS, PAST_CACHES};
use crate::soft::forked::Origin;
use crate::soft::peers::message::Object;
use crate::soft::peers::peer::Peer;
use crate::soft::peers::segments::{Offer, Segment, Segments};
use crate::soft::shared::end::{EndState, unless_revoked};
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::table::{Entry, RegionTable};
use crate::{Access, LocalSegment, RemoteSegment, RemoteView};

/// The memory that a queue pair and its peer have mapped of one another, as far as the queue pair has used
/// it.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    /// Our segments, as they were offered to the peer.
    offers: Vec<Arc<Offer>>,
    /// The peer's segments.
    mapped: Vec<(u64, Weak<Segment>)>,
}

/// Most entries of each list. A list that is full is emptied.
const MOST_ENTRIES: usize = 64;

/// An address in memory of the process that made the record: number of the segment, offset, length.
pub(super) type SegmentAddress = [u64; 3];

/// The addresses of a message's bytes, in memory of this process.
#[derive(Debug)]
pub(super) struct SegmentAddresses {
    addresses: [SegmentAddress; MAX_SEGMENTS as usize],
    count: usize,
}

impl SegmentAddresses {
    /// Returns the addresses as the payload of a record.
    pub(super) fn as_bytes(&self) -> &[u8] {
        let words = self.addresses[..self.count].as_flattened();
        // SAFETY: the bytes of numbers are initialised, and bytes need no alignment.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
    }
}

impl Pulls {
    /// Returns the addresses of `segments`, if the peer has mapped all of them. Offers those that it has not.
    pub(super) fn addresses(
        &mut self,
        core: &Core,
        connection: &Connection,
        segments: &[LocalSegment],
    ) -> Option<SegmentAddresses> {
        if !connection.shares_memory() {
            return None;
        }
        let mut list = SegmentAddresses { addresses: [[0; 3]; MAX_SEGMENTS as usize], count: 0 };
        let mut mapped = true;
        for segment in segments.iter().filter(|segment| segment.length() > 0) {
            let (id, offset) =
                core.domain.find_shared(segment.lkey(), segment.address(), segment.length())?;
            mapped &= self.is_mapped_by_peer(core, connection, id)?;
            *list.addresses.get_mut(list.count)? = [id, offset, segment.length()];
            list.count += 1;
        }
        mapped.then_some(list)
    }

    /// Returns whether the peer has mapped our segment `id`. Offers the segment if not. `None` if it can't be
    /// offered.
    fn is_mapped_by_peer(&mut self, core: &Core, connection: &Connection, id: u64) -> Option<bool> {
        if self.offers.iter().any(|offer| offer.id == id && offer.is_mapped()) {
            return Some(true);
        }
        self.offer(core, connection, id)
    }

    #[cold]
    fn offer(&mut self, core: &Core, connection: &Connection, id: u64) -> Option<bool> {
        let memory = core.domain.device.memory(id)?;
        let offer = connection.peer.offer(&connection.address, &memory)?;
        let mapped = offer.is_mapped();
        if mapped {
            if self.offers.len() >= MOST_ENTRIES {
                self.offers.clear();
            }
            self.offers.push(offer);
        }
        Some(mapped)
    }

    /// Offers the segment that a READ of the peer reads, so that the peer can copy from it the next time.
    pub(super) fn offer_for_reads(core: &Core, connection: &Connection, key: u32, address: u64, length: u64) {
        if connection.shares_memory()
            && let Some((id, _)) = core.domain.find_shared(crate::Lkey(key), address, length)
            && let Some(memory) = core.domain.device.memory(id)
        {
            connection.peer.offer(&connection.address, &memory);
        }
    }

    /// Returns the peer's segment `id`, if this process has mapped it.
    pub(super) fn segment(&mut self, core: &Core, id: u64) -> Option<Arc<Segment>> {
        let known = self.mapped.iter().find(|(known, _)| *known == id);
        if let Some(mapping) = known.and_then(|(_, mapping)| mapping.upgrade()) {
            return Some(mapping);
        }
        self.mapped.retain(|(known, _)| *known != id);
        let mapping = core.segments()?.find(id)?;
        if self.mapped.len() >= MOST_ENTRIES {
            self.mapped.clear();
        }
        self.mapped.push((id, Weak::clone(&mapping)));
        mapping.upgrade()
    }

    /// Carries out a READ by a copy from the peer's memory. Returns false if that is not possible; the peer
    /// then serves the READ, or refuses it.
    pub(super) fn read(
        &mut self,
        core: &Core,
        connection: &Connection,
        into: &[LocalSegment],
        remote: RemoteSegment,
    ) -> bool {
        let total = LocalSegment::total(into);
        if total == 0 {
            return false;
        }
        let Ok(FoundMemory { table, entry, offset }) = find_remote(connection, remote, total) else {
            return false;
        };
        let Some(segment) = self.segment(core, entry.segment) else { return false };
        let Some(from) = segment.mapping.range(offset, total) else { return false };
        let from = from.as_ptr().cast_const();
        let stores = Stores { ends_a_word: false, past_caches: total >= PAST_CACHES };
        let before = total.saturating_sub(WORD);
        let mut word = [0; WORD as usize];
        let last = &mut word[..(total - before) as usize];
        // SAFETY:
        // - the mapping has these bytes, and lives until the end of this function; and
        // - the segments have `total` bytes, and were checked for writing with the send queue locked.
        unsafe {
            source::scatter(into, 0, from, before, stores);
            crate::copy_bytes(from.wrapping_add(before as usize), last.as_mut_ptr(), last.len());
        }
        let valid = unless_revoked::<Native, Shipping>(|| {
            table.holds(remote.rkey.0) && connection.end.state() != EndState::Ended
        });
        if !valid {
            return false;
        }
        let stores = Stores { ends_a_word: true, past_caches: false };
        // SAFETY: as above; `word` is ours.
        unsafe { source::scatter(into, before, last.as_ptr(), last.len() as u64, stores) };
        true
    }
}

/// Memory of the peer, as the peer's table has it.
pub(super) struct FoundMemory<'a> {
    pub(super) table: &'a Arc<RegionTable>,
    pub(super) entry: Entry,
    /// Offset in the segment.
    pub(super) offset: u64,
}

/// Finds `length` bytes of the peer's memory at `remote`, if this side may read them. The peer may revoke the
/// entry at any time.
#[inline]
pub(super) fn find_remote(
    connection: &Connection,
    remote: RemoteSegment,
    length: u64,
) -> Result<FoundMemory<'_>, NoView> {
    let table = connection.table.as_ref().ok_or(NoView::Never)?;
    if !connection.access.contains(Access::REMOTE_READ) {
        return Err(NoView::Never);
    }
    let entry = table.find(remote.rkey.0).ok_or(NoView::Revoked)?;
    let serves = entry.domain == connection.domain && entry.serves(connection.address.number);
    if !serves || !entry.access.contains(Access::REMOTE_READ) {
        return Err(NoView::Revoked);
    }
    let offset = entry.offset(remote.address, length).ok_or(NoView::Revoked)?;
    Ok(FoundMemory { table, entry, offset })
}

/// A view of a part of a segment.
///
/// The owner of the memory can take it back at any time, without waiting. The mapping stays until the last
/// view is gone.
#[derive(Debug)]
struct View {
    /// Taken when this value is dropped.
    segment: Option<Arc<Segment>>,
    segments: Arc<Segments>,
    key: u32,
    entry: Entry,
    table: Arc<RegionTable>,
    /// The queue pair is not held, because it would hold the device.
    core: Weak<Core>,
    peer: Weak<Peer>,
    origin: Origin,
}

impl Core {
    /// Returns a view of `length` bytes of the peer's memory at `remote`, if this process has mapped them.
    pub(super) fn view(self: &Arc<Self>, remote: RemoteSegment, length: u64) -> Result<RemoteView, NoView> {
        let connection = self.connection().ok_or(NoView::Never)?;
        let FoundMemory { table, entry, offset } = find_remote(connection, remote, length)?;
        if entry.segment == 0 {
            return Err(NoView::Never);
        }
        let origin = Origin::here().map_err(|_| NoView::Never)?;
        // The peer maps this side before it offers memory.
        let segments = self.segments().ok_or(NoView::NotYet)?;
        let view = View {
            segment: Some(segments.begin_view(entry.segment).ok_or(NoView::NotYet)?),
            segments: Arc::clone(segments),
            key: remote.rkey.0,
            entry,
            table: Arc::clone(table),
            core: Arc::downgrade(self),
            peer: Arc::downgrade(&connection.peer),
            origin,
        };
        // The entry may be of two regions, if the peer changed it meanwhile.
        if !view.stands() {
            return Err(NoView::Revoked);
        }
        let base = view.segment.as_ref().and_then(|segment| segment.mapping.range(offset, length));
        let base = base.ok_or(NoView::Revoked)?;
        // SAFETY:
        // - the segment has these bytes, and stays mapped as long as `view` lives; and
        // - this process makes no reference to bytes of a segment.
        Ok(unsafe { RemoteView::new(base, length as usize, Arc::new(view)) })
    }
}

impl View {
    /// Returns whether the peer's table still has the entry.
    fn stands(&self) -> bool {
        unless_revoked::<Native, Shipping>(|| self.table.find(self.key) == Some(self.entry))
    }
}

impl crate::remote_view::ViewOwner for View {
    fn is_current(&self) -> bool {
        if self.origin.is_forked() {
            return false;
        }
        let Some(core) = self.core.upgrade() else { return false };
        let stands = self.stands();
        let connected = |connection: &super::core::Connection| {
            connection.end.state() != EndState::Ended && !connection.peer.is_dead()
        };
        stands && !core.has_failed() && core.connection().is_some_and(connected)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let Some(segment) = self.segment.take() else { return };
        if self.origin.is_forked() {
            // The peer is one of the parent, and the parent may still have the segment mapped.
            return;
        }
        let id = self.entry.segment;
        if self.segments.end_view(id, segment) {
            let peer = std::mem::take(&mut self.peer);
            closer::free(move || {
                if let Some(peer) = peer.upgrade() {
                    peer.send_by_any(Object::Unmapped { id });
                }
            });
        }
    }
}
