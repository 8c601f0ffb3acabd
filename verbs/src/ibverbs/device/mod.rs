//! Choosing and opening a device.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

use ibverbs_sys as sys;
use rustix::fs::OFlags;

use super::address::Link;
use super::completion_queue::Queue;
use super::connection_manager::{OWN_REQUESTS, Service};
use super::core::Core;
use super::gid::{Gid, GidKind};
use super::library::Library;
use super::lock;
use super::port::{DeviceList, Port, PortState, RawContext, Transport, mtu_bytes, mtu_code, transport};
use super::protection_domain::{Domain, probe_inline};
use super::shared_receive_queue::SharedQueues;
use super::soft_iwarp::KeyGuard;
use crate::{CompletionQueue, Context, DeviceAttributes, ProtectionDomain, VerbsError};

/// Which device, port and address to use. What is `None` is chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// The device's name; otherwise the first that has a port to use.
    pub device: Option<String>,
    /// The port's number, from 1; otherwise the first that is active.
    pub port: Option<u8>,
    /// Index in the port's GID table; otherwise the best, see [`Port::best_gid`].
    pub gid_index: Option<u32>,
    /// Largest path MTU to offer to peers, in bytes (256, 512, 1024, 2048 or 4096); otherwise what the port has.
    pub mtu: Option<u16>,
}

impl OpenOptions {
    /// Options that leave everything open.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the device of that name.
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// Takes the port of that number, from 1.
    #[must_use]
    pub fn port(mut self, number: u8) -> Self {
        self.port = Some(number);
        self
    }

    /// Takes the address at that index of the port's GID table.
    #[must_use]
    pub fn gid_index(mut self, index: u32) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// Offers peers a path MTU of at most `bytes`.
    #[must_use]
    pub fn mtu(mut self, bytes: u16) -> Self {
        self.mtu = Some(bytes);
        self
    }
}

/// An opened device, with the port and the address that its queue pairs use.
#[derive(Debug)]
pub(super) struct Device {
    me: Weak<Device>,
    /// Before the context, which is closed after it is dropped.
    _key_guard: Option<KeyGuard>,
    pub(super) raw: RawContext,
    attributes: DeviceAttributes,
    options: OpenOptions,
    pub(super) transport: Transport,
    /// On iWARP: what connects queue pairs.
    pub(super) manager: Option<Service>,
    pub(super) port: Port,
    pub(super) gid: Option<Gid>,
    /// Path MTU that peers are offered, as a code.
    pub(super) mtu: sys::ibv_mtu,
    /// RDMA READs of a peer that a queue pair can serve at a time.
    pub(super) max_served_reads: u8,
    /// Most transport retries that end.
    pub(super) max_retries: u8,
    /// Queue pairs by number, for asynchronous events.
    pub(super) pairs: Mutex<HashMap<u32, Arc<Core>>>,
    /// For completions of their receives.
    pub(super) shared_receives: Mutex<SharedQueues>,
    /// Where the kernel shows the device, and the inode of that folder.
    shown: (PathBuf, Option<u64>),
    /// Whether the device was taken away: it will never complete anything any more.
    removed: AtomicBool,
}

/// `vendor_id` of Soft-RoCE. It takes 7 transport retries for endless ones, as if they were RNR retries, and so would
/// never notice that a peer is gone; by the specification they end (IBA vol. 1, 9.9.2.1.1).
const SOFT_ROCE: u32 = 0xff_ffff;

/// Devices that are in use; opening one again with the same options yields the same.
static OPENED: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

