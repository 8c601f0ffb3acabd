//! Completion channels.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use crate::VerbsError;
use crate::ibverbs::device::Device;
use crate::ibverbs::library::{check, last_error, set_nonblocking};

/// A completion channel, whose descriptor does not block.
#[derive(Debug)]
pub(super) struct Channel {
    device: Arc<Device>,
    pub(super) channel: NonNull<sys::ibv_comp_channel>,
}

impl Channel {
    pub(super) fn create(device: Arc<Device>) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let channel = unsafe { (device.library().create_comp_channel)(device.context()) };
        let channel = NonNull::new(channel).ok_or_else(|| last_error("creating a completion channel"))?;
        let channel = Self { device, channel };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY:
        // - the channel is alive, and never changes its descriptor, and
        // - that is open as long as the channel, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
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

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the completion queue was destroyed before: it drops its fields after itself.
        let result = unsafe { (self.device.library().destroy_comp_channel)(self.channel.as_ptr()) };
        if let Err(error) = check("destroying a completion channel", result) {
            tracing::warn!(%error, "an object of the device can't be given back");
        }
    }
}
