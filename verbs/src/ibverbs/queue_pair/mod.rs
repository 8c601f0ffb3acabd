//! Queue pairs: creating, connecting and destroying them. Posting is in [`posting`](super::posting).

pub(crate) mod path;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ibverbs_sys as sys;
use rustix::event::{PollFd, PollFlags, Timespec};

use self::path::{Address, Change, NUMBERS, Path};
use super::completion_queue::{Queue, Role};
use super::device::options::LocalPath;
use super::device::{self, Device};
use super::domain::{Domain, flags};
use super::iwarp::library::Listener;
use super::iwarp::manager::OWN_REQUESTS;
use super::library::{check, last_error};
use super::posting::core::Core;
use super::posting::lists::{Receives, Sends, post_hello_receive};
use super::posting::windows::Windows;
use super::shared_receive_queue::SharedQueue;
use super::ticket::Slot;
use super::window::Window;
use crate::panics::lock;
use crate::queue_pair::random;
use crate::{
    Access, CompletionQueue, Context as _, MemoryRegion, MemoryWindow, PathSettings, PostError, QueuePair,
    QueuePairAddress, QueuePairCapacity, QueuePairNumber, QueuePairState, ReceiveRequest, SendRequest,
    SharedReceiveQueue, VerbsError,
};

/// A queue pair. The drop order of the fields keeps the objects that the queue pair depends on until it is
/// destroyed.
#[derive(Debug)]
pub(crate) struct VerbsPair {
    core: Arc<Core>,
    capacity: QueuePairCapacity,
    first_packet: u32,
    /// Names the queue pair on iWARP.
    token: u64,
    /// The port and address of this side, from `to_init` on.
    path: OnceLock<Arc<LocalPath>>,
    /// Locked while the state changes, so that the device and `core` change in one order. The number is set
    /// by `to_rtr`: the READs that the peer serves at a time.
    peer_reads: Mutex<u8>,
    receives: Mutex<Receives>,
    send_queue: (Arc<Queue>, Slot),
    receive_queue: (Arc<Queue>, Slot),
    shared: Option<Arc<SharedQueue>>,
    domain: Arc<Domain>,
}

impl VerbsPair {
    pub(crate) fn create(
        domain: Arc<Domain>,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        shared: Option<&Arc<dyn SharedReceiveQueue>>,
        capacity: &QueuePairCapacity,
    ) -> Result<Self, VerbsError> {
        let device = &domain.device;
        let send_queue = Queue::of(send_queue, device)?;
        let receive_queue = Queue::of(receive_queue, device)?;
        let shared = shared.map(|shared| SharedQueue::of(shared, device)).transpose()?;
        capacity.check(device.attributes())?;
        let random = || random().map_err(|error| VerbsError::os("asking for random bits", error));
        let first_packet = random()? as u32 & NUMBERS;
        let token = random()?;
        let (pair, capacity) = create(&domain, &send_queue, &receive_queue, shared.as_deref(), capacity)?;
        let iwarp = device.manager.is_some();
        let poster = Sends::new(&capacity, !iwarp);
        let windows = device.attributes().memory_windows.then(Windows::default);
        let core = Arc::new(Core::new(device.library(), pair, &capacity, iwarp, poster, windows));
        let slots = enter(&core, &send_queue, &receive_queue).inspect_err(|_| {
            // SAFETY: the queue pair was just created, and is in no table.
            let _ = unsafe { (device.library().destroy_qp)(pair.as_ptr()) };
        })?;
        lock(&core.poster).set_slot(slots.0);
        core.windows.iter().for_each(|windows| windows.set_slot(slots.0));
        core.wakers.get_or_init(|| [send_queue.waker(), receive_queue.waker()]);
        lock(&device.pairs).insert(core.number, Arc::clone(&core));
        Ok(Self {
            core,
            first_packet,
            token,
            path: OnceLock::new(),
            peer_reads: Mutex::new(0),
            receives: Mutex::new(Receives::new(&capacity, slots.1)),
            capacity,
            send_queue: (send_queue, slots.0),
            receive_queue: (receive_queue, slots.1),
            shared,
            domain,
        })
    }

    fn device(&self) -> &Arc<Device> {
        &self.domain.device
    }

    /// Returns the port and address of this side.
    fn path(&self) -> Arc<LocalPath> {
        self.path.get().cloned().unwrap_or_else(|| self.device().path())
    }

    fn expect(&self, call: &'static str, expected: QueuePairState) -> Result<(), VerbsError> {
        match self.core.state() {
            state if state == expected => Ok(()),
            state => Err(VerbsError::state(call, state)),
        }
    }

