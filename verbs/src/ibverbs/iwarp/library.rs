//! librdmacm, loaded at run time, its structures that ibverbs-sys lacks (`rdma/rdma_cma.h`), and what this
//! provider makes of them: identifiers, of which each names a connection or a listener, the content of
//! events, and addresses.

use std::ffi::{CStr, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use ibverbs_sys as sys;
use rustix::net::SocketAddrAny;

use crate::VerbsError;
use crate::ibverbs::library::{check, last_error, library, symbols};

const FILE: &str = "librdmacm.so.1";

symbols! {
    /// The functions of librdmacm that are used. Manual pages of the same names describe them.
    #[derive(Debug)]
    pub(crate) struct ConnectionLibrary {
        create_event_channel = b"rdma_create_event_channel\0": fn() -> *mut EventChannel;
        destroy_event_channel = b"rdma_destroy_event_channel\0": fn(*mut EventChannel);
        create_id = b"rdma_create_id\0": fn(*mut EventChannel, *mut *mut Id, *mut c_void, c_int) -> c_int;
        destroy_id = b"rdma_destroy_id\0": fn(*mut Id) -> c_int;
        bind_addr = b"rdma_bind_addr\0": fn(*mut Id, *mut libc::sockaddr) -> c_int;
        listen = b"rdma_listen\0": fn(*mut Id, c_int) -> c_int;
        get_src_port = b"rdma_get_src_port\0": fn(*mut Id) -> u16;
        resolve_addr = b"rdma_resolve_addr\0":
            fn(*mut Id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        resolve_route = b"rdma_resolve_route\0": fn(*mut Id, c_int) -> c_int;
        connect = b"rdma_connect\0": fn(*mut Id, *mut Parameters) -> c_int;
        accept = b"rdma_accept\0": fn(*mut Id, *mut Parameters) -> c_int;
        reject = b"rdma_reject\0": fn(*mut Id, *const c_void, u8) -> c_int;
        get_event = b"rdma_get_cm_event\0": fn(*mut EventChannel, *mut *mut Event) -> c_int;
        ack_event = b"rdma_ack_cm_event\0": fn(*mut Event) -> c_int;
    }
}

/// Returns the library. The first call loads it.
pub(super) fn connection_library() -> Result<&'static ConnectionLibrary, VerbsError> {
    static LOADED: OnceLock<Result<ConnectionLibrary, VerbsError>> = OnceLock::new();
    let failed = |error| VerbsError::library(FILE, "librdmacm1", Arc::new(error));
    LOADED.get_or_init(|| ConnectionLibrary::load(FILE).map_err(failed)).as_ref().map_err(VerbsError::clone)
}

/// `RDMA_PS_TCP`: reliable connections.
pub(crate) const PORT_SPACE_TCP: c_int = 0x106;

/// `struct rdma_event_channel`.
#[repr(C)]
pub(crate) struct EventChannel {
    pub(crate) fd: c_int,
}

/// The beginning of `struct rdma_cm_id`. librdmacm alone creates these values.
#[repr(C)]
pub(crate) struct Id {
    /// The device that the identifier is bound to, opened by librdmacm itself; null before.
    pub(crate) verbs: *mut sys::ibv_context,
    channel: *mut EventChannel,
    context: *mut c_void,
    queue_pair: *mut sys::ibv_qp,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Parameters {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_length: u8,
    /// RDMA READs of the peer that are served at a time.
    pub(crate) responder_resources: u8,
    /// RDMA READs that are outstanding at a time.
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) shared_receive_queue: u8,
    pub(crate) queue_pair_number: u32,
}

/// The beginning of `struct rdma_cm_event`, as far as events of connections need it. librdmacm alone creates
/// these values.
#[repr(C)]
pub(crate) struct Event {
    pub(crate) id: *mut Id,
    pub(crate) listen_id: *mut Id,
    pub(crate) kind: u32,
    pub(crate) status: c_int,
    pub(crate) parameters: Parameters,
}

/// `enum rdma_cm_event_type`.
pub(crate) mod event {
    pub(crate) const ADDRESS_RESOLVED: u32 = 0;
    pub(crate) const ADDRESS_ERROR: u32 = 1;
    pub(crate) const ROUTE_RESOLVED: u32 = 2;
    pub(crate) const ROUTE_ERROR: u32 = 3;
    pub(crate) const CONNECT_REQUEST: u32 = 4;
    pub(crate) const CONNECT_ERROR: u32 = 6;
    pub(crate) const UNREACHABLE: u32 = 7;
    pub(crate) const REJECTED: u32 = 8;
    pub(crate) const ESTABLISHED: u32 = 9;
    pub(crate) const DISCONNECTED: u32 = 10;
    pub(crate) const DEVICE_REMOVAL: u32 = 11;
}

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

/// Listens at the first address of this machine that belongs to the device. The kernel names the device of an
/// address when the address is bound.
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
    Err(VerbsError::unusable(format!(
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
        (library.bind_addr)(id.as_ptr(), socket.as_mut_ptr().cast()) == 0
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

/// The data that the active side sends when it connects: the tokens of both queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    pub(super) target: u64,
    pub(super) source: u64,
}

impl Introduction {
    pub(super) const LENGTH: usize = 16;

    pub(super) fn to_bytes(self) -> [u8; Self::LENGTH] {
        (u128::from(self.target) << 64 | u128::from(self.source)).to_be_bytes()
    }

    /// Parses the data of a peer, which may have padding.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let both = u128::from_be_bytes(*bytes.first_chunk()?);
        Some(Self { target: (both >> 64) as u64, source: both as u64 })
    }
}

/// The content of an event.
pub(super) struct Note {
    pub(super) id: Option<NonNull<Id>>,
    pub(super) kind: u32,
    pub(super) status: c_int,
    pub(super) introduction: Option<Introduction>,
}

pub(super) fn note(event: NonNull<Event>) -> Note {
    // SAFETY: the event came from the library, and was not acknowledged yet.
    let event = unsafe { event.as_ref() };
    let data = event.parameters.private_data.cast::<u8>();
    let introduction = if event.kind == event::CONNECT_REQUEST && !data.is_null() {
        // SAFETY: the data of a request has the length that the event states.
        let bytes = unsafe { std::slice::from_raw_parts(data, event.parameters.private_data_length.into()) };
        Introduction::parse(bytes)
    } else {
        None
    };
    Note { id: NonNull::new(event.id), kind: event.kind, status: event.status, introduction }
}

/// A queue pair on iWARP: the listener that its peer connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listener {
    /// RDMA READs that the queue pair serves at a time.
    pub(crate) reads: u8,
    pub(crate) socket: SocketAddrV6,
    /// Names the queue pair.
    pub(crate) token: u64,
}

/// Returns the form of an address that system calls take: IPv4 for a mapped IPv4 address.
pub(crate) fn socket_address(address: SocketAddrV6) -> SocketAddrAny {
    match address.ip().to_ipv4_mapped() {
        Some(ip) => SocketAddrV4::new(ip, address.port()).into(),
        None => address.into(),
    }
}

/// Returns the addresses of this machine's network interfaces that other machines can reach, IPv4 first.
pub(crate) fn local_addresses() -> Result<Vec<IpAddr>, VerbsError> {
    let mut list = ptr::null_mut();
    // SAFETY: the result is writable.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(crate::ibverbs::library::last_error("listing the addresses of this machine"));
    }
    let mut addresses = Vec::new();
    let mut next: *const libc::ifaddrs = list;
    // SAFETY: the list is linked, and stays as it is until it is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: an entry's address is null, or complete.
        addresses.extend(unsafe { ip(entry.ifa_addr) });
    }
    // SAFETY: the list came from `getifaddrs`, and is freed once.
    unsafe { libc::freeifaddrs(list) };
    addresses.retain(|address| match address {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_loopback() && ip.segments()[0] & 0xffc0 != 0xfe80,
    });
    addresses.sort_by_key(IpAddr::is_ipv6);
    Ok(addresses)
}

