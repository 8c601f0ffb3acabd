//! Threads that spin on completion queues: [`PollMode::Busy`](super::PollMode::Busy).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::thread::CpuSet;

use super::queue::Queue;
use crate::verbs::VerbsError;

/// A thread that polls one queue without end; stopped and joined on drop.
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
                while !stopped.load(Ordering::Relaxed) {
                    if queue.poll().completions == 0 {
                        std::hint::spin_loop();
                    }
                }
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

fn pin_to(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(cpu, %error, "polling thread not pinned: no such CPU, or none that this process may use");
    }
}
