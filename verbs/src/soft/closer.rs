//! The threads that close what came from peers.
//!
//! The last close of a descriptor can block for as long as the process wants that has made it: a TCP socket
//! that lingers waits for its other side, and a file of FUSE waits for the process that serves it. The close
//! of a unix socket also closes all descriptors that wait in its queue. The last close of a memfd, and the
//! end of its last mapping, free all pages that the peer has written, which can take seconds. Therefore no
//! thread that polls, asks or answers does any of this.
//!
//! There are two threads, so that a descriptor that blocks does not delay the release of honest peers'
//! memory:
//!
//! | thread | closes | blocks |
//! |---|---|---|
//! | `rdma-soft-free` | memfds and mappings | as long as the kernel takes to free the pages |
//! | `rdma-soft-close` | all other descriptors, and sockets in whose queue descriptors wait | as long as a peer chooses |
//!
//! What waits for them is bounded, because this process takes no more descriptors from a peer when many wait
//! already: see [`refuses`] and [`is_full`]. If a thread can't be started, what it would close stays open,
//! and counts; the next descriptor tries again.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use super::forked::Origin;
use crate::memfd;
use crate::panics::lock;
use crate::panics::run_foreign;

/// Number of descriptors of one source, without memfds, that wait to be closed, from which on this process
/// takes no more of this source.
const OF_ONE: usize = 128;
/// The same for memfds. A peer of this user may offer each of its 1024 segments once more while this process
/// is busy.
const MEMORIES_OF_ONE: usize = 256;
/// Number of descriptors of all sources but this user together, without memfds, from which on this process
/// takes no more of these sources.
const OF_UNTRUSTED: usize = 256;
/// Number of descriptors and sockets that wait, from which on this process makes no connections to devices.
/// This happens only before Linux 6.16, where a process can send descriptors before this process knows its
/// user, and so whether to let it in.
const MOST: usize = 512;
/// Most forks in a row, without exec, after which a process still has threads that close descriptors.
const GENERATIONS: usize = 4;

/// A process, or processes that share a bound: those of one user that have no number here, because they are
/// in other pid namespaces. The kernel does not tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) user: u32,
    /// The process number; 0 for processes without one.
    pub(super) process: i32,
}

impl Source {
    fn is_this_user(self) -> bool {
        self.process > 0 && self.user == rustix::process::geteuid().as_raw()
    }
}

/// The threads of one process.
struct Closers {
    origin: Origin,
    memory: Closer,
    others: Closer,
}

/// A thread, and what waits for it.
struct Closer {
    name: &'static str,
    state: Mutex<CloserState>,
    filled: Condvar,
}

#[derive(Default)]
struct CloserState {
    waiting: VecDeque<(Option<Source>, Work)>,
    /// The source of the descriptor that the thread is closing.
    closing: Option<Source>,
    is_running: bool,
}

type Work = Box<dyn FnOnce() + Send>;

impl CloserState {
    /// Returns the number of descriptors that are not closed yet, and whose source `counts`.
    fn count(&self, counts: impl Fn(Source) -> bool) -> usize {
        let waiting = self.waiting.iter().filter_map(|(source, _)| *source);
        waiting.chain(self.closing).filter(|source| counts(*source)).count()
    }
}

impl Closer {
    fn new(name: &'static str) -> Self {
        Self { name, state: Mutex::default(), filled: Condvar::new() }
    }

    /// Has the thread do `work`, after all work that it got before.
    fn add(&'static self, source: Option<Source>, work: Work) {
        let mut state = lock(&self.state);
        state.waiting.push_back((source, work));
        if !state.is_running {
            let thread = std::thread::Builder::new().name(self.name.into());
            state.is_running = thread.spawn(move || self.run()).is_ok();
        }
        drop(state);
        self.filled.notify_one();
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            let Some((source, work)) = state.waiting.pop_front() else {
                state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.closing = source;
            drop(state);
            // The last reference to an object of the application may be dropped here.
            run_foreign("memory of a peer", work);
            state = lock(&self.state);
            state.closing = None;
        }
    }

