//! What devices there are, with their ports and addresses: what can be asked before one is taken into use.

use std::ffi::{CStr, OsStr, c_int};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::NonNull;

use ibverbs_sys as sys;

use super::gid::{self, Gid};
use super::library::{Library, check, last_error, library};
use crate::VerbsError;

/// A device as `libibverbs` lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevice {
    /// Its name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// How it connects.
    pub transport: Transport,
    /// Its ports in their order, from number 1; or why the device could not be opened to ask for them.
    pub ports: Result<Vec<Port>, String>,
}

/// How queue pairs of a device connect (`enum ibv_transport_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// InfiniBand, and RoCE on an Ethernet port: addresses are exchanged by whoever connects them.
    InfiniBand,
    /// iWARP: RDMA over TCP, connected by librdmacm.
    Iwarp,
    /// None that this provider can drive.
    Other,
}

/// One port of a device (`struct ibv_port_attr`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it can carry traffic.
    pub state: PortState,
    /// Whether it is on Ethernet (RoCE, iWARP); on InfiniBand otherwise.
    pub ethernet: bool,
    /// The path MTU that it has now, in bytes; 0 if it says none.
    pub active_mtu: u16,
    /// Local identifier on InfiniBand; 0 elsewhere.
    pub lid: u16,
    /// Partition keys that it has.
    pub partition_keys: u16,
    /// Longest message of one request, in bytes.
    pub max_message_size: u32,
    /// Its addresses.
    pub gids: Vec<Gid>,
}

/// State of a port (`enum ibv_port_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// A link, but no subnet manager has set it up (InfiniBand).
    Initializing,
    /// Carries traffic.
    Active,
    /// Anything else.
    Unknown,
}

impl Port {
    /// The address that is taken if no index is asked for: RoCE version 2 first, then those that routers forward, then
    /// IPv4.
    pub fn best_gid(&self) -> Option<&Gid> {
        gid::best(&self.gids)
    }
}

/// Devices that libibverbs has a driver for. The list is empty on a machine that has none.
///
/// # Errors
/// - [`Library`](VerbsError::Library) if libibverbs is not installed.
/// - [`Os`](VerbsError::Os) if the kernel does not answer.
pub fn list() -> Result<Vec<ListedDevice>, VerbsError> {
    let devices = DeviceList::new()?;
    let listed = devices.iter().map(|device| ListedDevice {
        name: devices.name(device),
        transport: transport(device),
        ports: devices.open(device).and_then(|context| context.ports()).map_err(|error| error.to_string()),
    });
    Ok(listed.collect())
}

pub(super) fn transport(device: NonNull<sys::ibv_device>) -> Transport {
    // SAFETY: the device is one of a list that is alive, as in all of this file.
    match unsafe { device.as_ref() }.transport_type {
        sys::IBV_TRANSPORT_IB => Transport::InfiniBand,
        sys::IBV_TRANSPORT_IWARP => Transport::Iwarp,
        _ => Transport::Other,
    }
}

/// The list of devices; they are valid as long as it lives.
#[derive(Debug)]
pub(super) struct DeviceList {
    library: &'static Library,
    list: NonNull<*mut sys::ibv_device>,
    count: usize,
}

impl DeviceList {
    pub(super) fn new() -> Result<Self, VerbsError> {
        let library = library()?;
        let mut count: c_int = 0;
        // SAFETY: the count is writable.
        let list = unsafe { (library.get_device_list)(&raw mut count) };
        let list = NonNull::new(list).ok_or_else(|| last_error("listing the RDMA devices"))?;
        Ok(Self { library, list, count: usize::try_from(count).unwrap_or(0) })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = NonNull<sys::ibv_device>> {
        // SAFETY:
        // - the list has `count` entries, and
        // - nobody writes to it until it is freed.
        let entries = unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) };
        entries.iter().filter_map(|&device| NonNull::new(device))
    }

    pub(super) fn name(&self, device: NonNull<sys::ibv_device>) -> String {
        // SAFETY: the library returns the device's own name, terminated, which lives as long as the device.
        let name = unsafe { CStr::from_ptr((self.library.get_device_name)(device.as_ptr())) };
        name.to_string_lossy().into_owned()
    }

    /// Where sysfs shows a device, such as `/sys/class/infiniband_verbs/uverbs0`.
    pub(super) fn folder(&self, device: NonNull<sys::ibv_device>) -> PathBuf {
        // SAFETY: the path is a terminated text in the device, which is one of this list.
        let path = unsafe { CStr::from_ptr((&raw const (*device.as_ptr()).dev_path).cast()) };
        PathBuf::from(OsStr::from_bytes(path.to_bytes()))
    }

    /// Opens a device; it stays usable when the list is gone (man 3 ibv_get_device_list).
    pub(super) fn open(&self, device: NonNull<sys::ibv_device>) -> Result<RawContext, VerbsError> {
        // SAFETY: the device is one of this list.
        let context = unsafe { (self.library.open_device)(device.as_ptr()) };
        let context = NonNull::new(context)
            .ok_or_else(|| last_error(format!("opening the RDMA device {}", self.name(device))))?;
        Ok(RawContext { library: self.library, context })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from the library and is freed once; opened devices don't need it.
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) };
    }
}

