//! The end of queue pairs that took receives from a shared receive queue.
//!
//! Destroying such a queue pair at once would lose the receives that it had taken and not completed: their buffers would never
//! come back. So a queue pair goes to Error first. The device then completes what the queue pair took, and reports by an
//! event that it will take nothing more (Last WQE Reached; IBA vol. 1, 10.2.9.3 and 11.6.3.1). Then the completions are
//! taken from the device, and the queue pair is destroyed.
//!
//! One thread for all devices does this, so that no user waits. It exists while there are such queue pairs.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::DetachedPair;
use crate::ibverbs::device::Device;
use crate::ibverbs::device::async_events;
use crate::sync::lock;
use crate::{Context as _, QueuePairState};

/// Time that a device gets to report the last receive. Some devices report nothing: Soft-RoCE of Linux 6.1 completes what
/// was taken, without the event.
const PATIENCE: Duration = Duration::from_secs(1);

/// Longest sleep of the thread. An event that another thread takes does not wake this one.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

static LIST: Mutex<List> = Mutex::new(List { pairs: Vec::new(), has_thread: false });

struct List {
    pairs: Vec<Ending>,
    has_thread: bool,
}

struct Ending {
    pair: Arc<DetachedPair>,
    since: Instant,
}

/// Moves the queue pair to Error, and destroys it when all receives that it took have completed. Destroys it at once if it
/// can't have taken any.
pub(super) fn destroy_after_receives(pair: Arc<DetachedPair>) {
    if matches!(pair.core.state(), QueuePairState::Reset | QueuePairState::Init) || pair.device().is_removed()
    {
        return pair.destroy();
    }
    pair.core.close();
    let mut list = lock(&LIST);
    list.pairs.push(Ending { pair, since: Instant::now() });
    if !list.has_thread {
        let thread = std::thread::Builder::new().name("tonic-rdma-end".into()).spawn(run);
        list.has_thread = thread.is_ok();
        if let Err(error) = thread {
            tracing::warn!(%error, "receives of ended queue pairs may be lost: no thread waits for them");
            let pairs = std::mem::take(&mut list.pairs);
            drop(list);
            pairs.into_iter().for_each(|ending| ending.pair.destroy());
        }
    }
}

fn run() {
    let mut pairs = Vec::new();
    loop {
        {
            let mut list = lock(&LIST);
            pairs.append(&mut list.pairs);
            if pairs.is_empty() {
                list.has_thread = false;
                return;
            }
        }
        let devices = devices(&pairs);
        devices.iter().for_each(|device| async_events::handle(device));
        for ending in pairs.extract_if(.., |ending| ending.is_over()) {
            ending.pair.receive_queue().fetch_all();
            ending.pair.destroy();
        }
        if !pairs.is_empty() {
            sleep(&devices);
        }
    }
}

impl Ending {
    fn is_over(&self) -> bool {
        let reported = self.pair.core.has_reached_last_receive() || self.pair.device().is_removed();
        if !reported && self.since.elapsed() > PATIENCE {
            tracing::debug!(queue_pair = self.pair.core.number, "the device did not report the last receive");
            return true;
        }
        reported
    }
}

/// Returns the devices of the queue pairs, each once.
fn devices(pairs: &[Ending]) -> Vec<Arc<Device>> {
    let mut devices: Vec<Arc<Device>> = Vec::new();
    for device in pairs.iter().map(|ending| ending.pair.device()) {
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
