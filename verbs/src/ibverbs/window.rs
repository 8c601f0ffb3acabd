//! Memory windows of type 2: rights of the peer of one queue pair, which requests of the send queue give and
//! take away (IBA vol. 1, 10.6.7.2).
//!
//! ```text
//!  free ── open: BIND_MW, a new key ──▶ open ── drop: LOCAL_INV ──▶ closing ── its completion ──▶ free
//! ```
//!
//! The bind runs before each request that is posted later, so its completion says nothing that anybody waits
//! for. A peer has its right until the invalidation has completed. Until then the window keeps the region, and
//! the owner of the bytes.
//!
//! These requests have slots of their own in the send queue, [`REQUESTS`](super::posting::windows::REQUESTS), so the user's requests always find
//! as many slots as the user asked for. A window is opened only if a slot is left for its invalidation, too.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, MutexGuard, OnceLock};

use ibverbs_sys as sys;

use super::domain::{Domain, Region, flags};
use super::library::{Owned, last_error, post_error_kind};
use super::posting::core::Core;
use super::posting::lists::hand_over;
use super::posting::windows::{Closing, Kept, State, Windows};
use super::ticket::{RequestKind, Ticket};
use crate::panics::lock;
use crate::region::check_window;
use crate::{Access, MemoryRegion, MemoryWindow, PostErrorKind, QueuePairState, Rkey, VerbsError};

/// Number of binds of which one is signalled, so that their slots become free.
const SIGNALED: u32 = 16;

/// Returns the index of a window that can be opened, if there is one, and slots for its requests.
fn reserve<'a>(windows: &'a Windows, domain: &Domain) -> Option<(MutexGuard<'a, State>, usize)> {
    let mut state = lock(&windows.0);
    if state.has_room() && state.free.is_empty() {
        // Pollers take the lock, too, so none is held while the driver is asked.
        drop(state);
        let window = alloc(domain)?;
        state = lock(&windows.0);
        if state.ended {
            drop(state);
            return None;
        }
        let index = state.all.len();
        state.all.push(window);
        state.free.push(index);
    }
    let index = if state.has_room() { state.free.pop()? } else { return None };
    Some((state, index))
}