/// An open device (`struct ibv_context`), closed on drop.
#[derive(Debug)]
pub(super) struct RawContext {
    pub(super) library: &'static Library,
    pub(super) context: NonNull<sys::ibv_context>,
}

// SAFETY: libibverbs is thread-safe throughout, every object of it (rdma-core, Documentation/libibverbs.md).
unsafe impl Send for RawContext {}
// SAFETY: as above.
unsafe impl Sync for RawContext {}

impl RawContext {
    /// What the device has (man 3 ibv_query_device).
    pub(super) fn query(&self) -> Result<sys::ibv_device_attr, VerbsError> {
        let mut attributes = sys::ibv_device_attr::default();
        // SAFETY: the context is open, and the structure writable.
        let result = unsafe { (self.library.query_device)(self.context.as_ptr(), &raw mut attributes) };
        check("asking the device what it has", result)?;
        Ok(attributes)
    }

    /// All ports, with their addresses.
    pub(super) fn ports(&self) -> Result<Vec<Port>, VerbsError> {
        let gids = self.gids()?;
        (1..=self.query()?.phys_port_cnt).map(|number| self.port(number, &gids)).collect()
    }

    fn port(&self, number: u8, gids: &[(u32, Gid)]) -> Result<Port, VerbsError> {
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

    /// The whole GID table, without its empty places; each entry with its port.
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
                // The table is longer than that.
                Err(_) if count == -(libc::EINVAL as isize) && entries.len() < 1 << 16 => {
                    entries.resize(entries.len() * 4, sys::ibv_gid_entry::default());
                }
                Err(_) => check("reading the GID table", count as c_int)?,
            }
        }
    }
}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: every object of the context holds a reference to it, so none is left.
        let result = unsafe { (self.library.close_device)(self.context.as_ptr()) };
        if let Err(error) = check("closing the device", result) {
            tracing::warn!(%error, "an object of the device can't be given back");
        }
    }
}

/// Name of the device that a context is of; `None` for a null pointer.
///
/// # Safety
/// - `context` must be null, or open.
pub(super) unsafe fn context_name(context: *mut sys::ibv_context) -> Option<String> {
    let library = library().ok()?;
    // SAFETY: by this function's contract; the name of an open device is terminated, and lives as long as it.
    unsafe {
        let context = context.as_ref()?;
        let name = (library.get_device_name)(context.device);
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// Bytes of a path MTU code (IBA vol. 1, 14.2.5.6).
pub(super) fn mtu_bytes(code: sys::ibv_mtu) -> Option<u16> {
    matches!(code, sys::IBV_MTU_256..=sys::IBV_MTU_4096).then(|| 128 << code)
}

/// The code of the largest path MTU that is not above `bytes`.
pub(super) fn mtu_code(bytes: u16) -> Option<sys::ibv_mtu> {
    (sys::IBV_MTU_256..=sys::IBV_MTU_4096)
        .rev()
        .find(|&code| mtu_bytes(code).is_some_and(|size| size <= bytes))
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Down => "down",
            Self::Initializing => "initializing",
            Self::Active => "active",
            Self::Unknown => "unknown",
        })
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand or RoCE",
            Self::Iwarp => "iWARP",
            Self::Other => "other",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_mtus() {
        assert_eq!((1..=5).map(mtu_bytes).collect::<Vec<_>>(), [256, 512, 1024, 2048, 4096].map(Some));
        assert_eq!((mtu_bytes(0), mtu_bytes(6)), (None, None));
        let codes = [255, 256, 1500, 4096, 9000].map(mtu_code);
        assert_eq!(codes, [None, Some(1), Some(3), Some(5), Some(5)]);
    }
}