/// Opens a device, or finds it open: there is one per process and [`OpenOptions`]. It is closed when nothing of it is in
/// use any more.
///
/// # Errors
/// - [`Library`](VerbsError::Library) if libibverbs is not installed.
/// - [`NotFound`](VerbsError::NotFound) if the device, port or GID index does not exist; it names those that do.
/// - [`Unusable`](VerbsError::Unusable) if the port is down, or no device has one that is active.
/// - [`Limit`](VerbsError::Limit) if the MTU is none.
/// - [`Os`](VerbsError::Os) if the kernel refuses.
pub fn open(options: &OpenOptions) -> Result<Arc<dyn Context>, VerbsError> {
    let mut opened = lock(&OPENED);
    opened.retain(|device| device.strong_count() > 0);
    let in_use = |device: &Arc<Device>| device.options == *options && !device.is_removed();
    if let Some(device) = opened.iter().filter_map(Weak::upgrade).find(in_use) {
        return Ok(device);
    }
    let device = Device::open(options)?;
    opened.push(Arc::downgrade(&device));
    Ok(device)
}

impl Device {
    fn open(options: &OpenOptions) -> Result<Arc<Self>, VerbsError> {
        let devices = DeviceList::new()?;
        let names: Vec<_> = devices.iter().map(|device| devices.name(device)).collect();
        let Some(wanted) = &options.device else {
            return Self::open_first(options, &devices);
        };
        let position = names.iter().position(|name| name == wanted);
        let found = position.and_then(|position| devices.iter().nth(position));
        let found = found.ok_or_else(|| VerbsError::NotFound {
            what: "RDMA device",
            wanted: wanted.clone(),
            available: one_of("device", &names),
        })?;
        Self::open_one(options, &devices, found)
    }

    /// The first device that can be used.
    fn open_first(options: &OpenOptions, devices: &DeviceList) -> Result<Arc<Self>, VerbsError> {
        let mut reasons = Vec::new();
        for device in devices.iter() {
            match Self::open_one(options, devices, device) {
                Ok(device) => return Ok(device),
                Err(error) => reasons.push(format!("{}: {error}", devices.name(device))),
            }
        }
        Err(VerbsError::Unusable(match &reasons[..] {
            [] => "this machine has no RDMA device".into(),
            reasons => format!("no RDMA device can be used: {}", reasons.join("; ")),
        }))
    }