/// Posts a request for a window.
fn post(
    state: &mut State,
    core: &Core,
    request: &mut sys::ibv_send_wr,
    signaled: bool,
) -> Result<u32, PostErrorKind> {
    let number = state.posted;
    request.wr_id = Ticket { kind: RequestKind::Window, slot: state.slot, position: number }.to_bits();
    if signaled {
        request.send_flags = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    // A thread that polls the completion at once waits for the lock, and then finds the number.
    hand_over(core, request).map_err(|(error, _)| post_error_kind(error))?;
    state.posted = number.wrapping_add(1);
    state.unsignaled = if signaled { 0 } else { state.unsignaled + 1 };
    Ok(number)
}

/// Allocates a window. Returns `None` if the device has no more.
fn alloc(domain: &Domain) -> Option<Owned<sys::ibv_mw>> {
    // SAFETY: the domain is alive, and with it its context, whose table never changes.
    let ops = unsafe { (*(*domain.as_ptr()).context).ops };
    let (alloc, dealloc) = (ops.alloc_mw?, ops.dealloc_mw?);
    // SAFETY:
    // - the domain is alive, and its queue pair, which owns the window, is dropped before it; and
    // - the window is deallocated once, by `Owned`.
    let window = unsafe {
        let window = alloc(domain.as_ptr(), sys::IBV_MW_TYPE_2);
        Owned::new(window, dealloc, "freeing a memory window")
    };
    if window.is_none() {
        let error = last_error("allocating a memory window");
        tracing::debug!(%error, "memory is registered instead");
    }
    window
}

/// An open window.
#[derive(Debug)]
pub(crate) struct Window {
    core: Arc<Core>,
    index: usize,
    rkey: u32,
    region: Arc<dyn MemoryRegion>,
    owner: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl Window {
    /// Opens a window of the queue pair. Returns `None` if there is no room for one now.
    pub(crate) fn open(
        core: &Arc<Core>,
        domain: &Domain,
        region: &Arc<dyn MemoryRegion>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Option<Self>, VerbsError> {
        let any: &dyn Any = &**region;
        let ours = any.downcast_ref().filter(|region: &&Region| region.is_of(domain));
        let registered = ours.ok_or_else(|| VerbsError::foreign("region"))?;
        let access = check_window(&**region, &range, access)?;
        let Some(windows) = core.windows.as_ref().filter(|_| core.state() == QueuePairState::Rts) else {
            return Ok(None);
        };
        let Some((mut state, index)) = reserve(windows, domain) else { return Ok(None) };
        let state = &mut *state;
        let window = state.all[index].as_ptr();
        // SAFETY: the window is alive, and only changed with the lock held.
        let rkey = next_key(unsafe { (*window).rkey });
        let mut bind = sys::ibv_send_wr { opcode: sys::ibv_wr_opcode::IBV_WR_BIND_MW, ..Default::default() };
        bind.__bindgen_anon_2.bind_mw = sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw: window,
            rkey,
            bind_info: sys::ibv_mw_bind_info {
                mr: registered.as_ptr(),
                addr: region.memory().address() + range.start as u64,
                length: range.len() as u64,
                mw_access_flags: flags(access, domain.device.transport),
            },
        };
        let signaled = state.unsignaled + 1 >= SIGNALED;
        if let Err(kind) = post(state, core, &mut bind, signaled) {
            state.free.push(index);
            tracing::debug!(queue_pair = core.number, %kind, "a window was not opened");
            return Ok(None);
        }
        state.open += 1;
        // The library leaves this to its user (man 3 ibv_post_send).
        // SAFETY: as above.
        unsafe { (*window).rkey = rkey };
        let (core, region) = (Arc::clone(core), Arc::clone(region));
        Ok(Some(Self { core, index, rkey, region, owner: OnceLock::new() }))
    }
}

impl crate::sealed::Sealed for Window {}

impl MemoryWindow for Window {
    fn rkey(&self) -> Rkey {
        Rkey(self.rkey)
    }

    fn keep(&self, owner: Box<dyn Any + Send + Sync>) {
        let _ = self.owner.set(owner);
    }
}

impl Drop for Window {
    /// Takes the right away. What the window keeps is kept until that has happened.
    fn drop(&mut self) {
        let kept = Kept::new(self.owner.take(), Arc::clone(&self.region));
        let Some(windows) = &self.core.windows else { return };
        let mut state = lock(&windows.0);
        if !state.ended {
            state.open -= 1;
            let mut invalidate =
                sys::ibv_send_wr { opcode: sys::ibv_wr_opcode::IBV_WR_LOCAL_INV, ..Default::default() };
            invalidate.__bindgen_anon_1.invalidate_rkey = self.rkey;
            let index = self.index;
            match post(&mut state, &self.core, &mut invalidate, true) {
                Ok(request) => state.closing.push_back(Closing { request, index, kept }),
                // The queue pair has failed, or the device is broken. The window ends with the queue pair.
                Err(kind) => {
                    state.lost.push(kept);
                    // The lock keeps the queue pair alive.
                    self.core.fail(|| format!("a memory window could not be closed: {kind}"));
                }
            }
            return;
        }
        // Outside the lock, because this runs code of others.
        drop(state);
        drop(kept);
    }
}

/// Returns the key that follows `key` (man 3 ibv_inc_rkey).
fn next_key(key: u32) -> u32 {
    key & !0xff | key.wrapping_add(1) & 0xff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_differs_from_the_last_255_in_its_low_byte() {
        let mut keys = vec![0x1234_56fe];
        for _ in 0..256 {
            keys.push(next_key(*keys.last().unwrap_or(&0)));
        }
        assert_eq!(&keys[..4], [0x1234_56fe, 0x1234_56ff, 0x1234_5600, 0x1234_5601]);
        assert_eq!(keys[256], keys[0]);
        let distinct: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), 256);
    }
}
