//! An open device of libibverbs.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use ibverbs_sys as sys;

use super::gid::Gid;
use super::port::{Port, PortState, mtu_bytes};
use crate::VerbsError;
use crate::ibverbs::library::{Library, Owned, check};

/// An open device (`struct ibv_context`), closed on drop. Every object of the context holds a reference to it.
#[derive(Debug)]
pub(crate) struct RawContext {
    pub(crate) library: &'static Library,
    pub(crate) context: Owned<sys::ibv_context>,
}

impl RawContext {
    /// Returns the descriptor that becomes readable with an asynchronous event.
    pub(crate) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY:
        // - the context is open, and never changes its descriptor, and
        // - that is open as long as the context, which is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.context.as_ptr()).async_fd) }
    }

    /// Returns the attributes of the device (man 3 ibv_query_device).
    pub(crate) fn query(&self) -> Result<sys::ibv_device_attr, VerbsError> {
        let mut attributes = sys::ibv_device_attr::default();
        // SAFETY: the context is open, and the structure writable.
        let result = unsafe { (self.library.query_device)(self.context.as_ptr(), &raw mut attributes) };
        check("asking the device what it has", result)?;
        Ok(attributes)
    }

    /// Returns all ports, with their addresses.
    pub(crate) fn ports(&self) -> Result<Vec<Port>, VerbsError> {
        let gids = self.gids()?;
        (1..=self.query()?.phys_port_cnt).map(|number| self.port_with(number, &gids)).collect()
    }

    /// Returns one port, with its addresses.
    pub(crate) fn port(&self, number: u8) -> Result<Port, VerbsError> {
        self.port_with(number, &self.gids()?)
    }

    fn port_with(&self, number: u8, gids: &[(u32, Gid)]) -> Result<Port, VerbsError> {
        let mut attributes = sys::ibv_port_attr::default();
        // SAFETY:
        // - the context is open, and
        // - the structure, all zeros, is a later version of the one that the function fills: it begins with the same
        //   fields, and is longer.
        let result =
            unsafe { (self.library.query_port)(self.context.as_ptr(), number, (&raw mut attributes).cast()) };
        check(format!("asking for the state of port {number}"), result)?;
        let of_this_port = gids.iter().filter(|(port, _)| *port == u32::from(number));
        Ok(Port {
            number,
            state: match attributes.state {
                sys::ibv_port_state::IBV_PORT_DOWN => PortState::Down,
                sys::ibv_port_state::IBV_PORT_INIT | sys::ibv_port_state::IBV_PORT_ARMED => {
                    PortState::Initializing
                }
                sys::ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
                _ => PortState::Unknown,
            },
            ethernet: u32::from(attributes.link_layer) == sys::IBV_LINK_LAYER_ETHERNET,
            active_mtu: mtu_bytes(attributes.active_mtu).unwrap_or(0),
            lid: attributes.lid,
            partition_keys: attributes.pkey_tbl_len,
            max_message_size: attributes.max_msg_sz,
            gids: of_this_port.map(|(_, gid)| *gid).collect(),
        })
    }

    /// Returns the GID table without its empty places; each entry comes with its port.
    fn gids(&self) -> Result<Vec<(u32, Gid)>, VerbsError> {
        let mut entries = vec![sys::ibv_gid_entry::default(); 256];
        loop {
            // SAFETY:
            // - the context is open, and
            // - the table is writable for as many entries of that size as the call says.
            let count = unsafe {
                (self.library.query_gid_table)(
                    self.context.as_ptr(),
                    entries.as_mut_ptr(),
                    entries.len(),
                    0,
                    size_of::<sys::ibv_gid_entry>(),
                )
            };
            match usize::try_from(count) {
                Ok(count) => {
                    return Ok(entries[..count.min(entries.len())]
                        .iter()
                        .map(|entry| (entry.port_num, Gid::new(entry)))
                        .collect());
                }
                // The table is longer than the array.
                Err(_) if count == -(libc::EINVAL as isize) && entries.len() < 1 << 16 => {
                    entries.resize(entries.len() * 4, sys::ibv_gid_entry::default());
                }
                Err(_) => check("reading the GID table", count as c_int)?,
            }
        }
    }
}
