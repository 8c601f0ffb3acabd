//! An opened device, with the port and the address that its queue pairs use, and its asynchronous events.

pub(crate) mod list;
pub(crate) mod options;
pub(crate) mod shared_receives;

use std::collections::HashMap;
use std::ffi::c_int;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

use ibverbs_sys as sys;

use self::list::{DeviceList, RawContext, Transport, transport};
use self::options::{LocalPath, OpenOptions, choose_port, one_of};
use self::shared_receives::SharedQueues;
use super::iwarp::manager::{OWN_REQUESTS, Service};
use super::library::{Library, Owned, last_error, set_nonblocking};
use super::posting::core::Core;
use super::posting::windows;
use crate::panics::lock;
use crate::{Context as _, DeviceAttributes, VerbsError};

/// An opened device, with the port and the address that its queue pairs use.
#[derive(Debug)]
pub(crate) struct Device {
    me: Weak<Device>,
    /// Declared before the context, which must be closed after this is dropped.
    _key_guard: Option<Owned<sys::ibv_cq>>,
    pub(crate) raw: RawContext,
    pub(crate) attributes: DeviceAttributes,
    pub(crate) options: OpenOptions,
    pub(crate) transport: Transport,
    /// The connection manager, on iWARP alone.
    pub(crate) manager: Option<Service>,
    /// The number of the port in use, which never changes.
    pub(crate) port: u8,
    /// The path as it was read last.
    path: Mutex<Arc<LocalPath>>,
    /// RDMA READs of a peer that a queue pair can serve at a time.
    pub(crate) max_served_reads: u8,
    /// Largest retry count that the device does not take for endless.
    pub(crate) max_retries: u8,
    /// Queue pairs by number, for asynchronous events.
    pub(crate) pairs: Mutex<HashMap<u32, Arc<Core>>>,
    /// How many of `pairs` their users have dropped.
    ending: AtomicUsize,
    /// The shared receive queues, for completions of their receives.
    pub(crate) shared_receives: Mutex<SharedQueues>,
    /// The folder in which the kernel shows the device, and the inode of that folder.
    shown: (PathBuf, Option<u64>),
    /// Whether the device was removed. It will never complete anything any more.
    removed: AtomicBool,
}

/// `vendor_id` of Soft-RoCE. Soft-RoCE takes 7 transport retries for endless ones, as with RNR retries, and
/// so would never notice that a peer is gone. By the specification transport retries end (IBA vol. 1,
/// 9.9.2.1.1).
const SOFT_ROCE: u32 = 0xff_ffff;

impl Device {
    pub(crate) fn open(options: &OpenOptions) -> Result<Arc<Self>, VerbsError> {
        let devices = DeviceList::new()?;
        let Some(wanted) = &options.device else { return Self::open_first(options, &devices) };
        let found = devices.iter().find(|device| devices.name(*device) == *wanted).ok_or_else(|| {
            let names: Vec<_> = devices.iter().map(|device| devices.name(device)).collect();
            VerbsError::not_found("RDMA device", wanted, one_of("device", &names))
        })?;
        Self::open_one(options, &devices, found)
    }