    fn count(&self, counts: impl Fn(Source) -> bool) -> usize {
        lock(&self.state).count(counts)
    }
}

/// Returns the threads of this process. A child that was forked gets its own. `None` after too many forks.
fn closers() -> Option<&'static Closers> {
    static CLOSERS: [OnceLock<Option<Closers>>; GENERATIONS] = [const { OnceLock::new() }; GENERATIONS];
    CLOSERS.iter().find_map(|closers| {
        let closers = closers.get_or_init(|| {
            let origin = Origin::here().ok()?;
            let (memory, others) = (Closer::new("rdma-soft-free"), Closer::new("rdma-soft-close"));
            Some(Closers { origin, memory, others })
        });
        closers.as_ref().filter(|closers| !closers.origin.is_forked())
    })
}

/// Does `work` in the thread that frees memory, after everything that this thread got before.
pub(super) fn free(work: impl FnOnce() + Send + 'static) {
    match closers() {
        Some(closers) => closers.memory.add(None, Box::new(work)),
        // No thread of this process may wait, so the memory stays.
        None => {
            let _ = ManuallyDrop::new(work);
        }
    }
}

/// Closes a descriptor of `source`, or a socket that may have descriptors of `source` in its queue.
pub(super) fn close(descriptor: OwnedFd, source: Option<Source>) {
    match closers() {
        Some(closers) => {
            let closer = if memfd::is_memfd(&descriptor) { &closers.memory } else { &closers.others };
            closer.add(source, Box::new(move || drop(descriptor)));
        }
        None => {
            let _ = ManuallyDrop::new(descriptor);
        }
    }
}

/// Returns whether this process takes no descriptor of `source` now, because too many of them, or of all
/// untrusted peers, are not closed yet.
pub(super) fn refuses(source: Source) -> bool {
    let of_source = |other| other == source;
    let refused = closers().is_none_or(|closers| {
        let others = lock(&closers.others.state);
        others.count(of_source) >= OF_ONE
            || !source.is_this_user() && others.count(|other| !other.is_this_user()) >= OF_UNTRUSTED
            || closers.memory.count(of_source) >= MEMORIES_OF_ONE
    });
    if refused {
        crate::throttled!(
            warn,
            process = source.process,
            user = source.user,
            "too many descriptors of peers wait to be closed"
        );
    }
    refused
}

/// Returns whether this process makes no connection to a device now, because too many descriptors and sockets
/// are not closed yet.
pub(super) fn is_full() -> bool {
    closers().is_none_or(|closers| closers.others.count(|_| true) + closers.memory.count(|_| true) >= MOST)
}

/// Waits until the thread that frees memory has done all work that it got before.
#[cfg(any(test, fuzzing))]
pub(super) fn wait_until_free() {
    let (done, ended) = std::sync::mpsc::channel::<()>();
    free(move || drop(done));
    let _ = ended.recv();
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::sync::mpsc::channel;

    use super::*;

    fn other(user: u32) -> Source {
        Source { user, process: 0 }
    }

    /// What one peer leaves to be closed counts against this peer.
    #[test]
    fn a_source_has_its_own_bound() {
        let closer: &'static Closer = Box::leak(Box::new(Closer::new("test")));
        let (release, wait) = channel::<()>();
        closer.add(Some(other(1)), Box::new(move || wait.recv().unwrap()));
        for _ in 0..3 {
            closer.add(Some(other(2)), Box::new(|| ()));
        }
        closer.add(None, Box::new(|| ()));
        assert_eq!([1, 2, 3].map(|user| closer.count(|source| source == other(user))), [1, 3, 0]);
        assert_eq!(closer.count(|_| true), 4);
        release.send(()).unwrap();
        let (done, ended) = channel();
        closer.add(None, Box::new(move || done.send(()).unwrap()));
        ended.recv().unwrap();
        assert_eq!(closer.count(|_| true), 0);
    }
}
