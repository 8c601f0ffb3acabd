//! Views of memory of the other process, which this process has mapped for reading.
//!
//! The owner of the memory can take it back at any time, without waiting. The mapping stays until the last view is gone.

use std::sync::{Arc, Weak};

use super::core::Core;
use super::pulls::{Found, find_remote};
use crate::soft::closer;
use crate::soft::forked::Origin;
use crate::soft::peers::peer::Peer;
use crate::soft::peers::segments::{Segment, Segments};
use crate::soft::shared::end::EndState;
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::states::unless_revoked;
use crate::soft::shared::table::{Entry, RegionTable};
use crate::{NoView, RemoteSegment, RemoteView};

/// A view of a part of a segment.
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
        let Found { table, entry, offset } = find_remote(connection, remote, length)?;
        if entry.segment == 0 {
            return Err(NoView::Never);
        }
        let origin = Origin::here().map_err(|_| NoView::Never)?;
        // The peer maps this end before it offers memory.
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
        let base = view.segment.as_ref().and_then(|segment| segment.range(offset, length));
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
        let connected = |connection: &super::connection::Connection| {
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
                    peer.say_unmapped(id);
                }
            });
        }
    }
}