    /// Opens the first device that can be used.
    fn open_first(options: &OpenOptions, devices: &DeviceList) -> Result<Arc<Self>, VerbsError> {
        let mut reasons = Vec::new();
        for device in devices.iter() {
            match Self::open_one(options, devices, device) {
                Ok(device) => return Ok(device),
                Err(error) => reasons.push(format!("{}: {error}", devices.name(device))),
            }
        }
        Err(VerbsError::unusable(match &reasons[..] {
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
            return Err(VerbsError::unusable(format!("{name} is neither InfiniBand, RoCE nor iWARP")));
        }
        let raw = devices.open(found)?;
        let port = choose_port(&name, raw.ports()?, options.port)?;
        let (number, max_message_size) = (port.number, port.max_message_size);
        let path = LocalPath::choose(&name, port, options, transport != Transport::Iwarp)?;
        let limits = raw.query()?;
        let key_guard = guard_key(&raw, limits.vendor_id)?;
        let iwarp = transport == Transport::Iwarp;
        let manager = if iwarp { Some(Service::start(&name)?) } else { None };
        // On iWARP requests wait until there is a connection.
        // Soft-RoCE checks a request with the key of a window against the bounds of the region, not against those
        // of the window (Linux 6.1, drivers/infiniband/sw/rxe/rxe_resp.c, `check_rkey`).
        let exact = limits.vendor_id != SOFT_ROCE || options.inexact_windows;
        let window_requests = if !iwarp && exact && has_windows(&limits) { windows::REQUESTS } else { 0 };
        let attributes = DeviceAttributes {
            max_message_size: max_message_size.into(),
            max_work_requests: count(limits.max_qp_wr).saturating_sub(if iwarp {
                OWN_REQUESTS
            } else {
                window_requests
            }),
            max_segments: count(limits.max_sge),
            // Soft-RoCE and other devices do not report this number.
            max_read_segments: match (count(limits.max_sge_rd), iwarp) {
                (0, true) => 1,
                (0, false) => count(limits.max_sge),
                (most, _) => most,
            },
            max_inline: probe_inline(&raw),
            max_outstanding_reads: count(limits.max_qp_init_rd_atom),
            max_completions: count(limits.max_cqe),
            max_memory_regions: count(limits.max_mr),
            // On iWARP every queue pair needs a receive of its own, for the hello.
            max_shared_receive_queues: if iwarp { 0 } else { count(limits.max_srq) },
            max_shared_receives: count(limits.max_srq_wr),
            immediate: !iwarp,
            locks_memory: true,
            memory_windows: window_requests > 0,
            window_requests,
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
            port: number,
            path: Mutex::new(Arc::new(path)),
            max_served_reads: limits.max_qp_rd_atom.clamp(0, u8::MAX.into()) as u8,
            max_retries: if limits.vendor_id == SOFT_ROCE { 6 } else { 7 },
            pairs: Mutex::default(),
            ending: AtomicUsize::new(0),
            shared_receives: Mutex::default(),
            shown: (shown.clone(), inode(&shown)),
            removed: AtomicBool::new(false),
        }))
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.raw.library
    }

    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        self.raw.context.as_ptr()
    }

    /// Counts a queue pair of the table that its user has dropped. The queue pair stays in the table until
    /// [`remove_ended`](Self::remove_ended).
    pub(crate) fn count_ending(&self) {
        self.ending.fetch_add(1, SeqCst);
    }

    /// Removes a queue pair from the table, after [`count_ending`](Self::count_ending).
    pub(crate) fn remove_ended(&self, number: u32) {
        lock(&self.pairs).remove(&number);
        self.ending.fetch_sub(1, SeqCst);
    }

    /// Returns the number by which a completion of a shared receive names its queue pair: 0 if the user has
    /// dropped the queue pair. (The device may use the number again as soon as the queue pair is destroyed.)
    pub(crate) fn number_for_user(&self, number: u32) -> u32 {
        let any_ending = self.ending.load(SeqCst) > 0;
        let ending = any_ending && lock(&self.pairs).get(&number).is_some_and(|pair| pair.is_ending());
        if ending { 0 } else { number }
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(SeqCst)
    }

    pub(crate) fn set_removed(&self) {
        self.removed.store(true, SeqCst);
    }

    /// Returns whether the kernel no longer shows the device. Soft-RoCE and soft-iWARP report their removal
    /// (`rdma link delete`) by no event, and objects that are open keep working.
    pub(crate) fn has_vanished(&self) -> bool {
        let (folder, at_first) = &self.shown;
        at_first.is_some() && inode(folder) != *at_first
    }

    /// Returns the path as it was read last.
    pub(crate) fn path(&self) -> Arc<LocalPath> {
        Arc::clone(&lock(&self.path))
    }

    /// Reads the port and its addresses again, and returns the path for a new queue pair. Addresses may have
    /// changed since the device was opened. If they can't be read, because the device is gone, this is the
    /// path as it was read last.
    pub(crate) fn read_path(&self) -> Result<Arc<LocalPath>, VerbsError> {
        // On iWARP, TCP chooses the path.
        if self.transport == Transport::Iwarp {
            return Ok(self.path());
        }
        let name = &self.attributes.name;
        let port = match self.raw.port(self.port) {
            Ok(port) => port,
            Err(error) => {
                tracing::debug!(device = %name, %error, "the addresses of the port can't be read again");
                return Ok(self.path());
            }
        };
        let new = LocalPath::choose(name, port, &self.options, true)?;
        let mut path = lock(&self.path);
        if **path != new {
            tracing::info!(device = %name, gid = ?new.gid.map(|gid| gid.to_string()), "the port has changed; new connections use it as it is now");
            *path = Arc::new(new);
        }
        Ok(Arc::clone(&path))
    }

    pub(crate) fn strong(&self) -> Result<Arc<Self>, VerbsError> {
        self.me.upgrade().ok_or_else(|| VerbsError::foreign("context"))
    }
}