    fn open_one(
        options: &OpenOptions,
        devices: &DeviceList,
        found: NonNull<sys::ibv_device>,
    ) -> Result<Arc<Self>, VerbsError> {
        let name = devices.name(found);
        let transport = transport(found);
        if transport == Transport::Other {
            return Err(VerbsError::Unusable(format!("{name} is neither InfiniBand, RoCE nor iWARP")));
        }
        let raw = devices.open(found)?;
        let port = choose_port(&name, raw.ports()?, options.port)?;
        let gid = choose_gid(&name, &port, options.gid_index)?;
        if gid.is_none() && port.ethernet && transport != Transport::Iwarp {
            return Err(VerbsError::Unusable(format!(
                "port {} of {name} has no GID: give its network interface an address",
                port.number
            )));
        }
        let mtu = choose_mtu(&port, options.mtu)?;
        let limits = raw.query()?;
        let key_guard = KeyGuard::new(&raw, limits.vendor_id)?;
        let iwarp = transport == Transport::Iwarp;
        let manager = if iwarp { Some(Service::start(&name)?) } else { None };
        let attributes = DeviceAttributes {
            max_message_size: port.max_message_size.into(),
            max_work_requests: count(limits.max_qp_wr).saturating_sub(if iwarp { OWN_REQUESTS } else { 0 }),
            max_segments: count(limits.max_sge),
            // Soft-RoCE and others say nothing of it.
            max_read_segments: match (count(limits.max_sge_rd), iwarp) {
                (0, true) => 1,
                (0, false) => count(limits.max_sge),
                (most, _) => most,
            },
            max_inline: probe_inline(&raw),
            max_outstanding_reads: count(limits.max_qp_init_rd_atom),
            max_completions: count(limits.max_cqe),
            max_memory_regions: count(limits.max_mr),
            // There every queue pair needs a receive of its own, for the hello.
            max_shared_receive_queues: if iwarp { 0 } else { count(limits.max_srq) },
            max_shared_receives: count(limits.max_srq_wr),
            immediate: !iwarp,
            locks_memory: true,
            ..DeviceAttributes::new("ibverbs", name)
        };
        set_nonblocking(raw.async_fd())?;
        let shown = devices.folder(found);
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            _key_guard: key_guard,
            raw,
            attributes,
            options: options.clone(),
            transport,
            manager,
            port,
            gid,
            mtu,
            max_served_reads: limits.max_qp_rd_atom.clamp(0, u8::MAX.into()) as u8,
            max_retries: if limits.vendor_id == SOFT_ROCE { 6 } else { 7 },
            pairs: Mutex::default(),
            shared_receives: Mutex::default(),
            shown: (shown.clone(), inode(&shown)),
            removed: AtomicBool::new(false),
        }))
    }

    pub(super) fn library(&self) -> &'static Library {
        self.raw.library
    }

    pub(super) fn context(&self) -> *mut sys::ibv_context {
        self.raw.context.as_ptr()
    }

    pub(super) fn is_removed(&self) -> bool {
        self.removed.load(SeqCst)
    }

    pub(super) fn set_removed(&self) {
        self.removed.store(true, SeqCst);
    }

    /// Whether the kernel shows the device no more. Soft-RoCE and soft-iWARP report their removal (`rdma link delete`) by
    /// no event, and go on with what is open.
    pub(super) fn has_vanished(&self) -> bool {
        let (folder, at_first) = &self.shown;
        at_first.is_some() && inode(folder) != *at_first
    }

    /// What carries its queue pairs' packets.
    pub(super) fn link(&self) -> Link {
        match self.gid.map(|gid| gid.kind) {
            _ if !self.port.ethernet => Link::InfiniBand,
            Some(GidKind::RoceV1) => Link::RoceV1,
            _ => Link::RoceV2,
        }
    }

    fn strong(&self) -> Result<Arc<Self>, VerbsError> {
        self.me.upgrade().ok_or(VerbsError::Foreign("context"))
    }
}

impl Context for Device {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn alloc_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        Ok(Domain::alloc(self.strong()?)?)
    }

    fn create_completion_queue(&self, capacity: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        Ok(Queue::create(self.strong()?, capacity)?)
    }

    fn async_event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.raw.async_fd())
    }

    fn handle_events(&self) {
        super::async_events::handle(self);
    }
}

impl RawContext {
    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY:
        // - the context is open, and never changes its descriptor, and
        // - that is open as long as the context, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.context.as_ref().async_fd) }
    }
}

/// Has reads of a descriptor fail when there is nothing to read.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), VerbsError> {
    let action = || format!("making descriptor {} non-blocking", fd.as_raw_fd());
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|error| VerbsError::os(action(), error))?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(|error| VerbsError::os(action(), error))
}

fn inode(folder: &Path) -> Option<u64> {
    std::fs::metadata(folder).ok().map(|metadata| metadata.ino())
}

fn choose_port(device: &str, ports: Vec<Port>, wanted: Option<u8>) -> Result<Port, VerbsError> {
    let describe = |port: &Port| format!("{} ({})", port.number, port.state);
    let described: Vec<_> = ports.iter().map(describe).collect();
    let chosen = match wanted {
        Some(wanted) => {
            let found = ports.into_iter().find(|port| port.number == wanted);
            found.ok_or_else(|| VerbsError::NotFound {
                what: "port",
                wanted: format!("{wanted} of {device}"),
                available: one_of("port", &described),
            })?
        }
        None => {
            let found = ports.into_iter().find(|port| port.state == PortState::Active);
            found.ok_or_else(|| {
                VerbsError::Unusable(format!("{device} has no active port: {}", described.join(", ")))
            })?
        }
    };
    if chosen.state != PortState::Active {
        return Err(VerbsError::Unusable(format!("port {} of {device} is {}", chosen.number, chosen.state)));
    }
    Ok(chosen)
}

