//! Completion channels.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ibverbs_sys as sys;

use crate::VerbsError;
use crate::ibverbs::device::Device;
use crate::ibverbs::library::{Owned, last_error, set_nonblocking};

/// A completion channel, whose descriptor does not block.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) channel: Owned<sys::ibv_comp_channel>,
    device: Arc<Device>,
}

impl Channel {
    pub(super) fn create(device: Arc<Device>) -> Result<Self, VerbsError> {
        let library = device.library();
        // SAFETY:
        // - the context is open, and
        // - the completion queue of the channel is dropped before it, and the device after it.
        let channel = unsafe {
            let channel = (library.create_comp_channel)(device.context());
            Owned::new(channel, library.destroy_comp_channel, "destroying a completion channel")
        };
        let channel = channel.ok_or_else(|| last_error("creating a completion channel"))?;
        let channel = Self { device, channel };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY:
        // - the channel is alive, and never changes its descriptor, and
        // - that is open as long as the channel, which is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }

    /// Takes one event, if there is one.
    pub(super) fn take_event(&self) -> bool {
        let mut queue = std::ptr::null_mut();
        let mut context = std::ptr::null_mut();
        // SAFETY: the channel is alive, and both results are writable.
        let result = unsafe {
            (self.device.library().get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut context)
        };
        result == 0
    }
}
