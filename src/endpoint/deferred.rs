//! Work that was found under a lock and is carried out after the lock, and tasks that end with their owner.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::sync::Arc;
use std::task::Waker;

use bytes::Bytes;
use http::HeaderMap;
use tokio::task::AbortHandle;
use tonic_rdma_verbs::unstable::{drop_all, run_each, wake_all};

/// Tasks to wake, work to run, and memory to drop. Functions that hold a lock collect them here; the thread
/// that held the lock carries them out once it holds no lock.
#[derive(Debug, Default)]
pub struct Deferred {
    /// The tasks to wake.
    pub wakers: Vec<Waker>,
    /// The work to run.
    pub runs: Vec<Arc<dyn Run>>,
    /// Memory of the application that is not needed any more. Its owner may run code of the application when
    /// it is dropped.
    pub unneeded: Vec<Bytes>,
    /// Headers and trailers that were sent, or are not sent any more. Their values may have owners, too.
    pub headers: Vec<SentHeaders>,
}

/// Headers or trailers that are not needed any more.
#[derive(Debug)]
pub enum SentHeaders {
    /// The fields alone.
    Fields(HeaderMap),
    /// Headers that others may have.
    Shared(Arc<dyn Any + Send + Sync>),
}

/// Work for the thread that found it, such as a new call that a server polls in place.
pub trait Run: Send + Sync + Debug {
    /// Does the work. The caller holds no lock. The thread may be any thread of the process, also one outside
    /// a runtime.
    fn run(self: Arc<Self>);
}

thread_local! {
    /// Empty lists that keep their memory.
    static REUSED: RefCell<Deferred> = const { RefCell::new(Deferred::new()) };
}

impl Deferred {
    const fn new() -> Self {
        Self { wakers: Vec::new(), runs: Vec::new(), unneeded: Vec::new(), headers: Vec::new() }
    }

    /// Returns empty lists, which have the memory of those that this thread has given to
    /// [`reuse`](Self::reuse).
    pub fn reused() -> Self {
        // A thread that ends, or that is carrying something out, gets new ones.
        REUSED.try_with(RefCell::take).unwrap_or_default()
    }

    /// Keeps the memory of the lists, which are empty, for the next ones of this thread.
    pub fn reuse(self) {
        /// Longer lists are rare, and give their memory back.
        const LONGEST: usize = 256;
        let lengths =
            [self.wakers.capacity(), self.runs.capacity(), self.unneeded.capacity(), self.headers.capacity()];
        if lengths.iter().all(|&length| length <= LONGEST) {
            let _ = REUSED.try_with(|reused| reused.replace(self));
        }
    }

    /// Moves all that `other` has to the ends of these lists.
    pub fn append(&mut self, other: &mut Self) {
        if !other.is_empty() {
            self.wakers.append(&mut other.wakers);
            self.runs.append(&mut other.runs);
            self.unneeded.append(&mut other.unneeded);
            self.add_headers(&mut other.headers);
        }
    }

    /// Moves `headers`, which may be many, to the end of this list.
    pub fn add_headers(&mut self, headers: &mut Vec<SentHeaders>) {
        if self.headers.is_empty() {
            std::mem::swap(&mut self.headers, headers);
        } else {
            self.headers.append(headers);
        }
    }

    /// Returns whether there is nothing to do.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.wakers.is_empty() && self.runs.is_empty() && self.unneeded.is_empty() && self.headers.is_empty()
    }

    /// Does the work in order, then wakes the tasks and drops the memory. A panic of the application ends
    /// with its own item. All lists are empty afterwards, and keep their own memory. The caller holds no
    /// lock.
    pub fn carry_out(&mut self) {
        run_each("work of a connection", self.runs.drain(..), Run::run);
        wake_all(self.wakers.drain(..));
        drop_all(self.unneeded.drain(..));
        drop_all(self.headers.drain(..));
    }
}

thread_local! {
    /// The tasks that the present work of connections has made ready on this thread.
    static READY: Cell<usize> = const { Cell::new(0) };
}

/// Notes that work of a connection has made a task ready on this thread: a call that waits. The thread stops
/// to spin, so that the task runs.
pub(crate) fn task_is_ready() {
    READY.set(READY.get() + 1);
}

/// Carries out `work`. Returns how many tasks it has made ready, without those of polls within it.
pub(crate) fn ready_tasks_of(work: impl FnOnce()) -> usize {
    let before = READY.take();
    work();
    READY.replace(before)
}

/// A task that ends when this is dropped.
#[derive(Debug)]
pub(crate) struct OwnedTask(pub(crate) AbortHandle);

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic, reason = "tests")]

    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    /// Counts what was done with it, and panics then.
    #[derive(Debug)]
    struct Bomb(Arc<AtomicUsize>);

    impl Bomb {
        fn explode(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("as the test asked");
        }
    }

    impl Wake for Bomb {
        fn wake(self: Arc<Self>) {
            self.explode();
        }
    }

    impl Run for Bomb {
        fn run(self: Arc<Self>) {
            self.explode();
        }
    }

    struct Memory(Bomb);

    impl AsRef<[u8]> for Memory {
        fn as_ref(&self) -> &[u8] {
            b"content"
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            self.0.explode();
        }
    }

    #[test]
    fn a_panic_keeps_no_other_work_from_being_carried_out() {
        let count = Arc::<AtomicUsize>::default();
        let mut after = Deferred::default();
        for _ in 0..3 {
            let bomb = || Arc::new(Bomb(Arc::clone(&count)));
            after.runs.push(bomb());
            after.wakers.push(bomb().into());
            after.unneeded.push(Bytes::from_owner(Memory(Bomb(Arc::clone(&count)))));
        }
        after.carry_out();
        assert_eq!(count.load(Ordering::Relaxed), 9);
        assert!(after.is_empty());
    }
}
