//! Threads that spin on completion queues: [`PollMode::Busy`](super::PollMode::Busy).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::thread::CpuSet;

use super::pace::Pace;
use super::queue::Queue;
use crate::verbs::VerbsError;

/// A thread that polls one queue without end, unless others want its core; stopped and joined on drop.
#[derive(Debug)]
pub(crate) struct BusyThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BusyThread {
    /// One thread for each queue, on the CPUs in turn.
    pub(crate) fn start_all(queues: &[Arc<Queue>], cpus: &[usize]) -> Result<Vec<Self>, VerbsError> {
        let start = |(index, queue): (usize, &Arc<Queue>)| {
            let cpu = (!cpus.is_empty()).then(|| cpus[index % cpus.len()]);
            Self::start(Arc::clone(queue), index, cpu)
        };
        queues.iter().enumerate().map(start).collect()
    }

    fn start(queue: Arc<Queue>, index: usize, cpu: Option<usize>) -> Result<Self, VerbsError> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name(format!("rdma-poll-{index}"))
            .spawn(move || {
                if let Some(cpu) = cpu {
                    pin_to(cpu);
                }
                spin(&queue, &stopped);
            })
            .map_err(|error| VerbsError::os("starting a polling thread", error))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for BusyThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Polls until told to stop. On a core that others want too, spinning would keep from running those whom we wait for: there
/// it sleeps until the device wakes it.
fn spin(queue: &Queue, stopped: &AtomicBool) {
    const POLLS_PER_LOOK: usize = 16;
    let mut pace = Pace::new(Duration::MAX);
    let mut last_yield = Instant::now();
    while !stopped.load(Ordering::Relaxed) {
        for _ in 0..POLLS_PER_LOOK {
            if queue.poll().completions == 0 {
                std::hint::spin_loop();
            }
        }
        let now = Instant::now();
        if now - last_yield > pace.yield_every() {
            rustix::thread::sched_yield();
            last_yield = Instant::now();
            pace.yielded(last_yield - now, last_yield);
            while pace.is_crowded(Instant::now()) && !stopped.load(Ordering::Relaxed) {
                sleep(queue);
            }
        }
    }
}

/// Waits for a completion, for a moment.
fn sleep(queue: &Queue) {
    const MOMENT: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    queue.arm();
    if queue.poll().completions > 0 {
        queue.disarm();
        return;
    }
    let mut event = [PollFd::from_borrowed_fd(queue.event_fd(), PollFlags::IN)];
    // An error is as good as the time being up: the queue is polled next.
    let _ = rustix::event::poll(&mut event, Some(&MOMENT));
    queue.acknowledge_events();
    queue.disarm();
    queue.poll();
}

fn pin_to(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(cpu, %error, "polling thread not pinned: no such CPU, or none that this process may use");
    }
}
