//! librdmacm, loaded at run time, and its structures that ibverbs-sys lacks (`rdma/rdma_cma.h`).

use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};

use ibverbs_sys as sys;

use crate::VerbsError;
use crate::ibverbs::library::symbols;

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
pub(crate) fn library() -> Result<&'static ConnectionLibrary, VerbsError> {
    static LOADED: OnceLock<Result<ConnectionLibrary, Arc<libloading::Error>>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| ConnectionLibrary::load(FILE).map_err(Arc::new));
    loaded.as_ref().map_err(|error| VerbsError::Library {
        library: FILE,
        install: "librdmacm1",
        source: Arc::clone(error) as _,
    })
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

/// The beginning of `struct rdma_cm_event`, as far as events of connections need it. librdmacm alone creates these
/// values.
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
