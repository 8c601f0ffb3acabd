//! Threads that may begin calls of a server.
//!
//! A handler must not begin within the poll of another future: it would see the task-locals, the span and the other context of that future, and would
//! run under the locks that its caller holds. So calls begin where no code of the application is under way: in the poll task, in the hook of
//! an idle runtime, and in busy threads.

use std::cell::Cell;

thread_local! {
    static HERE: Cell<bool> = const { Cell::new(false) };
}

/// This thread begins calls, or it does not, until this is dropped.
#[derive(Debug)]
pub(crate) struct Accepting {
    before: bool,
}

impl Accepting {
    /// Notes that no code of the application is under way on this thread.
    pub(crate) fn begin() -> Self {
        Self { before: HERE.replace(true) }
    }

    /// Takes the right to begin a call: none begins within it. Returns `None` if this thread begins no calls.
    pub(crate) fn take() -> Option<Self> {
        HERE.replace(false).then_some(Self { before: true })
    }

    /// Returns whether this thread begins calls.
    pub(crate) fn is_here() -> bool {
        HERE.get()
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        // A thread that ends has no calls.
        let _ = HERE.try_with(|here| here.set(self.before));
    }
}
