//! A port, and the queue whose poller takes its completions.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};

use crate::link::port::Port;
use tonic_rdma::internal::{Pace, Queue, Reactor};
use tonic_rdma_verbs::PeerWork;

/// A port in its queue. The port leaves the queue when this is dropped.
#[derive(Debug)]
pub(crate) struct PolledPort {
    pub(crate) port: Arc<Port>,
    pub(crate) queue: Arc<Queue>,
    /// The work that the peer asks of the queue pair. `None` on devices that work without the CPU.
    pub(crate) work: Option<Arc<dyn PeerWork>>,
    /// The number of looks since the last one that found work, or the last wait. Threads may overwrite one another's counts.
    pub(crate) looks: AtomicU32,
    /// The number of the port in the queue.
    pub(crate) key: u32,
    /// The time for which a future looks at a word itself before its thread sleeps. Only one future at a time does so.
    pub(crate) pace: Option<Mutex<Pace>>,
    /// The queue is polled as long as this is held.
    pub(crate) reactor: Arc<Reactor>,
}

impl PolledPort {
    /// The number of looks in a row without work, after which a thread spins for work. A future looks once or twice before it
    /// waits.
    const SPIN: u32 = 8;

    /// Carries out what the peer has asked of the queue pair, for a thread that looks at words of its memory.
    #[inline]
    pub(crate) fn progress(&self) {
        let Some(work) = &self.work else { return };
        let looks = self.looks.load(Ordering::Relaxed);
        if work.progress() {
            self.looks.store(0, Ordering::Relaxed);
            self.progressed(&**work, looks >= Self::SPIN);
        } else {
            self.looks.store(looks.saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Notes that a future begins to wait, so that its looks are not taken for those of a thread that spins.
    pub(crate) fn begin_wait(&self) {
        self.looks.store(0, Ordering::Relaxed);
    }

    fn progressed(&self, work: &dyn PeerWork, spins: bool) {
        // SYNC: Dekker's algorithm with `Wait`: this thread has stored words, and `PeerWork::progress` has executed a fence. The
        // task that waits has added its word to the list, then looks at the word.
        if self.queue.has_watched() {
            self.queue.wake_watched();
        } else if spins && work.need_no_events() {
            // SYNC: a task that begins to wait asks for events after it has added its word to the list. Either this thread sees the
            // word, or that task asks later.
            fence(Ordering::SeqCst);
            if self.queue.has_watched() {
                self.need_events();
            }
        }
    }

    /// Asks for events with the peer's writes, because a task waits for a word and the poller sleeps.
    pub(crate) fn need_events(&self) {
        if let Some(work) = &self.work {
            work.need_events();
            if work.progress() {
                self.queue.wake_watched();
            }
        }
    }
}

impl Drop for PolledPort {
    fn drop(&mut self) {
        self.queue.remove(self.key, &*self.port);
    }
}
