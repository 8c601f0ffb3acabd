//! Which devices there are, with their ports and addresses: what can be asked before a device is used.

use std::ffi::{CStr, OsStr, c_int};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::NonNull;

use ibverbs_sys as sys;

use super::port::Port;
use super::raw_context::RawContext;
use crate::VerbsError;
use crate::ibverbs::library::{Library, Owned, last_error, library};

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
///     println!("{}: {}", device.name, device.transport);
/// }
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
///
/// # Errors
/// - [`Library`](VerbsError::Library) if libibverbs is not installed.
/// - [`Os`](VerbsError::Os) if the kernel does not answer.
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
    list: NonNull<*mut sys::ibv_device>,
    count: usize,
}

impl DeviceList {
    pub(crate) fn new() -> Result<Self, VerbsError> {
        let library = library()?;
        let mut count: c_int = 0;
        // SAFETY: the count is writable.
        let list = unsafe { (library.get_device_list)(&raw mut count) };
        let list = NonNull::new(list).ok_or_else(|| last_error("listing the RDMA devices"))?;
        Ok(Self { library, list, count: usize::try_from(count).unwrap_or(0) })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = NonNull<sys::ibv_device>> {
        // SAFETY:
        // - the list has `count` entries, and
        // - no code writes to it until it is freed.
        let entries = unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) };
        entries.iter().filter_map(|&device| NonNull::new(device))
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
        // SAFETY: the list came from the library and is freed once; opened devices don't need it.
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) };
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
