//! Identifiers of librdmacm: each names a connection, or a listener.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv6Addr, SocketAddrV6};
use std::ptr::{self, NonNull};

use ibverbs_sys as sys;

use super::library::{ConnectionLibrary, EventChannel, Id, PORT_SPACE_TCP};
use super::network::{local_addresses, socket_address};
use crate::VerbsError;
use crate::ibverbs::library::{check, last_error, library};

/// Most connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

pub(crate) fn create_id(
    library: &'static ConnectionLibrary,
    channel: NonNull<EventChannel>,
) -> Result<NonNull<Id>, VerbsError> {
    let mut id = ptr::null_mut();
    // SAFETY: the channel is alive, and the result writable.
    let result =
        unsafe { (library.create_id)(channel.as_ptr(), &raw mut id, ptr::null_mut(), PORT_SPACE_TCP) };
    check("creating an iWARP connection", result)?;
    NonNull::new(id).ok_or_else(|| last_error("creating an iWARP connection"))
}

pub(crate) fn destroy_id(library: &'static ConnectionLibrary, id: NonNull<Id>) {
    // This call waits for events that were taken and not acknowledged. There are none.
    // SAFETY: the identifier is alive, and in no table any more.
    let result = unsafe { (library.destroy_id)(id.as_ptr()) };
    if let Err(error) = check("destroying an iWARP connection", result) {
        tracing::debug!(%error);
    }
}

/// Listens at the first address of this machine that belongs to the device. The kernel names the device of an address
/// when the address is bound.
pub(crate) fn listen(
    library: &'static ConnectionLibrary,
    channel: NonNull<EventChannel>,
    device: &str,
) -> Result<(NonNull<Id>, SocketAddrV6), VerbsError> {
    for address in local_addresses()? {
        let id = create_id(library, channel)?;
        match listen_at(library, id, device, address) {
            Ok(Some(socket)) => return Ok((id, socket)),
            Ok(None) => destroy_id(library, id),
            Err(error) => {
                destroy_id(library, id);
                return Err(error);
            }
        }
    }
    Err(VerbsError::Unusable(format!(
        "no address of this machine belongs to {device}: give its network interface one"
    )))
}

fn listen_at(
    library: &'static ConnectionLibrary,
    id: NonNull<Id>,
    device: &str,
    address: IpAddr,
) -> Result<Option<SocketAddrV6>, VerbsError> {
    let ip = match address {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let mut socket = socket_address(SocketAddrV6::new(ip, 0, 0, 0));
    // SAFETY:
    // - the identifier is alive, and the address complete, and
    // - once it is bound, it names the device's context, which librdmacm keeps open.
    let bound = unsafe {
        (library.bind_addr)(id.as_ptr(), (&raw mut socket).cast()) == 0
            && context_name(id.as_ref().verbs).is_some_and(|name| name == device)
    };
    if !bound {
        return Ok(None);
    }
    // SAFETY: the identifier is bound.
    let result = unsafe { (library.listen)(id.as_ptr(), BACKLOG) };
    check(format!("listening for iWARP connections at {address}"), result)?;
    // SAFETY: the identifier is bound.
    let port = u16::from_be(unsafe { (library.get_src_port)(id.as_ptr()) });
    Ok(Some(SocketAddrV6::new(Ipv6Addr::from(ip.octets()), port, 0, 0)))
}

/// Returns the name of a context's device; `None` for a null pointer.
///
/// # Safety
/// - `context` must be null, or open.
unsafe fn context_name(context: *mut sys::ibv_context) -> Option<String> {
    let library = library().ok()?;
    // SAFETY: by this function's contract; the name of an open device is terminated, and lives as long as it.
    unsafe {
        let context = context.as_ref()?;
        let name = (library.get_device_name)(context.device);
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}