fn choose_gid(device: &str, port: &Port, wanted: Option<u32>) -> Result<Option<Gid>, VerbsError> {
    let Some(wanted) = wanted else { return Ok(port.best_gid().copied()) };
    let found = port.gids.iter().find(|gid| gid.index == wanted);
    found.copied().map(Some).ok_or_else(|| VerbsError::NotFound {
        what: "GID index",
        wanted: format!("{wanted} of port {} of {device}", port.number),
        available: one_of("index", &port.gids.iter().map(Gid::to_string).collect::<Vec<_>>()),
    })
}

fn choose_mtu(port: &Port, wanted: Option<u16>) -> Result<sys::ibv_mtu, VerbsError> {
    let active = mtu_code(port.active_mtu).unwrap_or(sys::IBV_MTU_1024);
    let Some(wanted) = wanted else { return Ok(active) };
    Ok(exact_mtu(wanted)?.min(active))
}

/// The code of an MTU that must be one of the five there are.
pub(super) fn exact_mtu(bytes: u16) -> Result<sys::ibv_mtu, VerbsError> {
    let code = mtu_code(bytes).filter(|&code| mtu_bytes(code) == Some(bytes));
    code.ok_or(VerbsError::Limit {
        what: "path MTU (256, 512, 1024, 2048 or 4096)",
        asked: bytes.into(),
        limit: 4096,
    })
}

fn one_of(what: &str, names: &[String]) -> String {
    if names.is_empty() { format!("no {what}") } else { names.join(", ") }
}

fn count(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    fn port(number: u8, state: PortState) -> Port {
        let address = Ipv6Addr::LOCALHOST;
        Port {
            number,
            state,
            ethernet: true,
            active_mtu: 1024,
            lid: 0,
            partition_keys: 1,
            max_message_size: 1 << 20,
            gids: vec![Gid { index: 3, address, kind: GidKind::RoceV2, interface: 1 }],
        }
    }

    #[test]
    fn the_first_active_port_is_taken() {
        let ports = || vec![port(1, PortState::Down), port(2, PortState::Active), port(3, PortState::Active)];
        assert_eq!(choose_port("x", ports(), None).unwrap().number, 2);
        assert_eq!(choose_port("x", ports(), Some(3)).unwrap().number, 3);
        let error = choose_port("x", ports(), Some(4)).unwrap_err().to_string();
        assert_eq!(error, "port 4 of x does not exist; there is 1 (down), 2 (active), 3 (active)");
        assert_eq!(choose_port("x", ports(), Some(1)).unwrap_err().to_string(), "port 1 of x is down");
        let error = choose_port("x", vec![port(1, PortState::Down)], None).unwrap_err().to_string();
        assert_eq!(error, "x has no active port: 1 (down)");
    }

    #[test]
    fn a_gid_index_that_does_not_exist_is_named() {
        let port = port(1, PortState::Active);
        assert_eq!(choose_gid("x", &port, None).unwrap().unwrap().index, 3);
        let error = choose_gid("x", &port, Some(9)).unwrap_err().to_string();
        assert_eq!(error, "GID index 9 of port 1 of x does not exist; there is 3 (::1, RoCE v2)");
    }

    #[test]
    fn an_mtu_is_one_of_five_and_not_above_the_port() {
        let port = port(1, PortState::Active);
        assert_eq!(choose_mtu(&port, None).unwrap(), sys::IBV_MTU_1024);
        assert_eq!(choose_mtu(&port, Some(512)).unwrap(), sys::IBV_MTU_512);
        assert_eq!(choose_mtu(&port, Some(4096)).unwrap(), sys::IBV_MTU_1024);
        assert!(matches!(choose_mtu(&port, Some(1500)), Err(VerbsError::Limit { asked: 1500, .. })));
    }
}