/// Returns the address in a structure of the system, if it is an IPv4 or IPv6 address.
///
/// # Safety
/// - `address` must be null, or complete for its family.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by this function's contract.
    unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let address = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let address = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write as _};
    use std::mem::offset_of;
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// Lets the C compiler compare our structures with those of the header, where the header is installed.
    #[test]
    fn structures_are_those_of_the_header() {
        if !Path::new("/usr/include/rdma/rdma_cma.h").exists() {
            let _ = writeln!(io::stderr(), "left out: needs rdma/rdma_cma.h (Debian: librdmacm-dev)");
            return;
        }
        let same = |what: &str, value: usize| format!("_Static_assert({what} == {value}, \"{what}\");\n");
        let offset = |structure: &str, field: &str, value| {
            same(&format!("offsetof(struct {structure}, {field})"), value)
        };
        let checks = [
            offset("rdma_event_channel", "fd", offset_of!(EventChannel, fd)),
            offset("rdma_cm_id", "verbs", offset_of!(Id, verbs)),
            offset("rdma_cm_id", "qp", offset_of!(Id, queue_pair)),
            same("sizeof(struct rdma_conn_param)", size_of::<Parameters>()),
            offset("rdma_conn_param", "private_data_len", offset_of!(Parameters, private_data_length)),
            offset("rdma_conn_param", "responder_resources", offset_of!(Parameters, responder_resources)),
            offset("rdma_conn_param", "initiator_depth", offset_of!(Parameters, initiator_depth)),
            offset("rdma_conn_param", "flow_control", offset_of!(Parameters, flow_control)),
            offset("rdma_conn_param", "retry_count", offset_of!(Parameters, retry_count)),
            offset("rdma_conn_param", "rnr_retry_count", offset_of!(Parameters, rnr_retry_count)),
            offset("rdma_conn_param", "srq", offset_of!(Parameters, shared_receive_queue)),
            offset("rdma_conn_param", "qp_num", offset_of!(Parameters, queue_pair_number)),
            offset("rdma_cm_event", "id", offset_of!(Event, id)),
            offset("rdma_cm_event", "listen_id", offset_of!(Event, listen_id)),
            offset("rdma_cm_event", "event", offset_of!(Event, kind)),
            offset("rdma_cm_event", "status", offset_of!(Event, status)),
            offset("rdma_cm_event", "param.conn", offset_of!(Event, parameters)),
            same("RDMA_PS_TCP", PORT_SPACE_TCP as usize),
            same("RDMA_CM_EVENT_ADDR_RESOLVED", event::ADDRESS_RESOLVED as usize),
            same("RDMA_CM_EVENT_ADDR_ERROR", event::ADDRESS_ERROR as usize),
            same("RDMA_CM_EVENT_ROUTE_RESOLVED", event::ROUTE_RESOLVED as usize),
            same("RDMA_CM_EVENT_ROUTE_ERROR", event::ROUTE_ERROR as usize),
            same("RDMA_CM_EVENT_CONNECT_REQUEST", event::CONNECT_REQUEST as usize),
            same("RDMA_CM_EVENT_CONNECT_ERROR", event::CONNECT_ERROR as usize),
            same("RDMA_CM_EVENT_UNREACHABLE", event::UNREACHABLE as usize),
            same("RDMA_CM_EVENT_REJECTED", event::REJECTED as usize),
            same("RDMA_CM_EVENT_ESTABLISHED", event::ESTABLISHED as usize),
            same("RDMA_CM_EVENT_DISCONNECTED", event::DISCONNECTED as usize),
            same("RDMA_CM_EVENT_DEVICE_REMOVAL", event::DEVICE_REMOVAL as usize),
        ];
        let source = format!("#include <stddef.h>\n#include <rdma/rdma_cma.h>\n{}", checks.concat());
        let file = std::env::temp_dir().join(format!("tonic-rdma-layout-{}.c", std::process::id()));
        std::fs::write(&file, source).unwrap();
        let result = Command::new("cc").args(["-fsyntax-only", "-x", "c"]).arg(&file).output();
        std::fs::remove_file(&file).unwrap();
        let result = result.unwrap();
        assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
    }
}

#[cfg(test)]
mod introduction_tests {
    use super::*;

    #[test]
    fn an_introduction_survives_the_round_trip() {
        let introduction = Introduction { target: 1, source: u64::MAX - 1 };
        let bytes = introduction.to_bytes();
        assert_eq!(Introduction::parse(&bytes), Some(introduction));
        assert_eq!(Introduction::parse(&[&bytes[..], &[0; 9]].concat()), Some(introduction));
        assert_eq!(Introduction::parse(&bytes[..15]), None);
    }
}

#[cfg(test)]
mod network_tests {
    use super::*;

    #[test]
    fn an_address_survives_the_round_trip() {
        for (address, expected) in [("[::ffff:10.1.2.3]:7", "10.1.2.3"), ("[2001:db8::1]:7", "2001:db8::1")] {
            let storage = socket_address(address.parse().unwrap());
            // SAFETY: the address is complete.
            let found = unsafe { ip(storage.as_ptr().cast()) };
            assert_eq!(found, Some(expected.parse().unwrap()));
        }
        assert!(local_addresses().unwrap().iter().all(|address| !address.is_loopback()));
    }
}
