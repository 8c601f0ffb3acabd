//! Which devices there are, with their ports and addresses: what can be asked before a device is used, and
//! what an open device answers.

use std::cmp::Reverse;
use std::ffi::{CStr, OsStr, c_int};
use std::fmt;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::NonNull;

use ibverbs_sys as sys;

use crate::VerbsError;
use crate::ibverbs::library::{Library, Owned, check, last_error, library};

/// A device in the list of libibverbs.
#[derive(Debug)]
pub struct ListedDevice {
    /// Its name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// The transport of its queue pairs.
    pub transport: Transport,
    /// Its ports in order, from number 1; or the reason why the device could not be opened.
    pub ports: Result<Vec<Port>, VerbsError>,
}

/// The transport of a device's queue pairs (`enum ibv_transport_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// InfiniBand, and RoCE on an Ethernet port. The application exchanges the addresses.
    InfiniBand,
    /// iWARP: RDMA over TCP, connected by librdmacm.
    Iwarp,
    /// A transport that this provider can't drive.
    Other,
}

/// Returns the devices that libibverbs has a driver for. The list is empty on a machine without devices.
///
/// ```no_run
/// for device in tonic_rdma_verbs::ibverbs::list()? {
///     println!("{}: {:?}", device.name, device.transport);
/// }
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
///
/// # Errors
/// - [`NoDevice`](crate::VerbsErrorKind::NoDevice) if libibverbs is not installed.
/// - [`System`](crate::VerbsErrorKind::System) if the kernel does not answer.
pub fn list() -> Result<Vec<ListedDevice>, VerbsError> {
    let devices = DeviceList::new()?;
    let listed = devices.iter().map(|device| ListedDevice {
        name: devices.name(device),
        transport: transport(device),
        ports: devices.open(device).and_then(|context| context.ports()),
    });
    Ok(listed.collect())
}

pub(crate) fn transport(device: NonNull<sys::ibv_device>) -> Transport {
    // SAFETY: the device is one of a list that is alive.
    match unsafe { device.as_ref() }.transport_type {
        sys::IBV_TRANSPORT_IB => Transport::InfiniBand,
        sys::IBV_TRANSPORT_IWARP => Transport::Iwarp,
        _ => Transport::Other,
    }
}

/// The list of devices. The devices are valid as long as the list lives.
#[derive(Debug)]
pub(crate) struct DeviceList {
    library: &'static Library,
    /// `None` if the kernel has no support for RDMA.
    list: Option<NonNull<*mut sys::ibv_device>>,
    count: usize,
}

impl DeviceList {
    pub(crate) fn new() -> Result<Self, VerbsError> {
        let library = library()?;
        let mut count: c_int = 0;
        // SAFETY: the count is writable.
        let list = unsafe { (library.get_device_list)(&raw mut count) };
        let list = NonNull::new(list);
        if list.is_none() {
            let error = io::Error::last_os_error();
            // The kernel has no support for RDMA (man 3 ibv_get_device_list), so it has no device.
            if error.raw_os_error() != Some(libc::ENOSYS) {
                return Err(VerbsError::os("listing the RDMA devices", error));
            }
        }
        Ok(Self { library, list, count: usize::try_from(count).unwrap_or(0) })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = NonNull<sys::ibv_device>> {
        // SAFETY:
        // - the list has `count` entries, and
        // - no code writes to it until it is freed.
        let entries = |list: NonNull<_>| unsafe { std::slice::from_raw_parts(list.as_ptr(), self.count) };
        self.list.map(entries).unwrap_or_default().iter().filter_map(|&device| NonNull::new(device))
    }

    pub(crate) fn name(&self, device: NonNull<sys::ibv_device>) -> String {
        // SAFETY: the library returns the device's own name, terminated, which lives as long as the device.
        let name = unsafe { CStr::from_ptr((self.library.get_device_name)(device.as_ptr())) };
        name.to_string_lossy().into_owned()
    }

    /// Returns the folder of a device in sysfs, such as `/sys/class/infiniband_verbs/uverbs0`.
    pub(crate) fn folder(&self, device: NonNull<sys::ibv_device>) -> PathBuf {
        // SAFETY: the path is a terminated text in the device, which is one of this list.
        let path = unsafe { CStr::from_ptr((&raw const (*device.as_ptr()).dev_path).cast()) };
        PathBuf::from(OsStr::from_bytes(path.to_bytes()))
    }

    /// Opens a device. It stays usable after the list is gone (man 3 ibv_get_device_list).
    pub(crate) fn open(&self, device: NonNull<sys::ibv_device>) -> Result<RawContext, VerbsError> {
        // SAFETY:
        // - the device is one of this list, and
        // - every object of the context holds a reference to it, so none is left when the context is dropped.
        let context = unsafe {
            let context = (self.library.open_device)(device.as_ptr());
            Owned::new(context, self.library.close_device, "closing the device")
        };
        let context =
            context.ok_or_else(|| last_error(format!("opening the RDMA device {}", self.name(device))))?;
        Ok(RawContext { library: self.library, context })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if let Some(list) = self.list {
            // SAFETY: the list came from the library and is freed once; opened devices don't need it.
            unsafe { (self.library.free_device_list)(list.as_ptr()) };
        }
    }
}

/// An open device (`struct ibv_context`), closed on drop. Every object of the context holds a reference to
/// it.
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
        // - the structure, all zeros, is a later version of the one that the function fills: it begins with
        //   the same fields, and is longer.
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