fn inode(folder: &Path) -> Option<u64> {
    std::fs::metadata(folder).ok().map(|metadata| metadata.ino())
}

fn count(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

/// `vendor_id` of soft-iWARP.
const SOFT_IWARP: u32 = 0x62_6d74;
/// Entries of a completion queue that reaches beyond the bad key; an entry has 32 bytes.
const ENTRIES: i32 = 0x90000 / 32 + 1;

/// Returns whether the device has windows of type 2, which belong to one queue pair.
fn has_windows(limits: &sys::ibv_device_attr) -> bool {
    let types = sys::IBV_DEVICE_MEM_WINDOW_TYPE_2A | sys::IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    limits.device_cap_flags & types != 0 && limits.max_mw > 0
}

/// Creates an unused completion queue that occupies the bad key. It must be dropped before the device is
/// closed. Call this for a device that was just opened, so that its objects have the first keys. Returns
/// `None` for other drivers.
///
/// A workaround for soft-iWARP.
///
/// The kernel names each queue that a program maps by a *key*: the offset in the device's file, from 0 on, at
/// the lowest gap that fits. To libsiw, the driver's half in libibverbs, the key `0x90000` means that there
/// is no key (`SIW_INVAL_UOBJ_KEY` in rdma/siw-abi.h). So an object that gets this key can't be created. The
/// next object gets this key again, so no later object can be created either. With queue pairs of two pages
/// this happens after some seventy of them. (rdma-core 44 to 65.)
fn guard_key(raw: &RawContext, vendor: u32) -> Result<Option<Owned<sys::ibv_cq>>, VerbsError> {
    if vendor != SOFT_IWARP {
        return Ok(None);
    }
    let nothing = std::ptr::null_mut();
    // SAFETY: the context is open, and no code uses the queue, which the caller drops before the context.
    let queue = unsafe {
        let queue = (raw.library.create_cq)(raw.context.as_ptr(), ENTRIES, nothing, std::ptr::null_mut(), 0);
        Owned::new(queue, raw.library.destroy_cq, "destroying the completion queue that keeps a bad key")
    };
    let error = || last_error("creating the completion queue that keeps a bad key from others");
    queue.map(Some).ok_or_else(error)
}

/// Returns the most inline bytes of a queue pair. Devices have no attribute for this number, so this function
/// creates queue pairs that ask for less and less.
fn probe_inline(raw: &RawContext) -> u32 {
    const MOST: u32 = 8192;
    let library = raw.library;
    // SAFETY:
    // - the context is open,
    // - each object is created from ones that are alive, and destroyed once, in the opposite order, and
    // - no other code knows them.
    unsafe {
        let domain = (library.alloc_pd)(raw.context.as_ptr());
        if domain.is_null() {
            return 0;
        }
        let no_channel = std::ptr::null_mut();
        let queue = (library.create_cq)(raw.context.as_ptr(), 1, std::ptr::null_mut(), no_channel, 0);
        let mut granted = 0;
        if !queue.is_null() {
            let mut asked = MOST;
            while asked > 0 {
                let mut attributes = sys::ibv_qp_init_attr {
                    send_cq: queue,
                    recv_cq: queue,
                    qp_type: sys::ibv_qp_type::IBV_QPT_RC,
                    cap: sys::ibv_qp_cap {
                        max_send_wr: 1,
                        max_recv_wr: 1,
                        max_send_sge: 1,
                        max_recv_sge: 1,
                        max_inline_data: asked,
                    },
                    ..Default::default()
                };
                let pair = (library.create_qp)(domain, &raw mut attributes);
                if !pair.is_null() {
                    granted = attributes.cap.max_inline_data;
                    let _ = (library.destroy_qp)(pair);
                    break;
                }
                asked /= 2;
            }
            let _ = (library.destroy_cq)(queue);
        }
        let _ = (library.dealloc_pd)(domain);
        granted
    }
}

/// Takes and applies all events that have come, and checks whether the device is still there. Acknowledges an
/// event as soon as it was applied, because destroying the object of the event waits for that.
pub(crate) fn handle_events(device: &Device) {
    while let Some(mut event) = next_event(device) {
        apply_event(device, &event);
        // SAFETY: the event came from the library, and is acknowledged once.
        unsafe { (device.library().ack_async_event)(&raw mut event) };
    }
    if device.has_vanished() {
        mark_removed(device, &format!("{}: the device was removed", device.attributes().name));
    }
}

fn next_event(device: &Device) -> Option<sys::ibv_async_event> {
    let mut event = sys::ibv_async_event {
        element: sys::ibv_async_event__bindgen_ty_1 { port_num: 0 },
        event_type: sys::IBV_EVENT_COMM_EST,
    };
    // SAFETY: the context is open, and the structure writable.
    let result = unsafe { (device.library().get_async_event)(device.context(), &raw mut event) };
    if result == 0 {
        return Some(event);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
        // The kernel took the device away: its descriptors are dead.
        _ => mark_removed(device, &format!("the device was removed ({error})")),
    }
    None
}

fn apply_event(device: &Device, event: &sys::ibv_async_event) {
    let name = &device.attributes().name;
    match event.event_type {
        sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: these events carry a queue pair, which is not destroyed before they are acknowledged.
            let number = unsafe { (*event.element.qp).qp_num };
            let what = match event.event_type {
                sys::IBV_EVENT_QP_REQ_ERR => "an invalid request of the peer",
                sys::IBV_EVENT_QP_ACCESS_ERR => "a forbidden access of the peer",
                _ => "a fatal error of the queue pair",
            };
            if let Some(pair) = lock(&device.pairs).get(&number) {
                pair.fail(|| format!("{name}: {what}"));
            }
        }
        sys::IBV_EVENT_QP_LAST_WQE_REACHED => {
            // SAFETY: this event carries a queue pair, which is not destroyed before it is acknowledged.
            let number = unsafe { (*event.element.qp).qp_num };
            if let Some(pair) = lock(&device.pairs).get(&number) {
                pair.last_receive_reached();
            }
        }
        sys::IBV_EVENT_CQ_ERR => {
            // SAFETY: this event carries a completion queue, which is not destroyed before it is
            // acknowledged.
            let queue = unsafe { event.element.cq };
            fail_pairs(
                device,
                |pair| pair.completes_on(queue),
                &format!("{name}: a completion queue overran"),
            );
        }
        sys::IBV_EVENT_PORT_ERR => {
            // SAFETY: this event carries the number of a port.
            let port: c_int = unsafe { event.element.port_num };
            if port == i32::from(device.port) {
                fail_pairs(device, |_| true, &format!("{name}: port {port} went down"));
            }
        }
        sys::IBV_EVENT_DEVICE_FATAL => {
            mark_removed(device, &format!("{name}: the device failed, or was removed"))
        }
        sys::IBV_EVENT_GID_CHANGE | sys::IBV_EVENT_LID_CHANGE | sys::IBV_EVENT_PKEY_CHANGE => {
            tracing::info!(device = %name, event = event.event_type, "an address of the port has changed");
        }
        other => tracing::debug!(device = %name, event = other, "asynchronous event"),
    }
}

/// Marks the device as removed, and moves its queue pairs to Error: it will complete nothing any more.
fn mark_removed(device: &Device, reason: &str) {
    if !device.is_removed() {
        tracing::warn!(device = %device.attributes().name, reason, "a device is gone");
    }
    device.set_removed();
    fail_pairs(device, |_| true, reason);
}

fn fail_pairs(device: &Device, concerned: impl Fn(&Core) -> bool, reason: &str) {
    for pair in lock(&device.pairs).values().filter(|pair| concerned(pair)) {
        pair.fail(|| reason.to_owned());
    }
}
