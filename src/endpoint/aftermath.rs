//! Work that was found under a lock and is carried out after the lock.

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::Arc;
use std::task::Waker;

use bytes::Bytes;

/// Tasks to wake, work to run, and memory to drop. Functions that hold a lock collect them here; the thread that held the lock carries them out once
/// it holds no lock.
#[derive(Debug, Default)]
pub struct Aftermath {
    /// The tasks to wake.
    pub wakers: Vec<Waker>,
    /// The work to run.
    pub runs: Vec<Arc<dyn Run>>,
    /// Memory of the application that is not needed any more. Its owner may run code of the application when it is dropped.
    pub unneeded: Vec<Bytes>,
}

/// Work for the thread that found it, such as a new call that a server polls in place.
pub trait Run: Send + Sync + Debug {
    /// Does the work. The caller holds no lock. The thread may be any thread of the process, also one outside a runtime.
    fn run(self: Arc<Self>);
}

thread_local! {
    /// Empty lists with memory.
    static REUSED: RefCell<Aftermath> = const { RefCell::new(Aftermath::new()) };
}

impl Aftermath {
    const fn new() -> Self {
        Self { wakers: Vec::new(), runs: Vec::new(), unneeded: Vec::new() }
    }

    /// Returns empty lists, which have the memory of those that this thread has given to [`reuse`](Self::reuse).
    pub fn reused() -> Self {
        // A thread that ends, or that is carrying something out, gets new ones.
        REUSED.try_with(RefCell::take).unwrap_or_default()
    }

    /// Keeps the memory of the lists, which are empty, for the next ones of this thread.
    pub fn reuse(self) {
        /// Longer lists are rare, and give their memory back.
        const LONGEST: usize = 256;
        if self.wakers.capacity().max(self.runs.capacity()).max(self.unneeded.capacity()) <= LONGEST {
            let _ = REUSED.try_with(|reused| reused.replace(self));
        }
    }

    /// Moves all that `other` has to the ends of these lists.
    pub fn append(&mut self, other: &mut Self) {
        if !other.is_empty() {
            self.wakers.append(&mut other.wakers);
            self.runs.append(&mut other.runs);
            self.unneeded.append(&mut other.unneeded);
        }
    }

    /// Returns whether there is nothing to do.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.wakers.is_empty() && self.runs.is_empty() && self.unneeded.is_empty()
    }

    /// Does the work in order, then wakes the tasks and drops the memory. All lists are empty afterwards, and keep their own memory.
    /// The caller holds no lock.
    pub fn carry_out(&mut self) {
        self.runs.drain(..).for_each(Run::run);
        self.wakers.drain(..).for_each(Waker::wake);
        self.unneeded.clear();
    }
}