    fn modify(&self, action: &'static str, mut change: Change) -> Result<(), VerbsError> {
        // SAFETY: the queue pair is alive as long as `self`.
        let result = unsafe {
            let mask = change.mask.0 as i32;
            (self.device().library().modify_qp)(self.core.as_ptr(), &raw mut change.attributes, mask)
        };
        check(action, result)
    }
}

/// Creates the device's queue pair. Returns the queue pair and its granted capacity. The number of inline
/// bytes depends on all other numbers, and drivers refuse a large number instead of granting less. So this
/// function asks for less and less.
fn create(
    domain: &Domain,
    send_queue: &Queue,
    receive_queue: &Queue,
    shared: Option<&SharedQueue>,
    capacity: &QueuePairCapacity,
) -> Result<(NonNull<sys::ibv_qp>, QueuePairCapacity), VerbsError> {
    let device = &domain.device;
    let mut inline = capacity.inline.min(device.attributes().max_inline);
    let ours = if device.manager.is_some() { OWN_REQUESTS } else { 0 };
    loop {
        let mut attributes = sys::ibv_qp_init_attr {
            send_cq: send_queue.as_ptr(),
            recv_cq: receive_queue.as_ptr(),
            srq: shared.map_or(std::ptr::null_mut(), SharedQueue::as_ptr),
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
            cap: sys::ibv_qp_cap {
                max_send_wr: (capacity.send_requests + ours + device.attributes().window_requests).max(1),
                max_recv_wr: (capacity.receive_requests + ours).max(1),
                max_send_sge: capacity.send_segments.max(1),
                max_recv_sge: capacity.receive_segments.max(1),
                max_inline_data: inline,
            },
            ..Default::default()
        };
        // SAFETY: the domain and both queues are alive, and of one context.
        let pair = unsafe { (device.library().create_qp)(domain.as_ptr(), &raw mut attributes) };
        let Some(pair) = NonNull::new(pair) else {
            let error = last_error(format!("creating a queue pair ({capacity:?})"));
            if inline == 0 {
                return Err(error);
            }
            inline /= 2;
            continue;
        };
        let granted =
            QueuePairCapacity { inline: inline.min(attributes.cap.max_inline_data), ..capacity.clone() };
        return Ok((pair, granted));
    }
}

/// Enters a queue pair into the tables of its completion queues.
fn enter(core: &Arc<Core>, sends: &Arc<Queue>, receives: &Arc<Queue>) -> Result<(Slot, Slot), VerbsError> {
    if Arc::ptr_eq(sends, receives) {
        let slot = sends.enter(core, Role { sends: true, receives: true })?;
        return Ok((slot, slot));
    }
    let slot = sends.enter(core, Role { sends: true, receives: false })?;
    let other = receives.enter(core, Role { sends: false, receives: true });
    let other = other.inspect_err(|_| sends.leave(slot, core.number))?;
    Ok((slot, other))
}

impl crate::sealed::Sealed for VerbsPair {}

impl QueuePair for VerbsPair {
    fn number(&self) -> QueuePairNumber {
        QueuePairNumber(self.core.number)
    }

    fn state(&self) -> QueuePairState {
        self.core.state()
    }

    fn failure(&self) -> Option<String> {
        self.core.failure().map(str::to_owned)
    }

    fn capacity(&self) -> &QueuePairCapacity {
        &self.capacity
    }

    fn local_address(&self) -> QueuePairAddress {
        let device = self.device();
        if let Some(manager) = &device.manager {
            let (reads, socket, token) = (device.max_served_reads, manager.socket, self.token);
            return Address::Iwarp(Listener { reads, socket, token }).into();
        }
        let local = self.path();
        Address::InfiniBand(Path {
            packets: local.packets(),
            mtu: local.mtu,
            reads: device.max_served_reads,
            number: self.core.number,
            first_packet: self.first_packet,
            lid: local.port.lid,
            gid: local.gid.map_or([0; 16], |gid| gid.address.octets()),
        })
        .into()
    }

    fn to_init(&self, access: Access) -> Result<(), VerbsError> {
        let _changing = lock(&self.peer_reads);
        self.expect("to_init", QueuePairState::Reset)?;
        let path = self.device().read_path()?;
        self.path.get_or_init(|| path);
        let rights = flags(access, self.device().transport);
        self.modify("taking the queue pair to Init", path::to_init(self.device().port, rights))?;
        if let Some(manager) = &self.device().manager {
            post_hello_receive(&self.core, self.receive_queue.1)
                .map_err(|error| VerbsError::unusable(format!("posting the first receive: {error}")))?;
            manager.add(self.token, self.core.clone(), self.receive_queue.0.clone());
        }
        self.core.advance("to_init", QueuePairState::Reset, QueuePairState::Init)
    }

    fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError> {
        let mut peer_reads = lock(&self.peer_reads);
        self.expect("to_rtr", QueuePairState::Init)?;
        let device = self.device();
        match (Address::decode(peer)?, &device.manager) {
            (Address::InfiniBand(peer), None) => {
                let local = self.path();
                path::check_settings(settings, &local.port)?;
                let change = path::to_rtr(device.max_served_reads, &local, &peer, settings)?;
                self.modify("taking the queue pair to Rtr", change)?;
                *peer_reads = peer.reads;
            }
            // TCP has timeouts, retries and an MTU of its own, so the settings do not apply.
            (Address::Iwarp(peer), Some(manager)) => {
                let reads = path::outstanding_reads(device, settings);
                manager.connect(self.token, peer, device.max_served_reads, reads)?;
            }
            (Address::Iwarp(_), None) => {
                return Err(VerbsError::unreachable("the peer's device is an iWARP device, ours is not"));
            }
            (Address::InfiniBand(_), Some(_)) => {
                return Err(VerbsError::unreachable("our device is an iWARP device, the peer's is not"));
            }
        }
        self.core.advance("to_rtr", QueuePairState::Init, QueuePairState::Rtr)
    }

    fn to_rts(&self, settings: &PathSettings) -> Result<(), VerbsError> {
        let peer_reads = lock(&self.peer_reads);
        self.expect("to_rts", QueuePairState::Rtr)?;
        // On iWARP the kernel moves the queue pair to Rts when there is a connection. Requests that are
        // posted earlier wait.
        if self.device().manager.is_none() {
            path::check_settings(settings, &self.path().port)?;
            let device = self.device();
            let reads = path::outstanding_reads(device, settings).min(*peer_reads);
            let change = path::to_rts(self.first_packet, device.max_retries, reads, settings);
            self.modify("taking the queue pair to Rts", change)?;
        }
        self.core.advance("to_rts", QueuePairState::Rtr, QueuePairState::Rts)
    }

    fn to_error(&self) {
        self.core.close();
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        let attributes = self.device().attributes();
        lock(&self.core.poster).post(&self.core, &self.capacity, attributes, requests)
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        lock(&self.receives).post(&self.core, &self.capacity, requests)
    }

    fn has_windows(&self) -> bool {
        self.core.windows.is_some()
    }