    /// Returns the GID table without its empty entries; each entry comes with its port.
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

/// One port of a device (`struct ibv_port_attr`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number, from 1.
    pub number: u8,
    /// The state.
    pub state: PortState,
    /// Whether the port is on Ethernet (RoCE, iWARP); otherwise it is on InfiniBand.
    pub ethernet: bool,
    /// The active path MTU in bytes; 0 if the port states none.
    pub active_mtu: u16,
    /// Local identifier on InfiniBand; 0 elsewhere.
    pub lid: u16,
    /// Number of partition keys.
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
    /// The link is up, but no subnet manager has set up the port yet (InfiniBand).
    Initializing,
    /// Carries traffic.
    Active,
    /// Anything else.
    Unknown,
}

impl Port {
    /// Returns the address that is taken if no option names an index: RoCE version 2 first, then routable
    /// addresses, then IPv4.
    pub fn best_gid(&self) -> Option<&Gid> {
        best(&self.gids)
    }
}

/// Returns the bytes of a path MTU code (IBA vol. 1, 14.2.5.6).
pub(crate) fn mtu_bytes(code: sys::ibv_mtu) -> Option<u16> {
    matches!(code, sys::IBV_MTU_256..=sys::IBV_MTU_4096).then(|| 128 << code)
}

/// Returns the code of the largest path MTU that is not above `bytes`.
pub(crate) fn mtu_code(bytes: u16) -> Option<sys::ibv_mtu> {
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

/// One entry of a port's GID table (`struct ibv_gid_entry`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the table, as `RDMA_GID_INDEX` takes it.
    pub index: u32,
    /// The identifier, in the form of an IPv6 address; an IPv4 address is mapped (`::ffff:a.b.c.d`).
    pub address: Ipv6Addr,
    /// The protocol that the identifier is for.
    pub kind: GidKind,
    /// Index of its network interface; 0 if it has none.
    pub interface: u32,
}

/// The format of the packets of a GID (`enum ibv_gid_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand, and devices without a kind of their own.
    InfiniBand,
    /// RoCE version 1: Ethernet frames, which no router forwards.
    RoceV1,
    /// RoCE version 2: UDP, port 4791.
    RoceV2,
}

impl Gid {
    pub(crate) fn new(entry: &sys::ibv_gid_entry) -> Self {
        let kind = match entry.gid_type {
            sys::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            sys::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            _ => GidKind::InfiniBand,
        };
        // SAFETY: both members of the union are 16 bytes for which any value will do.
        let raw = unsafe { entry.gid.raw };
        Self { index: entry.gid_index, address: Ipv6Addr::from(raw), kind, interface: entry.ndev_ifindex }
    }

    /// Returns whether the address is valid on the link alone (`fe80::/10`).
    pub fn is_link_local(&self) -> bool {
        self.address.segments()[0] & 0xffc0 == 0xfe80
    }

    /// Returns the rank, best last: RoCE version 2 before version 1, a routable address before a link-local
    /// one, IPv4 before IPv6 (because people set up the IPv4 address), and the lowest index.
    fn rank(&self) -> impl Ord {
        let version = match self.kind {
            GidKind::RoceV2 => 2,
            GidKind::InfiniBand => 1,
            GidKind::RoceV1 => 0,
        };
        (version, !self.is_link_local(), self.address.to_ipv4_mapped().is_some(), Reverse(self.index))
    }
}

/// Returns the entry to take if no option names one.
pub(crate) fn best(gids: &[Gid]) -> Option<&Gid> {
    gids.iter().filter(|gid| !gid.address.is_unspecified()).max_by_key(|gid| gid.rank())
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.index, self.address, self.kind)
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

#[cfg(test)]
mod port_tests {
    use super::*;

    #[test]
    fn path_mtus() {
        assert_eq!((1..=5).map(mtu_bytes).collect::<Vec<_>>(), [256, 512, 1024, 2048, 4096].map(Some));
        assert_eq!((mtu_bytes(0), mtu_bytes(6)), (None, None));
        let codes = [255, 256, 1500, 4096, 9000].map(mtu_code);
        assert_eq!(codes, [None, Some(1), Some(3), Some(5), Some(5)]);
    }
}

#[cfg(test)]
mod gid_tests {
    use super::*;

    fn gid(index: u32, address: &str, kind: GidKind) -> Gid {
        Gid { index, address: address.parse().unwrap(), kind, interface: 0 }
    }

    #[test]
    fn a_routable_gid_of_version_2_is_best() {
        let mut gids = vec![
            gid(0, "fe80::1", GidKind::RoceV1),
            gid(1, "fe80::1", GidKind::RoceV2),
            gid(2, "::ffff:10.0.0.1", GidKind::RoceV1),
            gid(3, "2001:db8::1", GidKind::RoceV2),
            gid(4, "::ffff:10.0.0.1", GidKind::RoceV2),
            gid(5, "::ffff:10.0.0.2", GidKind::RoceV2),
        ];
        let mut order = Vec::new();
        while let Some(best) = best(&gids).copied() {
            order.push(best.index);
            gids.retain(|gid| gid.index != best.index);
        }
        assert_eq!(order, [4, 5, 3, 1, 2, 0]);
    }

    #[test]
    fn an_empty_entry_is_none() {
        assert_eq!(best(&[gid(0, "::", GidKind::RoceV2)]), None);
    }
}