    fn open_window(
        &self,
        region: &Arc<dyn MemoryRegion>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Option<Arc<dyn MemoryWindow>>, VerbsError> {
        let opened = Window::open(&self.core, &self.domain, region, range, access)?;
        Ok(opened.map(|window| Arc::new(window) as Arc<dyn MemoryWindow>))
    }

    fn places_in_order(&self) -> bool {
        let Some(query) = self.device().library().query_qp_data_in_order else { return false };
        let opcodes = [sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE, sys::ibv_wr_opcode::IBV_WR_RDMA_READ];
        // SAFETY: the queue pair is alive as long as `self`.
        opcodes.into_iter().all(|opcode| unsafe { query(self.core.as_ptr(), opcode, 0) } == 1)
    }
}

impl Drop for VerbsPair {
    fn drop(&mut self) {
        let device = &self.domain.device;
        let detached = Arc::new(DetachedPair {
            core: Arc::clone(&self.core),
            token: self.token,
            queues: [Arc::clone(&self.send_queue.0), Arc::clone(&self.receive_queue.0)],
            shared: self.shared.clone(),
            domain: Arc::clone(&self.domain),
        });
        if self.shared.is_some() {
            self.core.set_ending();
            device.count_ending();
        } else {
            lock(&device.pairs).remove(&self.core.number);
        }
        self.core.windows.iter().for_each(Windows::end);
        self.send_queue.0.leave(self.send_queue.1, self.core.number);
        self.receive_queue.0.leave(self.receive_queue.1, self.core.number);
        if self.shared.is_some() {
            return destroy_after_receives(detached);
        }
        if device.manager.as_ref().is_some_and(|manager| manager.is_connecting(self.token)) {
            let patient = Arc::clone(&detached);
            let thread = std::thread::Builder::new().name("tonic-rdma-end".into());
            if thread.spawn(move || patient.destroy()).is_ok() {
                return;
            }
        }
        detached.destroy();
    }
}

/// A queue pair whose user dropped it, with the objects that it was made of.
#[derive(Debug)]
struct DetachedPair {
    core: Arc<Core>,
    token: u64,
    /// The completion queues of its sends and of its receives.
    queues: [Arc<Queue>; 2],
    shared: Option<Arc<SharedQueue>>,
    domain: Arc<Domain>,
}

impl DetachedPair {
    /// Destroys the queue pair; called once. Waits first until a connecting call of the kernel has ended.
    fn destroy(&self) {
        let device = &self.domain.device;
        if let Some(manager) = &device.manager {
            manager.remove(self.token);
        }
        if self.shared.is_some() {
            device.remove_ended(self.core.number);
        }
        // SAFETY: the queue pair is in no table any more, its users held the lock of a table, and this is
        // called once.
        let result = unsafe { (device.library().destroy_qp)(self.core.as_ptr()) };
        if let Err(error) = check("destroying a queue pair", result) {
            tracing::warn!(queue_pair = self.core.number, %error, "an object of the device can't be given back");
        }
    }
}

/// Time that a device gets to report the last receive. Some devices report nothing: Soft-RoCE of Linux 6.1
/// completes what was taken, without the event.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Longest sleep of the thread. An event that another thread takes does not wake this one.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

static ENDING: Mutex<EndingPairs> = Mutex::new(EndingPairs { pairs: Vec::new(), has_thread: false });

struct EndingPairs {
    pairs: Vec<Ending>,
    has_thread: bool,
}

struct Ending {
    pair: Arc<DetachedPair>,
    since: Instant,
}

/// Moves the queue pair to Error, and destroys it when all receives that it took have completed. Destroys it
/// at once if it can't have taken any.
///
/// Destroying such a queue pair at once would lose the receives that it had taken and not completed: their
/// buffers would never come back. So a queue pair goes to Error first. The device then completes what the
/// queue pair took, and reports by an event that it will take nothing more (Last WQE Reached; IBA vol. 1,
/// 10.2.9.3 and 11.6.3.1). Then the completions are taken from the device, and the queue pair is destroyed.
///
/// One thread for all devices does this, so that no user waits. It exists while there are such queue pairs.
fn destroy_after_receives(pair: Arc<DetachedPair>) {
    if matches!(pair.core.state(), QueuePairState::Reset | QueuePairState::Init)
        || pair.domain.device.is_removed()
    {
        return pair.destroy();
    }
    pair.core.close();
    let mut list = lock(&ENDING);
    list.pairs.push(Ending { pair, since: Instant::now() });
    if !list.has_thread {
        let thread = std::thread::Builder::new().name("tonic-rdma-end".into()).spawn(end_pairs);
        list.has_thread = thread.is_ok();
        if let Err(error) = thread {
            tracing::warn!(%error, "receives of ended queue pairs may be lost: no thread waits for them");
            let pairs = std::mem::take(&mut list.pairs);
            drop(list);
            pairs.into_iter().for_each(|ending| ending.pair.destroy());
        }
    }
}

/// Ends the queue pairs of the list, until there are none.
fn end_pairs() {
    let mut pairs = Vec::new();
    loop {
        {
            let mut list = lock(&ENDING);
            pairs.append(&mut list.pairs);
            if pairs.is_empty() {
                list.has_thread = false;
                return;
            }
        }
        let devices = devices(&pairs);
        devices.iter().for_each(|device| device::handle_events(device));
        for ending in pairs.extract_if(.., |ending| ending.is_over()) {
            ending.pair.queues[1].fetch_all();
            ending.pair.destroy();
        }
        if !pairs.is_empty() {
            sleep(&devices);
        }
    }
}

impl Ending {
    fn is_over(&self) -> bool {
        let reported = self.pair.core.has_reached_last_receive() || self.pair.domain.device.is_removed();
        if !reported && self.since.elapsed() > TIMEOUT {
            tracing::debug!(queue_pair = self.pair.core.number, "the device did not report the last receive");
            return true;
        }
        reported
    }
}

/// Returns the devices of the queue pairs, each once.
fn devices(pairs: &[Ending]) -> Vec<Arc<Device>> {
    let mut devices: Vec<Arc<Device>> = Vec::new();
    for device in pairs.iter().map(|ending| &ending.pair.domain.device) {
        if !devices.iter().any(|known| Arc::ptr_eq(known, device)) {
            devices.push(Arc::clone(device));
        }
    }
    devices
}

/// Sleeps until an event of a device, or for a short time.
fn sleep(devices: &[Arc<Device>]) {
    let events = devices.iter().filter_map(|device| device.async_event_fd());
    let mut waits: Vec<_> = events.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    // An interrupted sleep is a short one.
    let _ = rustix::event::poll(&mut waits, Some(&NAP));
}
